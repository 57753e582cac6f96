"""One mark that is passed answers for the ops before it, so that of many short ops few are asked for."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import accel
from accel import registry
from accel.completion import AdaptiveCompletion, Pacing
from accel.completion.adaptive import AdaptiveWatcher
from accel.engine.lane import EventPool, Lane
from accel.engine.run import Run
from accel.engine.submission import BatchSubmission
from accel.errors import DriverError, FaultScope
from accel.ops import Plan
from tests.completion_support import PATIENCE, Device, Event, Mark, open_watcher
from tests.late_backend import LateDevice, LateEvent


def lane_with(marks: int) -> tuple[Lane, dict[int, Event]]:
    """Return a lane in which so many ops were sent, each with a mark."""
    device: Any = Device()
    lane = Lane("lane", device, device.create_stream(), device, EventPool(device))
    events: dict[int, Event] = {}
    send(lane, events, marks)
    return lane, events


def send(lane: Lane, events: dict[int, Event], marks: int) -> None:
    for _ in range(marks):
        seq = lane.issue()
        events[seq] = Event()
        lane.mark, lane.newest = events[seq], seq
        lane.advance(seq)


def queries(events: dict[int, Event]) -> int:
    return sum(event.queries for event in events.values())


def test_one_question_answers_for_all_that_were_sent_before() -> None:
    lane, events = lane_with(64)
    for event in events.values():
        event.end()
    assert all(lane.has_passed(seq) for seq in events)
    assert lane.completed == 64
    assert queries(events) == 1


def test_few_marks_are_asked_themselves() -> None:
    lane, events = lane_with(4)
    for event in events.values():
        event.end()
    assert not any(lane.has_passed(seq) for seq in events)
    assert queries(events) == 0


def test_what_is_known_is_not_asked() -> None:
    lane, events = lane_with(64)
    lane.complete(10)
    assert lane.has_passed(10)
    assert queries(events) == 0


def test_the_same_later_mark_is_asked_until_it_is_passed() -> None:
    """While ops go on being sent the newest is never passed; the newest of a while ago is."""
    lane, events = lane_with(64)
    assert not lane.has_passed(1)
    lane.complete(1)
    send(lane, events, 1)
    events[64].end()
    assert lane.has_passed(2)
    assert lane.completed == 64
    assert not lane.has_passed(65), "nothing is far enough ahead of it"
    assert queries(events) == 2


def test_what_takes_long_is_asked_for_ever_more_seldom() -> None:
    lane, events = lane_with(100)
    for seq in range(1, 100):
        assert not lane.has_passed(seq)
        lane.complete(seq)
    assert queries(events) <= 8
    assert events[100].queries == queries(events)


@pytest.mark.parametrize("outcome", [DriverError("gone", code=700, scope=FaultScope.PROCESS), RuntimeError("a bug")], ids=["fault", "bug"])
def test_what_cannot_be_asked_leaves_each_mark_to_tell(outcome: Exception) -> None:
    lane, events = lane_with(64)
    events[64].end(outcome)
    assert not lane.has_passed(1)
    assert lane.completed == 0


class Overtaken(Mark):
    """A mark of which its lane knows that it is passed."""

    is_known = True

    def is_overtaken(self) -> bool:
        return self.is_known

    def complete(self) -> None:
        self._end(None)


async def test_one_that_is_overtaken_stays_no_longer() -> None:
    """Whose caller looked itself; the next one's may."""
    watcher = open_watcher(AdaptiveCompletion(Pacing(throughout=2 * PATIENCE)))
    assert isinstance(watcher, AdaptiveWatcher)
    reactor = watcher._reactor
    reactor._predictor.observe("kind", PATIENCE)  # however long this machine takes for the next lines
    first, second = Overtaken(Event()), Mark(Event())
    first.is_known = False
    assert not watcher.attend_once(first), "it stays"
    second.enqueued_at = first.enqueued_at + 1e-6
    assert reactor._another_stays(second, second.enqueued_at)
    first.is_known = True
    assert watcher.attend_once(first)
    assert not reactor._another_stays(second, second.enqueued_at)
    await watcher.aclose()


