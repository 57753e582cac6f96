"""The allocator on real slabs: alignment, waste, misuse, stream-ordered reuse, and slabs of an earlier allocator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from accel.errors import InvalidArgumentError, StaleRefError
from accel.memory import Allocator, Block, Dependency, MemfdSlab, Timeline
from tests.memory_support import KIB, MIB, Source, make, pending

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np


def write(block: Block, timeline: Timeline) -> list[Dependency]:
    dependencies: list[Dependency] = []
    block.usage.write(timeline, timeline.issue(), dependencies)
    return dependencies


def fill_up(allocator: Allocator, nbytes: int, timeline: Timeline | None = None) -> list[Block]:
    """Allocate until the slabs there are have no room."""
    blocks = []
    while (block := allocator.allocate(nbytes, timeline)) is not None:
        blocks.append(block)
    return blocks


# -- blocks
def test_without_a_slab_there_is_no_block_until_one_is_adopted(source: Source) -> None:
    allocator = make(source)
    assert allocator.allocate(100) is None
    request = allocator.request_slab(100)
    assert (request.nbytes, request.release) == (MIB, [])
    allocator.adopt(request, request.create())
    block = allocator.allocate(100)
    assert block is not None
    assert (block.nbytes, block.size, block.offset, block.slab) == (100, 256, 0, source.open[0])
    assert block.address == source.open[0].address
    assert "100 bytes" in repr(block)


def test_blocks_of_no_bytes_are_valid_and_distinct(source: Source) -> None:
    allocator = make(source)
    one, other = allocator.allocate_blocking(0), allocator.allocate_blocking(0)
    assert one.address != other.address
    assert (one.nbytes, one.size) == (0, 256)


def test_reserved_bytes_are_aligned_and_waste_is_bounded(source: Source, rng: np.random.Generator) -> None:
    allocator = make(source, slab_bytes=256 * MIB)
    sizes = [*range(600), *(int(rng.integers(1, 1 << bits, endpoint=True)) for bits in range(1, 27) for _ in range(20))]
    for nbytes in sizes:
        block = allocator.allocate_blocking(nbytes)
        assert block.address % 256 == 0
        assert block.size % 256 == 0
        assert 0 <= block.size - nbytes < max(0.125 * nbytes, 256) or nbytes == 0, nbytes
        allocator.free(block)


def test_negative_sizes_are_refused(source: Source) -> None:
    with pytest.raises(InvalidArgumentError):
        make(source).allocate(-1)


@pytest.mark.parametrize(("slab_bytes", "granularity", "limit"), [(0, 256, None), (256, 0, None), (256, 100, None), (256, 256, -1)])
def test_sizes_that_do_not_go_together_are_refused(source: Source, slab_bytes: int, granularity: int, limit: int | None) -> None:
    with pytest.raises(InvalidArgumentError):
        Allocator(source, slab_bytes=slab_bytes, granularity=granularity, limit=limit)


# -- misuse
def test_double_free_is_detected(source: Source) -> None:
    allocator = make(source)
    block = allocator.allocate_blocking(1000)
    allocator.free(block)
    again = allocator.allocate_blocking(1000)
    with pytest.raises(InvalidArgumentError, match="freed twice"):
        allocator.free(block)
    assert allocator.used == again.size


def test_use_after_free_is_detected(source: Source) -> None:
    allocator = make(source)
    timeline = Timeline("t")
    block = allocator.allocate_blocking(1000)
    allocator.free(block)
    assert block.address == 0
    for use in (block.usage.read, block.usage.write):
        with pytest.raises(StaleRefError) as error:
            use(timeline, 1, [])
        assert error.value.reason == "freed"
    for place in ("slab", "offset"):
        with pytest.raises(StaleRefError):
            getattr(block, place)
    assert "freed" in repr(block)


def test_a_block_of_another_allocator_is_refused(source: Source) -> None:
    one, other = make(source), make(source)
    block = one.allocate_blocking(10)
    with pytest.raises(InvalidArgumentError, match="another allocator"):
        other.free(block)
    one.free(block)


# -- stream-ordered reuse
@pytest.mark.parametrize(("is_over", "asks", "reused"), [(True, "b", True), (False, "a", True), (False, "b", False), (False, None, False)])
def test_memory_is_reused_at_once_that_is_idle_for_who_asks_and_fresh_memory_is_preferred_to_waiting(
    source: Source, is_over: bool, asks: str | None, reused: bool
) -> None:
    allocator = make(source)
    timelines = {"a": Timeline("a"), "b": Timeline("b"), None: None}
    a = timelines["a"]
    assert a is not None
    block = allocator.allocate_blocking(5000, a)
    address = block.address
    write(block, a)
    allocator.free(block)
    a.complete(is_over)
    again = allocator.allocate(4900, timelines[asks])
    assert again is not None
    assert (again.address == address) is reused
    assert write(again, timelines[asks] or Timeline("c")) == []


def test_freed_blocks_are_kept_for_others_of_their_size_while_there_is_other_room(source: Source) -> None:
    allocator = make(source)
    a = Timeline("a")
    blocks = [allocator.allocate_blocking(4 * KIB) for _ in range(64)]
    freed = {block.address for block in blocks}
    for block in blocks:
        allocator.free(block)
    other = allocator.allocate(64 * KIB, a)
    assert other is not None
    assert other.offset == 64 * 4 * KIB
    assert {allocator.allocate_blocking(4 * KIB, a).address for _ in range(64)} == freed


def test_without_other_room_memory_is_reused_with_the_uses_it_has(source: Source) -> None:
    allocator = make(source)
    a, b = Timeline("a"), Timeline("b")
    blocks = [allocator.allocate_blocking(64 * KIB, a), *fill_up(allocator, 64 * KIB, a)]
    for block in blocks:
        write(block, a)
    address, seq = blocks[5].address, a.issued - len(blocks) + 6
    allocator.free(blocks[5])
    again = allocator.allocate(64 * KIB, b)
    assert again is not None
    assert again.address == address
    assert write(again, b) == [(a, seq)]
    assert len(source.asked) == 1


def test_own_memory_is_preferred_when_there_is_no_fresh_room(source: Source) -> None:
    allocator = make(source)
    a, b = Timeline("a"), Timeline("b")
    blocks = [allocator.allocate_blocking(64 * KIB), *fill_up(allocator, 64 * KIB)]
    for block in blocks:
        write(block, b if block is blocks[3] else a)
    address = blocks[3].address
    for block in blocks:
        allocator.free(block)
    again = allocator.allocate(64 * KIB, b)
    assert again is not None
    assert again.address == address
    assert write(again, b) == []


def test_idle_memory_is_merged_before_anything_has_to_wait(source: Source) -> None:
    allocator = make(source)
    a, b = Timeline("a"), Timeline("b")
    busy = allocator.allocate_blocking(20 * KIB)
    small = fill_up(allocator, 10 * KIB)
    write(busy, a)
    for block in (busy, *small[4:7]):
        allocator.free(block)
    again = allocator.allocate(20 * KIB, b)
    assert again is not None
    assert write(again, b) == []


def test_no_more_is_joined_than_needed(source: Source) -> None:
    allocator = make(source)
    a, b, c = Timeline("a"), Timeline("b"), Timeline("c")
    first, second, *_ = (allocator.allocate_blocking(nbytes) for nbytes in (64 * KIB, 256 * KIB, 704 * KIB))
    write(first, a)
    write(second, b)
    allocator.free(first)
    allocator.free(second)
    again = allocator.allocate(192 * KIB, c)
    assert again is not None
    assert again.offset == 64 * KIB
    assert write(again, c) == [(b, 1)]


def test_joined_neighbours_pass_all_their_uses_on(source: Source) -> None:
    allocator = make(source)
    a, b, c = Timeline("a"), Timeline("b"), Timeline("c")
    blocks = [allocator.allocate_blocking(64 * KIB), *fill_up(allocator, 64 * KIB)]
    assert [block.offset for block in blocks] == [64 * KIB * number for number in range(16)]
    for number, timeline in ((3, a), (4, b), (5, a), (6, b), (9, c)):
        write(blocks[number], timeline)
        allocator.free(blocks[number])
    joined = allocator.allocate(3 * 64 * KIB, c)
    assert joined is not None
    assert joined.offset == 3 * 64 * KIB
    assert dict(write(joined, c)) == {a: 2, b: 1}
    tail = allocator.allocate(64 * KIB, b)
    assert tail is not None
    assert tail.offset == 6 * 64 * KIB, "what was not joined kept its own uses"
    assert write(tail, b) == []


def test_the_tail_of_a_cut_block_keeps_its_uses(source: Source) -> None:
    allocator = make(source)
    a, b = Timeline("a"), Timeline("b")
    whole = allocator.allocate_blocking(MIB, a)
    write(whole, a)
    allocator.free(whole)
    parts = [allocator.allocate(256 * KIB, b) for _ in range(4)]
    assert allocator.allocate(0, b) is None
    for part in parts:
        assert part is not None
        assert write(part, b) == [(a, 1)]
    assert pending(allocator) == []


def test_large_blocks_never_get_a_piece_that_is_too_small(source: Source) -> None:
    allocator = make(source, slab_bytes=128 * MIB)
    blocks = [allocator.allocate_blocking(nbytes * MIB) for nbytes in (32, 20, 34, 36)]
    allocator.free(blocks[0])
    allocator.free(blocks[2])
    fitting = allocator.allocate(33 * MIB)
    assert fitting is not None
    assert (fitting.offset, fitting.size) == (52 * MIB, 34 * MIB)
    assert allocator.allocate(33 * MIB) is None
    exact = allocator.allocate(31 * MIB)
    assert exact is not None
    assert (exact.offset, exact.size) == (0, 32 * MIB)


def test_large_blocks_are_reused_by_size(source: Source) -> None:
    allocator = make(source, slab_bytes=128 * MIB)
    a, b = Timeline("a"), Timeline("b")
    small, large = allocator.allocate_blocking(20 * MIB, a), allocator.allocate_blocking(33 * MIB, a)
    address = large.address
    for block in (large, small):
        write(block, a)
        allocator.free(block)
    again = allocator.allocate(33 * MIB, a)
    assert again is not None
    assert again.address == address
    other = allocator.allocate(40 * MIB, b)
    assert other is not None
    assert write(other, b) == []


@pytest.fixture
def slab() -> Iterator[MemfdSlab]:
    slab = MemfdSlab(MIB)
    yield slab
    slab.close()


def test_blocks_keep_their_places_and_the_rest_of_the_slab_is_free(slab: MemfdSlab) -> None:
    allocator = make(Source())
    tail = 5120 + 512 * KIB

    second, first, last = allocator.restore(slab, [(4096, 1000, 1024), (0, 100, 256), (tail, 0, MIB - tail)])

    found = [(block.offset, block.nbytes, block.size) for block in (first, second, last)]
    assert found == [(0, 100, 256), (4096, 1000, 1024), (tail, 0, MIB - tail)]
    assert all(block.slab is slab for block in (first, second, last))
    assert (allocator.used, allocator.reserved) == (256 + 1024 + MIB - tail, MIB)
    between = allocator.allocate(4096 - 256)
    behind = allocator.allocate(512 * KIB)
    assert between is not None
    assert behind is not None
    assert (between.offset, behind.offset) == (256, 5120)
    assert allocator.allocate(1) is None


def test_a_slab_that_one_block_fills_has_no_room(slab: MemfdSlab) -> None:
    allocator = make(Source())

    (block,) = allocator.restore(slab, [(0, MIB, MIB)])

    assert allocator.allocate(1) is None
    allocator.free(block)
    assert allocator.allocate(MIB) is not None


@pytest.mark.parametrize(
    "blocks",
    [
        [(0, 100, 512), (256, 100, 256)],
        [(0, 100, 256), (0, 100, 256)],
        [(0, MIB, MIB), (0, 0, 256)],
        [(128, 100, 256)],
        [(0, 100, 200)],
        [(0, 257, 256)],
        [(0, -1, 256)],
        [(MIB - 256, 100, 512)],
        [(MIB, 100, 256)],
        [(-256, 100, 256)],
    ],
)
def test_blocks_that_cannot_be_there_are_refused(slab: MemfdSlab, blocks: list[tuple[int, int, int]]) -> None:
    with pytest.raises(InvalidArgumentError, match="no room"):
        make(Source()).restore(slab, blocks)
