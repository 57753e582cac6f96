"""The small copies of a CUDA stream, without a GPU: pieces are reserved, staged, landed in order and given back."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import numpy as np
import pytest

from accel.memory import HostArena
from accel_cuda.core.transfers import STAGED, StreamTransfers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accel.memory import Block

LIMIT = 2 << 20


class Kept:
    """Something that a transfer keeps alive."""


@pytest.fixture
def arena() -> Iterator[HostArena]:
    made = HostArena(LIMIT, block_bytes=LIMIT)
    yield made
    made.close()


@pytest.fixture
def transfers(arena: HostArena) -> Iterator[StreamTransfers]:
    made = StreamTransfers(arena)
    made.prepare()
    yield made
    made.close()
    assert arena.statistics().used == 0


def staged(transfers: StreamTransfers, nbytes: int) -> Block:
    piece = transfers.stage(nbytes)
    assert piece is not None
    assert piece.nbytes >= nbytes
    return piece


def test_streams_share_the_arena(arena: HostArena, transfers: StreamTransfers) -> None:
    other = StreamTransfers(arena)
    other.prepare()
    assert arena.statistics().reserved == LIMIT
    first, second = staged(transfers, 10), staged(other, 10)
    assert first.slab is second.slab
    assert first.address != second.address
    for each, piece in ((transfers, first), (other, second)):
        each.begin(None, piece)
    other.close()


@pytest.mark.parametrize("nbytes", [1, 4096, 4097, 65537, STAGED])
def test_what_comes_from_the_device_lands_when_its_ticket_has_passed(transfers: StreamTransfers, nbytes: int) -> None:
    seed = int(np.random.default_rng().integers(1 << 31))
    data = np.random.default_rng(seed).integers(1, 256, nbytes, np.uint8)
    piece, target, kept = staged(transfers, nbytes), np.zeros(nbytes, np.uint8), Kept()
    seen = weakref.ref(kept)
    np.frombuffer(piece.slab.view(), np.uint8)[piece.offset : piece.offset + nbytes] = data  # type: ignore[attr-defined]
    transfers.begin(kept, piece, target.ctypes.data, nbytes)
    del kept
    transfers.finish(0)
    assert not target.any()
    assert seen() is not None
    transfers.finish(transfers.issued)
    assert np.array_equal(target, data), seed
    assert seen() is None
    assert transfers.finished == transfers.issued == 1


def test_a_piece_is_used_again_only_when_its_transfer_has_ended(transfers: StreamTransfers) -> None:
    pieces = [staged(transfers, STAGED) for _ in range(LIMIT // STAGED)]
    assert len({piece.address for piece in pieces}) == len(pieces)
    for piece in pieces:
        transfers.begin(None, piece)
    assert transfers.stage(STAGED) is None
    assert transfers.grow(STAGED) is None
    transfers.finish(1)
    again = staged(transfers, STAGED)
    assert again is pieces[0]
    assert transfers.stage(STAGED) is None
    transfers.begin(None, again)


def test_what_was_reserved_is_there_though_others_have_taken_the_rest(arena: HostArena, transfers: StreamTransfers) -> None:
    assert transfers.reserve(STAGED)
    assert transfers.reserve(STAGED)
    rest = []
    while (piece := arena.take(STAGED)) is not None:
        rest.append(piece)
    assert not transfers.reserve(STAGED)
    for _ in range(2):
        transfers.begin(None, staged(transfers, STAGED))
    assert transfers.stage(STAGED) is None
    for piece in rest:
        arena.free(piece)


def test_what_was_reserved_for_a_copy_that_was_dropped_is_given_back(arena: HostArena, transfers: StreamTransfers) -> None:
    for _ in range(LIMIT // STAGED):
        assert transfers.reserve(STAGED)
    assert not transfers.reserve(1)
    transfers.release_reserved()
    assert transfers.reserve(STAGED)
    assert transfers.reserve(100)
    transfers.reserved.rotate()
    larger = staged(transfers, STAGED)  # the small one before it was for a copy that never came
    assert not transfers.reserved
    transfers.begin(None, larger)


def test_a_closed_stream_says_that_it_may_not_block_and_keeps_nothing(arena: HostArena, transfers: StreamTransfers) -> None:
    transfers.begin(None, staged(transfers, 5))
    transfers.close()
    assert arena.statistics().used == 0
    assert transfers.reserve(STAGED)
    assert not transfers.reserved
