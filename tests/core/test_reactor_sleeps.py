"""The pieces that a sleep to a predicted end is cut into, with a timer that rings when the test says so."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from accel.completion import Pacing
from accel.completion.reactor import Reactor, ReactorLane
from tests.completion_support import Event, Mark

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.completion.strategy import Ended

PACING = Pacing()


class Timer:
    def __init__(self) -> None:
        self.delays: list[float] = []

    def arm(self, delay: float) -> None:
        self.delays.append(delay)

    def disarm(self) -> None: ...

    def close(self) -> None: ...


def sleeping(duration: float, event: Event, settle: Callable[[list[Ended]], None]) -> tuple[Reactor, Timer]:
    """Return a reactor that sleeps to the end of an op that took ``duration`` before, and its timer."""
    timer = Timer()
    reactor = Reactor(asyncio.get_running_loop(), PACING)
    reactor._timer.close()
    reactor._timer = timer
    for _ in range(3):
        reactor._predictor.observe("kind", duration)
    reactor.add(ReactorLane(settle, lambda: pytest.fail("no waiter naps here")), Mark(event, kind="kind"))
    return reactor, timer


@pytest.mark.parametrize("duration", [1e-3, 2.7e-3, 5e-3, 9e-3])
async def test_no_sleep_lets_the_processor_get_cold_under_an_op_that_would_feel_it(duration: float) -> None:
    event, began = Event(), time.perf_counter()
    reactor, timer = sleeping(duration, event, lambda _: None)
    pieces = 0
    while reactor._next_turn is None:  # then it looks in every turn
        assert len(timer.delays) == pieces + 1, "each piece is followed by another, or by the looking"
        pieces = len(timer.delays)
        until = time.perf_counter() + timer.delays[-1]
        while time.perf_counter() < until:
            pass
        reactor._on_timer()
    assert max(timer.delays) <= PACING.fine
    assert time.perf_counter() >= began + duration - 2 * PACING.window
    assert event.queries >= pieces, "it glanced at the mark each time"
    reactor.close()


async def test_what_ends_early_is_found_at_the_next_glance() -> None:
    event = Event()
    ends: list[Ended] = []
    reactor, timer = sleeping(8e-3, event, ends.extend)
    for _ in range(2):
        reactor._on_timer()
    assert not ends
    assert len(timer.delays) == 3
    event.end()
    reactor._on_timer()
    assert [error for _, error in ends] == [None]
    known = reactor._predictor.expect("kind")
    assert known is not None
    assert known.last < 8e-3, "it has learned from it"
    reactor.close()


async def test_an_op_that_does_not_feel_it_is_slept_for_in_one_piece() -> None:
    reactor, timer = sleeping(1.0, Event(), lambda _: None)
    assert timer.delays == [PACING.trust - PACING.fine]
    reactor.close()
