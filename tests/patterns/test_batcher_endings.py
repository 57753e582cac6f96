"""How requests of a batcher end: with errors, cancelled, expired, or by closing; always exactly once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import anyio
import numpy as np
import pytest

import accel
from accel.patterns import DynamicBatcher
from tests.batcher_support import Handler, settled, turns


async def test_an_exception_in_the_place_of_a_result_fails_that_item_alone() -> None:
    async def handler(items: list[int]) -> list[int | Exception]:
        return [ValueError(str(item)) if item % 2 else item for item in items]

    async with DynamicBatcher(handler) as batcher:
        results = await asyncio.gather(*(batcher.submit(n) for n in range(4)), return_exceptions=True)
    assert results[0] == 0
    assert results[2] == 2
    assert isinstance(results[1], ValueError)
    assert str(results[3]) == "3"
    assert (batcher.statistics().answered, batcher.statistics().failed) == (2, 2)


class Odd(Exception):  # noqa: N818 - a user's class
    """Cannot be copied."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} {b}")


@pytest.mark.parametrize(
    ("error", "shared"),
    [(accel.LibraryError("no", code=7), False), (ValueError("no"), False), (Odd(1, 2), True)],
    ids=["accel", "plain", "uncopyable"],
)
async def test_what_the_handler_raises_reaches_every_caller_as_an_instance_of_its_own(error: Exception, shared: bool) -> None:
    async def handler(items: list[int]) -> list[int]:
        raise error

    async with DynamicBatcher(handler) as batcher:
        results = await asyncio.gather(*(batcher.submit(n) for n in range(3)), return_exceptions=True)
        assert settled(batcher.statistics())
    assert [type(result) for result in results] == [type(error)] * 3
    assert [str(result) for result in results] == [str(error)] * 3
    assert len({id(result) for result in results}) == (1 if shared else 3)


async def test_a_stop_iteration_does_not_break_its_batch() -> None:
    async def handler(items: list[int]) -> list[int | Exception]:
        return [StopIteration(), 1]

    async with DynamicBatcher(handler) as batcher:
        first, second = await asyncio.gather(batcher.submit(0), batcher.submit(1), return_exceptions=True)
    assert isinstance(first, RuntimeError)
    assert second == 1


@pytest.mark.parametrize("results", [[], [1, 2, 3], None, 5], ids=repr)
async def test_a_wrong_number_of_results_is_an_error_for_all_of_the_batch(results: Any) -> None:
    async def handler(items: list[int]) -> Any:
        return results

    async with DynamicBatcher[int, int](handler) as batcher:
        got = await asyncio.gather(batcher.submit(0), batcher.submit(1), return_exceptions=True)
    assert all(isinstance(error, accel.InvalidArgumentError) and "for 2 items" in str(error) for error in got)
    assert batcher.statistics().failed == 2


@pytest.mark.parametrize(
    "results",
    [{0: 1, 1: 2}, {1, 2}, "ab", b"ab", bytearray(2), iter([1, 2]), np.array(2), {}.keys()],
    ids=lambda value: type(value).__name__,
)
async def test_what_is_no_list_is_not_taken_for_results(results: Any) -> None:
    async def handler(items: list[int]) -> Any:
        return results

    async with DynamicBatcher[int, int](handler) as batcher:
        got = await asyncio.gather(batcher.submit(0), batcher.submit(1), return_exceptions=True)
    assert all(isinstance(error, accel.InvalidArgumentError) and f"a {type(results).__name__}" in str(error) for error in got), got
    assert batcher.statistics().failed == 2


@pytest.mark.parametrize("results", [(1, 2), deque([1, 2]), range(1, 3), np.array([1, 2])], ids=lambda value: type(value).__name__)
async def test_every_sequence_is_a_list_of_results(results: Any) -> None:
    async def handler(items: list[int]) -> Any:
        return results

    async with DynamicBatcher[int, int](handler) as batcher:
        assert tuple(await asyncio.gather(batcher.submit(0), batcher.submit(1))) == (1, 2)


