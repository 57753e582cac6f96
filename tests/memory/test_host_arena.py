"""The arena of page-locked host memory: pieces, blocks and their registration, the limit, and freeing from anywhere."""

from __future__ import annotations

import gc
import os
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from accel.errors import ClosedError, ContextPoisonedError, FaultScope, OutOfMemoryError
from accel.memory import Block, HostArena, HostBlock
from tests.memory_support import KIB, MIB, Registrar

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def registrar() -> Registrar:
    return Registrar()


@pytest.fixture
def arena(registrar: Registrar) -> Iterator[HostArena]:
    made = HostArena(4 * MIB, registrar=registrar, block_bytes=MIB, device="cpu:0")
    yield made
    made.close()


def grown(arena: HostArena, nbytes: int) -> Block:
    piece = arena.grow(nbytes)
    assert piece is not None
    return piece


def test_pieces_share_a_block_that_a_descriptor_holds_and_the_device_knows(arena: HostArena, registrar: Registrar) -> None:
    assert arena.take(100) is None
    pieces = [grown(arena, 100) for _ in range(10)]
    (block,) = {piece.slab for piece in pieces}
    assert isinstance(block, HostBlock)
    assert os.fstat(block.fd).st_size == block.nbytes == MIB
    assert all(registrar.covers(piece) and piece.address % 256 == 0 for piece in pieces)
    assert arena.statistics().reserved == MIB


def test_another_mapping_of_the_descriptor_shows_the_same_memory(arena: HostArena) -> None:
    piece = grown(arena, 4096)
    block = piece.slab
    assert isinstance(block, HostBlock)
    np.frombuffer(block.view(), np.uint8)[piece.offset : piece.offset + 3] = (1, 2, 3)
    assert os.pread(block.fd, 3, piece.offset) == b"\1\2\3"


def test_a_large_piece_has_a_block_of_its_own(arena: HostArena) -> None:
    assert grown(arena, 3 * MIB).slab.nbytes == 3 * MIB


def test_at_the_limit_there_is_nothing_until_something_is_freed(arena: HostArena) -> None:
    pieces = [grown(arena, MIB) for _ in range(4)]
    assert arena.grow(1) is None
    assert arena.request(1) is None
    arena.free(pieces.pop())
    assert arena.grow(MIB) is not None
    assert arena.statistics().reserved == 4 * MIB


def test_idle_blocks_make_room_for_a_larger_one(arena: HostArena, registrar: Registrar) -> None:
    for piece in [grown(arena, MIB) for _ in range(4)]:
        arena.free(piece)
    assert grown(arena, 4 * MIB).slab.nbytes == 4 * MIB
    assert arena.statistics().reserved == 4 * MIB == sum(registrar.known.values())


@pytest.mark.parametrize("nbytes", [4 * MIB + 1, 1 << 40])
def test_what_could_never_fit_is_out_of_memory(arena: HostArena, nbytes: int) -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        arena.grow(nbytes)
    assert (caught.value.requested, caught.value.limit) == (nbytes, 4 * MIB)


def test_what_rounding_makes_too_large_is_out_of_memory_and_not_waited_for() -> None:
    arena = HostArena(900 * KIB)
    with pytest.raises(OutOfMemoryError):
        arena.request(897 * KIB)
    arena.close()


def test_a_block_that_cannot_be_registered_is_not_kept(arena: HostArena, registrar: Registrar) -> None:
    registrar.error = OutOfMemoryError("no more pages to lock")
    with pytest.raises(OutOfMemoryError, match="no more pages"):
        arena.grow(1)
    assert arena.statistics().reserved == 0
    registrar.error = None
    assert arena.grow(1) is not None


def test_a_dying_context_leaves_a_block_unregistered_and_the_next_one_gets_it(arena: HostArena, registrar: Registrar) -> None:
    registrar.error = ContextPoisonedError("gone", scope=FaultScope.CONTEXT)
    piece = grown(arena, 1)
    assert not registrar.covers(piece)
    arena.detach(registrar)
    following = Registrar()
    arena.attach(following)
    assert following.covers(piece)


def test_a_late_end_of_a_context_takes_nothing_from_the_next(arena: HostArena, registrar: Registrar) -> None:
    old = grown(arena, MIB)
    following = Registrar()
    arena.attach(following)
    new = grown(arena, MIB)
    assert (registrar.covers(old), following.covers(old), following.covers(new)) == (True, False, True), (
        "the first may still use what it has"
    )
    arena.detach(registrar)
    assert registrar.known == {}
    assert following.covers(old), "it is the next one's now"
    assert following.covers(new)
    arena.detach(registrar)
    assert following.covers(old)
    assert following.covers(grown(arena, MIB)), "blocks to come too"
    arena.detach(following)
    assert following.known == {}


