"""Host arrays on their way to and from a child, in blocks of memory that both processes map."""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING, Any

from accel.dtype import DType
from accel.ops import Get, Put
from accel.remote.messages import ArenaSlice

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping, Sequence

    import numpy as np

    from accel.memory import Block, HostArena, HostBlock, MemfdSlab
    from accel.ops import KernelOp
    from accel.storage.pinned import PinnedMemory

__all__ = ["MAX_INLINE_COPY", "CopyBack", "SharedArray", "SharedArrays", "host_array_of", "release_all", "release_from"]

MAX_INLINE_COPY = 128 << 10
"""Bytes that the loop's thread copies itself: for more, a hand-off to a thread is faster."""


class SharedArray:
    """An array of an op, and its place in shared memory: it is copied there, or from there.

    An array that is in shared memory itself, as pinned ones are, is not copied. Nor is one for a
    child on another machine, to which it is sent: its piece of the arena is a place there.

    Attributes
    ----------
    place : ArenaSlice
        Block and offset of the array in the child.
    address : int
        Address of the place in this process.
    array : ndarray
        The user's array.
    is_copied : bool
        Whether the array is copied to or from shared memory of this machine.
    """

    __slots__ = ("_arena", "_piece", "_view", "address", "array", "is_copied", "place")

    def __init__(
        self,
        arena: HostArena,
        piece: Block | None,
        address: int,
        array: np.ndarray[Any, Any],
        place: ArenaSlice,
        *,
        is_sent: bool = False,
    ) -> None:
        self._arena = arena
        self._piece = piece
        # The view keeps the mapping until this is closed, also if the arena is closed before.
        slab: MemfdSlab | None = None if piece is None else piece.slab  # type: ignore[assignment]
        self._view = None if slab is None or is_sent else slab.view()
        self.is_copied = self._view is not None
        self.address = address
        self.array = array
        self.place = place

    @property
    def holds_piece(self) -> bool:
        """Whether the place takes memory of the arena, until :meth:`close`."""
        return self._piece is not None

    @property
    def extent(self) -> tuple[int, int, int]:
        """The number of the block, and the offset and bytes in it."""
        return self.place.block, self.place.offset, self.array.nbytes

    def memory(self) -> memoryview:
        """Return the bytes of the array, to be sent or received."""
        return self.array.reshape(-1).view("uint8").data

    def copy_in(self) -> None:
        """Copy the array into shared memory, unless it is there. Blocks for as long as that takes."""
        view = self._view  # keeps the mapping while this copies, also if this is closed meanwhile
        if view is not None:
            ctypes.memmove(self.address, self.array.ctypes.data, self.array.nbytes)

    def copy_back(self) -> None:
        """Copy shared memory into the array, unless that is there. Blocks as :meth:`copy_in` does."""
        view = self._view
        if view is not None:
            ctypes.memmove(self.array.ctypes.data, self.address, self.array.nbytes)

    def close(self) -> None:
        """Free the place: the child does not use it any more. Idempotent."""
        piece, self._piece, self._view = self._piece, None, None
        if piece is not None:
            self._arena.free(piece)


