"""What each way of waiting adds to kernels from 0 to 10 ms, and the processor time of it: the points that ``benchmarks/plot.py`` draws."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel import System
from accel.cli.bench.cases import OURS, RAW
from accel.cli.bench.measure import compare
from accel_cuda.families.kernels.bench import EmptyKernel, SpinKernel
from benchmarks.cuda_cases.rig import CUPY, TORCH_QUERY, TORCH_THREAD
from benchmarks.cuda_cases.waits import Wait, as_awaitable
from benchmarks.measures import Point, add_point

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from accel import AccelRef, Device
    from accel.cli.bench.suite import Bench
    from accel.completion import CompletionName
    from benchmarks.cuda_cases.rig import Rig

    Line = Callable[[int], Callable[[], Awaitable[Any]]]

__all__ = ["LENGTHS", "kernel_lengths"]

LENGTHS = (0, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
"""Microseconds; 0 is the empty kernel."""

_STRATEGIES: tuple[CompletionName, ...] = ("adaptive", "polled", "host_fn", "sync")
_OVERHEAD = 60e-6


def _ours(device: Device, out: AccelRef) -> Line:
    def line(nanoseconds: int) -> Callable[[], Awaitable[Any]]:
        op = SpinKernel(out, nanoseconds) if nanoseconds else EmptyKernel(out)
        return lambda: device.run(op)

    return line


async def _lines(rig: Rig, bench: Bench, system: System) -> dict[str, Line]:
    """Return name -> what makes an op of a length."""
    raw, cupy, torch = rig.raw(bench), rig.cupy(bench), rig.torch(bench)
    lines: dict[str, Line] = {}
    for completion in _STRATEGIES:
        device = await system.open_device(bench.spec, completion=completion)
        lines[f"{OURS}, {completion}"] = _ours(device, await device.zeros(4))
    lines[RAW] = lambda nanoseconds: as_awaitable(raw.blocking(nanoseconds))
    if cupy is not None:
        lines[CUPY] = cupy.op
    if torch is not None:
        # One and the same kernel, launched in the cheapest way: what differs is PyTorch's waiting.
        stream = torch.stream
        lines[TORCH_QUERY] = lambda nanoseconds: torch.queried(raw.launcher(nanoseconds, stream=stream))
        lines[TORCH_THREAD] = lambda nanoseconds: torch.in_thread(raw.launcher(nanoseconds, stream=stream))
    return lines


async def kernel_lengths(rig: Rig, bench: Bench) -> None:
    """Measure every line at every length, the lines in turn."""
    rounds, budget = bench.scale(4, 2), bench.scale(400, 60) / 1e3
    async with System("bench") as system:
        lines = await _lines(rig, bench, system)
        for microseconds in LENGTHS:
            seconds = microseconds / 1e6
            count = max(8, min(bench.scale(400, 120), int(budget / (seconds + _OVERHEAD))))
            what = f"added to a kernel of {microseconds:,} us" if microseconds else "await an empty kernel, by completion"
            waits = {name: Wait(line(1000 * microseconds), seconds, -(-count // rounds)) for name, line in lines.items()}
            for wait in waits.values():
                await wait.warm_up(max(bench.scale(10, 4), count // 5))
            for name, samples in (await compare(waits, rounds, warm_up=0)).items():
                bench.report.add(what, name, samples)
                p50, p99 = (round(1e6 * samples.percentile(q), 3) for q in (50, 99))
                add_point(bench.report, Point(name, microseconds, p50, p99, round(waits[name].percent, 2)))
