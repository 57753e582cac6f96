"""How long a child may take to be ready: by what was heard of it while this process was there to hear it, not by the clock alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

__all__ = ["StartupTimeout"]

_LOOKS = 8
"""How often it is looked, at least."""

_LONGEST = 1.0
"""Seconds between two looks, at most."""

_TO_READ = 0.05
"""Seconds for what has come meanwhile to be read, before a verdict."""


class _Heard(Protocol):
    has_spoken: bool


class StartupTimeout:
    """Waits for a child until it is cancelled.

    Time in which this process was stopped, or its loop was held up, does not count: it has read no answer then.

    Parameters
    ----------
    loop
        Where it looks.
    seconds
        Within which the child must have said something.
    longest
        Seconds within which it must be ready, once it has.
    link
        Says whether it ``has_spoken``.
    expired
        Called once, with the seconds that were too long.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, seconds: float, longest: float, link: _Heard, expired: Callable[[float], object]
    ) -> None:
        self._loop = loop
        self._seconds = seconds
        self._longest = longest
        self._link = link
        self._expired = expired
        self._left = seconds
        self._pause = min(seconds / _LOOKS, _LONGEST)
        self._is_asked = False
        self._arm(self._pause)

    def cancel(self) -> None:
        """Wait no more."""
        self._handle.cancel()

    def _arm(self, pause: float) -> None:
        self._next = pause
        self._since = self._loop.time()
        self._handle = self._loop.call_later(pause, self._look)

    def _look(self) -> None:
        passed = self._loop.time() - self._since
        # Of a stall, only what there would have been without it: nothing was heard in it.
        self._left -= passed if passed < 2 * self._next else self._next
        if self._link.has_spoken and self._seconds != self._longest:
            self._seconds = self._left = self._longest
            self._is_asked = False
        if self._left > 0:
            self._arm(min(self._pause, self._left))
        elif not self._is_asked:
            self._is_asked = True
            self._arm(_TO_READ)
        else:
            self._expired(self._seconds)
