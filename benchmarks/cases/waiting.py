"""Ways of waiting: how late the end of an op is seen, and what it costs to see it."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from accel import CompletionStrategy, PolledCompletion, System
from accel.backend import Injection
from accel.cli.bench.measure import CpuMeter, Samples, compare
from accel.cli.bench.suite import Bench, BenchCase

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from accel.completion import CompletionName

__all__ = ["CASES"]

_DURATION = 5e-3


class _Sleeps:
    """Lets each copy take a while, on the device's own thread and without using the processor: given as ``faults=``.

    Attributes
    ----------
    ended : float
        When the last one was over.
    """

    def __init__(self) -> None:
        self.ended = 0.0

    def sleep(self) -> None:
        time.sleep(_DURATION)
        self.ended = time.perf_counter()

    def take(self, kind: str) -> Injection | None:
        """See :class:`accel.testing.FaultPlan`."""
        return Injection("hang", release=self.sleep) if kind == "copy" else None


class _Waiter:
    """Times one way of waiting."""

    def __init__(self, sleeps: _Sleeps, wait: Callable[[], Awaitable[Any]], count: int) -> None:
        self.sleeps = sleeps
        self.wait = wait
        self.count = count
        self.cpu = self.wall = 0.0

    async def __call__(self, samples: Samples) -> None:
        with CpuMeter() as meter:
            for _ in range(self.count):
                await self.wait()
                samples.add(time.perf_counter() - self.sleeps.ended)
        self.cpu += meter.cpu
        self.wall += meter.wall

    @property
    def percent(self) -> float:
        """CPU of one core."""
        return round(100.0 * self.cpu / self.wall, 3)


async def _waiting(bench: Bench) -> None:
    count, rounds = bench.scale(20, 8), bench.scale(5, 2)
    names: tuple[CompletionName, ...] = ("adaptive", "host_fn", "polled", "sync")
    strategies: dict[str, CompletionName | CompletionStrategy] = {name: name for name in names}
    strategies["polled, every turn"] = PolledCompletion(0.0)
    waiters: dict[str, _Waiter] = {}
    async with System("bench") as system:
        for name, completion in strategies.items():
            sleeps = _Sleeps()
            device = await system.open_device(bench.spec, completion=completion, faults=sleeps)
            source, target = await device.zeros(8), await device.zeros(8)
            waiters[name] = _Waiter(sleeps, lambda device=device, pair=(source, target): device.copy(*pair), count)  # type: ignore[misc]
        sleeps = _Sleeps()
        waiters["asyncio.to_thread"] = _Waiter(sleeps, lambda: asyncio.to_thread(sleeps.sleep), count)
        for waiter in waiters.values():
            # The first ops teach how long such an op takes: they are not what a service pays.
            await waiter(Samples())
            waiter.cpu = waiter.wall = 0.0
        results = await compare(waiters, rounds, warm_up=0)
    for name, samples in results.items():
        # Of the whole time, the op itself included, which is not in what was added to it.
        samples.rates = [samples.ops / waiters[name].wall]
        bench.report.add("time added to a 5 ms op", name, samples)
    cpu = {name: waiter.percent for name, waiter in waiters.items()}
    bench.report.hold("completion", cpu["adaptive"], cpu_percent=cpu)


CASES = (BenchCase("waiting", "completion strategies on a 5 ms op", _waiting, ("completion",)),)
