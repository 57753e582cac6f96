"""The address space of the slabs: chunks in a row.

Only the allocator uses this. A chunk is in one of three states: *live* (a block has it), *resting*
(freed as it is, perhaps with pending uses; the allocator keeps those by size), or *clean* (free,
idle, and merged with its clean neighbours). Keeping apart what has pending uses means that a short
use of one block never makes a large piece of fresh memory wait.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

from accel.errors import InvalidArgumentError
from accel.memory.usage import Usage

if TYPE_CHECKING:
    from accel.backend import SlabMemory

__all__ = ["ALIGNMENT", "BASE", "CLEAN", "LIVE", "RESTING", "Chunk", "Slab", "free_run", "round_up"]

BASE: Final = 4096
"""The lowest address at which memory can be: the first page of a process is never mapped, so that a null pointer is below it."""

ALIGNMENT: Final = 256
"""Every block starts at a multiple of it, and every size is one."""

_COARSE_ABOVE: Final = 16 << 20
_COARSE: Final = 2 << 20

# States of a chunk. Plain ints: comparing enum members costs more than the rest of a step here.
LIVE: Final = 0
RESTING: Final = 1
CLEAN: Final = 2


@lru_cache(maxsize=4096)
def round_up(nbytes: int) -> int:
    """Return what is reserved for ``nbytes``: eight sizes per doubling, so less than 12.5 % more.

    Sizes are multiples of 256 bytes, so small ones reserve up to 255 bytes more.

    Above 16 MiB it is whole multiples of 2 MiB: one eighth of a large buffer would be too much to
    give away.

    Raises
    ------
    InvalidArgumentError
        If ``nbytes`` is negative.
    """
    if nbytes < 0:
        raise InvalidArgumentError(f"a block cannot have {nbytes} bytes")
    if nbytes > _COARSE_ABOVE:
        return -(-nbytes // _COARSE) * _COARSE
    units = -(-nbytes // ALIGNMENT) or 1
    shift = max((units - 1).bit_length() - 4, 0)
    return (-(-units >> shift) << shift) * ALIGNMENT


class Slab:
    """A slab and its chunks, in the order of their addresses."""

    __slots__ = ("first", "memory", "owner", "size")

    def __init__(self, memory: SlabMemory, owner: object) -> None:
        self.memory = memory
        self.owner: object = owner
        self.size = memory.nbytes // ALIGNMENT * ALIGNMENT
        self.first = Chunk(self, memory.address, self.size)

    def is_empty(self) -> bool:
        """Return whether all of it is one clean chunk."""
        return self.first.state == CLEAN and self.first.next is None

    def has_live(self) -> bool:
        """Return whether any block is in it. Looks at every chunk."""
        chunk: Chunk | None = self.first
        while chunk is not None and chunk.state != LIVE:
            chunk = chunk.next
        return chunk is not None


class Chunk:
    """A piece of a slab, linked to its neighbours."""

    __slots__ = ("address", "next", "prev", "size", "slab", "state", "usage")

    def __init__(self, slab: Slab, address: int, size: int) -> None:
        self.slab = slab
        self.address = address
        self.size = size
        self.state = CLEAN
        self.prev: Chunk | None = None
        self.next: Chunk | None = None
        self.usage = Usage()  # of the block that it was last; pending ones only while it rests

    def split(self, size: int) -> Chunk:
        """Cut everything after ``size`` bytes off and return it; it is in no bin yet."""
        tail = Chunk(self.slab, self.address + size, self.size - size)
        self.size = size
        tail.prev = self
        after = tail.next = self.next
        if after is not None:
            after.prev = tail
        self.next = tail
        return tail

    def absorb_next(self) -> None:
        """Add the next chunk's memory to this one; the next chunk is no more."""
        absorbed = self.next
        assert absorbed is not None
        self.size += absorbed.size
        after = self.next = absorbed.next
        if after is not None:
            after.prev = self


def free_run(chunk: Chunk) -> list[Chunk]:
    """Return the free chunks in a row around ``chunk``, itself included, by address."""
    while chunk.prev is not None and chunk.prev.state != LIVE:
        chunk = chunk.prev
    run = [chunk]
    while (after := run[-1].next) is not None and after.state != LIVE:
        run.append(after)
    return run
