"""Slabs of an earlier allocator: their blocks are found again, and blocks that cannot be there are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from accel.errors import InvalidArgumentError
from accel.memory import MemfdSlab
from tests.memory_support import KIB, MIB, Source, make

if TYPE_CHECKING:
    from collections.abc import Iterator


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
