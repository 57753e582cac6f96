"""Being awake for a message that is about to come: a process that sleeps takes longer to wake than a short op takes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

__all__ = ["Attention"]

_FEW = 4
"""With fewer processors than this, whoever stays awake keeps others from what they wait for."""


class Attention:
    """Keeps a loop turning for a short while, so that it sees at once what arrives meanwhile.

    Parameters
    ----------
    loop
        Which.
    seconds
        How long each time.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._loop = loop
        self._seconds = seconds if len(os.sched_getaffinity(0)) >= _FEW else 0.0
        self._until = 0.0
        self._is_turning = False

    @property
    def seconds(self) -> float:
        """How long each time; 0 where it is of no use."""
        return self._seconds

    def pay(self) -> None:
        """Begin, or begin anew."""
        if self._seconds:
            self._until = self._loop.time() + self._seconds
            if not self._is_turning:
                self._is_turning = True
                self._loop.call_soon(self._turn)

    def end(self) -> None:
        """There is nothing to wait for any more."""
        self._until = 0.0

    def _turn(self) -> None:
        if self._loop.time() < self._until:
            self._loop.call_soon(self._turn)
        else:
            self._is_turning = False
