"""Completion strategies: each mark ends once its event has passed, and not before; what wakes the loop; and what closing leaves."""

from __future__ import annotations

import asyncio
import math
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel.completion import (
    AdaptiveCompletion,
    CompletionStrategy,
    HostFnCompletion,
    Pacing,
    PolledCompletion,
    SyncCompletion,
    Watcher,
    resolve_strategy,
)
from accel.errors import ClosedError, DriverError, FaultScope, InvalidArgumentError
from tests.child_support import descriptors
from tests.completion_support import Device, Event, Mark, completion_threads, open_watcher, threads_gone, turns, watched
from tests.fork_leaves_support import SMALL, SleepOp, Sleeps

if TYPE_CHECKING:
    from accel.completion import CompletionStrategy


def test_strategies_are_found_by_name_or_taken_as_they_are() -> None:
    for kind in (AdaptiveCompletion, PolledCompletion, SyncCompletion, HostFnCompletion):
        assert resolve_strategy(kind.name) == kind()
    own = PolledCompletion(interval=0.25)
    assert resolve_strategy(own) is own
    for wrong in ("fastest", None, 3):
        with pytest.raises(InvalidArgumentError):
            resolve_strategy(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("interval", [-1.0, float("inf"), float("nan")])
def test_intervals_that_are_no_times_are_refused(interval: float) -> None:
    with pytest.raises(InvalidArgumentError):
        PolledCompletion(interval=interval)
    with pytest.raises(InvalidArgumentError):
        HostFnCompletion(watch_interval=interval)


async def test_mark_completes_once_its_event_has_passed_and_not_before(watcher: Watcher) -> None:
    event, mark = watched(watcher)
    await turns()
    assert mark.ends == []
    event.end()
    await mark.ended
    await turns()
    assert mark.ends == [None]


async def test_marks_of_a_lane_that_have_passed_complete_together_and_in_order(watcher: Watcher) -> None:
    pairs = [watched(watcher) for _ in range(6)]
    order: list[int] = []
    for number, (_, mark) in enumerate(pairs):
        mark.ended.add_done_callback(lambda _, number=number: order.append(number))  # type: ignore[misc]
    for event, _ in reversed(pairs[:4]):
        event.end()
    await pairs[0][1].ended
    assert [len(mark.ends) for _, mark in pairs] == [1, 1, 1, 1, 0, 0]
    pairs[5][0].end()
    pairs[4][0].end()
    await pairs[5][1].ended
    assert order == list(range(6))


async def test_lanes_do_not_wait_for_each_other(watcher: Watcher) -> None:
    slow_event, slow = watched(watcher, "slow")
    for _ in range(3):
        event, mark = watched(watcher, "fast")
        event.end()
        await mark.ended
    assert slow.ends == []
    slow_event.end()
    await slow.ended


async def test_each_mark_gets_the_fault_that_its_own_query_raised(watcher: Watcher) -> None:
    passed, first, second = (watched(watcher) for _ in range(3))
    fault = DriverError("dead", code=700, scope=FaultScope.CONTEXT)
    passed[0].end()
    for event, _ in (first, second):
        event.end(fault)
    await second[1].ended
    assert passed[1].ends == [None]
    errors = [first[1].ends[0], second[1].ends[0]]
    assert [type(error) for error in errors] == [DriverError, DriverError]
    assert errors[0] is not errors[1]


async def test_backend_that_raises_something_else_fails_the_mark_with_it_as_the_cause(watcher: Watcher) -> None:
    event, mark = watched(watcher)
    event.end(ZeroDivisionError("bug"))
    await mark.ended
    assert isinstance(mark.ends[0], DriverError)
    assert mark.ends[0].is_fault
    assert isinstance(mark.ends[0].__cause__, ZeroDivisionError)


async def test_mark_that_raises_is_reported_and_holds_no_other_up(watcher: Watcher) -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    bad = Mark(Event())
    bad.complete = lambda: 1 // 0  # type: ignore[method-assign, assignment]
    watcher.watch(bad)
    event, good = watched(watcher)
    bad.event.end()
    event.end()
    await good.ended
    assert isinstance(reported[0]["exception"], ZeroDivisionError)
    await watcher.aclose()


async def test_mark_may_watch_another_when_it_ends(watcher: Watcher) -> None:
    left = 50
    done = asyncio.get_running_loop().create_future()

    def follow(mark: Mark) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            done.set_result(None)
            return
        event, following = watched(watcher, left % 3)
        following.complete = lambda: follow(following)  # type: ignore[method-assign]
        event.end()

    first = Mark(Event())
    follow(first)
    await done


async def test_nothing_pending_means_no_polls(watcher: Watcher, monkeypatch: pytest.MonkeyPatch) -> None:
    event, mark = watched(watcher)
    event.end()
    await mark.ended
    await turns()
    loop, queries = asyncio.get_running_loop(), event.queries
    call_soon, modules = loop.call_soon, []

    def note(callback: Any, *arguments: Any, **options: Any) -> asyncio.Handle:
        modules.append(getattr(callback, "__module__", None))
        return call_soon(callback, *arguments, **options)

    monkeypatch.setattr(loop, "call_soon", note)
    await turns(200)
    assert len(modules) >= 200
    assert [module for module in modules if module and module.startswith("accel.")] == []
    assert event.queries == queries


async def test_close_waits_for_what_is_watched(strategy: CompletionStrategy) -> None:
    watcher = open_watcher(strategy)
    event, mark = watched(watcher)
    closing = asyncio.ensure_future(watcher.aclose())
    second = asyncio.ensure_future(watcher.aclose())
    await turns()
    assert not closing.done()
    with pytest.raises(ClosedError):
        watched(watcher)
    event.end()
    await closing
    await second
    assert mark.ends == [None]
    await watcher.aclose()
    assert completion_threads() == []


@pytest.mark.parametrize("abandon", [False, True])
async def test_side_streams_are_closed_or_abandoned_with_their_watcher(abandon: bool) -> None:
    device = Device()
    watcher = open_watcher(HostFnCompletion(), device)
    event, mark = watched(watcher)
    event.end()
    await mark.ended
    await watcher.aclose(abandon=abandon)
    assert [stream.closed for stream in device.streams] == [[abandon]]
    await threads_gone()


async def test_an_error_of_one_side_stream_keeps_no_other_open(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    watcher = open_watcher(HostFnCompletion(), device)
    for lane in ("lane", "other lane"):
        mark = Mark(Event(), lane)
        watcher.watch(mark)
        mark.event.end()
        await mark.ended
    close_stream = type(device.streams[0]).close

    def close(stream: Any, *, abandon: bool = False) -> None:
        close_stream(stream, abandon=abandon)
        raise DriverError("the stream does not close")

    monkeypatch.setattr(type(device.streams[0]), "close", close)
    with pytest.raises(DriverError):
        await watcher.aclose()
    assert [stream.closed for stream in device.streams] == [[False], [False]]
    await threads_gone()


@pytest.mark.parametrize("missing", ["start_thread", "Semaphore"])
async def test_a_watcher_that_cannot_be_opened_leaves_no_timer(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    def refuse(*arguments: object) -> None:
        raise accel.OutOfMemoryError("there is none now")

    before = descriptors()
    monkeypatch.setattr(f"accel.completion.host_fn.{missing}", refuse)
    with pytest.raises(accel.OutOfMemoryError):
        open_watcher(HostFnCompletion())
    assert descriptors() == before


async def test_a_signal_is_one_poll() -> None:
    watcher = open_watcher(HostFnCompletion(watch_interval=3600.0))
    waiting = [thread for thread in threading.enumerate() if thread.name in completion_threads()]
    assert [thread.daemon for thread in waiting] == [True], "a device that never answers must not keep the process"
    for _ in range(3):
        event, mark = watched(watcher)
        event.end()
        await mark.ended
        assert event.queries == 2, "one poll, and what the mark itself asks"
    await watcher.aclose()


async def test_cancelling_close_abandons(strategy: CompletionStrategy) -> None:
    watcher = open_watcher(strategy)
    event, mark = watched(watcher)
    closing = asyncio.ensure_future(watcher.aclose())
    await turns(2)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert [type(error) for error in mark.ends] == [ClosedError]
    event.end()
    await watcher.aclose()
    await threads_gone()


async def test_host_function_is_not_needed_to_see_a_fault() -> None:
    device = Device()
    watcher = open_watcher(HostFnCompletion(watch_interval=1e-3), device)
    event, mark = watched(watcher)
    event.end(DriverError("dead", scope=FaultScope.CONTEXT))  # no host function runs
    await mark.ended
    assert isinstance(mark.ends[0], DriverError)
    await watcher.aclose()
    assert device.streams[0].closed == [False]


async def test_poisoned_device_that_takes_no_more_waits_is_looked_at_once() -> None:
    device = Device()
    watcher = open_watcher(HostFnCompletion(watch_interval=3600.0), device)
    event, mark = watched(watcher)
    device.fault = DriverError("dead", scope=FaultScope.CONTEXT)
    event.end(device.fault)
    for lane in ("lane", "new lane"):  # one with a side stream, one without
        refused = Mark(Event(), lane)
        refused.event.end(device.fault)
        watcher.watch(refused)
        await refused.ended
        assert isinstance(refused.ends[0], DriverError)
    assert len(mark.ends) == 1
    await watcher.aclose()


@pytest.mark.parametrize("count", [1, 3, 64])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.99, 1.0])
async def test_the_last_of_many_marks_that_have_passed_is_found_by_few_queries(count: int, share: float) -> None:
    watcher = open_watcher(PolledCompletion(interval=0))
    pairs = [watched(watcher) for _ in range(count)]
    passed = round(share * count)
    for event, mark in pairs:
        mark.complete = partial(mark._end, None)  # type: ignore[method-assign]  # its own asks once more
        if event in [each for each, _ in pairs[:passed]]:
            event.end()
    await turns(1)
    assert [len(mark.ends) for _, mark in pairs] == [1] * passed + [0] * (count - passed)
    assert sum(event.queries for event, _ in pairs) <= 2 + 2 * math.log2(count + 1)
    await watcher.aclose(abandon=True)


async def test_a_fault_behind_many_marks_that_have_passed_fails_those_after_it_alone() -> None:
    watcher = open_watcher(PolledCompletion(interval=0))
    pairs = [watched(watcher) for _ in range(20)]
    for number, (event, _) in enumerate(pairs):
        event.end(True if number < 7 else DriverError("dead", scope=FaultScope.CONTEXT))
    await turns(2)
    assert [type(mark.ends[0]) for _, mark in pairs] == [type(None)] * 7 + [DriverError] * 13
    await watcher.aclose()


async def test_devices_of_a_system_share_one_poller_until_the_last_is_closed() -> None:
    shared: dict[Any, Any] = {}
    first, second = (open_watcher(AdaptiveCompletion(), shared=shared) for _ in range(2))
    other = open_watcher(AdaptiveCompletion(Pacing(window=1e-3)), shared=shared)
    assert len(shared) == 2
    await other.aclose()
    await first.aclose()
    assert len(shared) == 1
    event, mark = watched(second)
    event.end()
    await mark.ended
    await second.aclose()
    assert shared == {}


NEVER = 3600.0
"""Seconds between two looks that nothing asks for: longer than any test."""


PATIENCE = 10.0
"""Seconds; what is woken takes a hundredth of them."""


async def _ends(completion: CompletionStrategy) -> None:
    async with accel.System(close_timeout=1.0) as system:
        device = await system.open_device("cpu", host="inline", completion=completion)
        await device.register(Sleeps)
        async with asyncio.timeout(PATIENCE):
            x = await device.put(SMALL)
            # Long enough for the stream's own thread, and for all to be asleep when it ends; then several that end one after the other.
            assert np.array_equal(await device.get(await device.run(SleepOp(x, 0.05))), SMALL)
            await asyncio.gather(*(device.run(SleepOp(x, 0.002)) for _ in range(8)))


async def test_a_host_function_wakes_the_loop_without_any_look_in_between() -> None:
    await _ends(accel.HostFnCompletion(watch_interval=NEVER))


async def test_the_thread_of_a_cpu_stream_wakes_the_loop_without_any_look_in_between() -> None:
    await _ends(accel.AdaptiveCompletion(watch_interval=NEVER))


@pytest.mark.parametrize("interval", [0.0, -1.0, float("inf"), float("nan")])
def test_an_interval_that_is_no_time_to_wait_is_refused(interval: float) -> None:
    with pytest.raises(accel.InvalidArgumentError, match="watch_interval"):
        accel.AdaptiveCompletion(watch_interval=interval)
