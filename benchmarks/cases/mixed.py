"""P14, a service's mix: products of sizes drawn at random, awaited by tasks that pause between two of them."""

from __future__ import annotations

import asyncio
import itertools
import time
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np

from accel import System
from accel.cli.bench.measure import CpuMeter, Samples
from accel.cli.bench.suite import Bench, BenchCase
from benchmarks.measures import add_overlapped, hold_worst

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from accel import Device
    from accel.cli.bench.measure import Meter

    Array = np.ndarray[Any, Any]
    Product = Callable[[int], Awaitable[object]]

__all__ = ["CASES", "INLINE", "PROCESS", "SIZES", "Block", "judge", "matrices_of", "measure", "products_of"]

SIZES = (64, 128, 256, 512, 1024, 1536, 2048)
INLINE, PROCESS = "accel, inline", "accel, process host"
_NUMPY = "numpy in a thread"
_TASKS = (8, 64)
_PAUSE = 0.5e-3

_DRAWS = 512
"""Sizes and pauses of one task and block. A task that runs more products begins again."""


class Block:
    """A round in which tasks at once run products for a while, and pause after each.

    All blocks with one seed draw the same sizes and pauses, round by round.

    Parameters
    ----------
    product
        Computes the square of the matrix of that side.
    sizes
        Sides to draw from, the smallest first.
    tasks
        How many.
    seconds
        After which no task begins another product.
    seed
        Of sizes and pauses.
    pause
        Seconds between two products of a task, the mean of an exponential distribution; 0 for none.

    Attributes
    ----------
    small : Samples
        Products of the smallest size.
    """

    def __init__(self, product: Product, sizes: Sequence[int], tasks: int, seconds: float, seed: int, pause: float = _PAUSE) -> None:
        self._product, self._sizes, self._tasks, self._seconds, self._seed = product, sizes, tasks, seconds, seed
        self._pause = pause
        self._rounds = 0
        self._cpu = self._wall = 0.0
        self.small = Samples()

    async def warm_up(self) -> None:
        """Run a round that does not count: pools and caches reach their size."""
        await self(Samples())
        self._rounds = 0
        self._cpu = self._wall = 0.0
        self.small = Samples()

    def draws(self, task: int) -> list[tuple[int, float]]:
        """Return the sizes and pauses of a task in the round to come."""
        rng = np.random.default_rng((self._seed, self._rounds, task))
        return list(zip(rng.choice(self._sizes, _DRAWS).tolist(), rng.exponential(self._pause, _DRAWS).tolist(), strict=True))

    async def __call__(self, samples: Samples) -> None:
        """Run a round."""
        product, clock, smallest = self._product, time.perf_counter, self._sizes[0]
        times: array[float] = array("d")
        small: array[float] = array("d")
        drawn = [self.draws(task) for task in range(self._tasks)]
        self._rounds += 1

        async def client(draws: list[tuple[int, float]]) -> None:
            for size, pause in itertools.cycle(draws):
                began = clock()
                await product(size)
                ended = clock()
                times.append(ended - began)
                if size == smallest:
                    small.append(ended - began)
                if pause:
                    await asyncio.sleep(pause)
                if clock() >= end:
                    return

        with CpuMeter() as meter:
            end = clock() + self._seconds
            async with asyncio.TaskGroup() as group:
                for draws in drawn:
                    group.create_task(client(draws))
        add_overlapped(samples, times, meter.wall)
        add_overlapped(self.small, small, meter.wall)
        self._cpu += meter.cpu
        self._wall += meter.wall

    @property
    def percent(self) -> float:
        """CPU of one core over all rounds, of this process alone."""
        return 100.0 * self._cpu / self._wall if self._wall else 0.0


def matrices_of(bench: Bench, sizes: Sequence[int]) -> dict[int, Array]:
    """Return a matrix of each size, by its side."""
    return {n: bench.rng.standard_normal((n, n), dtype=np.float32) for n in sizes}


async def products_of(system: System, bench: Bench, matrices: Mapping[int, Array]) -> dict[str, Product]:
    """Return how a device in this process, and one in a child, compute a square into new memory."""

    async def product_on(device: Device) -> Product:
        refs = {n: await device.put(matrix) for n, matrix in matrices.items()}
        return lambda n: device.blas.gemm(refs[n], refs[n])

    inline, process = (
        await system.open_device(bench.spec, host="inline", libraries=("blas",)),
        await system.open_device(bench.spec, host="process", libraries=("blas",)),
    )
    return {INLINE: await product_on(inline), PROCESS: await product_on(process)}


async def measure(bench: Bench, products: Mapping[str, Product], sizes: Sequence[int]) -> dict[int, dict[str, tuple[Samples, Block]]]:
    """Run blocks of all subjects in turn, add their rows, and return what each gave: tasks -> subject -> samples and block."""
    found: dict[int, dict[str, tuple[Samples, Block]]] = {}
    seconds = bench.scale(800, 250) / 1e3
    for tasks in _TASKS:
        blocks = {name: Block(product, sizes, tasks, seconds, bench.seed) for name, product in products.items()}
        for block in blocks.values():
            await block.warm_up()
        subjects: dict[str, Meter] = dict(blocks)
        case = f"products of {sizes[0]} to {sizes[-1]} from {tasks} tasks that pause"
        results = await bench.compare(case, subjects, rounds=bench.scale(5, 3), warm_up=0)
        for name, block in blocks.items():
            bench.report.add(f"{case}, those of {sizes[0]}", name, block.small)
        found[tasks] = {name: (results[name], block) for name, block in blocks.items()}
    return found


def judge(bench: Bench, found: Mapping[int, Mapping[str, tuple[Samples, Block]]], twin: str) -> None:
    """Hold this project's subjects against ``twin``; each budget is held by the worst of hosts and numbers of tasks."""
    ratios: dict[str, dict[str, float]] = {}
    cpu: dict[str, float] = {}
    for tasks, subjects in found.items():
        others, other_block = subjects[twin]
        for name, (samples, block) in subjects.items():
            cpu[f"{name}, {tasks} tasks"] = round(block.percent, 1)
            if name not in (INLINE, PROCESS):
                continue
            each = {
                "P14": samples.rate / others.rate,
                "P14-p50": samples.median / others.median,
                "P14-p99": samples.percentile(99) / others.percentile(99),
                "P14-small": block.small.median / other_block.small.median,
                "P14-cpu": block.percent / other_block.percent,
            }
            for budget, ratio in each.items():
                ratios.setdefault(budget, {})[f"{name}, {tasks} tasks"] = round(ratio, 3)
    for budget, values in ratios.items():
        hold_worst(bench, budget, values, cpu_percent=cpu)


async def _on_any(bench: Bench) -> None:
    """Measure the mix beside numpy, each of whose products runs in a thread. Larger products take a CPU too long."""
    sizes = SIZES[:3]
    matrices = matrices_of(bench, sizes)
    async with System("bench") as system:
        subjects = await products_of(system, bench, matrices)
        subjects[_NUMPY] = lambda n: asyncio.to_thread(np.matmul, matrices[n], matrices[n])
        await measure(bench, subjects, sizes)


CASES = (BenchCase("mixed", "products of jittered sizes from tasks that pause", _on_any),)
