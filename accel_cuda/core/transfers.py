"""Copies between host and device in flight in one stream, and the pinned memory that small ones are staged in.

Given pageable memory, the driver waits for the stream before it reads, or until it has written. So small copies are staged in pieces of pinned memory,
which come from the context's arena and are kept for the next copy. A piece that came from the device is moved to its destination ("landed") when an event
behind it has passed.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.memory import Block, HostArena

__all__ = ["STAGED", "StreamTransfers", "move", "move_small"]

STAGED = 256 << 10
"""The largest copy that is staged whole."""

# Sizes of pieces, and how many of each a stream keeps for itself: taking one from the arena costs more than all else that a small copy does.
_SIZES = (4 << 10, 64 << 10, STAGED)
_KEPT = (64, 16, 4)
_MEMMOVE = ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
_TYPES = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

move: Callable[[int, int, int], object] = ctypes.CFUNCTYPE(ctypes.c_void_p, *_TYPES)(_MEMMOVE)
"""``move(destination, source, nbytes)`` on the host, without the GIL."""

move_small: Callable[[int, int, int], object] = ctypes.PYFUNCTYPE(ctypes.c_void_p, *_TYPES)(_MEMMOVE)
"""The same, with the GIL: for copies that take less than getting the GIL back."""


class _StreamTransfer:
    __slots__ = ("destination", "keep", "nbytes", "piece", "ticket")

    def __init__(self, ticket: int, keep: object, piece: Block | None, destination: int, nbytes: int) -> None:
        self.ticket = ticket
        self.keep = keep
        self.piece = piece
        self.destination = destination
        self.nbytes = nbytes


class StreamTransfers:
    """The transfers in flight in one stream, oldest first: their pinned memory, and the host memory that they keep alive.

    Parameters
    ----------
    arena
        Where pinned memory comes from; shared by the streams of a context.

    Attributes
    ----------
    issued, finished : int
        Numbers of transfers, and of uses of plans, that were begun, and that are known to have ended.
    reserved : deque of Block
        Pieces for the copies that are enqueued next; see :meth:`reserve`.
    """

    __slots__ = ("_arena", "_kept", "_lock", "_queue", "finished", "issued", "reserved")

    def __init__(self, arena: HostArena) -> None:
        self.issued = 0
        self.finished = 0
        self.reserved: deque[Block] = deque()
        self._arena = arena
        self._lock = threading.Lock()
        self._queue: deque[_StreamTransfer] = deque()
        self._kept: dict[int, list[Block]] | None = {size: [] for size in _SIZES}

    def prepare(self) -> None:
        """Have the arena make its first block for small copies; a context is current. May block."""
        piece = self.grow(STAGED)
        if piece is not None:
            self._give(piece)

    def reserve(self, nbytes: int) -> bool:
        """Take a piece for a copy that is enqueued in this event loop iteration. ``False`` if there is none: then the copy may block."""
        if self._kept is None:
            return True  # the stream is closed, and will say so
        piece = self._take(nbytes)
        if piece is None:
            return False
        self.reserved.append(piece)
        return True

    def release_reserved(self) -> None:
        """Give back the pieces of copies that were dropped: every copy that was to use one has been enqueued, or never will be."""
        while (piece := self._pop_reserved()) is not None:
            self._give(piece)

    def stage(self, nbytes: int) -> Block | None:
        """Return a piece of at least ``nbytes`` for the transfer that is begun next, or ``None`` while there is no room."""
        while (piece := self._pop_reserved()) is not None:
            if piece.nbytes >= nbytes:
                return piece
            self._give(piece)
        return self._take(nbytes)

    def grow(self, nbytes: int) -> Block | None:
        """Return a piece as :meth:`stage` does, from a new block of the arena if necessary. May block."""
        return self._arena.grow(_size(nbytes))

    def begin(self, keep: object, piece: Block | None = None, destination: int = 0, nbytes: int = 0) -> None:
        """Note a transfer that has just been enqueued.

        Parameters
        ----------
        keep
            Object to keep alive until it has ended.
        piece
            Pinned memory that it uses, free after it.
        destination, nbytes
            Host memory to move the piece's contents to once it has ended, if any.
        """
        with self._lock:
            self.issued += 1
            self._queue.append(_StreamTransfer(self.issued, keep, piece, destination, nbytes))

    def number(self) -> int:
        """Return a number for what has just been enqueued, and is no transfer: it has ended once :attr:`finished` is as high."""
        with self._lock:
            self.issued += 1
            return self.issued

    def finish(self, ticket: int) -> None:
        """Retire the transfers up to ``ticket``, which have ended: land what came from the device, and take their memory back."""
        done: list[_StreamTransfer] = []
        with self._lock:
            queue = self._queue
            while queue and queue[0].ticket <= ticket:
                each = queue.popleft()
                if each.nbytes and each.piece is not None:
                    move_small(each.destination, each.piece.address, each.nbytes)
                done.append(each)
            self.finished = max(self.finished, ticket)
        for each in done:
            if each.piece is not None:
                self._give(each.piece)
        done.clear()  # without the lock: finalizers of what they kept may run any code

    def close(self) -> None:
        """Drop everything; no transfer is in flight, or the context is dead. May block."""
        with self._lock:
            queue, self._queue = self._queue, deque()
            kept, self._kept = self._kept, None
        for pieces in (kept or {}).values():
            for piece in pieces:
                self._arena.free(piece)
        for each in queue:
            if each.piece is not None:
                self._arena.free(each.piece)
        self.release_reserved()
        queue.clear()

    def _pop_reserved(self) -> Block | None:
        try:
            return self.reserved.popleft()  # alone: the loop's thread gives back while one beside it may take
        except IndexError:
            return None

    def _take(self, nbytes: int) -> Block | None:
        size = _size(nbytes)
        kept = self._kept
        if kept is not None:
            try:
                return kept[size].pop()  # pop alone is atomic; a look before it would not be
            except (IndexError, KeyError):
                pass
        return self._arena.take(size)

    def _give(self, piece: Block) -> None:
        kept = self._kept
        mine = None if kept is None else kept.get(piece.nbytes)
        if mine is not None and len(mine) < _KEPT[_SIZES.index(piece.nbytes)]:
            mine.append(piece)
        else:
            self._arena.free(piece)


def _size(nbytes: int) -> int:
    """Return the size of the piece for ``nbytes``."""
    for size in _SIZES:
        if nbytes <= size:
            return size
    return nbytes
