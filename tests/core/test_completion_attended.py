"""Marks whose waiter has let the loop take a turn, and looks itself."""

from __future__ import annotations

import asyncio
import itertools
import time
from types import SimpleNamespace

import pytest

from accel.completion import AdaptiveCompletion, Pacing, Watcher, reactor
from accel.completion.adaptive import AdaptiveWatcher
from accel.completion.sync import SyncWatcher
from accel.errors import DriverError, FaultScope
from tests.completion_support import PATIENCE, Event, Mark, open_watcher, turns, watched

LONG = 0.2
"""Seconds of an op that nobody stays awake for."""


async def test_attended_mark_that_was_passed_completes(watcher: Watcher) -> None:
    mark = Mark(Event())
    mark.event.end(True)
    watcher.attend(mark)
    await asyncio.wait_for(mark.ended, PATIENCE)
    assert mark.ends == [None]
    assert (watcher.statistics().pending, watcher.statistics().completed) == (0, 1)


async def test_attended_mark_that_was_not_passed_is_watched(watcher: Watcher) -> None:
    mark = Mark(Event())
    watcher.attend(mark)
    await turns()
    assert mark.ends == []
    assert watcher.statistics().pending == 1
    mark.event.end(True)
    await asyncio.wait_for(mark.ended, PATIENCE)
    assert mark.ends == [None]


async def test_attended_mark_does_not_overtake_those_watched_before(watcher: Watcher) -> None:
    first_event, first = watched(watcher)
    order: list[str] = []
    first.ended.add_done_callback(lambda _: order.append("first"))
    second = Mark(Event())
    second.ended.add_done_callback(lambda _: order.append("second"))
    second.event.end(True)
    watcher.attend(second)
    await turns()
    assert second.ends == [], "the lane's first mark is not passed, as far as anybody was told"
    first_event.end(True)
    await asyncio.wait_for(second.ended, PATIENCE)
    await turns()
    assert order == ["first", "second"]


async def test_attended_mark_stands_before_those_recorded_later(watcher: Watcher) -> None:
    """Of many marks only some are looked at, because a stream passes them in order: so their order must be the stream's."""
    oldest_event, oldest = watched(watcher)
    early = Mark(Event())
    blocked_event, blocked = watched(watcher)
    early.event.end(True)
    watcher.attend(early)
    latest_event, latest = watched(watcher)
    oldest_event.end(True)
    await asyncio.wait_for(early.ended, PATIENCE)
    await turns()
    assert [mark.ends for mark in (oldest, early, blocked, latest)] == [[None], [None], [], []]
    blocked_event.end(True)
    await asyncio.wait_for(blocked.ended, PATIENCE)
    assert latest.ends == []
    latest_event.end(True)
    await asyncio.wait_for(latest.ended, PATIENCE)


async def test_attended_mark_that_comes_before_all_others_is_looked_at_first(watcher: Watcher) -> None:
    early = Mark(Event())
    blocked_event, blocked = watched(watcher)
    watcher.attend(early)
    await turns()
    assert early.ends == []
    early.event.end(True)
    if not isinstance(watcher, SyncWatcher):  # its thread waits for the other one already, and for one at a time
        await asyncio.wait_for(early.ended, PATIENCE)
        await turns()
        assert blocked.ends == []
    order: list[str] = []
    blocked.ended.add_done_callback(lambda _: order.append("blocked"))
    early.ended.add_done_callback(lambda _: order.append("early"))
    blocked_event.end(True)
    await asyncio.wait_for(asyncio.gather(early.ended, blocked.ended), PATIENCE)
    assert order == ["early", "blocked"]


async def test_attended_mark_gets_its_fault(watcher: Watcher) -> None:
    mark = Mark(Event())
    mark.event.end(DriverError("gone", code=700, scope=FaultScope.PROCESS))
    watcher.attend(mark)
    await asyncio.wait_for(mark.ended, PATIENCE)
    (error,) = mark.ends
    assert isinstance(error, DriverError)
    assert error.code == 700


async def test_adaptive_takes_short_work_without_a_look_of_the_reactor() -> None:
    watcher = open_watcher(AdaptiveCompletion())
    for _ in range(5):
        mark = Mark(Event())
        mark.event.end(True)
        watcher.attend(mark)
        assert mark.ends == [None], "taken in the call"
    assert watcher.statistics().looks == 0
    await watcher.aclose()


def knows(watcher: Watcher, seconds: float = 0.0) -> None:
    """Let the reactor know what marks take, as if it had seen some: next to nothing, or so long that nobody stays awake for it."""
    assert isinstance(watcher, AdaptiveWatcher)
    for _ in range(3):
        watcher._reactor._predictor.observe("kind", seconds)


async def test_a_mark_of_which_nothing_is_known_is_watched_at_once(watcher: Watcher) -> None:
    mark = Mark(Event())
    assert watcher.attend_once(mark)
    assert watcher.statistics().pending == 1
    mark.event.end(True)
    await asyncio.wait_for(mark.ended, PATIENCE)
    assert mark.ends == [None]


