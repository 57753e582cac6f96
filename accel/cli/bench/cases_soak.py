"""A million ops, and whether anything grows."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from accel import AccelRef, Device, System
from accel.cli.bench.measure import Samples, live_objects, resident_bytes

if TYPE_CHECKING:
    from accel.cli.bench.suite import Bench

__all__ = ["soak"]

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


async def _run(loads: list[_Load], ops: int, samples: Samples) -> None:
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
        await _run(loads, ops // 20, Samples())
        used = device.info().memory.used  # first: it frees the memory of the refs that were dropped last
        objects = live_objects()
        resident = resident_bytes()
        await _run(loads, ops, samples)
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