async def test_a_handler_that_is_not_async_is_an_error_for_all_of_the_batch() -> None:
    def handler(items: list[int]) -> list[int]:
        return items

    async with DynamicBatcher[int, int](handler) as batcher:  # type: ignore[arg-type]
        got = await asyncio.gather(batcher.submit(0), batcher.submit(1), return_exceptions=True)
    assert all(isinstance(error, accel.InvalidArgumentError) and "async def" in str(error) for error in got), got
    assert got[0] is not got[1]


async def test_a_cancelled_item_is_dropped_before_launch() -> None:
    handler = Handler(is_open=False)
    async with DynamicBatcher(handler, max_items=4, max_in_flight=1) as batcher, asyncio.TaskGroup() as group:
        group.create_task(batcher.submit(0))
        await handler.until_called(1)
        gone = group.create_task(batcher.submit(1))
        group.create_task(batcher.submit(2))
        await turns()
        gone.cancel()
        handler.release()
    assert handler.batches == [[0], [2]]
    assert gone.cancelled()
    assert batcher.statistics().dropped == 1
    assert settled(batcher.statistics())


async def test_an_item_cancelled_between_forming_and_calling_is_not_in_the_call() -> None:
    handler = Handler()
    async with DynamicBatcher(handler) as batcher:
        loop = asyncio.get_running_loop()
        gone = asyncio.ensure_future(batcher.submit(1))
        kept = asyncio.ensure_future(batcher.submit(2))
        await asyncio.sleep(0)  # both have submitted, and the end of that turn is scheduled
        # Runs after the batch is formed and before its task takes its first step.
        loop.call_soon(gone.cancel)
        assert await kept == 4
    assert handler.batches == [[2]]
    assert gone.cancelled()


async def test_a_batch_of_cancelled_items_is_not_called() -> None:
    handler = Handler()
    async with DynamicBatcher(handler) as batcher:
        gone = asyncio.ensure_future(batcher.submit(1))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(gone.cancel)
        await turns()
        assert settled(batcher.statistics())
    assert handler.batches == []
    assert batcher.statistics().batches == 0


async def test_a_launched_item_that_is_cancelled_leaves_the_others_alone() -> None:
    handler = Handler(is_open=False)
    async with DynamicBatcher(handler) as batcher:
        gone, kept = asyncio.ensure_future(batcher.submit(1)), asyncio.ensure_future(batcher.submit(2))
        await handler.until_called(1)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        handler.release()
        assert await kept == 4
    assert batcher.statistics().abandoned == 1
    assert settled(batcher.statistics())


async def test_a_deadline_passes_in_the_queue_and_the_item_is_not_launched() -> None:
    handler = Handler(is_open=False)
    async with DynamicBatcher(handler, max_in_flight=1) as batcher, asyncio.TaskGroup() as group:
        group.create_task(batcher.submit(0))
        await handler.until_called(1)
        with pytest.raises(accel.DeadlineExceededError, match="not launched"):
            await batcher.submit(1, timeout=0.005)
        handler.release()
    assert handler.batches == [[0]]
    assert batcher.statistics().expired == 1
    assert settled(batcher.statistics())


async def test_a_deadline_passes_while_the_handler_runs() -> None:
    handler = Handler(is_open=False)
    async with DynamicBatcher(handler) as batcher:
        with pytest.raises(accel.DeadlineExceededError, match="was launched"):
            await batcher.submit(1, timeout=0.005)
        handler.release()
    assert batcher.statistics().expired == 1
    assert settled(batcher.statistics())


@pytest.mark.parametrize("timeout", [0, -1])
async def test_no_time_at_all_is_a_deadline_exceeded(timeout: float) -> None:
    handler = Handler()
    async with DynamicBatcher(handler) as batcher:
        with pytest.raises(accel.DeadlineExceededError):
            await batcher.submit(1, timeout=timeout)
        with pytest.raises(accel.InvalidArgumentError):
            await batcher.submit(1, timeout=float("nan"))
    assert handler.batches == []
    assert batcher.statistics().submitted == 0


