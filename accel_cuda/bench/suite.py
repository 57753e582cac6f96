"""The list of CUDA's cases."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from accel.cli.bench.cases import ASK, IDLE
from accel.cli.bench.cases_soak import soak
from accel.cli.bench.suite import BenchCase, Suite
from accel_cuda.bench import cases
from accel_cuda.bench.families import families
from accel_cuda.bench.others import CupyWays, TorchWays
from accel_cuda.bench.raw import Raw
from accel_cuda.bench.rig import Rig, machine

if TYPE_CHECKING:
    from accel_cuda.bench.rig import OwnRig

__all__ = ["CASE_LIMIT", "SOAK", "bench_suite", "kernel_cases"]

CASE_LIMIT = 60.0
"""Seconds of one case."""

SOAK = BenchCase("soak", "growth of memory and of live objects", partial(soak, tasks=64), ("P13",), once=True, limit=2 * CASE_LIMIT)


def kernel_cases(rig: OwnRig) -> tuple[BenchCase, ...]:
    """Return the cases that await an empty kernel, and the one that has real ops."""
    return (
        BenchCase("await", "await an empty kernel", partial(cases.await_one, rig), ("P1",), limit=CASE_LIMIT),
        BenchCase("tasks", "empty kernels from 64 tasks", partial(cases.from_tasks, rig), ("P2",), limit=CASE_LIMIT),
        BenchCase("busy", "an empty kernel beside a busy thread", partial(cases.busy, rig), ("P6", "P6-rate"), limit=CASE_LIMIT),
        BenchCase("families", "ops of every family beside PyTorch's", partial(families, rig), ("P17",), once=True, limit=2 * CASE_LIMIT),
    )


def bench_suite() -> Suite:
    """Return the cases, which share one rig. Nothing of CUDA is loaded before the first of them runs."""
    rig = Rig(Raw, CupyWays, TorchWays)
    return Suite((IDLE, ASK, *kernel_cases(rig), SOAK), ("asyncio", "uvloop"), machine, rig.close)
