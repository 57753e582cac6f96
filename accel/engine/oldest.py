"""Since when the oldest thing in flight is the oldest: what tells a device that makes no progress from one that is only full."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

__all__ = ["OldestWatch"]


class OldestWatch(ABC):
    """Looks from time to time at what was sent first of all that is in flight. Costs nothing while nothing is.

    An op waits for ops that were sent before it, and for no others. So what was sent first of all that is in flight waits for nothing: if it does not end,
    it hangs, whatever goes on in other streams.

    Parameters
    ----------
    loop
        Where it looks.
    period
        Seconds between two looks.
    oldest
        Returns what identifies the oldest in flight, such as its number; something false where nothing is.
    busy_seconds
        Returns for how many seconds so far something was opened, loaded or compiled that ops may wait for: that does not count ...
    allowance
        ... up to this many seconds for each that is the oldest.

    Attributes
    ----------
    handle : TimerHandle or None
        Of the next look; ``None`` while nothing is watched.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, period: float, oldest: Callable[[], Any], busy_seconds: Callable[[], float], allowance: float
    ) -> None:
        self._loop = loop
        self._period = period
        self._oldest = oldest
        self._busy_seconds = busy_seconds
        self._allowance = allowance
        self._seen: Any = None
        self._since = self._due = self._busy_before = 0.0
        self.handle: asyncio.TimerHandle | None = None

    @abstractmethod
    def judge(self, *, is_new: bool) -> float | None:
        """Take note of a look at something in flight, which is the oldest since :meth:`seconds`.

        ``is_new``: it was not so at the look before, or this process had stopped since, and has heard of nothing. Returns the seconds until the next look;
        ``None`` ends the watch.
        """

    def sent(self) -> None:
        """Take note that something is in flight."""
        if self.handle is None:
            self.begin(self._oldest())
            self._arm(self._period)

    def stop(self) -> None:
        """Look no more."""
        if self.handle is not None:
            self.handle.cancel()
            self.handle = None

    def seconds(self) -> float:
        """Return for how long what was the oldest at the last look is so, without what does not count. Any thread may ask."""
        busy = min(self._busy_seconds() - self._busy_before, self._allowance)
        return self._loop.time() - self._since - busy

    def begin(self, oldest: Any) -> None:
        """Take note of another oldest."""
        self._seen, self._since, self._busy_before = oldest, self._loop.time(), self._busy_seconds()

    def _arm(self, seconds: float) -> None:
        self._due = self._loop.time() + seconds
        self.handle = self._loop.call_at(self._due, self._look)

    def _look(self) -> None:
        self.handle = None
        oldest = self._oldest()
        is_new = oldest != self._seen
        if is_new:
            self.begin(oldest)
        if not oldest:
            return
        late = self._loop.time() - self._due
        if not is_new and late > max(0.1, 2 * self._period):  # this process was stopped, or its loop was: it has read no answer
            self._since += late
            is_new = True
        left = self.judge(is_new=is_new)
        if left is not None:
            self._arm(left)
