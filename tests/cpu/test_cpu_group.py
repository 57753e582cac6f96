"""Groups of CPU ranks, in threads of this process: how they find each other, and how waiting ends."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from accel import DeadlineExceededError, WorldChangedError
from accel.cpu.group import CpuGroup, Rendezvous

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def join(
    pool: ThreadPoolExecutor, place: Rendezvous, name: bytes, rank: int, size: int, revoked: threading.Event, seconds: float = 20.0
) -> Future[CpuGroup]:
    return pool.submit(place.join, name, rank, size, time.monotonic() + seconds, revoked)


def test_ranks_that_are_there_long_before_rank_0_have_one_place_each(pool: ThreadPoolExecutor) -> None:
    first, revoked = Rendezvous(), threading.Event()
    name = first.unique_id()
    others = [join(pool, Rendezvous(), name, rank, 4, revoked) for rank in (1, 2, 3)]
    time.sleep(0.3)  # many times as long as a rank waits for an answer at once
    groups = [join(pool, first, name, 0, 4, revoked).result(20.0), *(other.result(20.0) for other in others)]
    assert [group.rank for group in groups] == [0, 1, 2, 3]
    meeting = [pool.submit(group.meet) for group in groups]
    assert [met.result(20.0) for met in meeting] == [None] * 4


def test_a_join_ends_when_it_is_revoked_and_when_its_time_is_over(pool: ThreadPoolExecutor) -> None:
    first = Rendezvous()
    for rank in (0, 1):
        name, revoked = first.unique_id(), threading.Event()
        joining = join(pool, first if rank == 0 else Rendezvous(), name, rank, 2, revoked)
        revoked.set()
        with pytest.raises(WorldChangedError):
            joining.result(5.0)
        with pytest.raises(DeadlineExceededError):
            join(pool, first if rank == 0 else Rendezvous(), first.unique_id(), rank, 2, threading.Event(), 0.1).result(5.0)
    first.close()


def test_one_rank_that_revokes_ends_the_waiting_of_all(pool: ThreadPoolExecutor) -> None:
    first, flags = Rendezvous(), [threading.Event() for _ in range(3)]
    name = first.unique_id()
    joining = [join(pool, first if rank == 0 else Rendezvous(), name, rank, 3, flags[rank]) for rank in range(3)]
    groups = [joined.result(20.0) for joined in joining]
    waiting = [pool.submit(group.meet) for group in groups[:2]]  # the third never comes
    groups[2].revoke()
    for meeting in waiting:
        with pytest.raises(WorldChangedError):
            meeting.result(5.0)
    for group in groups:
        group.abort()


def test_only_the_process_that_made_the_id_is_rank_0(pool: ThreadPoolExecutor) -> None:
    first = Rendezvous()
    name = first.unique_id()
    with pytest.raises(WorldChangedError, match="not in the process of rank 0"):
        Rendezvous().join(name, 0, 2, time.monotonic() + 1.0, threading.Event())
    first.close()
