"""What a process host costs: P9, beside the raw twin of P1 and the inline device."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from accel import System
from accel.cli.bench.cases import OURS, RAW
from accel.cli.bench.measure import awaited, called
from accel_cuda.families.kernels.bench import EmptyKernel
from benchmarks.measures import together

if TYPE_CHECKING:
    from accel import Device
    from accel.cli.bench.measure import Meter
    from accel.cli.bench.suite import Bench
    from benchmarks.cuda_cases.rig import Rig

__all__ = ["await_one", "from_tasks"]

_MICRO = 1e6
_TASKS = 64
_INLINE = "accel, inline"


async def await_one(rig: Rig, bench: Bench) -> None:
    """P9: one empty kernel at a time, in a child."""
    raw = rig.raw(bench)
    async with System("bench") as system:
        device = await system.open_device(bench.spec, host="process")
        op = EmptyKernel(await device.zeros(4))
        subjects = {
            OURS: awaited(lambda: device.run(op), bench.scale(1000, 300)),
            RAW: called(raw.blocking(), bench.scale(1000, 300)),
        }
        results = await bench.compare("await an empty kernel, process host", subjects)
    ours, twin = results[OURS], results[RAW]
    bench.report.hold(
        "P9",
        ours.median / twin.median,
        us=round(ours.median * _MICRO, 3),
        p99_us=round(ours.percentile(99) * _MICRO, 3),
        raw_us=round(twin.median * _MICRO, 3),
    )


async def from_tasks(rig: Rig, bench: Bench) -> None:
    """P9-rate: empty kernels from 64 tasks, in a child and inline."""
    async with System("bench") as system:
        rates: dict[str, Meter] = {}
        for name, host in ((OURS, "process"), (_INLINE, "inline")):
            device = await system.open_device(bench.spec, host=host)  # type: ignore[arg-type]
            rates[name] = _together(device, [EmptyKernel(await device.zeros(4)) for _ in range(_TASKS)], bench.scale(100, 40))
        results = await bench.compare(f"empty kernels from {_TASKS} tasks, process host", rates)
    bench.report.hold(
        "P9-rate", results[OURS].rate / results[_INLINE].rate, ops_per_s={name: round(samples.rate) for name, samples in results.items()}
    )


def _together(device: Device, ops: list[EmptyKernel], count: int) -> Meter:
    turn = itertools.cycle(ops)
    return together(lambda: device.run(next(turn)), len(ops), count)
