"""Large copies between pageable host memory and the device: piece by piece through pinned memory, by several threads.

One thread copies host memory at a sixth of the speed of the bus. So several threads take pieces of one copy, move them and enqueue their transfers; the
order of the pieces does not matter. Each piece also costs driver calls under the GIL. So pieces are large, but half as large at both ends: at the beginning
the bus waits for the first pieces, and at the end the copy waits for the slowest thread.
"""

from __future__ import annotations

import functools
import itertools
import math
import queue
import threading
from collections import deque
from typing import TYPE_CHECKING, Protocol

from accel import OutOfMemoryError
from accel_cuda.core.transfers import move

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from accel.memory import Block, HostArena

__all__ = ["Copiers", "CopyChannel", "Slot", "pieces_of"]

_THREADS = 8
_EACH = 12 << 20  # bytes for which another thread is worth waking
_SLOTS = 2  # per thread: one is transferred while the thread fills or empties the other
_SMALLEST, _LARGEST = 512 << 10, 4 << 20
_SHARE = 16  # a piece is at most this part of the copy
_PAGE = 4096


class Slot(Protocol):
    """A part of pinned memory, with an event behind the last transfer from or to it. All but :meth:`close` are called in the channel's section."""

    @property
    def address(self) -> int:
        """Where it begins."""

    def transfer(self, device: int, nbytes: int, *, is_put: bool) -> None:
        """Enqueue a transfer of its contents to the device, or back, and record the event."""

    def wait(self) -> None:
        """Block until the stream has passed the event, releasing the GIL."""

    def close(self) -> None:
        """Give the event back."""


class CopyChannel(Protocol):
    """The stream that pieces are transferred in. Several threads call it, and its slots, at once; only what says so blocks."""

    @property
    def section(self) -> AbstractContextManager[object]:
        """Makes the context current on a thread that transfers."""

    def create_slot(self, address: int) -> Slot:
        """Return a slot whose event counts as passed; to be closed. In the section."""

    def reached(self) -> None:
        """Block until everything enqueued so far has ended, sleeping and without the GIL."""

    def begin(self, keep: object, piece: Block) -> None:
        """Note that the stream uses ``piece``, whose mapping ``keep`` keeps, until everything enqueued so far has ended."""


