"""How things are measured: samples, percentiles, and rounds of subject and twin in turn."""

from __future__ import annotations

import gc
import os
import statistics
import time
from array import array
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Self, TypeAlias

__all__ = ["CpuMeter", "Meter", "Samples", "awaited", "called", "compare", "live_objects", "resident_bytes"]


class Samples:
    """Seconds per op. Kept in one growing array of doubles: a list of floats would be garbage of its own.

    Attributes
    ----------
    times : array of float
        One entry per op, or per group of ops.
    ops : int
        Ops that were run.
    seconds : float
        Wall time, which is less than the sum of ``times`` where ops overlapped.
    rates : list of float
        Ops per second of each round.
    """

    __slots__ = ("ops", "rates", "seconds", "times")

    def __init__(self) -> None:
        self.times: array[float] = array("d")
        self.ops = 0
        self.seconds = 0.0
        self.rates: list[float] = []

    def add(self, seconds: float, ops: int = 1) -> None:
        """Add the time of one op, or the mean of several that were timed as one."""
        self.times.append(seconds / ops)
        self.ops += ops
        self.seconds += seconds

    def extend(self, others: Samples) -> None:
        """Add what was sampled elsewhere."""
        self.times.extend(others.times)
        self.ops += others.ops
        self.seconds += others.seconds
        self.rates += others.rates

    def percentile(self, q: float) -> float:
        """Return the value below which ``q`` percent of the samples are (nearest rank); 0.0 without samples."""
        if not self.times:
            return 0.0
        ordered = sorted(self.times)
        return ordered[min(len(ordered) - 1, max(0, -int(-len(ordered) * q // 100) - 1))]

    @property
    def median(self) -> float:
        """The 50th percentile, in seconds."""
        return self.percentile(50)

    @property
    def rate(self) -> float:
        """Ops per second of wall time: of the median round, which a disturbed one does not move; overall where there were no rounds."""
        if self.rates:
            return statistics.median(self.rates)
        return self.ops / self.seconds if self.seconds > 0 else 0.0

    def end_round(self, ops: int, seconds: float) -> None:
        """Note the rate of the round that began when there were ``ops`` ops and ``seconds`` seconds."""
        if self.seconds > seconds:
            self.rates.append((self.ops - ops) / (self.seconds - seconds))


Meter: TypeAlias = Callable[[Samples], Awaitable[None]]
"""Runs one round and adds what each op took."""


def awaited(function: Callable[[], Awaitable[Any]], count: int, ops: int = 1) -> Meter:
    """Return a round that awaits ``function()`` ``count`` times, one after the other; each call does ``ops`` ops."""

    async def meter(samples: Samples) -> None:
        clock = time.perf_counter
        for _ in range(count):
            began = clock()
            await function()
            samples.add(clock() - began, ops)

    return meter


def called(function: Callable[[], object], count: int, ops: int = 1) -> Meter:
    """Return a round that calls ``function()`` ``count`` times: the twin of :func:`awaited` for what does not wait."""

    async def meter(samples: Samples) -> None:
        clock = time.perf_counter
        for _ in range(count):
            began = clock()
            function()
            samples.add(clock() - began, ops)

    return meter


async def compare(subjects: Mapping[str, Meter], rounds: int, *, warm_up: int = 1) -> dict[str, Samples]:
    """Run the subjects in turn, A B A B, so that what disturbs the machine disturbs them alike.

    Parameters
    ----------
    subjects
        Name -> one round.
    rounds
        Rounds of each that count.
    warm_up
        Rounds of each before, that do not count.

    Returns
    -------
    dict of str to Samples
    """
    results = {name: Samples() for name in subjects}
    for turn in range(-warm_up, rounds):
        for name, meter in subjects.items():
            samples = results[name] if turn >= 0 else Samples()
            # Garbage of one subject is not to be collected at the cost of another.
            gc.collect()
            ops, seconds = samples.ops, samples.seconds
            await meter(samples)
            samples.end_round(ops, seconds)
    return results


class CpuMeter:
    """Measures how much of one core this process used.

    ``with CpuMeter() as meter: ...``, then ``meter.percent``. All threads count.
    """

    __slots__ = ("cpu", "wall")

    def __init__(self) -> None:
        self.cpu = 0.0
        self.wall = 0.0

    def __enter__(self) -> Self:
        self.wall, self.cpu = -time.perf_counter(), -time.process_time()
        return self

    def __exit__(self, *details: object) -> None:
        self.cpu += time.process_time()
        self.wall += time.perf_counter()

    @property
    def percent(self) -> float:
        """CPU time per wall time, in percent of one core."""
        return 100.0 * self.cpu / self.wall if self.wall > 0 else 0.0


def resident_bytes() -> int:
    """Return the resident memory of this process; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def live_objects() -> dict[str, int]:
    """Collect garbage, and return how many objects the collector tracks, by class: ``accel.ref.AccelRef``, for example."""
    for _ in range(3):
        gc.collect()
    counts: dict[str, int] = {}
    for kind in map(type, gc.get_objects()):
        name = f"{kind.__module__}.{kind.__qualname__}"
        counts[name] = counts.get(name, 0) + 1
    return counts
