"""The clock of a stream and its events, without a device: what is waited for, and what is closed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from accel.engine.stream_clock import EventPool, StreamClock
from tests.device_support import bounded, turns


class Event:
    """Notes that it was closed."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


class Stream:
    """Notes what it waits for; the marks that it records are passed at once, or not yet."""

    def __init__(self, *, is_passed: bool) -> None:
        self.is_passed = is_passed
        self.waits: list[Any] = []

    def record(self, event: Any) -> bool:
        return self.is_passed

    def wait(self, event: Any) -> None:
        self.waits.append(event)


def pool() -> EventPool:
    device: Any = SimpleNamespace(create_event=Event)
    return EventPool(device)


def clock(*, is_passed: bool = False) -> Any:
    return StreamClock("clock", Stream(is_passed=is_passed), pool())  # type: ignore[arg-type]


def test_a_pool_closes_every_event_it_made() -> None:
    events = pool()
    kept, given = events.acquire(), events.acquire()
    events.release(given)
    assert events.acquire() is given
    events.close()
    assert (kept.is_closed, given.is_closed) == (True, True)  # type: ignore[attr-defined]


def test_the_first_op_of_another_lane_is_waited_for_once() -> None:
    mine, other = clock(), clock()
    other.advance(1)
    mine.wait_for(other, 1)
    mine.wait_for(other, 1)
    assert len(mine.stream.waits) == 1
    assert (mine.waited[other], other.completed) == (1, 0)


def test_what_has_ended_is_not_waited_for() -> None:
    mine, other = clock(), clock(is_passed=True)
    other.advance(5)
    mine.wait_for(other, 4)  # its mark is passed when it is recorded: so is all the lane had
    assert (other.completed, mine.stream.waits) == (5, [])
    other.stream.is_passed = False
    mine.wait_for(other, 3)
    assert mine.stream.waits == []


async def test_a_number_is_waited_for_until_it_is_in_the_stream() -> None:
    mine = clock()
    waiting = [asyncio.ensure_future(mine.wait_enqueued(seq)) for seq in (1, 2)]
    await turns()
    mine.advance(1)
    await turns()
    assert [each.done() for each in waiting] == [True, False]
    mine.advance(2)
    await bounded(waiting[1])
