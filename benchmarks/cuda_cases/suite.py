"""The list of CUDA's cases: those of ``accel bench``, and those that measure beside CuPy, PyTorch and raw libraries."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from accel.cli.bench.cases import ASK, IDLE
from accel.cli.bench.suite import BenchCase, Suite
from accel_cuda.bench.rig import Rig, machine
from accel_cuda.bench.suite import CASE_LIMIT, SOAK, kernel_cases
from benchmarks.cuda_cases import copies, latency, lengths, mixed, process, products
from benchmarks.cuda_cases.twins import CupyTwins, RawTwins, TorchTwins

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from accel.cli.bench.suite import Bench
    from benchmarks.cuda_cases.twins import TwinRig

    Run = Callable[[TwinRig, Bench], Awaitable[None]]

__all__ = ["cuda_suite"]


def cuda_suite() -> Suite:
    """Return the cases, which share one rig. Nothing of CUDA is loaded before the first of them runs."""
    rig = Rig(RawTwins, CupyTwins, TorchTwins)

    def case(name: str, title: str, run: Run, budgets: tuple[str, ...] = (), *, once: bool = False, limit: float = CASE_LIMIT) -> BenchCase:
        return BenchCase(name, title, partial(run, rig), budgets, once=once, limit=limit)

    own = (
        case("batch", "batches of 64 empty kernels", latency.batch, ("P3",)),
        case("graph", "replay of a graph of 64 empty kernels", latency.graph, ("P3-graph",)),
        case("jittered", "kernels of 0.2 to 5 ms, 8 in flight", latency.jittered, ("P4", "P4-cpu")),
        case("copy", "put and get of large arrays", copies.copies, ("P7", "P7-put", "P7-get")),
        case("gemm4096", "gemm 4096, 8 in flight and one", products.products, ("P8", "P8-one")),
        case("process", "await an empty kernel on a process host", process.await_one, ("P9",)),
        case("process-tasks", "empty kernels from 64 tasks on a process host", process.from_tasks, ("P9-rate",)),
        case("process-copy", "pinned put and get on a process host", copies.copies_to_a_child, ("P9-copy",)),
        case("standby", "from a fault to the first good gemm", process.recoveries, ("P10", "P10-standby"), once=True),
        case(
            "mixed",
            "a service's mix: products of jittered sizes from tasks that pause",
            mixed.mixed,
            ("P14", "P14-p50", "P14-p99", "P14-small", "P14-cpu"),
            limit=2 * CASE_LIMIT,
        ),
        case("lengths", "added latency by length of the kernel", lengths.kernel_lengths, once=True),
        case("copies", "put and get from 4 KiB to 1 GiB", copies.copies_of_all_sizes, once=True),
        case("gemm", "gemm from 32 to 8192", products.products_of_all_sizes, once=True),
    )
    return Suite((IDLE, ASK, *kernel_cases(rig), *own, SOAK), ("asyncio", "uvloop"), machine, rig.close)
