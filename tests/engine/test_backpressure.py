"""Every queue has a bound; who meets a full one waits in order or is told when to come back."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import accel
from accel.testing import FaultPlan
from tests.device_support import failure, generation, in_flight, opened, task, turns

pytestmark = pytest.mark.usefixtures("nothing_left")


async def filled(device: accel.Device, count: int) -> list[asyncio.Future[accel.AccelRef]]:
    """Send so many ops, one after the other: the first goes into the hand of the device's actor, the others into its queue."""
    calls = []
    for _ in range(count):
        calls.append(task(device.zeros(1)))
        await turns()
    return calls


async def test_a_full_mailbox_holds_ops_back() -> None:
    """One op on the device, one in the hand of the device's actor, two in its mailbox: the others wait for room there."""
    plan = FaultPlan().hang_at(1)
    async with opened(plan, max_in_flight=1, pending_limit=2) as device:
        calls = await filled(device, 7)
        await in_flight(device, 1)  # its memory is made off the loop
        [actor] = [each for each in device._core.system.tree() if each.name.endswith("(cpu:0)")]
        assert (device.info().in_flight, actor.depth, plan.count) == (1, 2, 1)
        assert device._actor.mailbox.statistics().waiting_putters == 3
        assert not any(call.done() for call in calls)
        plan.release()
        await asyncio.gather(*calls)
        assert plan.count == 7


async def test_batch_larger_than_max_in_flight_runs_in_pieces() -> None:
    plan = FaultPlan().hang_at(1)
    async with opened(plan, max_in_flight=4) as device:
        refs: list[accel.AccelRef] = []

        async def large() -> None:
            async with device.batch() as batch:
                refs.extend(batch.full(2, float(number)) for number in range(50))

        running = task(large())
        await turns()
        assert device.info().in_flight <= 4
        plan.release()
        await running
        for number, ref in enumerate(refs):
            np.testing.assert_array_equal(await device.get(ref), np.full(2, number, np.float32))
        assert plan.count == 100


async def test_overload_rejects_with_the_time_to_come_back() -> None:
    plan = FaultPlan().hang_at(1)
    async with opened(plan, max_in_flight=1, pending_limit=2, overload="reject") as device:
        hanging = task(device.zeros(1))
        await in_flight(device, 1)
        queued = await filled(device, 3)
        error = await failure(device.zeros(1), accel.MailboxFullError)
        assert error.retryable
        assert error.retry_after is not None
        assert 0 < error.retry_after < 60
        assert (error.device, error.op) == ("cpu:0", "fill")
        with pytest.raises(accel.MailboxFullError) as caught:
            async with device.batch() as batch:
                ref = batch.zeros(1)
        assert caught.value.op == "batch"
        assert ref.is_stale
        plan.release()
        await asyncio.gather(hanging, *queued)
        await device.zeros(1)


async def test_overload_rejects_while_rebuilding_too() -> None:
    plan = FaultPlan().poison_at(1).poison_at(2)
    restart = accel.RestartStrategy(backoff=(0.1, 0.1))
    async with opened(plan, pending_limit=2, overload="reject", restart=restart) as device:
        for _ in range(2):
            await failure(device.zeros(1), accel.ContextPoisonedError)
        queued = await filled(device, 3)
        assert device.state is accel.DeviceState.REBUILDING
        error = await failure(device.zeros(1), accel.MailboxFullError)
        assert error.retry_after is not None
        assert error.retry_after > 0
        assert device.info().queued == 3
        await asyncio.gather(*queued)
        assert device.generation == 3


async def test_rejected_free_leaves_the_ref_as_it_was() -> None:
    plan = FaultPlan().hang_at(2)
    async with opened(plan, max_in_flight=1, pending_limit=1, overload="reject") as device:
        a = await device.full(3, 4.0)
        hanging = task(device.zeros(1))
        await in_flight(device, 1)
        queued = [task(device.elementwise.unary("neg", a))]
        await turns()
        queued.append(task(device.elementwise.unary("neg", a)))
        await turns()
        await failure(device.free(a), accel.MailboxFullError)
        assert not a.is_stale
        plan.release()
        await hanging
        for each in queued:
            np.testing.assert_array_equal(await device.get(await each), np.full(3, -4, np.float32))
        await device.free(a)
        assert a.is_stale


async def test_queue_of_waiters_has_a_bound() -> None:
    plan = FaultPlan().hang_at(1)
    async with opened(plan, max_in_flight=1, pending_limit=1) as device:
        calls = [task(device.zeros(1)) for _ in range(40)]
        await in_flight(device, 1)
        await turns()
        full = [each for each in calls if each.done()]
        assert 0 < len(full) < 40
        for each in full:
            error = await failure(each, accel.MailboxFullError)
            assert error.retry_after is not None
            assert error.message == "more than 16 submissions wait for room on device cpu:0"
        plan.release()
        await asyncio.gather(*(each for each in calls if each not in full))


async def test_waiters_for_room_survive_a_rebuild_in_order() -> None:
    plan = FaultPlan().hang_at(1).poison_at(1, op="reduce")
    async with opened(plan, max_in_flight=2, pending_limit=2, libraries=["reduce"]) as device:
        hanging = task(device.zeros(1))
        await in_flight(device, 1)
        order: list[int] = []
        x = np.zeros(3)
        calls = [task(device.put(x)) for _ in range(8)]
        for number, each in enumerate(calls):
            each.add_done_callback(lambda _, number=number: order.append(number))  # type: ignore[misc]
        await turns()
        first = calls.pop(0)  # it is on the device, behind the one that hangs
        plan.release()
        await hanging
        await first
        await asyncio.gather(*calls)
        assert order == list(range(8))
        ref = await device.put(x)
        await failure(device.reduce("sum", ref), accel.ContextPoisonedError)
        await generation(device, 2)


async def test_nobody_waits_for_room_on_a_context_that_has_faulted() -> None:
    plan = FaultPlan().hang_at(1)
    async with opened(plan, max_in_flight=1) as device:
        hanging = task(device.zeros(1))
        await in_flight(device, 1)
        context = device._host.context
        context.report_fault(accel.DriverError("gone", code=700, scope=accel.FaultScope.CONTEXT))
        # What is in flight there never retires: a batch that comes to its next piece only now must not wait for that.
        with pytest.raises(accel.ContextPoisonedError):
            await asyncio.wait_for(context.wait_for_room(1), 30)
        plan.release()
        with pytest.raises(accel.ContextPoisonedError):
            await hanging
        await generation(device, 2)
