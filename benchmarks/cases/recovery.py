"""From a fault to the first good answer."""

from __future__ import annotations

import time

import numpy as np

from accel import System
from accel.cli.bench.cases import TITLE, recoveries, survive
from accel.cli.bench.measure import Samples
from accel.cli.bench.suite import Bench, BenchCase
from accel.testing import FaultPlan

__all__ = ["CASES"]


async def _first_gemm(bench: Bench) -> None:
    a = bench.rng.standard_normal((64, 64), dtype=np.float32)
    opened, recovered = Samples(), Samples()
    async with System("bench") as system:
        for _ in range(bench.scale(15, 5)):
            began = time.perf_counter()
            device = await system.open_device(bench.spec, libraries=("blas",), faults=FaultPlan().poison_at(2, op="gemm"))
            x = await device.put(a)
            await device.blas.gemm(x, x)
            opened.add(time.perf_counter() - began)
            await survive(device, a, recovered)
            await device.aclose()
    bench.report.add(TITLE, "accel", recovered)
    bench.report.add(TITLE, "open_device to first gemm", opened)


CASES = (
    BenchCase("recovery", "time from a fault to the first good gemm", _first_gemm),
    BenchCase("standby", "the same on a process host, with and without a spare child", recoveries),
)