class Copiers:
    """The threads that copy, shared by the streams of a context.

    A stream that does not get on keeps its threads waiting; other streams get threads of their own.

    Parameters
    ----------
    arena
        Pinned memory; each copy takes some of it for as long as it lasts.
    name
        Prefix of the threads' names.
    """

    def __init__(self, arena: HostArena, name: str) -> None:
        self._arena = arena
        self._name = name
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[Callable[[], None] | None]] = []  # one inbox for each idle thread
        self._count = itertools.count(1)
        self._is_closed = False

    def copy(self, channel: CopyChannel, device: int, host: int, nbytes: int, *, is_put: bool) -> bool:
        """Copy ``nbytes`` to the device, or from it; returns when host memory is not used any more. Blocks until the stream has come so far.

        Returns ``False``, with nothing done, if the arena has no room.

        Raises
        ------
        OutOfMemoryError
            If a thread cannot be started.
        AccelError
            What the stream raises.
        """
        if not is_put:
            channel.reached()  # one thread waits for it, instead of all
        pieces = pieces_of(nbytes)
        size = max(length for _, length in pieces)
        count = min(_THREADS, 1 + nbytes // _EACH)
        memory = self._arena.grow(1 << (min(nbytes, count * _SLOTS * size) - 1).bit_length())
        if memory is None:
            return False
        slab = memory.slab
        keep = getattr(slab, "view", lambda: slab)()  # an arena that is closed meanwhile must not unmap what is copied
        addresses = [memory.address + start for start in range(0, memory.nbytes - size + 1, size)][: count * _SLOTS]
        copy = _Copy(channel, device, host, pieces, is_put=is_put)
        try:
            copy.run(addresses, min(count, len(pieces), len(addresses)), self._start)
        finally:
            channel.begin(keep, memory)  # the last transfers may be in flight
        return True

    def close(self) -> None:
        """End the idle threads; those that copy end after that. Does not wait."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for inbox in idle:
            inbox.put(None)

    def _start(self, work: Callable[[], None]) -> None:
        """Have a thread do ``work``, which raises nothing: the one that was busy last, or a new one."""
        with self._lock:
            inbox = self._idle.pop() if self._idle else None
        if inbox is None:
            inbox = queue.SimpleQueue()
            # A daemon: a stream that never ends must not keep the process.
            threading.Thread(target=self._work, args=(inbox,), name=f"{self._name}-{next(self._count)}", daemon=True).start()
        inbox.put(work)

    def _work(self, inbox: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while (work := inbox.get()) is not None:
            work()
            del work
            with self._lock:
                if self._is_closed:
                    return
                self._idle.append(inbox)


class _Copy:
    """One copy: its pieces, its slots, and the first error.

    All threads share the slots, oldest transfer first. So no piece waits for a thread that has another one in hand.
    """

    def __init__(self, channel: CopyChannel, device: int, host: int, pieces: Sequence[tuple[int, int]], *, is_put: bool) -> None:
        self._channel = channel
        self._device, self._host = device, host
        self._pieces = iter(pieces)  # its steps are atomic
        self._is_put = is_put
        self._slots: deque[tuple[Slot, int, int]] = deque()  # with start and length of the piece in it
        self._error: Exception | None = None
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()

    def run(self, addresses: Sequence[int], count: int, start: Callable[[Callable[[], None]], None]) -> None:
        """Copy with this thread and up to ``count - 1`` others, which ``start`` starts; raise what one of them raised once all have ended."""
        slots: list[Slot] = []
        started = 0
        try:
            with self._channel.section:
                for address in addresses:
                    slots.append(self._channel.create_slot(address))
                    self._fill(slots[-1])
            for _ in range(count - 1):
                start(self._work)
                started += 1
        except RuntimeError as error:  # of threading.Thread.start: the system has no thread
            self._fail(_no_thread(error))
        except Exception as error:
            self._fail(error)
        self._work()
        for _ in range(started + 1):
            self._ended.get()
        for slot in slots:
            slot.close()
        if self._error is not None:
            raise self._error

    def _fill(self, slot: Slot) -> None:
        """Take a slot into use: for a put it is empty, for a get its first transfer is enqueued here, so that the bus waits for no thread."""
        if self._is_put:
            self._slots.append((slot, 0, 0))
        else:
            self._pull(slot)

    def _work(self) -> None:
        """Copy pieces until none is left. Each thread calls it. Raises nothing."""
        try:
            step = self._put if self._is_put else self._get
            with self._channel.section:
                while self._error is None and step():
                    pass
        except Exception as error:
            self._fail(error)
        finally:
            self._ended.put(None)

    def _fail(self, error: Exception) -> None:
        """Let no thread begin another piece."""
        self._error = self._error or error

    def _put(self) -> bool:
        """Move one piece to the device; ``False`` if there is none."""
        piece = next(self._pieces, None)
        if piece is None:
            return False
        start, nbytes = piece
        slot, _, _ = self._slots.popleft()  # there are no fewer slots than threads
        slot.wait()
        move(slot.address, self._host + start, nbytes)
        slot.transfer(self._device + start, nbytes, is_put=True)
        self._slots.append((slot, start, nbytes))
        return True

    def _get(self) -> bool:
        """Move the oldest piece in flight to the host, and enqueue the next transfer; ``False`` if nothing is in flight."""
        try:
            slot, start, nbytes = self._slots.popleft()
        except IndexError:
            return False
        slot.wait()
        move(self._host + start, slot.address, nbytes)
        self._pull(slot)
        return True

    def _pull(self, slot: Slot) -> None:
        piece = next(self._pieces, None)
        if piece is not None:
            start, nbytes = piece
            slot.transfer(self._device + start, nbytes, is_put=False)
            self._slots.append((slot, start, nbytes))


def _no_thread(error: RuntimeError) -> OutOfMemoryError:
    made = OutOfMemoryError(
        f"no thread for a large copy could be started: {error}",
        library="os",
        remedy="Try again; if it goes on, raise the limit on threads (ulimit -u, or pids.max of the cgroup).",
    )
    made.__cause__ = error
    return made


@functools.lru_cache(maxsize=64)
def pieces_of(nbytes: int) -> tuple[tuple[int, int], ...]:
    """Return starts and lengths of the pieces of a copy: large ones, between two at each end that are half as large."""
    largest = _pages(min(_LARGEST, max(_SMALLEST, nbytes / _SHARE)))
    half = _pages(largest / 2)
    ends = [half, half] if nbytes >= 8 * half else []
    rest = nbytes - 2 * sum(ends)
    count = -(-rest // largest)
    lengths = [*ends, *[largest] * (count - 1), _pages(rest - largest * (count - 1)), *ends]
    starts = itertools.accumulate(lengths, initial=0)
    # The last piece is the one that is no multiple of a page.
    return tuple((start, min(length, nbytes - start)) for start, length in zip(starts, lengths, strict=False))


def _pages(nbytes: float) -> int:
    return math.ceil(nbytes / _PAGE) * _PAGE