async def test_closing_answers_all_that_was_submitted_and_takes_nothing_new() -> None:
    handler = Handler(is_open=False)
    batcher = DynamicBatcher(handler, max_items=1, max_pending=2, max_in_flight=1, max_delay=1000)
    await batcher.__aenter__()
    tasks = [asyncio.ensure_future(batcher.submit(n)) for n in range(6)]
    await handler.until_called(1)
    closing = asyncio.ensure_future(batcher.aclose())
    await turns()
    with pytest.raises(accel.ClosedError, match="closing"):
        await batcher.submit(9)
    assert not closing.done()
    handler.release()
    await asyncio.gather(closing, batcher.aclose())
    assert [task.result() for task in tasks] == [0, 2, 4, 6, 8, 10]
    with pytest.raises(accel.ClosedError, match="closed"):
        await batcher.submit(9)
    with pytest.raises(accel.ClosedError):
        await batcher.__aenter__()


async def test_closing_ends_a_handler_that_does_not() -> None:
    handler = Handler(is_open=False)
    batcher = DynamicBatcher(handler, max_items=1, max_in_flight=1, close_timeout=0.005)
    await batcher.__aenter__()
    tasks = [asyncio.ensure_future(batcher.submit(n)) for n in range(3)]
    await handler.until_called(1)
    await batcher.aclose()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(error, accel.ClosedError) for error in results)
    assert len({id(error) for error in results}) == 3
    assert handler.batches == [[0]]
    assert settled(batcher.statistics())


async def test_cancelling_the_close_hurries_it_and_goes_on_after() -> None:
    handler = Handler(is_open=False)
    batcher = DynamicBatcher(handler, close_timeout=1000)
    await batcher.__aenter__()
    task = asyncio.ensure_future(batcher.submit(1))
    await handler.until_called(1)
    closing = asyncio.ensure_future(batcher.aclose())
    await turns()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    with pytest.raises(accel.ClosedError):
        await task
    await batcher.aclose()


async def test_enter_and_exit_may_happen_in_different_tasks() -> None:
    batcher = DynamicBatcher(Handler())
    await asyncio.create_task(batcher.__aenter__())
    assert await batcher.submit(4) == 8
    await asyncio.create_task(batcher.aclose())
    assert not [task for task in asyncio.all_tasks() if "accel" in task.get_name()]


async def test_the_body_s_exception_leaves_as_it_is() -> None:
    async def body() -> None:
        async with DynamicBatcher(Handler()) as batcher:
            await batcher.submit(1)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await body()


async def test_a_handler_that_cancels_itself_fails_its_batch_and_nothing_else() -> None:
    async def handler(items: list[int]) -> list[int]:
        if 0 in items:
            raise asyncio.CancelledError
        return items

    async with DynamicBatcher(handler) as batcher:
        with pytest.raises(accel.ActorStoppedError):
            await batcher.submit(0)
        assert await batcher.submit(1) == 1
    assert settled(batcher.statistics())


async def test_use_before_entering_and_from_another_loop_raises() -> None:
    batcher = DynamicBatcher(Handler())
    with pytest.raises(accel.NotInitializedError):
        await batcher.submit(1)

    def elsewhere() -> None:
        with pytest.raises(accel.ClosedError, match="loop"):
            asyncio.run(batcher.submit(1))
        with pytest.raises(accel.ClosedError, match="loop"):
            asyncio.run(batcher.aclose())

    async with batcher:
        await asyncio.to_thread(elsewhere)
    unused = DynamicBatcher(Handler())
    await unused.aclose()
    with pytest.raises(accel.ClosedError):
        await unused.submit(1)


async def stubborn(stop: asyncio.Event, items: list[int]) -> list[int]:
    """Handle items once ``stop`` is set; cancellation before that is ignored."""
    while not stop.is_set():
        with contextlib.suppress(asyncio.CancelledError):
            await stop.wait()
    return items


async def test_closing_leaves_behind_what_will_not_end_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("accel.patterns.root._GRACE", 0.001)
    stop = asyncio.Event()
    batcher = DynamicBatcher(partial(stubborn, stop), close_timeout=0.001)
    await batcher.__aenter__()
    task = asyncio.ensure_future(batcher.submit(1))
    await turns()
    await batcher.aclose()
    assert "tasks_left_behind" in caplog.text
    stop.set()
    assert await task == 1
    await batcher.aclose()


