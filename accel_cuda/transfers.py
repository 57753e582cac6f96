"""Copies between host and device that are on their way in one stream.

Ordinary host memory cannot be given to the device: the driver would wait for the stream before it reads, or until it has written. So small copies go
through a ring of pinned memory, which this module hands out and takes back in the stream's order; what comes from the device is moved to
where it belongs ("landed") when an event behind it is seen to have passed.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from typing import TYPE_CHECKING

from accel_cuda.pinned import PinnedBlock

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel_cuda.driver import Driver

__all__ = ["RING", "STAGED", "Transfers", "move", "move_small"]

RING = 8 << 20
"""Bytes of pinned memory that a stream stages copies in."""

STAGED = 256 << 10
"""The largest copy that is staged whole."""

_ALIGNMENT = 256
_MEMMOVE = ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
_TYPES = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

move: Callable[[int, int, int], object] = ctypes.CFUNCTYPE(ctypes.c_void_p, *_TYPES)(_MEMMOVE)
"""``move(destination, source, nbytes)`` on the host, giving the GIL up."""

move_small: Callable[[int, int, int], object] = ctypes.PYFUNCTYPE(ctypes.c_void_p, *_TYPES)(_MEMMOVE)
"""The same, keeping the GIL."""


class _Transfer:
    __slots__ = ("destination", "end", "keep", "nbytes", "source", "ticket")

    def __init__(self, ticket: int, end: int, keep: object, destination: int, source: int, nbytes: int) -> None:
        self.ticket = ticket
        self.end = end
        self.keep = keep
        self.destination = destination
        self.source = source
        self.nbytes = nbytes


class Transfers:
    """What one stream has staged and what it keeps alive, oldest first.

    Attributes
    ----------
    issued, finished : int
        How many transfers were begun, and how many are known to have ended.
    """

    __slots__ = ("_head", "_lock", "_queue", "_ring", "_tail", "finished", "issued")

    def __init__(self) -> None:
        self.issued = 0
        self.finished = 0
        self._lock = threading.Lock()
        self._queue: deque[_Transfer] = deque()
        self._ring: PinnedBlock | None = None
        self._head = self._tail = 0  # bytes ever handed out, and ever taken back

    def prepare(self, driver: Driver) -> None:
        """Make the ring, if there is none; a context is current. May block."""
        if self._ring is None:
            self._ring = PinnedBlock(driver, RING)

    @property
    def is_prepared(self) -> bool:
        """Whether the ring is there."""
        return self._ring is not None

    def stage(self, nbytes: int) -> int:
        """Return the address of ``nbytes`` of the ring for the transfer that is begun next, or 0 while there is no room."""
        ring = self._ring
        if ring is None:
            return 0
        size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        start = self._head
        place = start % ring.nbytes
        if place + size > ring.nbytes:
            start += ring.nbytes - place
            place = 0
        if start + size - self._tail > ring.nbytes:
            return 0
        self._head = start + size
        return ring.address + place

    def begin(self, keep: object, destination: int = 0, source: int = 0, nbytes: int = 0) -> None:
        """Note a transfer that has just been enqueued.

        Parameters
        ----------
        keep
            What must live until it has ended.
        destination, source, nbytes
            Host memory to move once it has ended, if any.
        """
        with self._lock:
            self.issued += 1
            self._queue.append(_Transfer(self.issued, self._head, keep, destination, source, nbytes))

    def finish(self, ticket: int) -> None:
        """Note that the transfers up to ``ticket`` have ended: land what came from the device, and take their memory back."""
        done: list[_Transfer] = []
        with self._lock:
            queue = self._queue
            while queue and queue[0].ticket <= ticket:
                each = queue.popleft()
                if each.nbytes:
                    move_small(each.destination, each.source, each.nbytes)
                self._tail = each.end
                done.append(each)
            self.finished = max(self.finished, ticket)
        done.clear()  # what they kept may do anything when it goes, so not under the lock

    def close(self) -> None:
        """Forget everything; nothing of it is on the device any more, or the context is dead. May block."""
        with self._lock:
            queue, self._queue = self._queue, deque()
            ring, self._ring = self._ring, None
        queue.clear()
        if ring is not None:
            ring.close()
