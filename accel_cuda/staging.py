"""Large copies between ordinary host memory and the device: piece by piece through pinned memory, host copies and transfers side by side.

One thread copies host memory at a fifth of the speed of the bus, so each piece is copied by several.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from accel_cuda.event import CudaEvent
from accel_cuda.pinned import PinnedBlock
from accel_cuda.transfers import move

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel_cuda.stream import CudaStream

__all__ = ["Stager"]

_PIECES = 4
_SMALLEST, _LARGEST = 1 << 20, 16 << 20
_THREADS = 8
_PART = 2 << 20  # a thread that copies less than this costs more than it brings
_PAGE = 4096


class Stager:
    """The pieces of one stream. Only one thread at a time uses it.

    Parameters
    ----------
    stream
        Where the transfers go; its context is current.
    push, pull
        Enqueue a transfer of pinned memory to the device, and back: ``call(destination, source, nbytes)``.
    """

    def __init__(self, stream: CudaStream, push: Callable[[int, int, int], None], pull: Callable[[int, int, int], None]) -> None:
        self._stream = stream
        self._push, self._pull = push, pull
        self._ring = PinnedBlock(stream.context.driver, _LARGEST * _PIECES)
        self._events = [CudaEvent(stream.context) for _ in range(_PIECES)]
        self._workers = ThreadPoolExecutor(_THREADS, thread_name_prefix="accel-cuda-copy")
        stream.at_close(self.close)

    def put(self, destination: int, source: int, nbytes: int) -> None:
        """Copy host memory to the device: returns when the last piece has been read from the host. Blocks while the stream is behind."""
        length = _piece(nbytes)
        for number, start in enumerate(range(0, nbytes, length)):
            staged, event = self._slot(number)
            size = min(length, nbytes - start)
            event.synchronize()
            self._move(staged, source + start, size)
            self._push(destination + start, staged, size)
            self._stream.record(event)

    def get(self, destination: int, source: int, nbytes: int) -> None:
        """Copy device memory to the host: returns when it is there."""
        length = _piece(nbytes)
        starts = range(0, nbytes, length)
        for number in range(len(starts) + _PIECES - 1):
            if number < len(starts):
                staged, event = self._slot(number)
                event.synchronize()
                self._pull(staged, source + starts[number], min(length, nbytes - starts[number]))
                self._stream.record(event)
            behind = number - (_PIECES - 1)
            if behind >= 0:
                staged, event = self._slot(behind)
                event.synchronize()
                self._move(destination + starts[behind], staged, min(length, nbytes - starts[behind]))

    def close(self) -> None:
        """Give the memory and the threads back; the stream has ended."""
        for event in self._events:
            event.close()
        self._workers.shutdown()
        self._ring.close()

    def _slot(self, number: int) -> tuple[int, CudaEvent]:
        slot = number % _PIECES
        return self._ring.address + slot * _LARGEST, self._events[slot]

    def _move(self, destination: int, source: int, nbytes: int) -> None:
        count = max(1, min(_THREADS, nbytes // _PART))
        part = -(-nbytes // (count * _PAGE)) * _PAGE
        parts = [(destination + start, source + start, min(part, nbytes - start)) for start in range(0, nbytes, part)]
        others = [self._workers.submit(move, *arguments) for arguments in parts[1:]]
        move(*parts[0])
        for other in others:
            other.result()


def _piece(nbytes: int) -> int:
    """Return the length of the pieces: several, so that host copies and transfers overlap, and none so small that it costs more than it brings."""
    return min(_LARGEST, max(_SMALLEST, -(-nbytes // (_PIECES * _SMALLEST)) * _SMALLEST))
