"""Slabs that outlived their allocator: the blocks in them, found again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.errors import InvalidArgumentError
from accel.memory.block import Block
from accel.memory.space import ALIGNMENT, LIVE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from accel.memory.space import Chunk, Slab

__all__ = ["restore_blocks"]


def restore_blocks(slab: Slab, blocks: Iterable[tuple[int, int, int]]) -> tuple[list[Block], list[Chunk]]:
    """Cut a new slab, clean and in no bin, into live blocks and the clean chunks between them.

    Parameters
    ----------
    slab
        All of it is clean.
    blocks
        For each block its offset, the bytes asked for and the bytes reserved.

    Returns
    -------
    tuple
        The blocks, in the order given, and the clean chunks.

    Raises
    ------
    InvalidArgumentError
        If they overlap, or are not where a block can be.
    """
    wanted = list(blocks)
    made: dict[int, Block] = {}
    clean: list[Chunk] = []
    rest: Chunk | None = slab.first
    for at in sorted(range(len(wanted)), key=lambda index: wanted[index][0]):
        offset, nbytes, size = wanted[at]
        start = slab.first.slab.memory.address + offset
        if (
            rest is None
            or offset % ALIGNMENT
            or size % ALIGNMENT
            or not 0 <= nbytes <= size
            or not rest.address <= start <= rest.address + rest.size - size
        ):
            raise InvalidArgumentError(f"there is no room for a block of {size} bytes at {offset} of {slab.memory!r}")
        if start > rest.address:
            clean.append(rest)
            rest = rest.split(start - rest.address)
        chunk, rest = rest, rest.split(size) if rest.size > size else None
        chunk.state = LIVE
        made[at] = Block(chunk, nbytes)
    if rest is not None:
        clean.append(rest)
    return [made[at] for at in range(len(wanted))], clean
