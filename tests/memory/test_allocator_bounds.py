"""What the allocator promises in numbers: fragmentation under random work, and the cost of a block."""

from __future__ import annotations

import random
import secrets
import time
from typing import TYPE_CHECKING

import pytest

from accel.memory import Allocator, Block, MemfdSlab, Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KIB = 1 << 10
MIB = 1 << 20

SIZES: dict[str, Callable[[random.Random], int]] = {
    "small": lambda rng: rng.randint(1, 256 * KIB),
    "any scale": lambda rng: int(2 ** rng.uniform(0, 20)),
    "powers of two": lambda rng: 1 << rng.randint(8, 20),
}
SEEDS = [1, 2, 3, pytest.param(secrets.randbits(64), id="fresh")]


class Slabs:
    """Creates slabs, and closes them in the end."""

    def __init__(self) -> None:
        self.open: list[MemfdSlab] = []

    def __call__(self, nbytes: int) -> MemfdSlab:
        self.open.append(MemfdSlab(nbytes))
        return self.open[-1]


@pytest.fixture
def slabs() -> Iterator[Slabs]:
    slabs = Slabs()
    yield slabs
    for slab in slabs.open:
        slab.close()


class Work:
    """Random work on three streams, each of which is some ops behind, with live blocks of at most ``target`` bytes.

    It counts the most bytes that were in use, and the blocks that got the memory of a freed one as it was.
    """

    def __init__(self, allocator: Allocator, rng: random.Random, size: Callable[[random.Random], int], target: int) -> None:
        self.allocator, self.rng, self.size, self.target = allocator, rng, size, target
        self.timelines = [Timeline(name) for name in "abc"]
        self.live: list[Block] = []
        self.asked = self.peak = self.reuses = 0
        self.freed: set[tuple[int, int]] = set()

    def step(self) -> None:
        nbytes = self.size(self.rng)
        while self.asked + nbytes > self.target or (self.live and self.rng.random() < 0.3):
            self.free_one()
        timeline = self.rng.choice(self.timelines)
        block = self.allocator.allocate_blocking(nbytes, timeline)
        block.usage.write(timeline, timeline.issue(), [])
        self.live.append(block)
        self.asked += nbytes
        self.peak = max(self.peak, self.allocator.used)
        self.reuses += (block.address, block.size) in self.freed
        for each in self.timelines:
            each.complete(each.issued - 20)

    def free_one(self) -> None:
        block = self.live.pop(self.rng.randrange(len(self.live)))
        self.asked -= block.nbytes
        self.freed.add((block.address, block.size))
        self.allocator.free(block)


def run(slabs: Slabs, seed: int, size: Callable[[random.Random], int], steps: int, limit: int | None = None) -> Work:
    allocator = Allocator(slabs, limit=limit, slab_bytes=8 * MIB, granularity=64 * KIB)
    work = Work(allocator, random.Random(seed), size, 64 * MIB)
    for _ in range(steps):
        work.step()
    return work


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("sizes", SIZES)
def test_reserved_memory_stays_within_the_bound_of_what_was_used(slabs: Slabs, sizes: str, seed: int) -> None:
    # Measured over 60 seeds: at most 1.2, 1.44 and 1.25, where one slab more is 0.12; after 25 times as many steps at most 1.66.
    work = run(slabs, seed, SIZES[sizes], 4000)
    assert work.allocator.reserved <= 1.5 * work.peak, seed
    assert work.peak > 56 * MIB, seed


@pytest.mark.parametrize("seed", SEEDS)
def test_buffers_of_half_a_slab_stay_within_a_wider_bound(slabs: Slabs, seed: int) -> None:
    # Measured over 60 seeds: at most 1.78; a slab often holds one such buffer and not two.
    work = run(slabs, seed, lambda rng: rng.randint(256 * KIB, 4 * MIB), 1500)
    assert work.allocator.reserved <= 2.1 * work.peak, seed


def test_long_work_under_a_limit_never_runs_out(slabs: Slabs) -> None:
    seed = secrets.randbits(64)
    limit = 112 * MIB
    work = run(slabs, seed, SIZES["any scale"], 10_000, limit)
    assert work.allocator.reserved <= limit, seed
    assert work.reuses > 5_000, seed


def pair_cost(allocator: Allocator, timeline: Timeline) -> float:
    """Seconds for one allocate and free, at best."""
    best = float("inf")
    for _ in range(30):
        start = time.perf_counter()
        blocks = [allocator.allocate(3000, timeline) for _ in range(100)]
        for block in blocks:
            assert block is not None
            allocator.free(block)
        best = min(best, (time.perf_counter() - start) / 100)
    return best


def test_cost_does_not_grow_with_the_number_of_blocks(slabs: Slabs) -> None:
    timeline = Timeline("t")
    costs = []
    for live in (1, 10_000):
        allocator = Allocator(slabs, slab_bytes=256 * MIB)
        held = [allocator.allocate_blocking(secrets.randbelow(20_000)) for _ in range(live)]
        for block in held[::7]:
            allocator.free(block)
        costs.append(pair_cost(allocator, timeline))
    assert costs[1] < 4 * costs[0], costs
    assert costs[1] < 50e-6, f"far over the 10 us that an allocation and a free may take, even on a slow machine: {costs}"
