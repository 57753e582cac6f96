"""The cases that the package brings: an idle system, one awaited op, an actor's answer, a fault, and what launches kernels."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from accel import AccelRef, Actor, ActorContext, ContextPoisonedError, Device, RestartStrategy, System, UnsupportedError
from accel.backend import LaunchesEmptyKernels
from accel.cli.bench.measure import CpuMeter, Samples, awaited, called, live_objects, resident_bytes
from accel.cli.bench.suite import Bench, BenchCase
from accel.registry import find_device
from accel.testing import FaultPlan

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    Array = np.ndarray[Any, Any]

__all__ = [
    "ASK",
    "CASES",
    "CASE_LIMIT",
    "IDLE",
    "LAUNCH_CASES",
    "MANY_SOAK",
    "OURS",
    "RAW",
    "STANDBY",
    "TITLE",
    "Echo",
    "await_empty",
    "hold_recoveries",
    "micro",
    "recoveries",
    "soak",
    "survive",
]

OURS = "accel"
RAW = "raw launch + synchronize"
_MICRO = 1e6
TITLE = "from a fault to the first good gemm"
_REBUILT_WITHIN = 60.0


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


def micro(seconds: dict[str, float]) -> dict[str, Any]:
    """Return times in microseconds, for the details of a ratio."""
    return {name: round(value * _MICRO, 3) for name, value in seconds.items()}


async def await_empty(bench: Bench, others: Mapping[str, Callable[[], Awaitable[object]]] | None = None) -> None:
    """Measure one empty kernel at a time, beside the raw launch and ``others``: P1."""
    backend, found = find_device(bench.spec)
    if not isinstance(backend, LaunchesEmptyKernels):
        raise UnsupportedError(f"the backend {backend.name} has no empty kernel", remedy="Measure a device that launches kernels.")
    with backend.raw_launch(found.index) as raw:
        async with System("bench") as system:
            device = await system.open_device(bench.spec)
            op = backend.empty_op(await device.zeros(4))
            subjects = {
                OURS: awaited(lambda: device.run(op), bench.scale(1000, 300)),
                RAW: called(raw, bench.scale(1000, 300)),
                **{name: awaited(other, bench.scale(200, 50)) for name, other in (others or {}).items()},
            }
            results = await bench.compare("await an empty kernel", subjects)
    ours, twin = results[OURS], results[RAW]
    details = {"us": ours.median, "p99_us": ours.percentile(99), "raw_us": twin.median, "added_us": ours.median - twin.median}
    bench.report.hold("P1", ours.median / twin.median, **micro(details))


async def survive(device: Device, a: np.ndarray[tuple[int, int], np.dtype[np.float32]], recovered: Samples) -> None:
    """Run into the planned fault, and add the time from its being told to a product that is right."""
    x = await device.put(a)
    try:
        await device.blas.gemm(x, x)
    except ContextPoisonedError:
        began = time.perf_counter()
    else:
        raise AssertionError("the fault did not surface")
    x = await device.put(a)
    y = await device.blas.gemm(x, x)
    result = await device.get(y)
    recovered.add(time.perf_counter() - began)
    if not np.allclose(result, a @ a, rtol=1e-3, atol=1e-3):
        raise AssertionError("wrong product after the rebuild")


async def recovery(bench: Bench, standby: Literal["none", "imports", "context"], rounds: int) -> Samples:
    """Return the times from a fault in the child of a process host to the first product that is right and back on the host.

    The clock starts when the one who waits is told: that is one message after the driver has told the child. The report also has the times from that product
    until a spare child, which is forked then, is ready. Without a spare a child is forked after the fault, and makes its context then.
    """
    a = bench.rng.standard_normal((64, 64), dtype=np.float32)
    plan, samples, refills = FaultPlan(), Samples(), Samples()
    for turn in range(rounds):
        plan.poison_at(2 + 3 * turn, op="gemm")
    async with System("bench") as system:
        restart = RestartStrategy(max_restarts=rounds, backoff=(0.0, 0.0))
        device = await system.open_device(bench.spec, host="process", libraries=("blas",), standby=standby, faults=plan, restart=restart)
        for turn in range(rounds):
            began = time.perf_counter()
            async with asyncio.timeout(_REBUILT_WITHIN):
                await device.spare_ready()
            if turn and standby != "none":  # the first one began with the device
                refills.add(time.perf_counter() - began)
            await device.blas.gemm(x := await device.put(a), x)
            del x
            await survive(device, a, samples)
    bench.report.add(f"{TITLE}, process host", f"standby={standby!r}", samples)
    if standby != "none":
        bench.report.add("from the first good gemm to the next spare", f"standby={standby!r}", refills)
    return samples


async def recoveries(bench: Bench) -> dict[str, Samples]:
    """Return :func:`recovery` with each kind of spare child, and without."""
    rounds = {"none": bench.scale(5, 3), "imports": bench.scale(5, 3), "context": bench.scale(9, 4)}
    return {standby: await recovery(bench, standby, count) for standby, count in rounds.items()}  # type: ignore[arg-type]


async def hold_recoveries(bench: Bench) -> None:
    """P10: on a GPU the faults are kernels that write to an illegal address."""
    found = await recoveries(bench)
    imports_s = round(found["imports"].median, 4)
    for name, samples in (("P10", found["none"]), ("P10-standby", found["context"])):
        bench.report.hold(name, samples.median, max_s=round(max(samples.times), 4), imports_s=imports_s)


_TASKS = 8
_OPS = 10


@dataclass(slots=True)
class _Load:
    """One client's data; nothing of it changes size."""

    device: Device
    host: np.ndarray[Any, Any]
    sums: np.ndarray[Any, Any]
    weights: AccelRef

    async def run(self, times: int) -> None:
        """Run ``_OPS`` ops of most kinds, ``times`` times."""
        device, weights = self.device, self.weights
        for _ in range(times):
            x = await device.put(self.host)
            h = await device.blas.gemm(x, weights)
            h = await device.elementwise.unary("relu", h)
            h = await device.elementwise.binary("add", h, x)
            total = await device.reduce("sum", h, axis=1)
            await device.get(total, out=self.sums)
            await device.blas.gemm(x, weights, out=h, timeout=60.0)
            async with device.batch() as batch:
                y = batch.blas.gemm(h, weights)
                y = batch.elementwise.unary("relu", y)
                batch.reduce("sum", y, axis=0)


