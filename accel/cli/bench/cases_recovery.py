"""From a fault to the first good answer."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Literal

import numpy as np

from accel import ContextPoisonedError, RestartStrategy, System
from accel.cli.bench.measure import Samples
from accel.testing import FaultPlan

if TYPE_CHECKING:
    from accel import Device
    from accel.cli.bench.suite import Bench

__all__ = ["TITLE", "hold_recoveries", "recoveries", "survive"]

TITLE = "from a fault to the first good gemm"
_PATIENCE = 60.0


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
            async with asyncio.timeout(_PATIENCE):
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
