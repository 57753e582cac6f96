"""How the allocator grows, keeps its limit, gives slabs back and closes; and what it promises in numbers."""

from __future__ import annotations

import random
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from accel.errors import ClosedError, InvalidArgumentError, OutOfMemoryError
from accel.memory import Allocator, Block, MemfdSlab, Timeline
from tests.memory_support import KIB, MIB, Source, make

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.backend import SlabMemory


def write(block: Block, timeline: Timeline) -> None:
    block.usage.write(timeline, timeline.issue(), [])


def close(slabs: list[SlabMemory]) -> None:
    for slab in slabs:
        slab.close()


def test_a_large_block_gets_a_slab_of_its_own(source: Source) -> None:
    allocator = make(source)
    allocator.allocate_blocking(10)
    block = allocator.allocate_blocking(5 * MIB)
    assert source.asked == [MIB, 5 * MIB]
    assert block.slab is source.open[1]
    assert allocator.slabs() == source.open


def test_the_limit_counts_slabs_and_open_requests(source: Source) -> None:
    allocator = make(source, limit=2 * MIB + 100 * KIB)
    first, second = allocator.request_slab(10), allocator.request_slab(10)
    third = allocator.request_slab(10)
    assert (first.nbytes, second.nbytes, third.nbytes) == (MIB, MIB, 64 * KIB)
    with pytest.raises(OutOfMemoryError):
        allocator.request_slab(10)
    assert allocator.cancel(second) == []
    assert allocator.cancel(second) == []
    assert allocator.request_slab(10).nbytes == MIB
    with pytest.raises(InvalidArgumentError):
        allocator.adopt(second, source(MIB))


def test_out_of_memory_says_how_much_there_is(source: Source) -> None:
    allocator = make(source, limit=2 * MIB)
    allocator.allocate_blocking(MIB)
    allocator.allocate_blocking(1000)
    with pytest.raises(OutOfMemoryError) as caught:
        allocator.allocate_blocking(MIB)
    error = caught.value
    assert (error.requested, error.used, error.reserved, error.limit, error.device) == (MIB, MIB + KIB, 2 * MIB, 2 * MIB, "cpu:0")


def test_idle_slabs_make_room_under_the_limit(source: Source) -> None:
    allocator = make(source, limit=4 * MIB)
    small = [allocator.allocate_blocking(MIB) for _ in range(4)]
    for block in small[1:]:
        allocator.free(block)
    with pytest.raises(OutOfMemoryError):
        allocator.request_slab(4 * MIB)
    assert len(allocator.slabs()) == 4, "a request that fails gives nothing back"
    large = allocator.allocate_blocking(2 * MIB)
    assert [slab.fd >= 0 for slab in source.open].count(True) == 3, "two of the idle slabs were enough"
    assert large.nbytes == 2 * MIB
    assert allocator.reserved == 4 * MIB


def test_the_largest_idle_slabs_make_room_first(source: Source) -> None:
    allocator = make(source, limit=7 * MIB)
    blocks = [allocator.allocate_blocking(size * MIB) for size in (1, 4, 2)]
    for block in blocks:
        allocator.free(block)

    request = allocator.request_slab(4 * MIB + 1)

    assert [slab.nbytes for slab in request.release] == [4 * MIB, 2 * MIB]
    request.create()
    for slab in allocator.cancel(request):
        slab.close()


def test_a_request_cancelled_before_its_slab_is_created_creates_none(source: Source) -> None:
    allocator = make(source)
    request = allocator.request_slab(KIB)
    assert allocator.cancel(request) == []
    with pytest.raises(ClosedError):
        request.create()
    assert source.asked == []


def test_a_slab_is_closed_if_its_request_is_cancelled_while_it_is_created() -> None:
    begun, go_on = threading.Event(), threading.Event()
    made: list[MemfdSlab] = []

    def create(nbytes: int) -> MemfdSlab:
        begun.set()
        assert go_on.wait(10)
        made.append(MemfdSlab(nbytes))
        return made[-1]

    allocator = Allocator(create, slab_bytes=MIB, granularity=64 * KIB)
    request = allocator.request_slab(KIB)
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(request.create)
        assert begun.wait(10)
        assert allocator.cancel(request) == []
        go_on.set()
        assert isinstance(result.exception(), ClosedError)
    assert "closed" in repr(made[0])


def test_a_slab_that_nobody_adopted_comes_back_on_cancel(source: Source) -> None:
    allocator = make(source)
    request = allocator.request_slab(KIB)
    slab = request.create()
    assert allocator.cancel(request) == [slab]
    assert allocator.cancel(request) == []
    adopted = allocator.request_slab(KIB)
    allocator.adopt(adopted, adopted.create())
    assert allocator.cancel(adopted) == []


def test_a_device_with_little_room_gives_a_smaller_slab(source: Source) -> None:
    source.capacity = MIB + 128 * KIB
    allocator = make(source)
    allocator.allocate_blocking(MIB)
    block = allocator.allocate_blocking(100 * KIB)
    assert source.asked == [MIB, MIB, 512 * KIB, 256 * KIB, 128 * KIB]
    assert block.slab.nbytes == 128 * KIB


