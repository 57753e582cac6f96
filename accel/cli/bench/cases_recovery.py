"""From a fault to the first good answer."""

from __future__ import annotations

import time

import numpy as np

from accel import ContextPoisonedError, System
from accel.cli.bench.measure import Samples
from accel.cli.bench.suite import Bench, Case
from accel.testing import FaultPlan

__all__ = ["CASES"]


async def _recovery(bench: Bench) -> None:
    a = bench.rng.standard_normal((64, 64), dtype=np.float32)
    opened, recovered = Samples(), Samples()
    async with System("bench") as system:
        for _ in range(bench.scale(15, 5)):
            began = time.perf_counter()
            device = await system.open_device(bench.spec, libraries=("blas",), faults=FaultPlan().poison_at(2, op="gemm"))
            x = await device.put(a)
            await device.blas.gemm(x, x)
            opened.add(time.perf_counter() - began)
            try:
                await device.blas.gemm(x, x)
            except ContextPoisonedError:
                began = time.perf_counter()
            else:
                raise AssertionError("the fault did not surface")
            x = await device.put(a)
            y = await device.blas.gemm(x, x)
            recovered.add(time.perf_counter() - began)
            if not np.allclose(await device.get(y), a @ a, rtol=1e-3, atol=1e-3):
                raise AssertionError("wrong product after the rebuild")
            await device.aclose()
    bench.report.add("from a fault to the first good gemm", "accel", recovered)
    bench.report.add("from a fault to the first good gemm", "open_device to first gemm", opened)


CASES = (Case("recovery", "time from a fault to the first good gemm", _recovery),)