async def test_a_cancelled_close_leaves_behind_what_will_not_end_and_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("accel.patterns.root._GRACE", 0.001)
    stop = asyncio.Event()
    batcher = DynamicBatcher(partial(stubborn, stop), close_timeout=1000)
    await batcher.__aenter__()
    task = asyncio.ensure_future(batcher.submit(1))
    await turns()
    closing = asyncio.ensure_future(batcher.aclose())
    await turns()
    closing.cancel()
    await asyncio.wait({closing}, timeout=5)
    ended = closing.done()
    stop.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert ended, "it waited for the handler"
    assert "tasks_left_behind" in caplog.text
    assert await task == 1
    await batcher.aclose()


def test_a_handler_may_end_the_program_and_nobody_is_left_waiting() -> None:
    ends: list[BaseException] = []

    async def leaving(items: list[int]) -> list[int]:
        raise SystemExit(7)

    async def caller(batcher: DynamicBatcher[int, int]) -> None:
        try:
            await batcher.submit(1)
        except BaseException as error:
            ends.append(error)
            raise

    async def main() -> None:
        async with DynamicBatcher(leaving) as batcher:
            await asyncio.gather(caller(batcher), caller(batcher))

    with pytest.raises(SystemExit):
        asyncio.run(main())
    assert [type(error) for error in ends] == [accel.ActorStoppedError] * 2 or all(
        isinstance(error, asyncio.CancelledError) for error in ends
    )
    assert len(ends) == 2


class Quit(BaseException):
    """Ends everything."""


async def test_anything_else_that_ends_everything_closes_the_batcher_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def quitting(items: list[int]) -> list[int]:
        raise Quit

    async with DynamicBatcher(quitting, max_items=1, max_in_flight=1) as batcher:
        results = await asyncio.gather(*(batcher.submit(n) for n in range(3)), return_exceptions=True)
        assert all(isinstance(result, (accel.ActorStoppedError, accel.ClosedError)) for result in results)
        with pytest.raises(accel.ClosedError):
            await batcher.submit(4)
    assert "root_failed" in caplog.text
    assert settled(batcher.statistics())


async def test_results_that_raise_when_they_are_read_fail_their_batch_alone() -> None:
    class Lazy(Sequence[int]):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: Any) -> Any:
            raise RuntimeError("no such result")

    async def handler(items: list[int]) -> Any:
        return Lazy() if items[0] < 0 else items

    async with DynamicBatcher[int, int](handler) as batcher:
        with pytest.raises(RuntimeError, match="no such result"):
            await asyncio.wait_for(batcher.submit(-1), 30)
        assert await asyncio.wait_for(batcher.submit(2), 30) == 2


async def test_a_batcher_that_is_left_in_a_cancelled_scope_answers_what_it_has_taken() -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    async def handler(items: list[int]) -> list[int]:
        begun.set()
        await go.wait()
        return items

    async def let_go() -> None:
        for _ in range(50):  # turns of the loop, in each of which the scope would cancel what is not shielded from it
            await asyncio.sleep(0)
        go.set()

    with anyio.CancelScope() as scope:
        async with DynamicBatcher(handler, max_delay=0.0) as batcher:
            answer = asyncio.ensure_future(batcher.submit(1))
            await begun.wait()
            later = asyncio.ensure_future(let_go())
            scope.cancel()
    async with asyncio.timeout(30):
        assert await answer == 1
        await later


async def test_cancelling_the_entry_into_a_batcher_does_not_break_its_root(caplog: pytest.LogCaptureFixture) -> None:
    async def handler(items: list[int]) -> list[int]:
        return items

    batcher = DynamicBatcher(handler)
    entering = asyncio.ensure_future(batcher.__aenter__())
    await asyncio.sleep(0)  # it waits for its root, which has not begun
    entering.cancel()
    with caplog.at_level(logging.ERROR, "accel"):
        async with asyncio.timeout(30):
            with pytest.raises(asyncio.CancelledError):
                await entering
            await batcher.aclose()
    assert caplog.text == ""
