"""Host arrays on their way to and from a child, in blocks of memory that both processes map."""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING, Any

from accel.dtype import DType
from accel.remote.messages import ArenaSlice

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    import numpy as np

    from accel.memory import Block, HostArena, HostBlock, MemfdSlab
    from accel.storage.pinned import PinnedMemory

__all__ = ["COPIED_HERE", "CopyBack", "SharedArray", "SharedArrays", "close_all"]

COPIED_HERE = 128 << 10
"""Bytes up to which the loop's thread copies: more takes longer than a hand-off to a thread."""


class SharedArray:
    """An array in shared memory, for one op.

    Attributes
    ----------
    place : ArenaSlice
        Where it lies in shared memory.
    array : ndarray
        The user's array.
    is_copied : bool
        Whether the array itself is not in shared memory.
    """

    __slots__ = ("_arena", "_piece", "_view", "address", "array", "place")

    def __init__(self, arena: HostArena, piece: Block | None, address: int, array: np.ndarray[Any, Any], place: ArenaSlice) -> None:
        self._arena = arena
        self._piece = piece
        # The view keeps the mapping until this is closed, also if the arena is closed before.
        slab: MemfdSlab | None = None if piece is None else piece.slab  # type: ignore[assignment]
        self._view = None if slab is None else slab.view()
        self.address = address
        self.array = array
        self.place = place

    @property
    def is_copied(self) -> bool:
        """Whether the array itself is not in shared memory."""
        return self._piece is not None

    def fill(self) -> None:
        """Copy the array into shared memory. May block for as long as that takes."""
        view = self._view  # keeps the mapping while this copies, also if this is closed meanwhile
        if view is not None:
            ctypes.memmove(self.address, self.array.ctypes.data, self.array.nbytes)

    def land(self) -> None:
        """Copy shared memory into the array. May block for as long as that takes."""
        view = self._view
        if view is not None:
            ctypes.memmove(self.array.ctypes.data, self.address, self.array.nbytes)

    def close(self) -> None:
        """Release the memory, which the child does not use any more. Idempotent."""
        piece, self._piece, self._view = self._piece, None, None
        if piece is not None:
            self._arena.free(piece)


class CopyBack:
    """The copy of arrays from shared memory into the user's, off the loop.

    The first call of :meth:`copy` or :meth:`give_up` decides; the other one does nothing.

    Parameters
    ----------
    arrays
        The arrays.
    """

    __slots__ = ("_arrays", "_claim")

    def __init__(self, arrays: Sequence[SharedArray]) -> None:
        self._arrays = arrays
        self._claim = threading.Lock()

    def copy(self) -> None:
        """Copy, and release the shared memory. Blocks."""
        if self._claim.acquire(blocking=False):
            try:
                for array in self._arrays:
                    array.land()
            finally:
                close_all(self._arrays)

    def give_up(self) -> None:
        """Release the shared memory; if it is being copied, :meth:`copy` releases it after that."""
        if self._claim.acquire(blocking=False):
            close_all(self._arrays)


class SharedArrays:
    """Places for arrays in the blocks of host memory of a device, for one child.

    Parameters
    ----------
    pinned
        Host memory of the device, over all generations.
    known
        Numbers of the blocks that the child has.
    announce
        ``announce(number, block)`` sends the child a block, which is then among these.
    """

    def __init__(self, pinned: PinnedMemory, known: Container[int], announce: Callable[[int, HostBlock], None]) -> None:
        self._pinned = pinned
        self._arena = pinned.arena
        self._announce = announce
        self._known = known

    def take(self, array: np.ndarray[Any, Any]) -> SharedArray | None:
        """Return a place for an array; ``None`` if it has to wait for one, or moves in pieces."""
        if not array.nbytes:
            return SharedArray(self._arena, None, 0, array, ArenaSlice(0, 0, array.shape, DType.of(array.dtype)))
        found = self._find(array)
        if found is not None:
            return found
        piece = self._pinned.allocate_part(array.nbytes)
        return None if piece is None else self.within(piece, array)

    def has_place(self, array: np.ndarray[Any, Any]) -> bool:
        """Whether :meth:`take` would return a place."""
        place = self.take(array)
        if place is not None:
            place.close()
        return place is not None

    def within(self, piece: Block, array: np.ndarray[Any, Any]) -> SharedArray:
        """Return a place for an array that is no larger than ``piece``."""
        block: HostBlock = piece.slab  # type: ignore[assignment]  # an arena's slabs are its own
        place = ArenaSlice(block.number, piece.offset, array.shape, DType.of(array.dtype))
        return SharedArray(self._arena, piece, piece.address, array, place)

    def announce(self, outgoing: SharedArray) -> None:
        """Send the child the block of an array unless it has it, before the op is sent."""
        number = outgoing.place.block
        if number and number not in self._known:
            self._announce(number, next(block for block in self._arena.blocks() if block.number == number))

    def _find(self, array: np.ndarray[Any, Any]) -> SharedArray | None:
        """Return the place of an array that lies in shared memory already."""
        address = array.ctypes.data
        for block in self._arena.blocks():
            offset = address - block.address
            if offset >= 0 and offset + array.nbytes <= block.nbytes:
                place = ArenaSlice(block.number, offset, array.shape, DType.of(array.dtype))
                return SharedArray(self._arena, None, address, array, place)
        return None


def close_all(arrays: Sequence[SharedArray]) -> None:
    """Release shared memory that no child uses."""
    for array in arrays:
        array.close()