async def test_the_waiter_of_the_only_mark_that_is_near_looks_itself() -> None:
    watcher = open_watcher(AdaptiveCompletion(Pacing(window=3600.0)))
    knows(watcher)
    mark = Mark(Event())
    looks = watcher.statistics().looks
    for _ in range(5):
        assert not watcher.attend_once(mark)
    assert (watcher.statistics().pending, watcher.statistics().looks) == (0, looks + 5)
    mark.event.end(True)
    assert watcher.attend_once(mark)
    assert mark.ends == [None], "taken in the call"
    await watcher.aclose()


async def test_of_several_waiters_one_looks_itself_and_gives_way_to_the_reactor() -> None:
    watcher = open_watcher(AdaptiveCompletion(Pacing(window=3600.0)))
    knows(watcher)
    first, second = Mark(Event(), lane="first"), Mark(Event(), lane="second")
    assert not watcher.attend_once(first)
    assert watcher.attend_once(second), "another looks already"
    assert watcher.statistics().pending == 1
    assert watcher.attend_once(first), "the reactor looks anyway"
    assert watcher.statistics().pending == 2
    for mark in (second, first):
        mark.event.end(True)
        await asyncio.wait_for(mark.ended, PATIENCE)
        assert mark.ends == [None]
    await watcher.aclose()


async def test_a_mark_that_is_late_or_not_known_is_not_stayed_for() -> None:
    watcher = open_watcher(AdaptiveCompletion(Pacing(window=0.0)))
    knows(watcher)
    mark = Mark(Event(), lane="unknown", kind="unknown")
    assert watcher.attend_once(mark)
    late = Mark(Event())
    late.enqueued_at -= 1.0
    assert watcher.attend_once(late)
    for each in (mark, late):
        each.event.end(True)
        await asyncio.wait_for(each.ended, PATIENCE)
    await watcher.aclose()


