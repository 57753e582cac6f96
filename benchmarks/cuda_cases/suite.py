"""The list of CUDA's cases: those of ``accel bench``, and those that measure beside CuPy, PyTorch and raw libraries."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from accel.cli.bench.cases import ASK, CASE_LIMIT, IDLE, MANY_SOAK, STANDBY
from accel.cli.bench.suite import BenchCase, Suite
from benchmarks.cuda_cases import copies, empty, latency, lengths, mixed, process, products
from benchmarks.cuda_cases.families import families
from benchmarks.cuda_cases.host_cost import host_cost
from benchmarks.cuda_cases.rig import Rig, machine

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from accel.cli.bench.suite import Bench

    Run = Callable[[Rig, Bench], Awaitable[None]]

__all__ = ["cuda_suite"]


def cuda_suite() -> Suite:
    """Return the cases, which share one rig. Nothing of CUDA is loaded before the first of them runs."""
    rig = Rig()

    def case(name: str, title: str, run: Run, budgets: tuple[str, ...] = (), *, once: bool = False, limit: float = CASE_LIMIT) -> BenchCase:
        return BenchCase(name, title, partial(run, rig), budgets, once=once, limit=limit)

    own = (
        case("await", "await an empty kernel", empty.await_one, ("P1",)),
        case("tasks", "empty kernels from 64 tasks", empty.from_tasks, ("P2",)),
        case("busy", "an empty kernel beside a busy thread", empty.busy, ("P6", "P6-rate")),
        case("families", "ops of every family beside PyTorch's", families, ("P17",), once=True, limit=2 * CASE_LIMIT),
        case("batch", "batches of 64 empty kernels", latency.batch, ("P3",)),
        case("graph", "replay of a graph of 64 empty kernels", latency.graph, ("P3-graph",)),
        case("jittered", "kernels of 0.2 to 5 ms, 8 in flight", latency.jittered, ("P4", "P4-cpu")),
        case("copy", "put and get of large arrays", copies.copies, ("P7", "P7-put", "P7-get")),
        case("gemm4096", "gemm 4096, 8 in flight and one", products.products, ("P8", "P8-one")),
        case("process", "await an empty kernel on a process host", process.await_one, ("P9",)),
        case("process-tasks", "empty kernels from 64 tasks on a process host", process.from_tasks, ("P9-rate",)),
        case("process-copy", "pinned put and get on a process host", copies.copies_to_a_child, ("P9-copy",)),
        STANDBY,
        case(
            "mixed",
            "a service's mix: products of jittered sizes from tasks that pause",
            mixed.mixed,
            ("P14", "P14-p50", "P14-p99", "P14-small", "P14-cpu"),
            limit=2 * CASE_LIMIT,
        ),
        case(
            "host-cost",
            "what an op costs the host, beside PyTorch",
            host_cost,
            ("P38", "P38-batch", "P38-products", "P38-dnn", "P38-matmul", "P38-mixed"),
            once=True,
            limit=2 * CASE_LIMIT,
        ),
        case("lengths", "added latency by length of the kernel", lengths.kernel_lengths, once=True),
        case("copies", "put and get from 4 KiB to 1 GiB", copies.copies_of_all_sizes, once=True),
        case("gemm", "gemm from 32 to 8192", products.products_of_all_sizes, once=True),
    )
    return Suite((IDLE, ASK, *own, MANY_SOAK), ("asyncio", "uvloop"), machine, rig.close)
