"""What the allocator hands out: blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NoReturn

from accel.errors import StaleRefError
from accel.memory.usage import Dependency, Timeline, Usage

if TYPE_CHECKING:
    from accel.backend import SlabMemory
    from accel.memory.space import Chunk

__all__ = ["FREED", "Block"]


class _FreedUsage(Usage):
    """The usage of freed blocks: it detects their use without a check on the way of every op."""

    __slots__ = ()

    def read(self, timeline: Timeline, seq: int, dependencies: list[Dependency]) -> NoReturn:
        raise StaleRefError(f"a freed block was read by {timeline!r}", reason="freed")

    def write(self, timeline: Timeline, seq: int, dependencies: list[Dependency]) -> NoReturn:
        raise StaleRefError(f"a freed block was written by {timeline!r}", reason="freed")


FREED: Final = _FreedUsage()


class Block:
    """A piece of a slab, from its allocation until it is freed.

    Made by an :class:`~accel.memory.Allocator` only.

    Attributes
    ----------
    address : int
        Where it starts; aligned to 256 bytes. 0 once the block is freed.
    nbytes : int
        Bytes asked for.
    size : int
        Bytes reserved, from ``address``.
    usage : Usage
        Its uses. A reused block starts with the pending uses of the memory's earlier blocks.
        Once the block is freed, recording a use raises :class:`~accel.StaleRefError` with the
        reason ``"freed"``; so take it from the block each time.
    """

    __slots__ = ("_chunk", "address", "nbytes", "size", "usage")

    def __init__(self, chunk: Chunk, nbytes: int) -> None:
        self._chunk: Chunk | None = chunk
        self.address = chunk.address
        self.nbytes = nbytes
        self.size = chunk.size
        self.usage = chunk.usage

    def __repr__(self) -> str:
        where = "freed" if self._chunk is None else f"at {self.address:#x}"
        return f"<Block {self.nbytes} bytes (of {self.size}) {where}>"

    @property
    def slab(self) -> SlabMemory:
        """The slab that holds the block."""
        return self._live_chunk().slab.memory

    @property
    def offset(self) -> int:
        """Bytes from the start of the slab."""
        chunk = self._live_chunk()
        return chunk.address - chunk.slab.memory.address

    def _live_chunk(self) -> Chunk:
        """Return the block's chunk; raise once the block is freed."""
        if self._chunk is None:
            raise StaleRefError("a freed block has no place in a slab", reason="freed")
        return self._chunk
