"""Cancelling detaches the waiter at once; work that has not reached the device is dropped, the rest ends by itself."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel.testing import FaultPlan
from tests.device_support import cancelled, in_flight, opened, task, turns, until, used

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

pytestmark = pytest.mark.usefixtures("nothing_left")


async def test_op_cancelled_while_queued_is_never_launched() -> None:
    plan = FaultPlan().hang_at(2)
    async with opened(plan, max_in_flight=1) as device:
        x = await device.full((), 1.0)
        hanging = task(device.blas.scal(x, 2.0))
        await in_flight(device, 1)
        queued = [task(device.blas.scal(x, 3.0)) for _ in range(4)]
        await turns()
        assert device.info().queued == 4
        for each in queued:
            await cancelled(each)
        await turns()
        assert device.info().queued <= 1
        plan.release()
        await hanging
        assert float(await device.get(x)) == 2.0
        assert plan.count == 3


async def test_op_cancelled_on_the_device_runs_on() -> None:
    plan = FaultPlan().hang_at(2)
    async with opened(plan) as device:
        x = await device.full((), 1.0)
        running = task(device.blas.scal(x, 2.0))
        await in_flight(device, 1)
        await cancelled(running)
        assert device.info().in_flight == 1
        plan.release()
        assert float(await device.get(x)) == 2.0
        await in_flight(device, 0)


async def test_task_cancelled_before_its_first_step_sends_nothing() -> None:
    plan = FaultPlan()
    async with opened(plan) as device:
        x = await device.full((), 1.0)
        await cancelled(task(device.blas.scal(x, 2.0)))
        assert float(await device.get(x)) == 1.0
        assert plan.count == 2


async def test_waiter_for_room_that_is_cancelled_leaves_the_others_in_order() -> None:
    plan = FaultPlan().hang_at(2)
    async with opened(plan, max_in_flight=1, pending_limit=1) as device:
        x, one = await device.full((), 1.0, "float64"), np.ones(())
        hanging = task(device.put(one, out=x))
        await in_flight(device, 1)
        order: list[int] = []
        waiters = [task(device.put(one * number, out=x)) for number in range(6)]
        for number, each in enumerate(waiters):
            each.add_done_callback(lambda _, number=number: order.append(number))  # type: ignore[misc]
        await turns()
        assert device.info().queued == 6
        for number in (2, 4):
            await cancelled(waiters[number])
        plan.release()
        await asyncio.gather(hanging, *(waiters[number] for number in (0, 1, 3, 5)))
        assert order == [2, 4, 0, 1, 3, 5]
        assert float(await device.get(x)) == 5.0


async def test_cancelled_in_the_turn_in_which_the_result_comes(device: accel.Device) -> None:
    for delay in range(12):
        work = task(device.zeros(16))
        await turns(delay)
        done = work.done()
        work.cancel()
        result = await asyncio.gather(work, return_exceptions=True)
        assert isinstance(result[0], accel.AccelRef if done else (asyncio.CancelledError, accel.AccelRef))
        del work, result
    await in_flight(device, 0)
    await until(lambda: used(device) == 0)


async def test_timeout_of_asyncio_and_task_groups_cancel_like_any_other() -> None:
    plan = FaultPlan().hang_at(1)
    async with opened(plan) as device:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await device.zeros(3)
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.TaskGroup() as group:
                group.create_task(_await(device.zeros(3)))
                group.create_task(_raise())
        assert caught.group_contains(ZeroDivisionError)
        plan.release()
        await in_flight(device, 0)
        await until(lambda: used(device) == 0)
        assert (await device.get(await device.zeros(3))).shape == (3,)


async def _await(awaitable: Any) -> None:
    await awaitable


async def _raise() -> None:
    await turns()
    raise ZeroDivisionError


async def test_waiting_for_a_library_or_a_slab_can_be_cancelled(device: accel.Device) -> None:
    a = await device.zeros((4, 4))
    calls: tuple[Callable[[], Awaitable[Any]], ...] = (lambda: device.blas.gemm(a, a), lambda: device.zeros(100 << 20, "uint8"))
    for call in calls:
        work = task(call())
        await turns(2)
        await cancelled(work)
    np.testing.assert_array_equal(await device.get(await device.blas.gemm(a, a)), np.zeros((4, 4)))
    assert used(device) == 256


def test_random_cancellation_on_every_loop(
    run_on_loop: Callable[[Callable[[], Coroutine[Any, Any, None]]], None], rng: np.random.Generator
) -> None:
    async def main() -> None:
        async with opened(max_in_flight=8, pending_limit=8) as device:
            a = await device.put(np.eye(3))
            calls = [task(device.blas.gemm(a, a)) for _ in range(80)]
            for index in rng.permutation(80)[:40]:
                await turns(int(rng.integers(0, 3)))
                calls[index].cancel()
            results = await asyncio.gather(*calls, return_exceptions=True)
            for result in results:
                assert isinstance(result, (asyncio.CancelledError, accel.AccelRef)), result
            await in_flight(device, 0)
            assert device.info().queued == 0
            del results, result, calls
            await until(lambda: used(device) == 256)

    run_on_loop(main)