async def test_a_watcher_takes_the_lanes_word_and_asks_no_more() -> None:
    watcher = open_watcher(AdaptiveCompletion())
    mark = Overtaken(Event())
    assert watcher.attend_once(mark)
    assert mark.ends == [None]
    assert mark.event.queries == 0
    assert watcher.statistics().completed == 1
    await watcher.aclose()


async def test_a_mark_does_not_overtake_those_that_are_watched() -> None:
    """They are told in their order."""
    watcher = open_watcher(AdaptiveCompletion())
    first, second = Mark(Event()), Overtaken(Event())
    watcher.watch(first)
    assert watcher.attend_once(second)
    assert not first.ends
    assert not second.ends
    second.event.end()
    first.event.end()
    await asyncio.gather(first.ended, second.ended)
    await watcher.aclose()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[LateEvent]:
    """Count the questions to marks of the device "late", whose own work ends at once."""
    asked: list[LateEvent] = []
    query = LateEvent.query

    def counting(event: LateEvent) -> bool:
        asked.append(event)
        return query(event)

    monkeypatch.setitem(registry._BUILT_IN, "late", "tests.late_backend:LateBackend")
    monkeypatch.setattr(LateDevice, "delay", 0.0)
    monkeypatch.setattr(LateEvent, "query", counting)
    return asked


async def test_many_tasks_ask_for_few_marks(asked: list[LateEvent]) -> None:
    rng = np.random.default_rng()
    values = rng.standard_normal((64, 8)).astype(np.float32)
    async with accel.System() as system:
        device = await system.open_device("late")
        refs = [await device.put(row) for row in values]
        asked.clear()

        async def client(ref: accel.AccelRef) -> None:
            for _ in range(20):
                await device.elementwise.unary("relu", ref, out=ref)

        await asyncio.gather(*map(client, refs))
        found = len(asked)
        for ref, row in zip(refs, values, strict=True):
            np.testing.assert_array_equal(await device.get(ref), np.maximum(row, 0))
    assert found < 64 * 20 / 2, "not even one question for two ops"


async def test_ops_and_batches_from_many_tasks_end_when_they_are_over(asked: list[LateEvent]) -> None:
    """A batch is over with its last op: no earlier."""
    rng = np.random.default_rng()
    values = rng.standard_normal((32, 8)).astype(np.float32)
    async with accel.System() as system:
        device = await system.open_device("late", streams="single")
        refs = [await device.put(row) for row in values]
        asked.clear()

        async def client(ref: accel.AccelRef, row: np.ndarray[Any, Any], at: int) -> None:
            for _ in range(10):
                if at % 2:
                    await device.elementwise.unary("neg", ref, out=ref)
                else:
                    async with device.batch() as batch:
                        for _ in range(3):
                            batch.elementwise.unary("neg", ref, out=ref)
                row *= -1
                np.testing.assert_array_equal(await device.get(ref), row)

        await asyncio.gather(*[client(ref, row, at) for at, (ref, row) in enumerate(zip(refs, values, strict=True))])
    assert len(asked) < 32 * 10 * 2, "fewer questions than ops and batches"


def test_a_batch_is_overtaken_by_what_passes_its_last_op() -> None:
    lane, _ = lane_with(64)
    context: Any = None
    ops: Any = [SimpleNamespace(kind="neg")] * 3
    nobody: Any = None
    nothing = Plan((), (), ())
    submission = BatchSubmission(tuple(ops), (nothing,) * 3, [], nobody, 1)
    port: Any = SimpleNamespace(lane=lane, actor=None)
    launches: list[Any] = [SimpleNamespace(seq=seq, commands=1, index=seq - 3) for seq in (3, 4, 5)]
    run = Run(context, submission, port, launches, is_last=True)
    lane.complete(4)
    assert not run.is_overtaken()
    lane.complete(5)
    assert run.is_overtaken()
    event: Any = Event()
    run.marked(event)
    assert (lane.mark, lane.newest) == (event, 5)
