"""Large copies between ordinary host memory and the device: piece by piece through pinned memory, by several threads.

One thread copies host memory at a sixth of the speed of the bus. So several take pieces, copy them, and enqueue their transfers themselves; the order
of the pieces of one copy does not matter. What a piece costs besides is the driver's calls under the GIL, in cold caches, and the way to it: with many
pieces the threads stand in line. So the pieces are large, and somewhat smaller at the beginning, where the bus would wait for a large one, and at the end,
where everybody would wait for the slowest thread.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Protocol

from accel import OutOfMemoryError
from accel_cuda.core.transfers import move

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from accel.memory import Block, HostArena

    _Inbox = queue.SimpleQueue[Callable[[], None] | None]

__all__ = ["Channel", "Copiers", "Place", "pieces_of"]

_THREADS = 8
_EACH = 16 << 20  # what makes another thread worth its start: they start one after the other, a GIL's wake-up each
_SLOTS = 2  # pieces that one thread has on their way
_SMALLEST, _LARGEST = 512 << 10, 4 << 20
_SHARE = 16  # of the whole, that a piece is at most; the first and the last are half as large
_PAGE = 4096
# Seconds for which a thread that may be needed again in a moment sleeps, so often at most: the processor does not go to sleep for so little.
_NAP, _NAPS = 200e-6, 5


def _ROUSED() -> None:  # noqa: N802 - a constant, of the type of what it stands among
    """Stand for work that comes in a moment."""


class Place(Protocol):
    """A place in pinned memory, with a mark behind the last transfer from or to it. All but :meth:`close` are called in the channel's section."""

    @property
    def address(self) -> int:
        """Where it begins."""

    def push(self, destination: int, nbytes: int) -> None:
        """Enqueue a transfer of what is in it to the device, and set the mark behind it."""

    def pull(self, source: int, nbytes: int) -> None:
        """Enqueue a transfer of the device's memory to it, and set the mark behind it."""

    def wait(self) -> None:
        """Block until the stream has passed the mark, releasing the GIL."""

    def close(self) -> None:
        """Give it back."""


class Channel(Protocol):
    """The stream that pieces are transferred in. Several threads call it, and its places, at once; of all that only what is said to blocks."""

    @property
    def section(self) -> AbstractContextManager[object]:
        """What a thread is in while it transfers."""

    def create_place(self, address: int, *, is_near: bool) -> Place:
        """Return a place whose mark counts as passed; to be closed. One that is near may be waited for by spinning."""

    def reached(self) -> None:
        """Block until everything enqueued so far has ended, releasing the GIL."""

    def begin(self, keep: object, piece: Block) -> None:
        """Note that the stream uses a piece, and what keeps its mapping, until everything enqueued so far has ended."""


class Copiers:
    """Threads that copy, shared by the streams of a context.

    A stream that is held up keeps its threads waiting; others get threads of their own. Each copy takes pinned memory from the arena for as long as it
    lasts.

    Parameters
    ----------
    arena
        Where pinned memory comes from.
    name
        Prefix of the threads' names.
    """

    def __init__(self, arena: HostArena, name: str) -> None:
        self._arena = arena
        self._threads = _Threads(name)

    def put(self, channel: Channel, destination: int, source: int, nbytes: int) -> bool:
        """Copy host memory to the device: returns when all of it has been read. Blocks while the stream is behind.

        Returns ``False``, with nothing done, if the arena has no room.
        """
        pieces = pieces_of(nbytes)
        return self._run(_Put(channel, destination, source, pieces), pieces, nbytes)

    def get(self, channel: Channel, destination: int, source: int, nbytes: int) -> bool:
        """Copy device memory to the host: returns when it is there. ``False``, with nothing done, if the arena has no room."""
        channel.reached()  # by one thread that sleeps; from here on there is little to wait for
        pieces = pieces_of(nbytes)
        return self._run(_Get(channel, destination, source, pieces), pieces, nbytes)

    def rouse(self, nbytes: int) -> None:
        """Wake the threads that a copy of ``nbytes`` will have: it will be begun on another thread in a moment."""
        self._threads.rouse(_count(nbytes) - 1)

    def close(self) -> None:
        """End the threads; those that copy end after that. Does not wait."""
        self._threads.close()

    def _run(self, copy: _Copy, pieces: Sequence[tuple[int, int]], nbytes: int) -> bool:
        size = max(length for _, length in pieces)
        count = _count(nbytes)
        memory = self._arena.grow(1 << (min(nbytes, count * _SLOTS * size) - 1).bit_length())
        if memory is None:
            return False
        slab = memory.slab
        keep = getattr(slab, "view", lambda: slab)()  # a context that is closed meanwhile must not unmap what is copied
        slots = [memory.address + start for start in range(0, memory.nbytes - size + 1, size)]
        count = min(count, len(pieces), len(slots))
        copy.begin(count, slots)
        shares = [slots[i::count] for i in range(count)]
        own = shares[:1]
        for i in range(1, count):
            try:
                self._threads.start(partial(copy.work, shares[i]))
            except RuntimeError as error:  # of threading.Thread.start: the system has no thread
                copy.fail(_no_thread(error))
                own += shares[i:]
                break
        for share in own:
            copy.work(share)
        copy.wait()
        copy.channel.begin(keep, memory)  # what was enqueued last may be on its way
        if copy.error is not None:
            raise copy.error
        return True


