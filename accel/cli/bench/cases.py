"""The cases that the package brings: an idle system, one awaited op, an actor's answer, and what launches kernels."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from accel import Actor, ActorContext, System
from accel.cli.bench.cases_launch import await_empty
from accel.cli.bench.cases_recovery import hold_recoveries
from accel.cli.bench.cases_soak import soak
from accel.cli.bench.measure import CpuMeter, awaited, called
from accel.cli.bench.suite import Bench, BenchCase

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]

__all__ = ["ASK", "CASES", "CASE_LIMIT", "IDLE", "LAUNCH_CASES", "MANY_SOAK", "STANDBY", "Echo"]


class Echo(Actor[int, int]):
    """Answers with the message."""

    async def receive(self, message: int, context: ActorContext) -> int:
        """Answer."""
        return message


async def _bare_future() -> None:
    """Await a future that the next iteration of the loop resolves: the least that an answer can cost."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    loop.call_soon(future.set_result, None)
    await future


async def _idle(bench: Bench) -> None:
    seconds = bench.scale(20, 10) / 10
    with CpuMeter() as alone:
        await asyncio.sleep(seconds)
    async with System("bench") as system:
        device = await system.open_device(bench.spec)
        ref = await device.put(bench.rng.standard_normal((8, 8), dtype=np.float32))
        for _ in range(100):
            await device.blas.gemm(ref, ref)
        # The awaited ops leave threads that are about to sleep, numpy's own among them.
        await asyncio.sleep(0.3)
        with CpuMeter() as idle:
            await asyncio.sleep(seconds)
    bench.report.hold("P5", idle.percent, seconds=seconds, without_system=round(alone.percent, 4))


async def _await_gemm(bench: Bench) -> None:
    a, b = bench.rng.standard_normal((2, 8, 8), dtype=np.float32)
    c = np.empty_like(a)
    count = bench.scale(1000, 300)
    async with System("bench") as system:
        device = await system.open_device(bench.spec)
        x, y = await device.put(a), await device.put(b)
        z = await device.empty((8, 8))
        gemm = device.blas.gemm
        subjects = {
            "accel": awaited(lambda: gemm(x, y), count),
            "numpy": called(lambda: np.matmul(a, b, out=c), count),
            "accel, out=": awaited(lambda: gemm(x, y, out=z), count),
            "accel, timeout=": awaited(lambda: gemm(x, y, timeout=60.0), count),
        }
        results = await bench.compare("await gemm 8x8 float32", subjects)
    added = {subject: (samples.median - results["numpy"].median) * 1e6 for subject, samples in results.items()}
    bench.report.hold("P11", added["accel"], with_out=round(added["accel, out="], 3), with_timeout=round(added["accel, timeout="], 3))


async def _ask(bench: Bench) -> None:
    count = bench.scale(2000, 500)
    async with System("bench") as system:
        echo = await system.spawn(Echo)
        subjects = {"accel": awaited(lambda: echo.ask(1), count), "bare future": awaited(_bare_future, count)}
        results = await bench.compare("ask round trip", subjects)
    bench.report.hold("P12", results["accel"].median / results["bare future"].median)


IDLE = BenchCase("idle", "CPU of an open system with nothing in flight", _idle, ("P5",))
ASK = BenchCase("ask", "actor ask round trip against a bare future", _ask, ("P12",))
CASES = (
    IDLE,
    BenchCase("gemm8", "await an 8x8 gemm", _await_gemm, ("P11",)),
    ASK,
    BenchCase("soak", "growth of memory and of live objects", soak, ("P13",)),
)
"""The cases of every backend, in the order in which they run."""

CASE_LIMIT = 60.0
"""Seconds of one case on a device that launches kernels."""
STANDBY = BenchCase("standby", "from a fault to the first good gemm", hold_recoveries, ("P10", "P10-standby"), once=True, limit=CASE_LIMIT)
MANY_SOAK = BenchCase("soak", "growth of memory and of live objects", partial(soak, tasks=64), ("P13",), once=True, limit=2 * CASE_LIMIT)
LAUNCH_CASES = (IDLE, ASK, BenchCase("await", "await an empty kernel", await_empty, ("P1",), limit=CASE_LIMIT), STANDBY, MANY_SOAK)
"""The cases of a backend whose ops are launches: see :class:`accel.backend.LaunchesEmptyKernels`."""
