"""The list of CUDA's cases."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from accel.cli.bench import cases_actors, cases_device
from accel.cli.bench.cases_soak import soak
from accel.cli.bench.suite import Case, Suite
from accel_cuda.bench import cases_copies, cases_latency, cases_lengths, cases_process, cases_products
from accel_cuda.bench.rig import Rig, machine

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from accel.cli.bench.suite import Bench

    Run = Callable[[Rig, Bench], Awaitable[None]]

__all__ = ["bench_suite"]

_LIMIT = 60.0
_GENERIC = ("idle", "ask")


def bench_suite() -> Suite:
    """Return the cases, which share one rig. Nothing of CUDA is loaded before the first of them runs."""
    rig = Rig()

    def case(name: str, title: str, run: Run, budgets: tuple[str, ...] = (), *, once: bool = False, has_points: bool = False) -> Case:
        return Case(name, title, partial(run, rig), budgets, once=once, has_points=has_points, limit=_LIMIT)

    generic = tuple(each for each in (*cases_device.CASES, *cases_actors.CASES) if each.name in _GENERIC)
    own = (
        case("await", "await an empty kernel", cases_latency.await_one, ("P1",)),
        case("tasks", "empty kernels from 64 tasks", cases_latency.from_tasks, ("P2",)),
        case("batch", "batches of 64 empty kernels", cases_latency.batch, ("P3",)),
        case("graph", "replay of a graph of 64 empty kernels", cases_latency.graph, ("P3-graph",)),
        case("long", "kernels of 1 and 5 ms", cases_latency.long_kernels, ("P4", "P4-cpu-1ms", "P4-cpu-5ms")),
        case("busy", "an empty kernel beside a busy thread", cases_latency.busy, ("P6", "P6-rate")),
        case("copy", "put and get of large arrays", cases_copies.copies, ("P7", "P7-put", "P7-get")),
        case("gemm4096", "gemm 4096, 8 in flight and one", cases_products.products, ("P8", "P8-one")),
        case("process", "await an empty kernel on a process host", cases_process.await_one, ("P9",)),
        case("process-tasks", "empty kernels from 64 tasks on a process host", cases_process.from_tasks, ("P9-rate",)),
        case("process-copy", "pinned put and get on a process host", cases_copies.copies_to_a_child, ("P9-copy",)),
        case("standby", "from a fault to the first good gemm", cases_process.recoveries, ("P10", "P10-standby"), once=True),
        case("lengths", "added latency by length of the kernel", cases_lengths.kernel_lengths, once=True, has_points=True),
        case("copies", "put and get from 4 KiB to 1 GiB", cases_copies.copies_of_all_sizes, once=True),
        case("gemm", "gemm from 32 to 8192", cases_products.products_of_all_sizes, once=True),
    )
    last = Case("soak", "growth of memory and of live objects", partial(soak, tasks=64), ("P13",), once=True, limit=2 * _LIMIT)
    return Suite((*generic, *own, last), ("asyncio", "uvloop"), machine, rig.close)
