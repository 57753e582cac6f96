"""The age of the oldest work in flight, for readiness and for the watchdog of a child."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.completion.prediction import Predictor

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Hashable

    from accel.engine.submission import Submission

__all__ = ["LoopClock", "OldestInFlight", "StallWatch"]

_CHECKS = 8
"""Checks within ``stall_after``: a stall is seen an eighth of it late at most."""

_KINDS = 256
"""The most kinds of slow work whose durations are remembered."""

_LATE = 0.1
"""Seconds by which a timer may be late without the loop counting as stopped."""


class LoopClock:
    """Seconds in which the loop ran, so that it could see work end.

    A timer that is late, because the process was stopped or its loop blocked, counts as one that
    was on time.

    Parameters
    ----------
    loop
        The loop.

    Attributes
    ----------
    seconds : float
        The count at the last timer.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.seconds = 0.0
        self._loop = loop
        self._armed_at = self._pause = 0.0

    def arm(self, pause: float, tick: Callable[[], object]) -> asyncio.TimerHandle:
        """Have ``tick`` called after ``pause`` seconds; it calls :meth:`advance` first."""
        self._pause, self._armed_at = pause, self._loop.time()
        return self._loop.call_at(self._armed_at + pause, tick)

    def advance(self) -> None:
        """Count the time since the last timer was armed."""
        self.seconds = self.now()

    def now(self) -> float:
        """Return the seconds so far. Any thread may ask."""
        passed, pause = self._loop.time() - self._armed_at, self._pause
        return self.seconds + (passed if passed < pause + max(pause, _LATE) else pause)


class OldestInFlight:
    """The oldest work in flight, and since when it is the oldest.

    Work waits for what was sent before it, and for nothing else. So the oldest waits for nothing:
    if it does not end, the device makes no progress, whatever goes on in other streams.

    Parameters
    ----------
    first
        Returns a key of the oldest work in flight, with its progress; ``None`` where nothing is in
        flight.
    busy_seconds
        Returns the seconds so far in which something was opened, loaded or compiled that work may
        wait for.
    allowance
        The most of these seconds that are not counted in the age of one work.

    Attributes
    ----------
    key : object
        Returned by ``first`` at the last look.
    """

    def __init__(self, first: Callable[[], Hashable], busy_seconds: Callable[[], float], allowance: float) -> None:
        self.key: Hashable = None
        self.first = first
        self._busy_seconds = busy_seconds
        self._allowance = allowance
        self._since = self._busy_before = 0.0

    def look(self, now: float) -> bool:
        """Update the oldest work; return whether it is another one, or has made progress."""
        key = self.first()
        if key == self.key:
            return False
        self.key, self._since, self._busy_before = key, now, self._busy_seconds()
        return True

    def seconds(self, now: float) -> float:
        """Return the age of the oldest work at the last look, without what does not count."""
        if self.key is None:
            return 0.0
        return now - self._since - min(self._busy_seconds() - self._busy_before, self._allowance)


class StallWatch:
    """Tells whether the oldest op in flight takes ``stall_after`` seconds more than usual.

    It checks on a timer, and has none while nothing is in flight. The first op of a kind is never
    stalled: it loads, compiles and plans, and nothing is known of it. Only kinds that take longer
    than an eighth of ``stall_after`` are remembered with how long they take. No ref and no result
    is kept.

    Parameters
    ----------
    loop
        On which it checks.
    stall_after
        Seconds.
    first
        Returns the oldest submission in flight and when it was sent, or ``None``.
    busy_seconds, allowance
        See :class:`OldestInFlight`.

    Attributes
    ----------
    ended : set
        Kinds of work that have ended at least once; see :attr:`Submission.work`.
    handle : TimerHandle or None
        Of the next check; ``None`` while nothing is in flight.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        stall_after: float,
        first: Callable[[], tuple[Submission, float] | None],
        busy_seconds: Callable[[], float],
        allowance: float,
    ) -> None:
        self._stall_after = stall_after
        self._period = stall_after / _CHECKS
        self._first = first
        self._clock = LoopClock(loop)
        self._oldest = OldestInFlight(self._progress, busy_seconds, allowance)
        self._predictor = Predictor(_KINDS)
        # Of the oldest submission at the last look: its kind and name, its age, and what is usual.
        self._work: Hashable = None
        self._name = ""
        self._age = self._usual = 0.0
        self.ended: set[Hashable] = set()
        self.handle: asyncio.TimerHandle | None = None

    def sent(self) -> None:
        """Begin to check, now that something is in flight."""
        if self.handle is None:
            self.handle = self._clock.arm(self._period, self._check)

    def stop(self) -> None:
        """Check no more."""
        if self.handle is not None:
            self.handle.cancel()
            self.handle = None

    def reason(self) -> str:
        """Return what is stalled, or an empty text. Any thread may ask."""
        oldest, seconds, usual = self._oldest, self._oldest.seconds(self._clock.now()), self._usual
        if self._work not in self.ended or seconds <= self._stall_after + usual:
            return ""
        try:
            if oldest.first() != oldest.key:
                return ""
        except (RuntimeError, KeyError):  # it ends at this moment, and this is another thread
            return ""
        return f"{self._name} has been the oldest op in flight for {seconds:.1f} s, and usually takes {usual:.1f} s"

    def _progress(self) -> tuple[float, int] | None:
        """Return when the oldest was sent, and how many of its ops are left.

        A batch that goes on is not stalled.
        """
        first = self._first()
        return None if first is None else (first[1], first[0].outstanding)

    def _check(self) -> None:
        """Look at the oldest submission, and arm the next check; called by the timer."""
        self.handle = None
        clock, oldest = self._clock, self._oldest
        clock.advance()
        if oldest.look(clock.seconds):
            self._begin()
        if oldest.key is not None:
            self._age = oldest.seconds(clock.seconds)
            self.handle = clock.arm(self._period, self._check)

    def _begin(self) -> None:
        """Learn the duration of the last oldest, and look up what is usual for the new one."""
        if self._age > self._period:
            self._predictor.observe(self._work, self._age)
        first, self._age = self._first(), 0.0
        self._work, self._name = (None, "") if first is None else (first[0].work, first[0].name)
        known = self._predictor.expect(self._work)
        self._usual = 0.0 if known is None else known.mean + known.deviation
