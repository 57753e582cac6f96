"""What a kernel costs in a batch and in a graph (P3), and what waiting adds to kernels of 0.2 to 5 ms (P4)."""

from __future__ import annotations

import asyncio
import time
from array import array
from typing import TYPE_CHECKING

from accel import System
from accel.cli.bench.cases import OURS, micro
from accel.cli.bench.measure import CpuMeter, Samples, awaited, called
from accel_cuda.families.kernels.bench import EmptyKernel, SpinKernel
from benchmarks.cuda_cases.rig import TORCH_QUERY
from benchmarks.measures import add_overlapped

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    import numpy as np

    from accel.cli.bench.measure import Meter
    from accel.cli.bench.suite import Bench
    from benchmarks.cuda_cases.rig import Rig

    Spin = Callable[[int], Awaitable[object]]

__all__ = ["batch", "graph", "jittered"]

_BATCH = 64
_IN_FLIGHT = 8
_SHORTEST, _LONGEST = 200_000, 5_000_000
"""Nanoseconds."""


async def batch(rig: Rig, bench: Bench) -> None:
    """P3: tiny kernels in batches, against a loop of raw launches."""
    raw, count = rig.raw(bench), bench.scale(150, 40)
    async with System("bench") as system:
        device = await system.open_device(bench.spec)
        op = EmptyKernel(await device.zeros(4))

        async def batched() -> None:
            async with device.batch() as recorded:
                for _ in range(_BATCH):
                    recorded.run(op)

        raw_name = f"{_BATCH} raw launches + synchronize"
        subjects = {
            "batch()": awaited(batched, count, _BATCH),
            raw_name: called(raw.blocking(launches=_BATCH), count, _BATCH),
        }
        results = await bench.compare(f"{_BATCH} empty kernels in a batch, each", subjects)
    bench.report.hold("P3", results["batch()"].rate / results[raw_name].rate)


async def graph(rig: Rig, bench: Bench) -> None:
    """P3-graph: the same kernels as a graph, against a raw graph."""
    raw, count = rig.raw(bench), bench.scale(300, 80)
    async with System("bench") as system:
        device = await system.open_device(bench.spec)
        op = EmptyKernel(await device.zeros(4))
        async with device.graph() as recorded:
            for _ in range(_BATCH):
                recorded.run(op)
        raw_name = "raw graph launch + synchronize"
        subjects = {"graph.replay()": awaited(recorded.replay, count), raw_name: called(raw.graph(_BATCH), count)}
        results = await bench.compare(f"a graph of {_BATCH} empty kernels", subjects)
    ours, twin = results["graph.replay()"].median, results[raw_name].median
    bench.report.hold("P3-graph", (ours - twin) * 1e6, **micro({"us": ours, "raw_us": twin}))


class _Jittered:
    """A round of tasks that each await kernels one after the other; it samples the time beyond the kernels' own.

    Parameters
    ----------
    spins
        For each task, how a kernel of a given length in nanoseconds is awaited. The kernels of different tasks run at the same time.
    nanoseconds
        For each task, the lengths of its kernels in a round.
    """

    def __init__(self, spins: Sequence[Spin], nanoseconds: np.ndarray[tuple[int, int], np.dtype[np.int64]]) -> None:
        self._spins = spins
        self._nanoseconds: list[list[int]] = nanoseconds.tolist()
        self._cpu = self._wall = 0.0

    async def __call__(self, samples: Samples) -> None:
        added: array[float] = array("d")
        clock = time.perf_counter

        async def client(spin: Spin, nanoseconds: list[int]) -> None:
            for length in nanoseconds:
                began = clock()
                await spin(length)
                added.append(clock() - began - length / 1e9)

        with CpuMeter() as meter:
            async with asyncio.TaskGroup() as group:
                for spin, nanoseconds in zip(self._spins, self._nanoseconds, strict=True):
                    group.create_task(client(spin, nanoseconds))
        add_overlapped(samples, added, meter.wall)
        self._cpu += meter.cpu
        self._wall += meter.wall

    async def warm_up(self) -> None:
        """Run a round that does not count."""
        await self(Samples())
        self._cpu = self._wall = 0.0

    @property
    def percent(self) -> float:
        """CPU of one core over all rounds."""
        return 100.0 * self._cpu / self._wall if self._wall else 0.0


async def jittered(rig: Rig, bench: Bench) -> None:
    """P4: 8 kernels in flight, each of a length that is drawn anew. Each task has a device, and so a stream, of its own."""
    raw, torch = rig.raw(bench), rig.torch(bench)
    lengths = bench.rng.integers(_SHORTEST, _LONGEST, (_IN_FLIGHT, bench.scale(80, 20)), endpoint=True)
    async with System("bench") as system:
        spins: list[Spin] = []
        for _ in range(_IN_FLIGHT):
            device = await system.open_device(bench.spec)
            out = await device.zeros(4)
            spins.append(lambda length, device=device, out=out: device.run(SpinKernel(out, length)))  # type: ignore[misc]
        waits = {OURS: _Jittered(spins, lengths)}
        if torch is not None:
            waits[TORCH_QUERY] = _Jittered(torch.spinning(raw, _IN_FLIGHT), lengths)
        for wait in waits.values():
            await wait.warm_up()
        subjects: dict[str, Meter] = dict(waits)
        case = f"added to kernels of {_SHORTEST / 1e6:g} to {_LONGEST / 1e6:g} ms, {_IN_FLIGHT} in flight"
        results = await bench.compare(case, subjects, rounds=bench.scale(7, 3), warm_up=0)
    cpu = {name: round(wait.percent, 1) for name, wait in waits.items()}
    ours = results[OURS]
    bench.report.hold("P4", ours.median * 1e6, **micro({"p99_us": ours.percentile(99)}))
    bench.report.hold("P4-cpu", waits[OURS].percent, cpu_percent=cpu)