class CopyBack:
    """A copy of arrays from shared memory into the user's, which a worker thread makes.

    The generation may end before the thread begins. So the first call of :meth:`copy` or
    :meth:`give_up` decides which of them releases the shared memory; the other does nothing.

    Parameters
    ----------
    arrays
        The places, which are released after the copy.
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
                    array.copy_back()
            finally:
                release_all(self._arrays)

    def give_up(self) -> None:
        """Release the shared memory without a copy; do nothing if :meth:`copy` has begun."""
        if self._claim.acquire(blocking=False):
            release_all(self._arrays)


class SharedArrays:
    """Places for arrays in a device's blocks of host memory, which one child maps.

    Parameters
    ----------
    pinned
        Host memory of the device, over all generations.
    sent_blocks
        Numbers of the blocks that the child has.
    send_block
        ``send_block(block)`` sends the child a block, and adds its number to these.
    is_sent
        Whether the child is on another machine, which has blocks of the same sizes: arrays are sent.
    """

    def __init__(
        self, pinned: PinnedMemory, sent_blocks: Container[int], send_block: Callable[[HostBlock], None], *, is_sent: bool = False
    ) -> None:
        self._is_sent = is_sent
        self._pinned = pinned
        self._arena = pinned.arena
        self._send_block = send_block
        self._sent_blocks = sent_blocks

    def allocate(self, array: np.ndarray[Any, Any]) -> SharedArray | None:
        """Return a place for an array; ``None`` if it has to wait for one, or moves in chunks.

        Called before the array's op is sent. Without a place the op waits, and later ones may
        overtake it.
        """
        if not array.nbytes:
            return SharedArray(self._arena, None, 0, array, ArenaSlice(0, 0, array.shape, DType.of(array.dtype)))
        shared = self._find_shared(array)
        if shared is not None:
            return shared
        piece = self._pinned.allocate_chunk(array.nbytes)
        return None if piece is None else self.in_piece(piece, array)

    def has_place(self, array: np.ndarray[Any, Any]) -> bool:
        """Return whether :meth:`allocate` would return a place now: allocate one, and free it."""
        place = self.allocate(array)
        if place is not None:
            place.close()
        return place is not None

    def place_now(self, ops: Sequence[KernelOp]) -> dict[int, SharedArray] | None:
        """Return places for the arrays of ops, by the op's index, and copy those of puts there.

        ``None`` if an array has to wait for its place; if the arrays take more than about one chunk
        of the arena, for which others may wait; or if the copies would occupy the loop for long.
        """
        placed: dict[int, SharedArray] = {}
        held, to_copy, is_done = 0, 0, False  # bytes of the arena; bytes to copy now
        try:
            for index, op in enumerate(ops):
                array = host_array_of(op)
                if array is None:
                    continue
                shared = None if held >= self._pinned.max_chunk else self.allocate(array)
                if shared is None:
                    return None
                placed[index] = shared
                if shared.holds_piece:
                    held += array.nbytes
                if type(op) is Put and shared.is_copied:
                    to_copy += array.nbytes
                if to_copy > MAX_INLINE_COPY:
                    return None
            for index, shared in placed.items():
                if type(ops[index]) is Put:
                    shared.copy_in()
            is_done = True
            return placed
        finally:
            if not is_done:
                release_all(placed.values())

    def in_piece(self, piece: Block, array: np.ndarray[Any, Any]) -> SharedArray:
        """Return a place for an array in a piece that is large enough; it owns the piece."""
        block: HostBlock = piece.slab  # type: ignore[assignment]  # an arena's slabs are its own
        place = ArenaSlice(block.number, piece.offset, array.shape, DType.of(array.dtype))
        return SharedArray(self._arena, piece, piece.address, array, place, is_sent=self._is_sent)

    def send_block(self, shared: SharedArray) -> None:
        """Send the child the block that an array is in, unless the child has it.

        Called before the array's op is sent.
        """
        number = shared.place.block
        if number and number not in self._sent_blocks:
            self._send_block(next(block for block in self._arena.blocks() if block.number == number))

    def _find_shared(self, array: np.ndarray[Any, Any]) -> SharedArray | None:
        """Return the place of an array that is in shared memory itself; ``None`` for others.

        Pinned arrays are: nothing is copied for them.
        """
        address = array.ctypes.data
        for block in self._arena.blocks():
            offset = address - block.address
            if offset >= 0 and offset + array.nbytes <= block.nbytes:
                place = ArenaSlice(block.number, offset, array.shape, DType.of(array.dtype))
                return SharedArray(self._arena, None, address, array, place)
        return None


def host_array_of(op: KernelOp) -> np.ndarray[Any, Any] | None:
    """Return the host array that an op reads or fills, if it has one."""
    return op.source if type(op) is Put else op.destination if isinstance(op, Get) else None


def release_all(arrays: Iterable[SharedArray]) -> None:
    """Release shared memory that no child uses."""
    for array in arrays:
        array.close()


def release_from(arrays: Mapping[int, SharedArray], index: int) -> None:
    """Release the shared memory of a batch's arrays from op ``index`` on: these ops were not sent."""
    release_all([shared for number, shared in arrays.items() if number >= index])