def test_a_block_that_the_next_context_does_not_take_is_slower_and_no_more(arena: HostArena, registrar: Registrar) -> None:
    old = grown(arena, MIB)
    following = Registrar()
    arena.attach(following)
    following.error = OutOfMemoryError("no more")
    arena.detach(registrar)
    assert not following.covers(old)


def test_what_is_being_given_back_is_not_registered(arena: HostArena, registrar: Registrar) -> None:
    """A block that is unmapped just now, on another thread, would be registered where something else is by then."""
    arena.detach(registrar)
    arena.free(grown(arena, MIB))
    at_close, go = threading.Event(), threading.Event()
    (block,) = arena.blocks()
    block.registration = Slow(at_close, go)
    assert arena.take(4 * MIB) is None
    request = arena.request(4 * MIB)
    assert request is not None
    growing = threading.Thread(target=arena.fulfil, args=(request,))
    growing.start()
    assert at_close.wait(10)
    following = Registrar()
    attaching = threading.Thread(target=arena.attach, args=(following,))
    attaching.start()
    go.set()
    for thread in (attaching, growing):
        thread.join(10)
    assert set(following.known) == {each.address for each in arena.blocks()}
    assert not block.is_open


class Slow:
    """A registration that takes long to end."""

    def __init__(self, begun: threading.Event, go: threading.Event) -> None:
        self._begun, self._go = begun, go

    def close(self) -> None:
        self._begun.set()
        assert self._go.wait(10)


def test_who_has_mapped_a_block_is_told_that_it_is_gone(arena: HostArena) -> None:
    gone: list[int] = []
    arena.on_block_closed = gone.append
    first, second = grown(arena, MIB), grown(arena, MIB)
    numbers = [block.number for block in arena.blocks()]
    kept = [block.duplicate() for block in arena.blocks()]
    arena.free(first)
    blocks = arena.blocks()
    grown(arena, 3 * MIB)
    assert gone == numbers[:1]
    assert blocks[0].duplicate() is None
    arena.close()
    assert sorted(gone) == [1, 2, 3]
    for fd in kept:
        assert fd is not None
        os.close(fd)
    del second


def test_closing_unregisters_and_unmaps_and_views_keep_what_they_show(arena: HostArena, registrar: Registrar) -> None:
    piece = grown(arena, 8)
    block = piece.slab
    assert isinstance(block, HostBlock)
    view = block.view()
    view[:8] = b"stays on"
    arena.close()
    arena.close()
    assert registrar.known == {}
    assert block.fd == -1
    assert bytes(view[:8]) == b"stays on"
    with pytest.raises(ClosedError):
        arena.take(1)
    arena.free(piece)
    assert arena.statistics() == type(arena.statistics())(0, 0, 4 * MIB)


def test_a_request_that_was_cancelled_counts_no_more(arena: HostArena, registrar: Registrar) -> None:
    assert arena.take(4 * MIB) is None
    request = arena.request(4 * MIB)
    assert request is not None
    assert arena.request(1) is None
    for block in arena.withdraw(request):
        block.close()
    with pytest.raises(ClosedError):
        arena.fulfil(request)
    assert registrar.known == {}
    assert arena.grow(4 * MIB) is not None


def test_room_is_told_of_after_a_free_and_after_a_request(arena: HostArena) -> None:
    told: list[int] = []
    arena.on_room = lambda: told.append(1)
    request = arena.request(MIB)
    assert request is not None
    arena.fulfil(request)
    assert len(told) == 1
    piece = arena.take(1)
    assert piece is not None
    arena.free(piece)
    assert len(told) == 2


def test_freeing_in_the_garbage_collector_of_any_thread_while_others_take(arena: HostArena) -> None:
    """Freeing takes no lock, so it cannot deadlock with the allocation that a collection interrupts."""
    errors: list[BaseException] = []

    class Owner:
        def __init__(self, piece: Block) -> None:
            self.piece = piece
            self.me = self  # only the collector ends it

        def __del__(self) -> None:
            arena.free(self.piece)

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        try:
            for _ in range(300):
                piece = arena.grow(int(random.integers(1, 30 * KIB)))
                if piece is not None:
                    Owner(piece)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    before = gc.get_threshold()
    gc.set_threshold(5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    finally:
        gc.set_threshold(*before)
    assert not any(thread.is_alive() for thread in threads)
    assert errors == []
    gc.collect()
    assert arena.statistics().used == 0
