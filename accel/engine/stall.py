"""The age of the oldest work in flight, for readiness and for the watchdog of a child."""

from __future__ import annotations

import threading
from time import monotonic
from typing import TYPE_CHECKING, Self

from accel.completion.prediction import Predictor

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Hashable

    from accel.engine.submission import Submission

__all__ = ["BusyTime", "LoopClock", "OldestInFlight", "StallWatch"]

_CHECKS = 8
"""Checks within ``stall_after``: a stall is seen an eighth of it late at most."""

_KINDS = 256
"""The most kinds of slow work whose durations are remembered."""

_LATE = 0.1
"""Seconds by which a timer may be late without the loop counting as stopped, if its delay is
shorter; else its delay."""


class BusyTime:
    """Counts what goes on of one kind, such as kernels that load, and the seconds in which any did.

    ``with busy_time:`` is around one. Ops may wait for it: the seconds do not count in their age.
    Thread-safe.

    Attributes
    ----------
    count : int
        How many go on now.
    """

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()
        self._since = self._before = 0.0  # when `count` changed last, and the seconds until then

    def __enter__(self) -> Self:
        self._add(1)
        return self

    def __exit__(self, *_: object) -> None:
        self._add(-1)

    def _add(self, change: int) -> None:
        """Change the count, and add up the time until now."""
        with self._lock:
            now = monotonic()
            self._before += (now - self._since) if self.count else 0.0
            self._since = now
            self.count += change

    def seconds(self) -> float:
        """Return for how many seconds so far the count was above 0."""
        with self._lock:
            return self._before + (monotonic() - self._since if self.count else 0.0)


