"""Which children of a device an agent ends, and when it starts another one beside them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import pytest

import accel
from accel.node.agent import Session
from accel.node.handshake import RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.node.agent import Agent
    from accel.node.relay import Relay


class FakeRelay:
    """A relay without a child."""

    def __init__(self, session: Session, number: int) -> None:
        self.is_stuck = False  # a kill does not end the child
        self.is_killed = False
        self.on_end: Callable[[], object] = lambda: session.on_relay_end(number)

    def kill(self) -> None:
        self.is_killed = True

    async def wait(self) -> None:
        assert self.is_killed
        if self.is_stuck:
            raise accel.HostDiedError("it has not ended")

    def end(self) -> None:
        self.on_end()


class FakeAgent:
    """What a session uses of an agent."""

    keep = 0.0

    def __init__(self) -> None:
        self.disposal: Any = None
        self.loop = asyncio.get_running_loop()


def begun(*numbers: int) -> tuple[Session, list[FakeRelay]]:
    """Return a session with children."""
    session = Session(cast("Agent", FakeAgent()), lambda: None)
    relays = [FakeRelay(session, number) for number in numbers]
    for number, relay in zip(numbers, relays, strict=True):
        session.add(number, cast("Relay", relay))
    return session, relays


async def test_a_request_that_comes_late_ends_no_child_that_was_asked_for_after_it() -> None:
    session, (first, second, third) = begun(1, 2, 3)
    await session.fence(2, frozenset([1]))
    assert not any(relay.is_killed for relay in (first, second, third))
    await session.fence(4, frozenset([3]))
    assert [relay.is_killed for relay in (first, second, third)] == [True, True, False]


async def test_a_child_that_was_given_up_before_its_request_came_is_refused() -> None:
    session, _ = begun(4)
    await session.fence(5, frozenset([3, 4]))
    await session.fence(2, frozenset([1]))  # late
    session.add(3, cast("Relay", FakeRelay(session, 3)))
    with pytest.raises(RefusedError, match="given up"):
        session.add(1, cast("Relay", FakeRelay(session, 1)))


async def test_a_child_that_does_not_end_holds_up_every_request() -> None:
    session, (stuck, _) = begun(1, 2)
    stuck.is_stuck = True
    for number in (2, 3, 4):
        with pytest.raises(accel.HostDiedError, match="has not ended"):
            await session.fence(number, frozenset([2]))
    stuck.is_stuck = False
    await session.fence(5, frozenset([2]))
    await session.fence(6, frozenset([2]))


async def test_slabs_are_dropped_only_by_the_one_child_that_is_there() -> None:
    session, _ = begun(1, 2)
    closed: list[int] = []
    session.slabs.fds.update({7: 70, 8: 80})
    slabs: Any = session.slabs
    slabs.close = closed.extend
    session.drop_slabs(1, frozenset(), frozenset([7]))  # child 2 may have made slab 8
    session.drop_slabs(2, frozenset([1]), frozenset([7]))
    assert not closed
    session.on_relay_end(1)
    session.drop_slabs(2, frozenset(), frozenset([7]))
    assert closed == [8]


async def test_a_number_is_given_once() -> None:
    session, _ = begun(1)
    with pytest.raises(RefusedError, match="there already"):
        session.add(1, cast("Relay", FakeRelay(session, 1)))
