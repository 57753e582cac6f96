"""When a child counts as hung: the oldest thing that it was asked for does not end for too long."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

__all__ = ["HangWatch"]

_TO_READ = 0.05
"""Seconds for what has come meanwhile to be read, before a verdict."""


class HangWatch:
    """Watches what one child was asked for. Costs nothing while nothing is in flight.

    An op waits for ops that were sent before it, and for no others. So what was sent first of all that is in flight waits for nothing: if it does not end,
    it hangs, whatever goes on in other streams. It ends, or ``hung`` is called, at the latest ``timeout`` and ``allowance`` seconds after it became the
    oldest, whatever the child says.

    Parameters
    ----------
    loop
        Where it looks.
    timeout
        Seconds that something may be the oldest in flight. It is found out within a quarter of that.
    oldest
        Returns the number of what was sent first of all that is in flight; 0 where nothing is.
    hung
        Called once, when it has taken longer.
    busy_seconds
        Returns for how many seconds so far the child has said that it opens, loads or compiles what ops may wait for: that does not count ...
    allowance
        ... up to so many seconds for each that is the oldest.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        timeout: float,
        oldest: Callable[[], int],
        hung: Callable[[], object],
        busy_seconds: Callable[[], float] = lambda: 0.0,
        allowance: float = 0.0,
    ) -> None:
        self._loop = loop
        self._timeout = timeout
        self._oldest = oldest
        self._seen = 0
        self._hung = hung
        self._since = 0.0
        self._due = 0.0
        self._busy_seconds = busy_seconds
        self._allowance = allowance
        self._busy_before = 0.0
        self._is_asked = False
        self._handle: asyncio.TimerHandle | None = None

    def sent(self) -> None:
        """Take note that something is in flight."""
        if self._handle is None:
            self._begin(self._oldest(), self._loop.time())
            self._arm(self._timeout / 4)

    def stop(self) -> None:
        """Look no more."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _begin(self, oldest: int, now: float) -> None:
        self._seen, self._since, self._is_asked = oldest, now, False
        self._busy_before = self._busy_seconds()

    def _arm(self, seconds: float) -> None:
        self._due = self._loop.time() + seconds
        self._handle = self._loop.call_at(self._due, self._look)

    def _look(self) -> None:
        self._handle = None
        oldest = self._oldest()
        if not oldest:
            return
        now, timeout = self._loop.time(), self._timeout
        # This process was stopped, or its loop was: it has heard nobody.
        is_late = now - self._due > max(0.1, timeout / 2)
        if oldest != self._seen:
            self._begin(oldest, now)
        elif is_late:
            self._since, self._is_asked = self._since + now - self._due, False
        left = self._since + timeout + min(self._busy_seconds() - self._busy_before, self._allowance) - now
        if left > 0:
            self._arm(min(left, timeout / 4))
        elif not self._is_asked:
            self._is_asked = True
            self._arm(_TO_READ)
        else:
            self._hung()
