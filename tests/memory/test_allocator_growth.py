"""How the allocator grows, keeps its limit, gives slabs back and closes."""

from __future__ import annotations

import random
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from accel.errors import ClosedError, InvalidArgumentError, OutOfMemoryError
from accel.memory import Allocator, Block, MemfdSlab, Timeline
from tests.memory_support import KIB, MIB, Source, make

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accel.backend import SlabMemory


@pytest.fixture
def source() -> Iterator[Source]:
    source = Source()
    yield source
    for slab in source.open:
        slab.close()


@pytest.fixture
def rng() -> random.Random:
    seed = secrets.randbits(64)
    print(f"seed {seed}")
    return random.Random(seed)


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


def test_a_cancelled_request_hands_over_what_it_did_not_close(source: Source) -> None:
    allocator = make(source, limit=MIB)
    allocator.free(allocator.allocate_blocking(KIB))
    allocator.limit = 2 * MIB
    request = allocator.request_slab(2 * MIB)
    assert request.release == source.open
    assert allocator.cancel(request) == source.open
    assert request.release == []
    assert "least" in repr(request)


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


def test_everything_merges_once_everything_is_freed(source: Source, rng: random.Random) -> None:
    allocator = make(source)
    blocks = [allocator.allocate_blocking(rng.randrange(50_000)) for _ in range(300)]
    while blocks:
        allocator.free(blocks.pop(rng.randrange(len(blocks))))
    assert allocator.used == 0
    assert allocator.trim(everything=True) == source.open
    assert allocator.reserved == 0


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
