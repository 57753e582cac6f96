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
