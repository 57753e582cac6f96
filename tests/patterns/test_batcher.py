"""The batcher: what forms a batch and when, how much may wait, and which options are refused."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any

import pytest

import accel
from accel.patterns import DynamicBatcher
from accel.patterns.requests import Counters, Request
from accel.patterns.takers import Taker
from accel.telemetry import Probes, Service
from tests.batcher_support import Handler, settled, turns

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


async def test_an_idle_batcher_starts_at_once_with_all_that_came_in_the_same_turn() -> None:
    handler = Handler()
    async with DynamicBatcher(handler, max_items=8, max_delay=1000) as batcher:
        assert await batcher.submit(1) == 2
        assert await asyncio.gather(*(batcher(n) for n in range(5))) == [0, 2, 4, 6, 8]
    assert handler.batches == [[1], [0, 1, 2, 3, 4]]
    statistics = batcher.statistics()
    assert statistics.batches == 2
    assert statistics.mean_batch == 3.0
    assert statistics.answered == 6
    assert settled(statistics)


async def test_a_batch_has_no_more_than_max_items_in_the_order_of_submission() -> None:
    handler = Handler()
    async with DynamicBatcher(handler, max_items=4) as batcher:
        await asyncio.gather(*(batcher.submit(n) for n in range(10)))
    assert [item for batch in handler.batches for item in batch] == list(range(10))
    assert max(map(len, handler.batches)) == 4


def test_it_works_on_every_loop(run_on_loop: Callable[[Callable[[], Coroutine[Any, Any, None]]], None]) -> None:
    async def main() -> None:
        handler = Handler()
        async with DynamicBatcher(handler, max_items=3, max_in_flight=2) as batcher:
            assert await asyncio.gather(*(batcher.submit(n, timeout=60) for n in range(20))) == [2 * n for n in range(20)]
        assert settled(batcher.statistics())
        assert max(map(len, handler.batches)) == 3

    run_on_loop(main)


async def test_items_gather_while_a_batch_runs_until_the_delay_has_passed() -> None:
    handler = Handler(is_open=False)
    async with DynamicBatcher(handler, max_items=8, max_delay=0.01, max_in_flight=2) as batcher, asyncio.TaskGroup() as group:
        group.create_task(batcher.submit(0))
        await handler.until_called(1)
        for n in (1, 2):
            group.create_task(batcher.submit(n))
            await turns()
        assert batcher.statistics().queued == 2
        assert handler.batches == [[0]]
        await handler.until_called(2)  # by the clock: nothing else can start it
        assert handler.batches == [[0], [1, 2]]
        handler.release()


async def test_a_full_batch_does_not_wait_and_more_than_one_is_in_flight() -> None:
    handler = Handler(is_open=False)
    async with DynamicBatcher(handler, max_items=2, max_delay=1000, max_in_flight=2) as batcher, asyncio.TaskGroup() as group:
        group.create_task(batcher.submit(0))
        await handler.until_called(1)
        for n in (1, 2, 3, 4):
            group.create_task(batcher.submit(n))
        await turns()
        assert handler.batches == [[0], [1, 2]]
        assert batcher.statistics().in_flight == 2
        assert batcher.statistics().queued == 2
        handler.release()


async def test_the_rest_starts_when_the_device_falls_idle_without_waiting_for_the_delay() -> None:
    handler = Handler(is_open=False)
    async with DynamicBatcher(handler, max_items=8, max_delay=1000, max_in_flight=2) as batcher, asyncio.TaskGroup() as group:
        group.create_task(batcher.submit(0))
        await handler.until_called(1)
        group.create_task(batcher.submit(1))
        await turns()
        handler.release()
        await handler.until_called(2)
    assert handler.batches == [[0], [1]]


async def test_sizes_are_counted_in_items() -> None:
    handler = Handler()
    async with DynamicBatcher(handler, max_items=10, size=lambda item: item) as batcher:
        await asyncio.gather(*(batcher.submit(n) for n in (4, 4, 4, 10, 1)))
        with pytest.raises(accel.InvalidArgumentError, match="11"):
            await batcher.submit(11)
        with pytest.raises(accel.InvalidArgumentError):
            await batcher.submit(0)
    assert handler.batches == [[4, 4], [4], [10], [1]]
    assert batcher.statistics().mean_batch == 23 / 4


@pytest.mark.parametrize("size", [True, 1.5, None, "2"], ids=repr)
async def test_a_size_is_an_int(size: Any) -> None:
    handler = Handler()
    async with DynamicBatcher(handler, max_items=10, size=lambda item: size) as batcher:
        with pytest.raises(accel.InvalidArgumentError, match="counts for"):
            await batcher.submit(1)
    assert handler.batches == []


async def test_the_time_an_item_takes_is_a_moving_average(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = 0.0

    async def handler(items: list[int]) -> list[int]:
        nonlocal seconds
        seconds += 0.6
        return items

    loop = asyncio.get_running_loop()
    taker = Taker(handler, None, Counters())
    service = Service("doubles", "", Probes(), dict)
    expected = 1e-3
    monkeypatch.setattr("accel.patterns.takers.perf_counter", lambda: seconds)
    for _ in range(3):
        batch = [Request(item, size, loop.create_future(), 0.0, False, service) for item, size in ((1, 2), (2, 1))]
        await taker.run(batch)

        expected += 0.2 * (0.6 / 3 - expected)
        assert taker.seconds_per_item == pytest.approx(expected)
        assert [request.future.result() for request in batch] == [1, 2]


async def test_a_full_queue_rejects_with_the_time_to_come_back() -> None:
    handler = Handler(is_open=False)
    batcher = DynamicBatcher(handler, max_items=2, max_pending=3, max_in_flight=1, overload="reject")
    async with batcher, asyncio.TaskGroup() as group:
        group.create_task(batcher.submit(0))
        await handler.until_called(1)
        for n in (1, 2, 3):
            group.create_task(batcher.submit(n))
        await turns()
        with pytest.raises(accel.MailboxFullError, match="max_pending") as caught:
            await batcher.submit(4)
        assert caught.value.retry_after is not None
        assert caught.value.retry_after > 0
        assert batcher.statistics().rejected == 1
        handler.release()
    assert batcher.statistics().submitted == 4
    assert settled(batcher.statistics())


async def test_a_full_queue_lets_wait_in_order_and_bounds_those_who_wait() -> None:
    handler = Handler(is_open=False)
    batcher = DynamicBatcher(handler, max_items=1, max_pending=1, max_in_flight=1)
    async with batcher, asyncio.TaskGroup() as group:
        group.create_task(batcher.submit(0))
        await handler.until_called(1)
        for n in range(1, 18):
            group.create_task(batcher.submit(n))
        await turns()
        assert (batcher.statistics().queued, batcher.statistics().waiting) == (1, 16)
        with pytest.raises(accel.MailboxFullError):
            await batcher.submit(18)
        handler.release()
    assert handler.batches == [[n] for n in range(18)]


async def test_room_left_by_a_cancelled_item_goes_to_the_first_who_waits() -> None:
    handler = Handler(is_open=False)
    async with DynamicBatcher(handler, max_items=1, max_pending=1, max_in_flight=1) as batcher, asyncio.TaskGroup() as group:
        group.create_task(batcher.submit(0))
        await handler.until_called(1)
        queued, first, _ = [group.create_task(batcher.submit(n)) for n in (1, 2, 3)]
        await turns()
        queued.cancel()
        await turns()
        assert (batcher.statistics().queued, batcher.statistics().waiting) == (1, 1)
        first.cancel()
        await turns()
        assert (batcher.statistics().queued, batcher.statistics().waiting) == (1, 0)
        handler.release()
    assert handler.batches == [[0], [3]]
    assert batcher.statistics().dropped == 2


@pytest.mark.parametrize(
    "options",
    [
        {"max_items": 0},
        {"max_items": True},
        {"max_items": 8, "max_pending": 7},
        {"max_in_flight": 0},
        {"max_delay": -1},
        {"max_delay": float("nan")},
        {"close_timeout": float("inf")},
        {"overload": "drop"},
        {"size": 3},
        {"idempotent": "x"},
        {"device": 3},
        {"remember_poison": -1},
        {"remember_poison": 1.5},
        {"quarantine_idle": -1},
        {"quarantine_idle": "1"},
        {"fingerprint": str},
    ],
    ids=repr,
)
async def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(accel.InvalidArgumentError):
        DynamicBatcher(Handler(), **options)


def test_the_options_have_their_documented_defaults() -> None:
    parameters = inspect.signature(DynamicBatcher).parameters

    assert {name: parameter.default for name, parameter in parameters.items() if name != "handler"} == {
        "max_items": 64,
        "max_delay": 0.002,
        "max_pending": None,
        "overload": "wait",
        "max_in_flight": 2,
        "size": None,
        "idempotent": False,
        "device": None,
        "quarantine": None,
        "quarantine_idle": 10.0,
        "remember_poison": 1024,
        "fingerprint": None,
        "close_timeout": 10.0,
        "shares": None,
    }


@pytest.mark.parametrize("handler", [None, 3, "handler"], ids=repr)
async def test_a_handler_that_cannot_be_called_is_refused(handler: Any) -> None:
    with pytest.raises(accel.InvalidArgumentError, match="async def"):
        DynamicBatcher(handler)


async def test_a_timeout_that_is_no_number_is_refused() -> None:
    async with DynamicBatcher(Handler()) as batcher:
        for timeout in ("1", float("nan"), [1]):
            with pytest.raises(accel.InvalidArgumentError, match="timeout"):
                await batcher.submit(1, timeout=timeout)  # type: ignore[arg-type]
        assert await batcher.submit(1, timeout=60) == 2
    assert settled(batcher.statistics())
