"""When a device counts as hung: ops are on it, and for too long none has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

__all__ = ["HangWatch"]

_TO_READ = 0.05
"""Seconds for what has come meanwhile to be read, before a verdict."""


class HangWatch:
    """Watches the ops of one context. Costs nothing while none is in flight.

    Parameters
    ----------
    loop
        Where it looks.
    timeout
        Seconds that the oldest op in flight may take without any op ending.
    is_idle
        Whether nothing is in flight.
    is_busy
        Whether the child opens, loads or compiles what ops may wait for: that does not count.
    hung
        Called once, when it has taken longer.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        timeout: float,
        is_idle: Callable[[], bool],
        is_busy: Callable[[], bool],
        hung: Callable[[], object],
    ) -> None:
        self._loop = loop
        self._timeout = timeout
        self._is_idle = is_idle
        self._hung = hung
        self._since = 0.0
        self._due = 0.0
        self._is_busy = is_busy
        self._is_asked = False
        self._handle: asyncio.TimerHandle | None = None

    def sent(self) -> None:
        """Take note that something is in flight."""
        if self._handle is None:
            self._since = self._loop.time()
            self._arm(self._timeout)

    def heard(self) -> None:
        """Take note that something has ended, or that the child was busy until now."""
        self._since = self._loop.time()
        self._is_asked = False

    def stop(self) -> None:
        """Look no more."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _arm(self, seconds: float) -> None:
        self._due = self._loop.time() + seconds
        self._handle = self._loop.call_at(self._due, self._look)

    def _look(self) -> None:
        self._handle = None
        if self._is_idle():
            return
        now, timeout = self._loop.time(), self._timeout
        # This process was stopped, or its loop was: it has heard nobody.
        is_late = now - self._due > max(0.1, timeout / 2)
        if is_late or self._is_busy():
            self._since, self._is_asked = now, False
        left = self._since + timeout - now
        if left > 0:
            self._arm(left)
        elif not self._is_asked:
            self._is_asked = True
            self._arm(_TO_READ)
        else:
            self._hung()
