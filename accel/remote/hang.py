"""When a child counts as hung: the oldest thing that it was asked for does not end for too long."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.engine.oldest import OldestWatch

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

__all__ = ["HangWatch"]

_TO_READ = 0.05
"""Seconds for what has come meanwhile to be read, before a verdict."""


class HangWatch(OldestWatch):
    """Watches what one child was asked for.

    It ends, or ``hung`` is called, at the latest ``timeout`` and ``allowance`` seconds after it became the oldest, whatever the child says.

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
    busy_seconds, allowance
        See :class:`~accel.engine.oldest.OldestWatch`: what the child says that it opens, loads or compiles.
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
        super().__init__(loop, timeout / 4, oldest, busy_seconds, allowance)
        self._timeout = timeout
        self._hung = hung
        self._is_asked = False

    def judge(self, *, is_new: bool) -> float | None:
        """See :class:`~accel.engine.oldest.OldestWatch`."""
        left = self._timeout - self.seconds()
        if left <= 0 and self._is_asked and not is_new:
            self._hung()
            return None
        self._is_asked = left <= 0
        return _TO_READ if left <= 0 else min(left, self._period)
