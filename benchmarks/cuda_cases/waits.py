"""Timing of waits for kernels of a known length: what was added to each, and the processor time that it took."""

from __future__ import annotations

import time
from array import array
from typing import TYPE_CHECKING, Any

from accel.cli.bench.measure import CpuMeter, Samples
from benchmarks.measures import add_overlapped

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["Wait", "as_awaitable"]


class Wait:
    """A round (see :class:`accel.cli.bench.measure.Meter`) that samples what a wait adds to its kernel.

    Parameters
    ----------
    op
        Starts the kernel and waits for it.
    seconds
        How long the kernel takes.
    count
        Ops of a round.
    """

    def __init__(self, op: Callable[[], Awaitable[Any]], seconds: float, count: int) -> None:
        self._op = op
        self._seconds = seconds
        self._count = count
        self._cpu = self._wall = 0.0

    async def warm_up(self, count: int) -> None:
        """Run ops that do not count: the first ones teach how long such an op takes."""
        for _ in range(count):
            await self._op()

    async def __call__(self, samples: Samples) -> None:
        """Run a round."""
        op, seconds, clock = self._op, self._seconds, time.perf_counter
        times: array[float] = array("d")
        with CpuMeter() as meter:
            for _ in range(self._count):
                began = clock()
                await op()
                times.append(clock() - began - seconds)
        add_overlapped(samples, times, meter.wall)
        self._cpu += meter.cpu
        self._wall += meter.wall

    @property
    def percent(self) -> float:
        """CPU of one core over all rounds, the kernels' own time included."""
        return 100.0 * self._cpu / self._wall if self._wall else 0.0


def as_awaitable(call: Callable[[], object]) -> Callable[[], Awaitable[None]]:
    """Return a blocking call as an op to await: it blocks the loop, as raw calls do."""

    async def op() -> None:
        call()

    return op
