"""Large copies of pageable memory, without a GPU: the transfers of the channel are copies of host memory, made by a thread as late as a stream makes them."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from accel.errors import ContextPoisonedError, OutOfMemoryError
from accel.memory import HostArena
from accel_cuda.core.copies import Copiers, pieces_of
from accel_cuda.core.transfers import move

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accel.memory import Block

MIB = 1 << 20
PATIENCE = 10.0


class Slot:
    """A piece of memory, and an event that the stream's thread sets."""

    def __init__(self, stream: Stream, address: int) -> None:
        self.stream = stream
        self.address = address
        self.event = threading.Event()
        self.event.set()

    def transfer(self, device: int, nbytes: int, *, is_put: bool) -> None:
        ends = (device, self.address) if is_put else (self.address, device)
        self.stream.transfer(self, *ends, nbytes)

    def wait(self) -> None:
        assert self.event.wait(PATIENCE)

    def close(self) -> None: ...


class Stream:
    """A channel with a thread for its stream, which stands still while ``gate`` is closed; it fails at the given number of transfers."""

    def __init__(self, arena: HostArena, fails_at: int = -1) -> None:
        self.arena = arena
        self.fails_at = fails_at
        self.gate = threading.Event()
        self.gate.set()
        self.count = 0
        self.section = contextlib.nullcontext()
        self._work: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            self.gate.wait(PATIENCE)
            function, *arguments = item
            function(*arguments)

    def transfer(self, slot: Slot, destination: int, source: int, nbytes: int) -> None:
        self.count += 1
        if self.count > self.fails_at >= 0:
            raise ContextPoisonedError("the plan")
        self._work.put((move, destination, source, nbytes))
        self._mark(slot)

    def _mark(self, slot: Slot) -> None:
        slot.event.clear()
        self._work.put((slot.event.set,))

    def create_slot(self, address: int) -> Slot:
        return Slot(self, address)

    def reached(self) -> None:
        slot = Slot(self, 0)
        self._mark(slot)
        slot.wait()

    def begin(self, keep: object, piece: Block) -> None:
        self._work.put((lambda keep: self.arena.free(piece), keep))

    def close(self) -> None:
        self._work.put(None)
        self._thread.join(PATIENCE)


@pytest.fixture
def arena() -> Iterator[HostArena]:
    made = HostArena(256 * MIB)
    yield made
    made.close()


@pytest.fixture
def copiers(arena: HostArena) -> Iterator[Copiers]:
    made = Copiers(arena, "test-copy")
    yield made
    made.close()


def fresh(nbytes: int) -> tuple[np.ndarray[Any, Any], int]:
    seed = int(np.random.default_rng().integers(1 << 31))
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8), seed


def copied(copiers: Copiers, stream: Stream, target: np.ndarray[Any, Any], source: np.ndarray[Any, Any], *, is_put: bool) -> bool:
    """Copy ``source`` to ``target``: for a put the target stands for device memory, for a get the source."""
    device, host = (target, source) if is_put else (source, target)
    return copiers.copy(stream, device.ctypes.data, host.ctypes.data, source.nbytes, is_put=is_put)