class LoopClock:
    """Counts the seconds in which the event loop ran, so that it could see work end.

    Time in which the process was stopped, or its loop blocked for long, is not counted: a timer that
    is late by its own delay or more, and by ``_LATE`` at least, counts as one that was on time. One
    that is less late counts with all of its time: so late it is in a busy loop, too.

    Parameters
    ----------
    loop
        The loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        # The count, when it was made or the timer armed after that, and the timer's delay: one
        # tuple, since another thread may read it at any moment.
        self._counted = (0.0, 0.0, 0.0)

    @property
    def seconds(self) -> float:
        """The count at the last timer."""
        return self._counted[0]

    def arm(self, delay: float, callback: Callable[[], object]) -> asyncio.TimerHandle:
        """Have ``callback`` called after ``delay`` seconds; it calls :meth:`count` first."""
        now = self._loop.time()
        self._counted = (self.seconds, now, delay)
        return self._loop.call_at(now + delay, callback)

    def count(self) -> None:
        """Count the time since the last timer was armed."""
        self._counted = (self.now(), self._loop.time(), 0.0)

    def now(self) -> float:
        """Return the seconds so far, those since the timer was armed included. Any thread may ask.

        :meth:`count` asks at each timer, and ``Device.health()`` between two of them.
        """
        seconds, since, delay = self._counted
        elapsed = self._loop.time() - since
        # Later than that, the loop has stood still, not only been busy: of that time only the
        # timer's delay counts.
        return seconds + (elapsed if elapsed < delay + max(delay, _LATE) else delay)


class OldestInFlight:
    """The oldest work in flight, and since when it is the oldest.

    Work waits for what was sent before it, and for nothing else. So the oldest waits for nothing:
    if it does not end, the device makes no progress, whatever other streams do.

    Parameters
    ----------
    get_oldest
        Returns a key of the oldest work in flight, which changes with its progress; ``None`` where
        nothing is in flight.
    busy_seconds
        Returns the seconds so far in which something was opened, loaded or compiled that work may
        wait for.
    allowance
        The most of these seconds that are not counted in the age of one work.

    Attributes
    ----------
    key : object
        The key that ``get_oldest`` returned at the last :meth:`update`.
    """

    def __init__(self, get_oldest: Callable[[], Hashable], busy_seconds: Callable[[], float], allowance: float) -> None:
        self.key: Hashable = None
        self.get_oldest = get_oldest
        self._busy_seconds = busy_seconds
        self._allowance = allowance
        self._since = self._busy_before = 0.0

    def update(self, now: float) -> bool:
        """Look up the oldest work; return whether it is another one, or has made progress.

        If so, its age counts from ``now``.
        """
        key = self.get_oldest()
        if key == self.key:
            return False
        self.key, self._since, self._busy_before = key, now, self._busy_seconds()
        return True

    def age(self, now: float) -> float:
        """Return the age of the oldest work in seconds, without loading and compiling."""
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
    get_oldest
        Returns the oldest submission in flight and when it was dispatched, or ``None``.
    busy_seconds, allowance
        See :class:`OldestInFlight`.

    Attributes
    ----------
    known_keys : set
        Keys of work that has ended at least once; see :attr:`Submission.duration_key`.
    handle : TimerHandle or None
        Of the next check; ``None`` while nothing is in flight.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        stall_after: float,
        get_oldest: Callable[[], tuple[Submission, float] | None],
        busy_seconds: Callable[[], float],
        allowance: float,
    ) -> None:
        self._stall_after = stall_after
        self._period = stall_after / _CHECKS
        self._get_oldest = get_oldest
        self._clock = LoopClock(loop)
        self._oldest = OldestInFlight(self._progress, busy_seconds, allowance)
        self._predictor = Predictor(_KINDS)
        # Of the oldest submission at the last check: its duration's key, its name, its age, and the
        # usual duration.
        self._duration_key: Hashable = None
        self._name = ""
        self._age = self._usual = 0.0
        self.known_keys: set[Hashable] = set()
        self.handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to check: something is in flight, and :attr:`handle` is ``None``."""
        self.handle = self._clock.arm(self._period, self._check)

    def stop(self) -> None:
        """Check no more: the context has faulted or ends."""
        if self.handle is not None:
            self.handle.cancel()
            self.handle = None

    def reason(self) -> str:
        """Return which op is stalled and for how long, or an empty text. Any thread may ask.

        Asked by :meth:`Device.health`. The age is that of now, not of the last check.
        """
        oldest, seconds, usual = self._oldest, self._oldest.age(self._clock.now()), self._usual
        if self._duration_key not in self.known_keys or seconds <= self._stall_after + usual:
            return ""
        try:
            if oldest.get_oldest() != oldest.key:  # it has ended, or made progress, since then
                return ""
        except (RuntimeError, KeyError):  # the loop's thread changes the submissions at this moment
            return ""
        return f"{self._name} has been the oldest op in flight for {seconds:.1f} s, and usually takes {usual:.1f} s"

    def _progress(self) -> tuple[float, int] | None:
        """Return when the oldest submission was dispatched, and how many of its ops are left.

        The key of :class:`OldestInFlight`: a batch whose ops retire is not stalled.
        """
        oldest = self._get_oldest()
        return None if oldest is None else (oldest[1], oldest[0].outstanding)

    def _check(self) -> None:
        """Look at the oldest submission; called by the timer.

        Arms the next check, unless nothing is in flight.
        """
        self.handle = None
        clock, oldest = self._clock, self._oldest
        clock.count()
        if oldest.update(clock.seconds):
            self._on_new_oldest()
        if oldest.key is not None:
            self._age = oldest.age(clock.seconds)
            self.handle = clock.arm(self._period, self._check)

    def _on_new_oldest(self) -> None:
        """Learn the duration of the former oldest work, and look up the usual one of the new."""
        if self._age > self._period:  # shorter ones are never near a stall, and not worth a record
            self._predictor.observe(self._duration_key, self._age)
        oldest, self._age = self._get_oldest(), 0.0
        self._duration_key, self._name = (None, "") if oldest is None else (oldest[0].duration_key, oldest[0].name)
        known = self._predictor.expect(self._duration_key)
        self._usual = 0.0 if known is None else known.mean + known.deviation