async def test_a_waiter_that_went_away_keeps_nobody_from_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(1000.0, 1e-6)  # a microsecond passes with each look at it
    monkeypatch.setattr(reactor, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    watcher = open_watcher(AdaptiveCompletion(Pacing(window=1e-3)))
    knows(watcher)
    gone, early, other = Mark(Event()), Mark(Event(), lane="early"), Mark(Event(), lane="other")
    gone.enqueued_at = early.enqueued_at = 1000.0
    assert not watcher.attend_once(gone), "and never again: its context has faulted"
    early.enqueued_at += 1e-6
    assert watcher.attend_once(early), "for as long as the first could be looked for"
    early.event.end(True)
    await asyncio.wait_for(early.ended, PATIENCE)
    other.enqueued_at = next(itertools.dropwhile(lambda now: now < 1000.0 + 2e-3, clock))
    assert not watcher.attend_once(other)
    assert other.nap is None
    watcher.attend(other)
    other.event.end(True)
    await asyncio.wait_for(other.ended, PATIENCE)
    await watcher.aclose(abandon=True)


async def test_a_mark_that_is_passed_when_it_is_first_looked_at_says_no_more_than_that_it_took_no_longer() -> None:
    """A busy loop comes late to its looks: were that taken for a part of the ops, it would nap on short ones as soon as it has time."""
    watcher = open_watcher(AdaptiveCompletion(Pacing(window=0.2)))
    knows(watcher)
    for _ in range(10):
        mark = Mark(Event())
        mark.enqueued_at -= 1.0
        mark.event.end(True)
        assert watcher.attend_once(mark)
    mark = Mark(Event())
    assert not watcher.attend_once(mark)
    assert mark.nap is None, "it is near"
    mark.event.end(True)
    assert watcher.attend_once(mark)
    knows(watcher, LONG)
    for _ in range(10):
        mark = Mark(Event())
        mark.event.end(True)
        assert watcher.attend_once(mark)
    mark = Mark(Event())
    assert not watcher.attend_once(mark)
    assert mark.nap is None, "what became shorter is known to be so"
    mark.event.end(True)
    assert watcher.attend_once(mark)
    await watcher.aclose()


async def napping(watcher: Watcher, lane: object = "lane") -> tuple[Mark, asyncio.Future[None]]:
    mark = Mark(Event(), lane=lane)
    assert not watcher.attend_once(mark)
    assert mark.nap is not None
    assert not mark.nap.done()
    return mark, mark.nap


async def test_the_waiter_of_the_only_mark_naps_while_the_end_is_far_and_then_looks_itself() -> None:
    watcher = open_watcher(AdaptiveCompletion(Pacing(window=LONG / 4)))
    knows(watcher, LONG)
    mark, nap = await napping(watcher)
    assert watcher.statistics().pending == 1
    await asyncio.wait_for(nap, PATIENCE)
    assert mark.ends == []
    assert watcher.statistics().pending == 0, "its waiter has it"
    looks = watcher.statistics().looks
    mark.nap = None
    mark.enqueued_at = time.perf_counter() - LONG  # however long the wake-up took here
    assert not watcher.attend_once(mark)
    assert mark.nap is None, "no nap: the end is near"
    await turns()
    assert watcher.statistics().looks == looks + 1, "nobody else looks"
    mark.event.end(True)
    assert watcher.attend_once(mark)
    assert mark.ends == [None], "taken in the call"
    await watcher.aclose()


@pytest.mark.parametrize(
    ("durations", "naps"),
    [
        ((5e-3, 5.1e-3, 5e-3, 5e-3), True),
        ((5e-3, 5e-3, 5e-3), False),
        ((5e-3, 5e-3, 5e-3, 5e-3, 2e-3, 2e-3), False),
        ((5e-3, 2e-3, 5e-3, 5e-3, 2e-3), False),
        ((LONG, LONG, LONG, LONG), False),
        ((2e-4, 2e-4, 2e-4, 2e-4), False),
        ((), False),
    ],
    ids=["steady", "few", "changed", "scattered", "long", "short", "unknown"],
)
async def test_the_waiter_of_a_mark_that_is_surely_far_naps_before_the_first_look(durations: tuple[float, ...], naps: bool) -> None:
    """Where it may end early all the same it is looked for first: else it would be found a piece of the sleep later, which may be long."""
    watcher = open_watcher(AdaptiveCompletion(Pacing(unknown_spin=0.0, brief=0.0)))
    assert isinstance(watcher, AdaptiveWatcher)
    for seconds in durations:
        watcher._reactor._predictor.observe("kind", seconds)
    mark = Mark(Event())
    mark.enqueued_at = time.perf_counter()
    assert not watcher.attend_at_once(mark)
    assert (mark.nap is not None) == naps
    assert mark.event.queries == (0 if durations else 1)
    if mark.nap is not None:
        mark.event.end(True)
        await asyncio.wait_for(mark.ended, PATIENCE)
        assert time.perf_counter() - mark.enqueued_at < PATIENCE
    await watcher.aclose()


async def test_a_mark_that_ends_under_a_nap_is_settled_by_the_reactor() -> None:
    watcher = open_watcher(AdaptiveCompletion())
    knows(watcher, LONG)
    mark, nap = await napping(watcher)
    mark.event.end(True)
    await asyncio.wait_for(mark.ended, PATIENCE)
    assert not nap.done(), "who ends the mark wakes its waiter"
    assert (mark.ends, watcher.statistics().pending) == ([None], 0)
    again, _ = await napping(watcher)
    again.event.end(True)
    watcher.attend(again)
    assert again.ends == [None]
    await watcher.aclose()


async def test_a_waiter_that_looks_during_its_nap_has_its_mark_back() -> None:
    watcher = open_watcher(AdaptiveCompletion())
    knows(watcher, LONG)
    mark, nap = await napping(watcher)
    assert not watcher.attend_once(mark), "another nap"
    assert nap.done()
    second = mark.nap
    assert second is not None
    assert second is not nap
    watcher.attend(mark)  # it is leaving
    assert second.done()
    assert watcher.statistics().pending == 1
    mark.event.end(True)
    await asyncio.wait_for(mark.ended, PATIENCE)
    assert mark.ends == [None]
    await watcher.aclose()


async def test_of_several_marks_none_is_given_back() -> None:
    watcher = open_watcher(AdaptiveCompletion())
    knows(watcher, LONG)
    mark, nap = await napping(watcher)
    others = [Mark(Event(), lane="other"), Mark(Event())]
    for other in others:
        assert watcher.attend_once(other), "one naps already"
    assert watcher.statistics().pending == 3
    for each in (mark, *others):
        each.event.end(True)
    for each in (mark, *others):
        await asyncio.wait_for(each.ended, PATIENCE)
        assert each.ends == [None]
    assert not nap.done()
    await watcher.aclose()


async def test_closing_waits_for_a_mark_whose_waiter_naps() -> None:
    watcher = open_watcher(AdaptiveCompletion())
    knows(watcher, LONG)
    mark, nap = await napping(watcher)
    closing = asyncio.ensure_future(watcher.aclose())
    await turns()
    assert not closing.done()
    assert watcher.attend_once(mark), "there is no coming back: it stays watched"
    watcher.attend(mark)
    mark.event.end(True)
    await asyncio.wait_for(closing, PATIENCE)
    assert mark.ends == [None]
    assert not nap.done()


async def test_closing_at_once_ends_a_mark_whose_waiter_naps() -> None:
    watcher = open_watcher(AdaptiveCompletion())
    knows(watcher, LONG)
    mark, _ = await napping(watcher)
    await watcher.aclose(abandon=True)
    assert len(mark.ends) == 1
    assert mark.ends[0] is not None
