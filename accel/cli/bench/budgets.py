"""The budgets of the design as data: what a ratio must be, what it should be, and which way is better."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["BUDGETS", "Budget", "budget_of", "holds"]

NEEDS_CUDA = "needs a CUDA device"


@dataclass(frozen=True, slots=True)
class Budget:
    """One budget.

    Parameters
    ----------
    title
        What is measured, against what.
    must, goal
        The limits, in ``unit``; ``must=None`` where nothing is demanded.
    unit
        ``"x"`` for ratios, else the unit of the value.
    better
        Which way is better.
    needs
        What it takes to run it; empty if every device can be asked.
    """

    title: str
    must: float | None
    goal: float | None
    unit: str = "x"
    better: Literal["lower", "higher"] = "lower"
    needs: str = ""


def holds(value: float, limit: float | None, better: Literal["lower", "higher"]) -> bool:
    """Return whether a value keeps a limit; no limit is always kept, and a value that is not a number keeps none."""
    if limit is None:
        return True
    return value <= limit if better == "lower" else value >= limit


BUDGETS: dict[str, Budget] = {
    "P1": Budget("await an empty kernel, against raw launch + synchronize", 3.0, 1.8, needs=NEEDS_CUDA),
    "P2": Budget(
        "empty kernels from 64 tasks, op/s against CuPy RawKernel + launch_host_func", 2.5, 4.0, better="higher", needs=NEEDS_CUDA
    ),
    "P3": Budget("64 tiny kernels in a batch, launches/s against the raw rate", 0.4, 0.7, better="higher", needs=NEEDS_CUDA),
    "P3-graph": Budget("await a graph replay, over raw graph launch + synchronize", 25.0, 12.0, "us", needs=NEEDS_CUDA),
    "P4": Budget("1 ms and 5 ms kernels, time added", 80.0, 25.0, "us", needs=NEEDS_CUDA),
    "P4-cpu-1ms": Budget("1 ms kernels, CPU of one core", 25.0, 12.0, "%", needs=NEEDS_CUDA),
    "P4-cpu-5ms": Budget("5 ms kernels, CPU of one core", 12.0, 4.0, "%", needs=NEEDS_CUDA),
    "P5": Budget("open system with a device, nothing in flight: CPU of one core", 0.5, 0.0, "%"),
    "P6": Budget("P1's kernel beside one busy Python thread, p50", 100.0, 25.0, "us", needs=NEEDS_CUDA),
    "P6-rate": Budget("P1's kernel beside one busy Python thread, op/s against idle", 0.3, 0.6, better="higher", needs=NEEDS_CUDA),
    "P7": Budget("pinned put and get, against raw pinned copies", 0.95, 0.99, better="higher", needs=NEEDS_CUDA),
    "P7-put": Budget("pageable put, against raw pageable copies", 2.0, 4.0, better="higher", needs=NEEDS_CUDA),
    "P7-get": Budget("pageable get, against raw pageable copies", 1.5, 2.5, better="higher", needs=NEEDS_CUDA),
    "P8": Budget("gemm 4096 with 8 in flight, against raw library calls", 0.98, 0.995, better="higher", needs=NEEDS_CUDA),
    "P8-one": Budget("one awaited gemm 4096, over the raw call", 30.0, 15.0, "us", needs=NEEDS_CUDA),
    "P9": Budget("process host: P1's await, against raw", 9.0, 4.0, needs=NEEDS_CUDA),
    "P9-rate": Budget("process host: P2", 2.0, 4.0, better="higher", needs=NEEDS_CUDA),
    "P9-copy": Budget("process host: P7 pinned", 0.9, 0.98, better="higher", needs=NEEDS_CUDA),
    "P10": Budget("from the driver's first error to the first good gemm, cold", 3.0, 1.0, "s", needs=NEEDS_CUDA),
    "P10-standby": Budget("the same with a warm standby", 0.3, 0.08, "s", needs=NEEDS_CUDA),
    "P11": Budget("await an 8x8 float32 gemm, over numpy.matmul(out=) itself (difference of medians)", 60.0, 25.0, "us"),
    "P12": Budget("actor ask round trip, against a bare future resolved by call_soon", 2.5, 1.6),
    "P13": Budget("growth of resident memory over the ops (live objects: 0)", 8.0, 0.0, "MiB"),
    "batcher": Budget("DynamicBatcher with 256 clients, items/s against a bare loop of the same batches", 0.5, None, better="higher"),
    "completion": Budget("wait for a 5 ms op with completion='adaptive': CPU of one core", 15.0, 4.0, "%"),
}
"""Name in the report -> budget. A suffix marks a further limit of the same line of the design."""


def budget_of(name: str) -> Budget:
    """Return the budget behind a ratio's name, which may end in the event loop that it was measured on: ``"P1-uvloop"``."""
    return BUDGETS[name if name in BUDGETS else name.rpartition("-")[0]]
