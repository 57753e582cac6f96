"""The pieces that a sleep to a predicted end is cut into, on a clock that goes, and with a timer that rings, as the test says."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from accel.completion import Pacing, reactor
from accel.completion.reactor import Reactor, ReactorLane
from tests.completion_support import Event, Mark

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from accel.completion.strategy import Ended

PACING = Pacing()


class Timer:
    """When it rings, and what it was armed with, or armed itself with."""

    def __init__(self) -> None:
        self.delays: list[float] = []
        self.is_armed = False
        self.every = 0.0

    def arm(self, delay: float, every: float = 0.0) -> None:
        self.delays.append(delay)
        self.is_armed, self.every = True, every

    def disarm(self) -> None:
        self.is_armed, self.every = False, 0.0

    def goes_on(self) -> None:
        """Ring again after :attr:`every`, unless that is 0."""
        self.is_armed = self.every > 0.0
        if self.is_armed:
            self.delays.append(self.every)

    def close(self) -> None:
        self.is_armed = False


class World:
    """A reactor, its clock and its timer."""

    def __init__(self, pacing: Pacing = PACING) -> None:
        self.now = 1000.0
        self.timer = Timer()
        self.reactor = Reactor(asyncio.get_running_loop(), pacing)
        self.reactor._timer.close()
        self.reactor._timer = self.timer
        self.ends: list[Ended] = []
        self.lane = ReactorLane(self.ends.extend, lambda: True)

    def knows(self, duration: float, kind: str = "kind") -> None:
        for _ in range(3):
            self.reactor._predictor.observe(kind, duration)

    def mark(self, event: Event, kind: str = "kind") -> Mark:
        mark = Mark(event, kind=kind)
        mark.enqueued_at = self.now
        return mark

    def add(self, event: Event, kind: str = "kind") -> None:
        self.reactor.add(self.lane, self.mark(event, kind))

    def rings(self, late: float = 0.0) -> None:
        """Let the time of the armed delay pass, and ring."""
        assert self.timer.is_armed
        self.now += self.timer.delays[-1] + late
        self.timer.goes_on()
        self.reactor._on_timer()

    @property
    def is_last(self) -> bool:
        """Whether the timer rings when it is time to look, and not for a glance."""
        alarm = self.reactor._alarm
        return alarm is not None and alarm - self.now < 1.5 * self.timer.delays[-1]

    @property
    def spins(self) -> bool:
        return self.reactor._next_turn is not None


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    made = World()
    monkeypatch.setattr(reactor, "time", SimpleNamespace(perf_counter=lambda: made.now))
    yield made
    made.reactor.close()
    assert not made.timer.is_armed


@pytest.mark.parametrize("duration", [1e-3, 2.7e-3, 5e-3, 9e-3])
async def test_no_sleep_lets_the_processor_get_cold_under_an_op_that_would_feel_it(world: World, duration: float) -> None:
    event, began = Event(), world.now
    world.knows(duration)
    world.add(event)
    glanced, rings = began, 0
    while not world.spins:
        queries = event.queries
        world.rings()
        rings += 1
        if event.queries > queries:
            glanced = world.now
        assert world.now - glanced <= (world.now - began) / 5, "a fifth of the time goes by without a glance at most"
    assert event.queries <= 5 + rings / 3, "not at each piece"
    assert max(world.timer.delays) <= 1.5 * PACING.fine
    assert not world.timer.is_armed, "it spins now"
    assert duration - 2 * PACING.window <= world.now - began <= duration


async def test_what_ends_early_is_found_at_the_next_glance_and_learned(world: World) -> None:
    event = Event()
    world.knows(8e-3)
    world.add(event)
    for _ in range(2):
        world.rings()
    assert not world.ends
    event.end()
    world.rings()
    assert [error for _, error in world.ends] == [None]
    known = world.reactor._predictor.expect("kind")
    assert known is not None
    assert not world.timer.is_armed
    # Between the glance before and this one.
    assert 0.95 * 2 * PACING.fine <= known.last <= 3 * PACING.fine


async def test_of_the_last_piece_no_more_than_the_window_is_unseen(world: World) -> None:
    """It ended somewhere between the last glance and the look."""
    event = Event()
    world.knows(0.95e-3)
    world.add(event)
    while not world.is_last:
        world.rings()
    event.end()
    began, (*_, last) = world.now, world.timer.delays
    assert PACING.window < last / 2, "else that bounds it"
    world.rings()
    known = world.reactor._predictor.expect("kind")
    assert known is not None
    assert known.last == pytest.approx(began - 1000.0 + last - PACING.window, abs=1e-9)


async def test_of_a_glance_that_comes_late_the_delay_is_not_taken_for_a_part_of_the_op(world: World) -> None:
    event = Event()
    world.knows(8e-3)
    world.add(event)
    event.end()
    world.rings(late=6e-3)
    known = world.reactor._predictor.expect("kind")
    assert known is not None
    assert known.last <= PACING.fine


async def test_rings_that_were_lost_do_not_make_an_op_shorter(world: World) -> None:
    """The loop was busy for some pieces; what is found by a glance later is learned by when it was found."""
    event = Event()
    world.knows(9.5e-3)
    world.add(event)
    world.rings()
    world.rings(late=2e-3)
    while world.now - 1000.0 < 8e-3:
        assert not world.is_last
        world.rings()
    event.end()
    while not world.ends:
        world.rings()
    known = world.reactor._predictor.expect("kind")
    assert known is not None
    assert 7e-3 <= known.last <= 9e-3


async def test_what_has_become_faster_is_slept_for_as_long_as_it_takes_soon(world: World) -> None:
    """Of what lies between two glances half is taken for a part of the op, so that it is not found as late for ever."""
    world.knows(9e-3)
    late: list[float] = []
    for _ in range(14):
        event, began = Event(), world.now
        world.add(event)
        while not world.ends:
            if world.spins:
                world.now += 5e-6
                world.reactor._next_turn.cancel()  # type: ignore[union-attr]  # it spins
                world.reactor._turn()
            else:
                world.rings()
            if world.now - began >= 5.5e-3 and event.outcome is False:
                event.end()
        world.ends.clear()
        late.append(world.now - began - 5.5e-3)
    assert max(late) <= 5.5e-3 / 4 + PACING.fine
    assert late[-1] < 50e-6, "it is known now"


@pytest.mark.parametrize("fine", [0.0, 1e-9])
async def test_pieces_have_a_least_length(fine: float) -> None:
    world = World(Pacing(fine=fine))
    world.knows(1e-3)
    world.add(Event())
    assert world.timer.delays[0] >= PACING.shortest / 2
    world.reactor.close()


async def test_an_op_that_does_not_feel_it_is_slept_for_in_one_piece(world: World) -> None:
    world.knows(1.0)
    world.add(Event())
    assert world.timer.delays == [pytest.approx(PACING.trust - PACING.fine)]


async def test_an_op_that_is_long_overdue_is_not_glanced_at(world: World) -> None:
    world.knows(2e-3)
    world.add(Event())
    while not world.spins:
        world.rings()
    world.now += 2 * PACING.trust  # the loop was busy
    world.reactor._turn()
    assert world.timer.delays[-1] == PACING.longest


async def test_the_next_op_is_slept_for_by_its_own_kind(world: World) -> None:
    short, long = Event(), Event()
    world.knows(5e-3)
    world.knows(1.0, "long")
    world.add(short)
    world.rings()
    short.end()
    world.rings()
    assert len(world.ends) == 1
    world.add(long, "long")
    assert world.timer.delays[-1] == pytest.approx(PACING.trust - PACING.fine)


async def test_the_next_op_after_a_nap_is_slept_for_by_its_own_kind(world: World) -> None:
    world.knows(1e-3)
    world.knows(1.0, "long")
    nap = world.reactor.nap(world.lane, world.mark(Event()))
    assert nap is not None
    while not nap.done():
        world.rings()
    world.add(Event(), "long")
    assert world.timer.delays[-1] == pytest.approx(PACING.trust - PACING.fine)


async def test_what_was_napped_for_was_looked_at_before(world: World) -> None:
    """Its waiter's first look tells how long it took."""
    event = Event()
    world.knows(1e-3)
    mark = world.mark(event)
    nap = world.reactor.nap(world.lane, mark)
    assert nap is not None
    while not nap.done():
        world.rings()
    world.now = mark.enqueued_at + 1.2e-3
    event.end()
    assert world.reactor.meets(mark)
    known = world.reactor._predictor.expect("kind")
    assert known is not None
    assert known.last == pytest.approx(1.2e-3)


class SecondLook(Event):
    """An event that has ended when it is asked for the second time."""

    def query(self) -> bool:
        super().query()
        return self.queries > 1


@pytest.mark.parametrize("event", [Event, SecondLook])
async def test_one_that_is_met_leaves_another_its_looking(world: World, event: type[Event]) -> None:
    world.knows(1e-4)
    first, second = world.mark(Event()), world.mark(event(), "other")
    assert world.reactor.is_near(first)
    world.now += 1e-6
    second.enqueued_at = world.now
    if event is Event:
        second.event.end()
    assert world.reactor.meets(second)
    third = world.mark(Event())
    third.enqueued_at = world.now + 1e-6
    assert not world.reactor.is_near(third), "the first looks already"


async def test_the_processor_is_kept_awake_although_a_lane_is_taken(world: World) -> None:
    world.knows(5e-3)
    with world.reactor.expecting():
        world.add(Event())
        world.reactor.take(world.lane)
        assert world.timer.is_armed
        assert world.timer.delays[-1] == PACING.alert
    world.rings()
    assert not world.timer.is_armed