class _Threads:
    """Threads that wait for work, more of them when all have some.

    What costs time here is the GIL, so there are no futures and no conditions; and waking a thread whose processor has gone to sleep, which takes
    a quarter of a millisecond. So each thread waits at a queue of its own, that all may be woken at once, and may be roused before there is work.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._idle: list[_Inbox] = []
        self._asleep: set[_Inbox] = set()  # of those, what is waited at without naps
        self._count = 0
        self._is_closed = False

    def start(self, work: Callable[[], None]) -> None:
        """Have a thread do ``work``, which raises nothing: the one that was busy last."""
        with self._lock:
            inbox = self._idle.pop() if self._idle else None
            self._count += inbox is None
            number = self._count
        if inbox is None:
            inbox = queue.SimpleQueue()
            # A daemon: a stream that never ends must not keep the process.
            threading.Thread(target=self._run, args=(inbox,), name=f"{self._name}-{number}", daemon=True).start()
        inbox.put(work)

    def rouse(self, count: int) -> None:
        """Wake so many of those that wait: there will be work in a moment. Those that nap are left alone: awake, they would only stand in line for the GIL."""
        with self._lock:
            for inbox in self._idle[-count:]:
                if inbox in self._asleep:
                    inbox.put(_ROUSED)

    def close(self) -> None:
        """End those that wait, and the others when they are through."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for inbox in idle:
            inbox.put(None)

    def _run(self, inbox: _Inbox) -> None:
        work = inbox.get()
        while work is not None:
            work()
            del work
            with self._lock:
                if self._is_closed:
                    return
                self._idle.append(inbox)
            # A copy is often followed by another.
            work = _ROUSED
            while work is _ROUSED:
                work = self._soon(inbox)

    def _soon(self, inbox: _Inbox) -> Callable[[], None] | None:
        """Return what there is to do, with naps at first; ``None`` for the end."""
        for _ in range(_NAPS):
            with contextlib.suppress(queue.Empty):
                return inbox.get(timeout=_NAP)
        self._asleep.add(inbox)
        try:
            return inbox.get()
        finally:
            self._asleep.discard(inbox)


class _Copy(ABC):
    """One copy: what is left of it, and what went wrong."""

    def __init__(self, channel: Channel, destination: int, source: int, pieces: Sequence[tuple[int, int]]) -> None:
        self.channel = channel
        self.error: Exception | None = None
        self._destination, self._source = destination, source
        self._left = iter(pieces)  # its steps are atomic
        self._running = itertools.count()
        self._ended = threading.Lock()

    def begin(self, count: int, slots: list[int]) -> None:
        """Say how many threads will work, and through which places all together."""
        self._running = itertools.count(count - 1, -1)
        self._ended.acquire()

    def fail(self, error: Exception) -> None:
        """Let no thread begin another piece; :attr:`error` is raised once all have ended."""
        self.error = error

    @abstractmethod
    def work(self, slots: list[int]) -> None:
        """Copy pieces until none is left; called by each thread, with the places that are its own. Raises nothing."""

    def wait(self) -> None:
        """Block until all threads have ended."""
        for _ in range(_NAPS):  # mostly the others are about to
            if self._ended.acquire(timeout=_NAP):
                return
        self._ended.acquire()

    def _end(self) -> None:
        if next(self._running) == 0:
            self._ended.release()

    def _next(self) -> tuple[int, int] | None:
        """Return start and length of a piece that nobody has taken, unless a thread has failed."""
        return None if self.error is not None else next(self._left, None)


