"""The budgets of the design as data: what a ratio must be, what it should be, and which way is better."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["BUDGETS", "Budget", "budget_of", "holds"]

NEEDS_CUDA = "needs a CUDA device"
_SOURCE = "needs benchmarks/run.py of the source tree"
_BOTH = "needs a CUDA device and benchmarks/run.py of the source tree"
_NOT_YET = "has no benchmark yet"


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
        What it takes to measure it; empty if ``accel bench`` measures it on every device.
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
    "P1": Budget("await an empty kernel, against raw launch + synchronize", 3.5, 2.5, needs=NEEDS_CUDA),
    "P2": Budget(
        "empty kernels from 64 tasks, op/s against the better of CuPy + launch_host_func and PyTorch + event.query",
        0.9,
        1.5,
        better="higher",
        needs=_BOTH,
    ),
    "P3": Budget("64 tiny kernels in a batch, launches/s against the raw rate", 0.4, 0.7, better="higher", needs=_BOTH),
    "P3-graph": Budget("await a graph replay, over raw graph launch + synchronize", 25.0, 12.0, "us", needs=_BOTH),
    "P4": Budget("kernels of 0.2 to 5 ms, 8 in flight: time added, p50", 120.0, 50.0, "us", needs=_BOTH),
    "P4-cpu": Budget("kernels of 0.2 to 5 ms, 8 in flight: CPU of one core", 40.0, 20.0, "%", needs=_BOTH),
    "P5": Budget("open system with a device, nothing in flight: CPU of one core", 0.5, 0.0, "%"),
    "P6": Budget("P1's kernel beside one busy Python thread, p50", 100.0, 25.0, "us", needs=_BOTH),
    "P6-rate": Budget("P1's kernel beside one busy Python thread, op/s against idle", 0.3, 0.6, better="higher", needs=_BOTH),
    "P7": Budget("pinned put and get, against raw pinned copies", 0.95, 0.99, better="higher", needs=_BOTH),
    "P7-put": Budget("pageable put, against raw pageable copies", 1.5, 4.0, better="higher", needs=_BOTH),
    "P7-get": Budget("pageable get, against raw pageable copies", 1.5, 2.5, better="higher", needs=_BOTH),
    "P8": Budget("gemm 4096 with 8 in flight, against raw library calls", 0.98, 0.995, better="higher", needs=_BOTH),
    "P8-one": Budget("one awaited gemm 4096, over the raw call", 80.0, 40.0, "us", needs=_BOTH),
    "P9": Budget("process host: P1's await, against raw", 12.0, 6.0, needs=_BOTH),
    "P9-rate": Budget("process host: empty kernels from 64 tasks, op/s against inline", 0.5, 1.0, better="higher", needs=_BOTH),
    "P9-copy": Budget("process host: P7 pinned", 0.9, 0.98, better="higher", needs=_BOTH),
    "P10": Budget("from the driver's first error to the first good gemm, cold", 3.0, 1.0, "s", needs=NEEDS_CUDA),
    "P10-standby": Budget("the same with a warm standby", 0.3, 0.08, "s", needs=NEEDS_CUDA),
    "P11": Budget("await an 8x8 float32 gemm, over numpy.matmul(out=) itself (difference of medians)", 60.0, 30.0, "us"),
    "P12": Budget("actor ask round trip, against a bare future resolved by call_soon", 2.5, 1.6),
    "P13": Budget("growth of resident memory over the ops (live objects: 0)", 8.0, 0.0, "MiB"),
    "P14": Budget("a service's mix, op/s against PyTorch + event.query on 8 streams", 0.95, 1.1, better="higher", needs=_BOTH),
    "P14-p50": Budget("a service's mix, p50 against the same", 1.1, 0.9, needs=_BOTH),
    "P14-p99": Budget("a service's mix, p99 against the same", 1.1, 0.8, needs=_BOTH),
    "P14-small": Budget("a service's mix, p50 of the smallest product against the same", 1.2, 0.9, needs=_BOTH),
    "P14-cpu": Budget("a service's mix, CPU of one core against the same", 1.1, None, needs=_BOTH),
    "P15": Budget(
        "a torch model behind the batcher, requests/s: eager against a hand-written batcher", 1.0, 1.1, better="higher", needs=_NOT_YET
    ),
    "P15-graphs": Budget(
        "graphs behind the batcher, requests/s against the eager hand-written batcher", 2.0, 4.0, better="higher", needs=_NOT_YET
    ),
    "P15-both": Budget(
        "graphs behind the batcher, requests/s against the hand-written one with graphs", 1.0, 1.1, better="higher", needs=_NOT_YET
    ),
    "P16": Budget("P15's service: from a kernel that asserts to the next good answer, with a spare", 1.0, 0.2, "s", needs=_NOT_YET),
    "P16-cold": Budget("the same without a spare, over the imports", 2.0, 0.5, "s", needs=_NOT_YET),
    "P17": Budget("each family's large op on the device, against PyTorch's", 0.95, 0.99, better="higher", needs=_BOTH),
    "P38": Budget("await a small op, against PyTorch + event.query in each iteration of the loop", 1.6, 1.1, needs=_BOTH),
    "P38-batch": Budget("add and softmax in batches of 8 and 64, against PyTorch, then synchronize", 2.5, 1.5, needs=_BOTH),
    "P38-products": Budget("gemm and attention in batches of 8 and 64, against the same", 2.0, 1.2, needs=_BOTH),
    "P38-dnn": Budget("conv2d and attention in a batch of 8, against the same", 1.6, 1.2, needs=_BOTH),
    "P38-matmul": Budget("the loop's time of linalg.matmul, over blas.gemm's", 1.1, 1.0, needs=_BOTH),
    "P38-mixed": Budget(
        "8 tasks, mixed products without pauses, op/s against PyTorch on 8 streams", 0.95, 1.05, better="higher", needs=_BOTH
    ),
    "batcher": Budget(
        "DynamicBatcher with 256 clients, items/s against a bare loop of the same batches", 0.5, None, better="higher", needs=_SOURCE
    ),
    "completion": Budget("wait for a 5 ms op with completion='adaptive': CPU of one core", 15.0, 4.0, "%", needs=_SOURCE),
}
"""Name in the report -> budget. A suffix marks a further limit of the same line of the design."""


def budget_of(name: str) -> Budget:
    """Return the budget behind a ratio's name, which may end in the event loop that it was measured on: ``"P1-uvloop"``."""
    return BUDGETS[name if name in BUDGETS else name.rpartition("-")[0]]
