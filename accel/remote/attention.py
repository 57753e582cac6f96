"""Being awake for a message that is about to come: a process that sleeps takes longer to wake than a short op takes."""

from __future__ import annotations

import os
from time import perf_counter
from typing import TYPE_CHECKING

from accel.completion.timer import create_timer

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from accel.completion.timer import Timer

__all__ = ["Attention", "Pacing"]

_SHORT = 300e-6
"""Seconds for which the end of an op is waited for awake, at most."""

_NEAR = 0.3e-3
"""So many seconds before the usual time of an op its end is near."""

_NAP, _SHORTEST, _LONG = 0.5e-3, 0.05e-3, 20e-3
"""Seconds of a nap, of the shortest that is worth a timer, and of an op that nobody stays half awake for."""

_PATIENCE = 8
"""An answer that is late is waited for awake for one part in so many of the usual time, besides."""

_SEVERAL = 16
"""So many messages do not wait for more of this turn: their receiver is to have something to do meanwhile. Where it has a processor of its own."""

_PARTS = 4
"""Of few messages that are in flight, one part in so many waits for more at most: else their receiver is idle when it is through with the others."""

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

    Attributes
    ----------
    until : float
        When it ends, on the clock of ``perf_counter``: a loop's own may go by whole milliseconds, as uvloop's does.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._loop = loop
        self._seconds = seconds if len(os.sched_getaffinity(0)) >= _FEW else 0.0
        self.until = 0.0
        self._is_turning = False

    @property
    def seconds(self) -> float:
        """How long each time; 0 where it is of no use."""
        return self._seconds

    def pay(self, more: float = 0.0, *, is_turned: bool = False) -> None:
        """Begin, or begin anew; for so many seconds more. ``is_turned``: somebody else keeps the loop turning."""
        if self._seconds:
            self.until = perf_counter() + self._seconds + more
            if not is_turned:
                self.turn()

    def turn(self) -> None:
        """Keep the loop turning, as long as it was begun for."""
        if not self._is_turning:
            self._is_turning = True
            self._loop.call_soon(self._turn)

    def end(self) -> None:
        """There is nothing to wait for any more."""
        self.until = 0.0

    def _turn(self) -> None:
        if perf_counter() < self.until:
            self._loop.call_soon(self._turn)
        else:
            self._is_turning = False


class Pacing:
    """When a parent's messages leave, and how it waits for the answers.

    Parameters
    ----------
    loop
        Where they are sent.
    flush
        Sends what was not sent yet.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, flush: Callable[[], object]) -> None:
        self._loop = loop
        self._flush = flush
        self._attention = Attention(loop, _SHORT)
        self._timer: Timer | None = None  # made when there is an op that takes so long
        self._is_napping = False
        self._began = 0.0
        self._usual = 0.0
        self._unsent = 0

    @property
    def is_awake(self) -> bool:
        """Whether an answer is near, as far as one can tell."""
        return perf_counter() < self._attention.until

    def sent(self, in_flight: int, *, is_first: bool, is_attended: bool) -> None:
        """Take note of an op of ``in_flight``; ``is_first``: the device was idle, and it has left already; ``is_attended``: its caller looks for its end."""
        if not is_first:
            self._unsent += 1
            if self._attention.seconds and self._unsent >= (_SEVERAL if in_flight > _SEVERAL else in_flight // _PARTS):
                self._unsent = 0
                self._flush()
            return
        self._unsent = 0
        if self._attention.seconds:
            self._began = perf_counter()
            if self._usual < _LONG:
                self._wait(is_attended=is_attended)

    def stay(self) -> None:
        """Stay awake although the caller who did is leaving."""
        if self.is_awake:
            self._attention.turn()

    def _wait(self, *, is_attended: bool = False) -> None:
        """Sleep while the end is far, but never long: a processor that sleeps deeply takes long to wake; stay awake when it is near."""
        self._is_napping = False
        left = max(0.0, self._began + self._usual - perf_counter())
        if left > _NEAR + _SHORTEST:
            if self._timer is None:
                self._timer = create_timer(self._loop, self._wait)
            self._is_napping = True
            self._timer.arm(min(left - _NEAR, _NAP))
        else:
            self._attention.pay(left + self._usual / _PATIENCE, is_turned=is_attended)

    def idle(self) -> None:
        """Take note that nothing is in flight any more."""
        self._attention.end()
        if self._attention.seconds:
            # How long the last ones took that found the device idle. One whose answer ended a nap was there for a while: it is no reason to sleep as long.
            took = perf_counter() - self._began
            self._usual += took - _NEAR - self._usual if self._is_napping else (took - self._usual) / 4
        self._rouse()

    def end(self) -> None:
        """Wait for nothing any more, and give the timer back. Idempotent."""
        self._attention.end()
        self._rouse()
        if self._timer is not None:
            self._timer.close()
            self._timer = None

    def _rouse(self) -> None:
        if self._is_napping and self._timer is not None:
            self._is_napping = False
            self._timer.disarm()
