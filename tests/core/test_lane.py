"""A lane and its events, without a device: what is waited for, and what is closed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from accel.engine.lane import EventPool, Lane
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


def lane(*, is_passed: bool = False, wanted: int = 0) -> Any:
    events, compute = (
        pool(),
        SimpleNamespace(workspace_wanted=lambda library: wanted, use_workspace=lambda *_: None, release_workspaces=list),
    )
    return Lane("lane", SimpleNamespace(), Stream(is_passed=is_passed), compute, events)  # type: ignore[arg-type]


def test_a_pool_closes_every_event_it_made() -> None:
    events = pool()
    kept, given = events.take(), events.take()
    events.give(given)
    assert events.take() is given
    events.close()
    assert (kept.is_closed, given.is_closed) == (True, True)  # type: ignore[attr-defined]


def test_the_first_op_of_another_lane_is_waited_for_once() -> None:
    mine, other = lane(), lane()
    other.advance(1)
    mine.wait_for(other, 1)
    mine.wait_for(other, 1)
    assert len(mine.stream.waits) == 1
    assert (mine.waited[other], other.completed) == (1, 0)


def test_what_has_ended_is_not_waited_for() -> None:
    mine, other = lane(), lane(is_passed=True)
    other.advance(5)
    mine.wait_for(other, 4)  # its mark is passed when it is recorded: so is all the lane had
    assert (other.completed, mine.stream.waits) == (5, [])
    other.stream.is_passed = False
    mine.wait_for(other, 3)
    assert mine.stream.waits == []


async def test_a_number_is_waited_for_until_it_is_in_the_stream() -> None:
    mine = lane()
    waiting = [asyncio.ensure_future(mine.reached(seq)) for seq in (1, 2)]
    await turns()
    mine.advance(1)
    await turns()
    assert [each.done() for each in waiting] == [True, False]
    mine.advance(2)
    await bounded(waiting[1])


@pytest.mark.parametrize("wanted", [0, 1, 1 << 20])
def test_a_workspace_is_needed_where_any_is_wanted(wanted: int) -> None:
    assert lane(wanted=wanted).needs_workspace("blas") is (wanted > 0)
