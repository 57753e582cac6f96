"""Line 9: what wakes the loop, and what keeps a close from being cut short. Fallbacks are put so far away that they cannot stand in for it."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import anyio
import numpy as np
import pytest

import accel
from accel.patterns import DynamicBatcher
from tests.fork_leaves_support import SMALL, SleepOp, Sleeps

if TYPE_CHECKING:
    from accel.completion import CompletionStrategy

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
    async with asyncio.timeout(PATIENCE):
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
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(asyncio.CancelledError):
                await entering
            await batcher.aclose()
    assert caplog.text == ""
