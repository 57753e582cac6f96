"""The address space of the slabs: chunks in a row, and bins of those that are free and idle.

Only the allocator uses this. A chunk is in one of three states: *live* (a block has it), *resting*
(freed as it is, perhaps with pending uses; the allocator keeps those), or *clean* (free, without
uses, merged with its clean neighbours, and in a bin). Keeping apart what has pending uses means
that a short use of one block never makes a large piece of fresh memory wait.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Iterable

    from accel.backend import SlabMemory
    from accel.memory.usage import Usage

__all__ = ["ALIGNMENT", "BASE", "CLEAN", "LIVE", "RESTING", "Chunk", "SizeClass", "Slab", "Space", "bin_of", "free_run", "round_up"]

BASE: Final = 4096
"""The lowest address at which memory can be: the first page of a process is never mapped, so that a null pointer is below it."""

ALIGNMENT: Final = 256
"""Every block starts at a multiple of it, and every size is one."""

_UNIT_BITS: Final = ALIGNMENT.bit_length() - 1
_COARSE_ABOVE: Final = 16 << 20
_COARSE: Final = 2 << 20
_BINS: Final = 8 * 48
_CHOICE: Final = 8

# States of a chunk. Plain ints: comparing enum members costs more than the rest of a step here.
LIVE: Final = 0
RESTING: Final = 1
CLEAN: Final = 2


def round_up(nbytes: int) -> int:
    """Return what is reserved for ``nbytes``: eight sizes per doubling, so less than 12.5 % more.

    Sizes are multiples of 256 bytes, so small ones reserve up to 255 bytes more.

    Above 16 MiB it is whole multiples of 2 MiB: one eighth of a large buffer would be too much to
    give away.
    """
    if nbytes > _COARSE_ABOVE:
        return -(-nbytes // _COARSE) * _COARSE
    units = (nbytes + ALIGNMENT - 1) >> _UNIT_BITS or 1
    shift = max((units - 1).bit_length() - 4, 0)
    return -(-units >> shift) << shift << _UNIT_BITS


def bin_of(size: int) -> int:
    """Return the bin for a free chunk of ``size``.

    The bins' lower bounds are the sizes of :func:`round_up` without its coarse part.
    """
    units = size >> _UNIT_BITS
    shift = units.bit_length() - 4
    return units if shift < 0 else (units >> shift) + 8 * shift


def _least(index: int) -> int:
    """Return the smallest size of a bin."""
    shift = max(index // 8 - 1, 0)
    return (index - 8 * shift) << shift << _UNIT_BITS


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


class SizeClass:
    """Blocks of one size: where freed ones rest, and where clean memory for new ones is.

    Attributes
    ----------
    size : int
        Bytes reserved for a block.
    rest : deque of Chunk
        Freed chunks, oldest first. The coarse sizes share one.
    keep : int
        How many idle ones may rest there.
    """

    __slots__ = ("first_bin", "keep", "partial_bin", "rest", "size")

    def __init__(self, size: int, rest: deque[Chunk], keep: int) -> None:
        self.size = size
        self.rest = rest
        self.keep = keep
        index = bin_of(size)
        # A coarse size lies inside a bin, and only part of that bin's chunks are large enough.
        exact = _least(index) == size
        self.first_bin = index if exact else index + 1
        self.partial_bin = -1 if exact else index


class Chunk:
    """A piece of a slab, linked to its neighbours."""

    __slots__ = ("address", "home", "next", "prev", "size", "slab", "state", "usage")

    def __init__(self, slab: Slab, address: int, size: int) -> None:
        self.slab = slab
        self.address = address
        self.size = size
        self.state = CLEAN
        self.prev: Chunk | None = None
        self.next: Chunk | None = None
        self.usage: Usage | None = None
        # Set while it is live or resting: the class whose `rest` it goes to, or is in.
        self.home: SizeClass | None = None

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


_address: Final = attrgetter("address")


class Space:
    """The clean chunks of all slabs, in bins by size. A bit per bin says whether it has any."""

    __slots__ = ("_bins", "_filled", "slabs")

    def __init__(self) -> None:
        self._bins: list[dict[Chunk, None]] = [{} for _ in range(_BINS)]
        self._filled = 0
        self.slabs: list[Slab] = []

    def add_slab(self, slab: Slab) -> None:
        """Add a new slab, all of it clean."""
        self.slabs.append(slab)
        self._insert(slab.first)

    def restore_slab(self, slab: Slab, clean: Iterable[Chunk]) -> None:
        """Add a slab some of which is taken; ``clean`` are its other chunks."""
        self.slabs.append(slab)
        for chunk in clean:
            self._insert(chunk)

    def remove_slab(self, slab: Slab) -> None:
        """Remove an empty slab."""
        self.slabs.remove(slab)
        self.remove(slab.first)

    def allocate(self, wanted: SizeClass) -> Chunk | None:
        """Cut a chunk of exactly the wanted size from clean memory.

        Its state is for the caller to set. ``None`` if there is none.
        """
        size = wanted.size
        chunk = self._allocate_partial(wanted) if wanted.partial_bin >= 0 else None
        if chunk is None:
            filled = self._filled >> wanted.first_bin
            if not filled:
                return None
            index = wanted.first_bin + (filled & -filled).bit_length() - 1
            chunks = self._bins[index]
            # The lowest address keeps the ends of slabs free for large blocks. Where there are many
            # to choose from, it would cost more than it helps.
            if 1 < len(chunks) <= _CHOICE:
                chunk = min(chunks, key=_address)
                del chunks[chunk]
            else:
                chunk = chunks.popitem()[0]
            if not chunks:
                self._filled ^= 1 << index
        if chunk.size > size:
            self._insert(chunk.split(size))
        return chunk

    def _allocate_partial(self, wanted: SizeClass) -> Chunk | None:
        if wanted.partial_bin >= _BINS:
            return None  # no slab is that large
        fitting = [chunk for chunk in self._bins[wanted.partial_bin] if chunk.size >= wanted.size]
        if not fitting:
            return None
        best = min(fitting, key=lambda chunk: chunk.size)
        self.remove(best)
        return best

    def add(self, chunk: Chunk) -> None:
        """Make ``chunk`` clean: forget its uses, and merge it with its clean neighbours."""
        after = chunk.next
        if after is not None and after.state == CLEAN:
            self.remove(after)
            chunk.absorb_next()
        before = chunk.prev
        if before is not None and before.state == CLEAN:
            self.remove(before)
            before.absorb_next()
            chunk = before
        chunk.state = CLEAN
        chunk.usage = None
        chunk.home = None
        self._insert(chunk)

    def remove(self, chunk: Chunk) -> None:
        """Remove a clean chunk from its bin."""
        index = bin_of(chunk.size)
        chunks = self._bins[index]
        del chunks[chunk]
        if not chunks:
            self._filled ^= 1 << index

    def _insert(self, chunk: Chunk) -> None:
        index = bin_of(chunk.size)
        self._bins[index][chunk] = None
        self._filled |= 1 << index