@pytest.mark.parametrize("nbytes", [1, 4097, MIB, 5 * MIB + 1, 64 * MIB, 70 * MIB + 7, 1024 * MIB])
def test_pieces_cover_the_whole_once_and_are_few(nbytes: int) -> None:
    pieces = pieces_of(nbytes)
    assert pieces[0][0] == 0
    for (start, length), (after, _) in itertools.pairwise(pieces):
        assert start + length == after
        assert length % 4096 == 0
    assert sum(pieces[-1]) == nbytes
    assert all(0 < length <= 4 * MIB for _, length in pieces)
    assert len(pieces) <= max(32, nbytes // (3 * MIB))


@pytest.mark.parametrize("nbytes", [300_001, MIB, 9 * MIB + 13, 100 * MIB + 1])
@pytest.mark.parametrize("is_put", [True, False], ids=["put", "get"])
def test_a_copy_is_whole_and_gives_its_memory_back(arena: HostArena, copiers: Copiers, is_put: bool, nbytes: int) -> None:
    stream = Stream(arena)
    source, seed = fresh(nbytes)
    target = np.full_like(source, 0xA5)
    assert copied(copiers, stream, target, source, is_put=is_put)
    stream.close()
    assert np.array_equal(source, target), seed
    assert arena.statistics().used == 0


@pytest.mark.parametrize("is_put", [True, False], ids=["put", "get"])
@pytest.mark.parametrize("fails_at", [0, 1, 7])
def test_a_failing_stream_ends_the_copy_with_its_error(arena: HostArena, copiers: Copiers, is_put: bool, fails_at: int) -> None:
    stream = Stream(arena, fails_at)
    source, _ = fresh(32 * MIB)
    target = np.zeros_like(source)
    with pytest.raises(ContextPoisonedError):
        copied(copiers, stream, target, source, is_put=is_put)
    stream.close()
    assert arena.statistics().used == 0


@pytest.mark.parametrize("is_put", [True, False], ids=["put", "get"])
@pytest.mark.parametrize("started", [0, 2])
def test_a_copy_for_which_no_thread_starts_fails_and_uses_nothing_afterwards(
    arena: HostArena, copiers: Copiers, is_put: bool, started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream(arena)
    source, seed = fresh(100 * MIB)
    target, late = np.zeros_like(source), np.zeros_like(source)
    left = itertools.count(started, -1)

    def refuse(thread: threading.Thread) -> None:
        if next(left) <= 0:
            raise RuntimeError("can't start new thread")
        start(thread)

    start = threading.Thread.start
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(OutOfMemoryError, match="no thread") as caught:
            copied(copiers, stream, target, source, is_put=is_put)
    assert caught.value.retryable
    assert caught.value.library == "os"
    transfers = stream.count
    assert transfers < len(pieces_of(source.nbytes)), "no piece is begun after the failure"
    # Nothing touches the caller's arrays after that.
    target[:] = 0xA5
    assert copied(copiers, stream, late, source, is_put=is_put)
    stream.close()
    assert stream.count > transfers
    assert np.array_equal(source, late), seed
    assert (target == 0xA5).all() or is_put  # what was put may be on the device's side of the stream yet
    assert arena.statistics().used == 0


def test_a_stream_that_is_held_up_holds_up_no_other(arena: HostArena, copiers: Copiers) -> None:
    held, other = Stream(arena), Stream(arena)
    held.gate.clear()
    source, seed = fresh(100 * MIB)
    targets = np.zeros_like(source), np.zeros_like(source)
    stuck = threading.Thread(target=copied, args=(copiers, held, targets[0], source), kwargs={"is_put": True})
    stuck.start()
    assert copied(copiers, other, targets[1], source, is_put=True)
    assert stuck.is_alive()
    held.gate.set()
    stuck.join(PATIENCE)
    held.close()
    other.close()
    assert np.array_equal(source, targets[0]), seed
    assert np.array_equal(source, targets[1]), seed
    assert arena.statistics().used == 0


def test_without_room_nothing_is_done(copiers: Copiers) -> None:
    full = HostArena(MIB)
    held = full.grow(MIB)
    stream = Stream(full)
    small = Copiers(full, "test-none")
    try:
        assert held is not None
        assert not small.copy(stream, 4096, 4096, MIB, is_put=True)
        assert stream.count == 0
    finally:
        small.close()
        stream.close()
        full.close()


def test_an_arena_that_is_closed_under_a_copy_unmaps_nothing_that_is_copied(copiers: Copiers) -> None:
    arena = HostArena(256 * MIB)
    own = Copiers(arena, "test-closed")
    stream = Stream(arena)
    stream.gate.clear()
    source, seed = fresh(100 * MIB)
    target = np.zeros_like(source)
    copy = threading.Thread(target=copied, args=(own, stream, target, source), kwargs={"is_put": True})
    copy.start()
    while not stream.count:
        assert copy.is_alive()
    arena.close()
    stream.gate.set()
    copy.join(PATIENCE)
    stream.close()
    own.close()
    assert np.array_equal(source, target), seed
