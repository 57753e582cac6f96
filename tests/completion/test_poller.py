"""The poller and its pace, on a clock that goes on as the test says: what is added to an op, and what the loop's core pays for it."""

from __future__ import annotations

import asyncio
import gc
import random
import statistics
import time
from collections import deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import pytest

import accel
from accel import registry
from accel.completion import Pacing, poller
from accel.completion.adaptive import AdaptivePace
from accel.completion.poller import MarkPoller, PolledLane
from accel.completion.prediction import Estimate, Predictor
from accel.cpu.stream import CpuStream
from tests.completion_support import Event, Mark
from tests.late_backend import LateDevice, LateEvent, LateStream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from accel.completion.strategy import Ended


PACING = Pacing()


POLL, WAKE = 10e-6, 25e-6
"""Seconds of the core that one loop iteration takes with a poll in it, and one that a timer has to begin first."""


LATE = 60e-6
"""Seconds that a timer is late at most, besides a tenth of its time: a processor that sleeps longer takes longer to wake."""


class Spent(NamedTuple):
    """What waiting for ops has cost: seconds added to each, and the share of a core."""

    added: list[float]
    share: float

    @property
    def usual(self) -> float:
        return statistics.median(self.added)


class World:
    """A loop, its clock and its timer: what a poller sees of a process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pacing: Pacing = PACING) -> None:
        self.now, self.spent = 1000.0, 0.0
        self.seed = random.randrange(1 << 32)
        self.random = random.Random(self.seed)
        self.due: float | None = None
        self.soon: deque[Callable[[], None]] = deque()
        self.delays: list[float] = []
        monkeypatch.setattr(poller, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(poller, "create_timer", self._create_timer)
        self.poller = MarkPoller(cast("asyncio.AbstractEventLoop", self), AdaptivePace(pacing))

    # -- as a loop

    def call_soon(self, callback: Callable[[], None]) -> Any:
        self.soon.append(callback)
        return SimpleNamespace(cancel=lambda: self.soon.remove(callback))

    # -- as a timer

    def _create_timer(self, loop: Any, callback: Callable[[], None]) -> World:
        self._on_timer = callback
        return self

    def arm(self, delay: float) -> None:
        self.due = self.now + delay
        self.delays.append(delay)

    def disarm(self) -> None:
        self.due = None

    def close(self) -> None:
        self.disarm()

    # -- what the tests do

    @property
    def is_scheduled(self) -> bool:
        return self.due is not None or bool(self.soon)

    def step(self) -> None:
        """Let one loop iteration take its time, or sleep until the timer begins one."""
        assert len(self.soon) <= 1, "one poll in an iteration"
        if self.soon:
            for _ in range(len(self.soon)):
                self.soon.popleft()()
            self.now += POLL
            self.spent += POLL
            return
        assert self.due is not None, "nothing would ever poll again"
        self.now = max(self.now, self.due) + self.random.uniform(0, LATE + self.delays[-1] / 10)
        self.due = None
        self._on_timer()
        self.now += WAKE
        self.spent += WAKE

    def ops(self, durations: list[float], *, lanes: int = 1, in_flight: int = 1) -> Spent:
        """Run ops one after the other in each lane, with a fixed number in flight, and return what it took to learn of their ends."""
        added: list[float] = []
        began, self.spent = self.now, 0.0
        left, free = deque(durations), [self.now] * lanes
        polled = [PolledLane(lambda ended: added.extend(self._sent(ended, send))) for _ in range(lanes)]

        def send() -> None:
            if left:
                lane = free.index(min(free))
                free[lane] = max(free[lane], self.now) + left.popleft()
                self.poller.add(polled[lane], cast("Any", _Op(self, free[lane])))

        for _ in range(in_flight):
            send()
        while len(added) < len(durations):
            self.step()
        assert not self.is_scheduled, "nothing is in flight"
        return Spent(added, self.spent / (self.now - began))

    def _sent(self, ended: list[Ended], send: Callable[[], None]) -> Iterator[float]:
        for mark, error in ended:
            assert error is None
            yield self.now - cast("Any", mark).end
            send()


class _Op:
    """A mark of which the clock says when it is passed."""

    def __init__(self, world: World, end: float, kind: str = "kind") -> None:
        self.end = end
        self.kind = kind
        self.enqueued_at = world.now
        self.event = SimpleNamespace(query=lambda: world.now >= end)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


@pytest.mark.parametrize("lanes", [1, 8])
def test_ops_whose_durations_scatter_are_seen_soon_for_little(world: World, lanes: int) -> None:
    """Budget P4: 120 us are added at p50, by 40 % of a core."""
    durations = [world.random.uniform(0.2e-3, 5e-3) for _ in range(2000)]
    spent = world.ops(durations, lanes=lanes, in_flight=8)
    assert spent.usual <= 120e-6, world.seed
    assert spent.share <= 0.4, world.seed
    assert max(spent.added) <= 1.1 * PACING.longest + LATE, world.seed


@pytest.mark.parametrize("duration", [5e-6, 50e-6, 150e-6, 400e-6])
def test_short_ops_are_polled_in_each_loop_iteration(world: World, duration: float) -> None:
    world.ops([duration] * 30)
    world.delays.clear()
    spent = world.ops([duration] * 200)
    assert max(spent.added) <= 2 * POLL
    if duration < 2 * PACING.shortest + PACING.window:
        assert world.delays == []


def test_a_services_mix_of_short_ops_is_polled_in_each_loop_iteration(world: World) -> None:
    """Budget P14: what an event.query loop adds, and no more."""
    durations = [world.random.uniform(60e-6, 250e-6) for _ in range(2000)]
    world.ops(durations[:200], in_flight=8)
    assert world.ops(durations, in_flight=8).usual <= POLL, world.seed


@pytest.mark.parametrize("duration", [1e-3, 5e-3, 0.05])
def test_an_op_that_takes_as_long_as_ever_is_seen_at_once_for_little(world: World, duration: float) -> None:
    def durations(count: int) -> list[float]:
        return [duration + world.random.uniform(0, 20e-6) for _ in range(count)]

    world.ops(durations(60))
    spent = world.ops(durations(100))
    assert spent.usual <= 2 * POLL, world.seed
    assert spent.share <= 0.3e-3 / duration + 0.04, world.seed


@pytest.mark.parametrize("duration", [20e-6, 1e-3, 30e-3])
def test_an_op_of_which_nothing_is_known_is_seen_after_a_bounded_part_of_its_time(monkeypatch: pytest.MonkeyPatch, duration: float) -> None:
    (added,) = World(monkeypatch).ops([duration]).added
    assert added <= 1.1 * max(duration / PACING.patience, PACING.shortest) + LATE + POLL


@pytest.mark.parametrize(("usual", "now"), [(5e-3, 0.3e-3), (5e-3, 20e-3), (0.1e-3, 3e-3), (0.5, 1e-3)])
def test_a_kind_that_changes_is_followed(world: World, usual: float, now: float) -> None:
    world.ops([usual] * 60)
    first = world.ops([now])
    assert max(first.added) <= 1.1 * PACING.longest + LATE + now / PACING.patience + PACING.shortest, "one sleep is the most that it costs"
    world.ops([now] * 100)
    assert world.ops([now] * 50).usual <= 2 * POLL


def test_polls_that_come_late_do_not_make_an_op_longer(world: World) -> None:
    """The loop is busy for 5 ms in between."""
    world.ops([20e-6] * 5)
    for _ in range(50):
        lane = PolledLane(lambda ended: None)
        world.poller.add(lane, cast("Any", _Op(world, world.now + 20e-6)))
        world.now += 5e-3
        while lane.marks:
            world.step()
    expected = cast("Any", world.poller._pace).expect("kind")
    assert expected.mean <= PACING.window
    assert max(world.ops([20e-6] * 5).added) <= 2 * POLL


def test_an_op_that_has_ended_at_its_first_poll_is_not_estimated(world: World) -> None:
    """Not even its kind is asked for: that is most ops of a service that awaits them one by one."""
    ends: list[Ended] = []
    mark = _Op(world, world.now)
    del mark.kind
    world.poller.add(PolledLane(ends.extend), cast("Any", mark))
    world.step()
    assert ends == [(cast("Any", mark), None)]
    assert cast("Any", world.poller._pace).expect("kind") is None


def test_a_timer_that_is_set_for_a_long_op_gives_way_to_a_shorter_one(world: World) -> None:
    ends: list[str] = []
    world.ops([0.5] * 60)
    lanes = [PolledLane(lambda _, name=name: ends.append(name)) for name in ("long", "short")]  # type: ignore[misc]
    world.poller.add(lanes[0], cast("Any", _Op(world, world.now + 0.5)))
    world.step()
    assert world.due is not None
    world.poller.add(lanes[1], cast("Any", _Op(world, world.now + 30e-6, "unknown")))
    began = world.now
    while ends != ["short"]:
        world.step()
    assert world.now - began <= 50e-6
    while len(ends) < 2:
        world.step()
    assert world.due is None


@pytest.mark.parametrize("kinds", [("unknown", "kind"), ("kind", "unknown")])
def test_the_poller_goes_by_the_lane_that_is_due_first(world: World, kinds: tuple[str, str]) -> None:
    world.ops([0.5] * 60)
    for kind in kinds:
        world.poller.add(PolledLane(lambda _: None), cast("Any", _Op(world, world.now + 0.5, kind)))
    for _ in range(3):
        world.step()
        assert world.soon, "the unknown op is young"


def test_the_timer_is_off_when_all_has_ended_before(world: World) -> None:
    world.ops([0.5] * 60)
    ends: list[Ended] = []
    for kind in ("kind", "unknown"):
        world.poller.add(PolledLane(ends.extend), cast("Any", _Op(world, world.now + 5 * POLL, kind)))
    world.step()
    while len(ends) < 2:
        world.step()
    assert not world.is_scheduled


def test_the_time_of_an_op_counts_from_its_own_beginning(world: World) -> None:
    """From the end of the one before it in its lane, and not from when one behind it was sent."""
    ends: list[Ended] = []
    lane = PolledLane(ends.extend)
    world.poller.add(lane, cast("Any", _Op(world, world.now + 1e-3)))
    while world.now < 1000.0 + 0.8e-3:
        world.step()
    world.poller.add(lane, cast("Any", _Op(world, 1000.0 + 3e-3, "second")))
    while len(ends) < 2:
        world.step()
    predictor = cast("Any", world.poller._pace)
    assert predictor.expect("kind").mean == pytest.approx(1e-3, abs=2 * PACING.shortest)
    assert predictor.expect("second").mean == pytest.approx(2e-3, abs=4 * PACING.shortest)


def test_a_lane_that_is_removed_is_not_polled(world: World) -> None:
    lane = PolledLane(lambda _: pytest.fail("told of a mark that was removed"))
    world.poller.add(lane, cast("Any", _Op(world, world.now)))
    world.poller.remove(lane)
    assert not world.soon
    assert world.due is None


def test_an_interrupt_in_a_mark_keeps_others_from_nothing(world: World) -> None:
    def interrupted(ended: list[Ended]) -> None:
        raise KeyboardInterrupt

    ends: list[Ended] = []
    world.poller.add(PolledLane(interrupted), cast("Any", _Op(world, world.now)))
    world.poller.add(PolledLane(ends.extend), cast("Any", _Op(world, world.now + 50e-6)))
    with pytest.raises(KeyboardInterrupt):
        world.step()
    while not ends:
        world.step()


async def test_other_callbacks_run_between_two_polls() -> None:
    loop = asyncio.get_running_loop()
    real = MarkPoller(loop, AdaptivePace(Pacing(young=3600.0)))
    ended = loop.create_future()
    mark = Mark(Event())
    real.add(PolledLane(ended.set_result), mark)
    between = 0
    while not ended.done():
        between += 1
        if between == 50:
            mark.event.end()
        await asyncio.sleep(0)
    assert between >= 50
    assert mark.event.queries >= 50
    real.close()
    real.close()


async def test_the_poller_sleeps_on_a_real_timer() -> None:
    loop = asyncio.get_running_loop()
    real = MarkPoller(loop, AdaptivePace(Pacing(young=0.0, shortest=1e-3, longest=1e-3)))
    mark, ended = Mark(Event()), loop.create_future()
    real.add(PolledLane(ended.set_result), mark)
    loop.call_later(0.02, mark.event.end)
    gc.freeze()  # or a collection walks through what other tests have left in this process
    began = time.process_time()
    await ended
    assert 1 <= mark.event.queries <= 30
    assert time.process_time() - began <= 0.02
    real.close()


def estimate_of(*durations: float) -> Estimate:
    """Return what a predictor makes of ops of one kind with these durations, in seconds."""
    predictor = Predictor(8)
    for seconds in durations:
        predictor.observe("gemm", seconds)
    estimate = predictor.expect("gemm")
    assert estimate is not None
    return estimate


def test_predictor_is_not_spoiled_by_one_op_that_seemed_long() -> None:
    estimate = estimate_of(*[1.0] * 20, 100.0)
    assert estimate.mean == pytest.approx(1.0, abs=0.01)
    assert estimate.deviation < 0.05


def test_predictor_begins_anew_with_an_op_that_takes_less_than_half() -> None:
    assert estimate_of(*[1.0] * 20, 0.4) == Estimate(0.4, 0.2)


def test_predictor_does_not_follow_what_scatters() -> None:
    estimate = estimate_of(*(1.0, 3.0) * 50)
    assert estimate.mean == pytest.approx(2.0, abs=0.2)
    assert estimate.deviation > 0.5


def test_predictor_forgets_the_kind_not_seen_for_longest() -> None:
    predictor = Predictor(2)
    for kind in ("a", "b", "a", "c"):
        predictor.observe(kind, 1.0)
    assert predictor.expect("b") is None
    assert predictor.expect("a") is not None
    assert predictor.expect("c") is not None


@pytest.fixture
def queries(monkeypatch: pytest.MonkeyPatch) -> list[LateEvent]:
    """Count the queries of marks of the device "late", whose own work ends at once.

    It runs on the loop's thread: on another one it would take as many polls as the loop makes until the system runs that thread.
    """
    queries: list[LateEvent] = []
    query = LateEvent.query

    def counting(event: LateEvent) -> bool:
        queries.append(event)
        return query(event)

    def at_once(stream: LateStream, work: Callable[[], object], cost: float = 0.0, keep: object = None) -> None:
        CpuStream.submit(stream, work, 0.0, keep)

    monkeypatch.setitem(registry._BUILT_IN, "late", "tests.late_backend:LateBackend")
    monkeypatch.setattr(LateDevice, "delay", 0.0)
    monkeypatch.setattr(LateStream, "submit", at_once)
    monkeypatch.setattr(LateEvent, "query", counting)
    return queries


async def test_of_many_tasks_marks_few_are_queried(queries: list[LateEvent]) -> None:
    rng = np.random.default_rng()
    values = rng.standard_normal((64, 8)).astype(np.float32)
    async with accel.System() as system:
        device = await system.open_device("late", streams=8)
        refs = [await device.put(row) for row in values]
        queries.clear()

        async def client(ref: accel.AccelRef) -> None:
            for _ in range(20):
                await device.elementwise.unary("relu", ref, out=ref)

        await asyncio.gather(*map(client, refs))
        found = len(queries)
        for ref, row in zip(refs, values, strict=True):
            np.testing.assert_array_equal(await device.get(ref), np.maximum(row, 0))
    assert found < 64 * 20 / 2, "not even one query for two ops"