class _Put(_Copy):
    """To the device: each thread fills places of its own."""

    def work(self, slots: list[int]) -> None:
        """Copy pieces to the device until none is left."""
        channel, destination, source = self.channel, self._destination, self._source
        places: list[Place] = []
        try:
            piece = self._next()
            if piece is not None:
                # Before anything else: with this the GIL goes to the next thread, which begins too.
                move(slots[0], source + piece[0], piece[1])
            with channel.section:
                for address in slots:
                    places.append(channel.create_place(address, is_near=False))  # noqa: PERF401 - those that were made are given back if one fails
                turns = itertools.cycle(places)
                place = next(turns)
                while piece is not None:
                    start, nbytes = piece
                    place.push(destination + start, nbytes)
                    piece = self._next()
                    if piece is not None:
                        place = next(turns)
                        place.wait()
                        move(place.address, source + piece[0], piece[1])
        except Exception as error:
            self.error = error
        finally:
            try:
                for place in places:
                    place.close()
            finally:
                self._end()


class _Get(_Copy):
    """From the device: the first transfers are enqueued by one thread, then each takes the oldest that is on its way, and gives its place to the next piece.

    So the bus does not wait until all threads are awake, and at the end no piece waits for a thread that has another one in hand.
    """

    def __init__(self, channel: Channel, destination: int, source: int, pieces: Sequence[tuple[int, int]]) -> None:
        super().__init__(channel, destination, source, pieces)
        self._coming: deque[tuple[Place, int, int]] = deque()
        self._places: list[Place] = []

    def begin(self, count: int, slots: list[int]) -> None:
        """Enqueue the first transfers."""
        super().begin(count, slots)
        try:
            with self.channel.section:
                for slot in slots[: count * _SLOTS]:
                    piece = self._next()
                    if piece is None:
                        break
                    self._places.append(self.channel.create_place(slot, is_near=True))
                    self._pull(self._places[-1], piece)
        except Exception as error:
            self.error = error

    def work(self, slots: list[int]) -> None:
        """Copy pieces from the device until none is left that nobody else has in hand."""
        try:
            with self.channel.section:
                while self.error is None and self._coming:
                    try:
                        place, start, nbytes = self._coming.popleft()
                    except IndexError:  # the last one was taken since
                        break
                    place.wait()
                    move(self._destination + start, place.address, nbytes)
                    piece = self._next()
                    if piece is not None:
                        self._pull(place, piece)
        except Exception as error:
            self.error = error
        finally:
            self._end()

    def wait(self) -> None:
        """Block until all threads have ended, and give the places back: they were everybody's."""
        super().wait()
        for place in self._places:
            place.close()

    def _pull(self, place: Place, piece: tuple[int, int]) -> None:
        start, nbytes = piece
        place.pull(self._source + start, nbytes)
        self._coming.append((place, start, nbytes))


def _no_thread(error: RuntimeError) -> OutOfMemoryError:
    made = OutOfMemoryError(
        f"no thread for a large copy could be started: {error}",
        library="os",
        remedy="Try again; if it goes on, raise the limit on threads (ulimit -u, or pids.max of the cgroup).",
    )
    made.__cause__ = error
    return made


def _count(nbytes: int) -> int:
    """Return how many threads a copy has."""
    return min(_THREADS, 2 + nbytes // _EACH)


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
    # What is no whole page is taken from the last one.
    return tuple((start, min(length, nbytes - start)) for start, length in zip(starts, lengths, strict=False))


def _pages(nbytes: float) -> int:
    return math.ceil(nbytes / _PAGE) * _PAGE