async def _run_loads(loads: list[_Load], ops: int, samples: Samples) -> None:
    """Run ``ops`` ops in groups, from all clients at once; one sample for each group."""
    times = 25
    group_ops = times * _OPS * len(loads)
    for _ in range(-(-ops // group_ops)):
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for load in loads:
                group.create_task(load.run(times))
        samples.add(time.perf_counter() - began, group_ops)


async def soak(bench: Bench, *, tasks: int = _TASKS) -> None:
    """Run a million ops (quick: a tenth) from ``tasks`` tasks, and see what has grown: P13."""
    ops = bench.scale(1_000_000, 100_000)
    samples = Samples()
    async with System("bench") as system:
        device = await system.open_device(bench.spec)
        loads = []
        for _ in range(tasks):
            host, weights = bench.rng.standard_normal((2, 8, 8), dtype=np.float32)
            loads.append(_Load(device, host, np.empty(8, np.float32), await device.put(weights)))
        # Caches fill and pools reach their size.
        await _run_loads(loads, ops // 20, Samples())
        used = device.info().memory.used  # first: it frees the memory of the refs that were dropped last
        objects = live_objects()
        resident = resident_bytes()
        await _run_loads(loads, ops, samples)
        device_bytes = device.info().memory.used - used
        after = live_objects()
        grown = (resident_bytes() - resident) / 2**20
    bench.report.add(f"{samples.ops} mixed ops from {tasks} tasks", "accel", samples)
    more = {name: after.get(name, 0) - objects.get(name, 0) for name in (after | objects).keys() - _TIMERS}
    own = sum(count for name, count in more.items() if name.startswith(_OWN))
    details: dict[str, Any] = {
        "ops": samples.ops,
        "objects": sum(more.values()),
        "accel_objects": own,
        "device_bytes": device_bytes,
    }
    if own or details["objects"]:
        details["grown"] = {name: more[name] for name in sorted(more, key=lambda name: -more[name])[:_SHOWN]}
    if bench.quick:
        details["note"] = "quick: fewer ops than the budget's 1e6"
    bench.report.hold("P13", max(0.0, grown), also=own <= _NOISE and device_bytes <= 0 and details["objects"] <= _NOISE, **details)


_OWN = ("accel.", "accel_cuda.")
_SHOWN = 6
_TIMERS = {"asyncio.events.TimerHandle", "_contextvars.Context"}
"""asyncio keeps up to a hundred timers that were cancelled, each with its context."""
_NOISE = 10
"""Objects that the interpreter, the loop, numpy and the lists of free memory may keep more than before, over any number of ops: no leaks."""


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
