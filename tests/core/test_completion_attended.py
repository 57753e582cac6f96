"""Marks whose waiter has let the loop take a turn, and looks itself."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from accel.completion import (
    AdaptiveCompletion,
    CompletionStrategy,
    Watcher,
)
from accel.errors import DriverError, FaultScope
from tests.completion_support import PATIENCE, STRATEGIES, Event, Mark, open_watcher, threads_gone, turns, watched

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture(params=STRATEGIES, ids=repr)
def strategy(request: pytest.FixtureRequest) -> CompletionStrategy:
    chosen: CompletionStrategy = request.param
    return chosen


@pytest.fixture
async def watcher(strategy: CompletionStrategy) -> AsyncIterator[Watcher]:
    shared: dict[Any, Any] = {}
    opened = open_watcher(strategy, shared=shared)
    yield opened
    await opened.aclose(abandon=True)
    assert shared == {}
    await threads_gone()


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
    await asyncio.wait_for(early.ended, PATIENCE)
    await turns()
    assert blocked.ends == []
    blocked_event.end(True)
    await asyncio.wait_for(blocked.ended, PATIENCE)


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