def test_a_full_device_gets_its_idle_slabs_back_before_the_error(source: Source) -> None:
    source.capacity = 2 * MIB
    allocator = make(source)
    idle, kept = allocator.allocate_blocking(MIB), allocator.allocate_blocking(MIB // 2)
    allocator.free(idle)
    with pytest.raises(OutOfMemoryError) as caught:
        allocator.allocate_blocking(2 * MIB)
    assert (caught.value.used, caught.value.reserved) == (kept.size, MIB)
    assert isinstance(caught.value.__cause__, OutOfMemoryError)
    allocator.free(kept)
    assert allocator.allocate_blocking(2 * MIB).nbytes == 2 * MIB


def test_unaligned_and_small_slabs_are_refused(source: Source) -> None:
    allocator = make(source)
    slab = source(MIB)
    for change in ("address", "nbytes"):
        request = allocator.request_slab(2 * KIB)
        value = getattr(slab, change)
        setattr(slab, change, value + 8 if change == "address" else 4 * KIB)
        with pytest.raises(InvalidArgumentError):
            allocator.adopt(request, slab)
        setattr(slab, change, value)
        assert allocator.cancel(request) == []
    assert allocator.reserved == 0


def test_trim_takes_idle_slabs_and_leaves_one(source: Source) -> None:
    allocator = make(source)
    timeline = Timeline("t")
    blocks = [allocator.allocate_blocking(MIB) for _ in range(4)]
    large = allocator.allocate_blocking(3 * MIB)
    write(blocks[0], timeline)
    for block in (*blocks[:3], large):
        allocator.free(block)
    taken = allocator.trim()
    assert taken == [source.open[2], source.open[4]]
    assert allocator.slabs() == [source.open[0], source.open[1], source.open[3]], "pending uses, one for the next block, a live block"
    timeline.complete(1)
    assert allocator.trim(everything=True) == source.open[:2]
    assert allocator.reserved == MIB
    assert allocator.trim(everything=True) == []
    close(taken)


def test_closing_takes_all_slabs_and_later_frees_do_no_harm(source: Source) -> None:
    allocator = make(source)
    blocks = [allocator.allocate_blocking(MIB // 2) for _ in range(3)]
    request = allocator.request_slab(MIB)
    assert allocator.take_all() == source.open
    assert allocator.take_all() == []
    allocator.free(blocks[0])
    with pytest.raises(InvalidArgumentError):
        allocator.free(blocks[0])
    with pytest.raises(ClosedError):
        allocator.allocate(10)
    with pytest.raises(ClosedError):
        allocator.request_slab(10)
    with pytest.raises(ClosedError):
        allocator.adopt(request, source.open[0])


SIZES: dict[str, Callable[[random.Random], int]] = {
    "small": lambda rng: rng.randint(1, 256 * KIB),
    "any scale": lambda rng: int(2 ** rng.uniform(0, 20)),
    "powers of two": lambda rng: 1 << rng.randint(8, 20),
}


SEEDS = [1, 2, 3, pytest.param(secrets.randbits(64), id="fresh")]


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


def run(source: Source, seed: int, size: Callable[[random.Random], int], steps: int, limit: int | None = None) -> Work:
    allocator = Allocator(source, limit=limit, slab_bytes=8 * MIB, granularity=64 * KIB)
    work = Work(allocator, random.Random(seed), size, 64 * MIB)
    for _ in range(steps):
        work.step()
    return work


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("sizes", SIZES)
def test_reserved_memory_stays_within_the_bound_of_what_was_used(source: Source, sizes: str, seed: int) -> None:
    # Measured over 60 seeds: at most 1.2, 1.44 and 1.25, where one slab more is 0.12; after 25 times as many steps at most 1.66.
    work = run(source, seed, SIZES[sizes], 4000)
    assert work.allocator.reserved <= 1.5 * work.peak, seed
    assert work.peak > 56 * MIB, seed


@pytest.mark.parametrize("seed", SEEDS)
def test_buffers_of_half_a_slab_stay_within_a_wider_bound(source: Source, seed: int) -> None:
    # Measured over 60 seeds: at most 1.78; a slab often holds one such buffer and not two.
    work = run(source, seed, lambda rng: rng.randint(256 * KIB, 4 * MIB), 1500)
    assert work.allocator.reserved <= 2.1 * work.peak, seed


def test_long_work_under_a_limit_never_runs_out(source: Source) -> None:
    seed = secrets.randbits(64)
    limit = 112 * MIB
    work = run(source, seed, SIZES["any scale"], 10_000, limit)
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


def test_cost_does_not_grow_with_the_number_of_blocks(source: Source) -> None:
    timeline = Timeline("t")
    costs = []
    for live in (1, 10_000):
        allocator = Allocator(source, slab_bytes=256 * MIB)
        held = [allocator.allocate_blocking(secrets.randbelow(20_000)) for _ in range(live)]
        for block in held[::7]:
            allocator.free(block)
        costs.append(pair_cost(allocator, timeline))
    assert costs[1] < 4 * costs[0], costs
    assert costs[1] < 50e-6, f"far over the 10 us that an allocation and a free may take, even on a slow machine: {costs}"
