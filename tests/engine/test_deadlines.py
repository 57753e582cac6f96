"""With ``timeout=`` an await ends by then, wherever its op is; expired work is not launched."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import numpy as np
import pytest

import accel
from accel.testing import FaultPlan
from tests.device_support import PATIENCE, failure, in_flight, opened, task, turns, until, used

pytestmark = pytest.mark.usefixtures("nothing_left")

SOON = 0.03


async def test_op_that_expires_while_queued_is_never_launched() -> None:
    plan = FaultPlan().hang_at(2)
    async with opened(plan, max_in_flight=1) as device:
        x = await device.full((), 1.0)
        hanging = task(device.blas.scal(x, 2.0))
        await in_flight(device, 1)
        # The first of these is in the hand of the device's actor, the others are in its queue.
        expired = [task(device.blas.scal(x, 3.0, timeout=SOON)) for _ in range(3)]
        for each in expired:
            error = await failure(each, accel.DeadlineExceededError)
            assert isinstance(error, TimeoutError)
            assert (error.op, error.device, error.retryable) == ("scal", "cpu:0", True)
            assert "not been launched" in str(error)
        plan.release()
        await hanging
        assert float(await device.get(x)) == 2.0
        assert plan.count == 3


async def test_op_that_expires_while_waiting_for_room_is_never_sent() -> None:
    plan = FaultPlan().hang_at(1)
    async with opened(plan, max_in_flight=1, pending_limit=1) as device:
        hanging = task(device.zeros(1))
        await in_flight(device, 1)
        queued = [task(device.zeros(1)) for _ in range(2)]
        await turns()
        late = task(device.zeros(1, timeout=SOON))
        behind = task(device.zeros(1))
        error = await failure(late, accel.DeadlineExceededError)
        assert "0.03 s" in str(error)
        plan.release()
        await asyncio.gather(hanging, *queued, behind)
        assert plan.count == 4


async def test_op_that_expires_on_the_device_runs_on_with_its_memory() -> None:
    plan = FaultPlan().hang_at(2)
    async with opened(plan, libraries=["blas"]) as device:
        x = await device.full(64, 1.0)
        error = await failure(device.blas.scal(x, 2.0, timeout=SOON), accel.DeadlineExceededError)
        assert "on the device" in str(error)
        assert device.info().in_flight == 1
        del x
        other = await device.full(64, 9.0)
        plan.release()
        await in_flight(device, 0)
        np.testing.assert_array_equal(await device.get(other), np.full(64, 9, np.float32))


async def test_op_that_expires_while_the_context_is_rebuilt() -> None:
    async with opened(FaultPlan().poison_at(1).poison_at(2), restart=accel.RestartStrategy(backoff=(0.2, 0.2))) as device:
        for _ in range(2):
            await failure(device.zeros(1), accel.ContextPoisonedError)
        # The second rebuild begins after a delay.
        for call in (device.zeros(1, timeout=SOON), _one_batch(device)):
            await failure(call, accel.DeadlineExceededError)
        assert device.state is accel.DeviceState.REBUILDING
        assert (await device.get(await device.zeros(1, timeout=PATIENCE))).shape == (1,)


async def _one_batch(device: accel.Device) -> None:
    async with device.batch(timeout=SOON) as batch:
        batch.zeros(1)


async def test_deadline_covers_a_library_that_is_opened(device: accel.Device) -> None:
    a = await device.zeros((4, 4))
    began = time.monotonic()
    with contextlib.suppress(accel.DeadlineExceededError):
        await device.blas.gemm(a, a, timeout=1e-6)
    assert time.monotonic() - began < PATIENCE / 2
    await device.blas.gemm(a, a, timeout=PATIENCE)


@pytest.mark.parametrize("timeout", [0, -1, -0.5, float("-inf")])
async def test_no_time_at_all_ends_before_anything_is_sent(timeout: float) -> None:
    plan = FaultPlan()
    async with opened(plan) as device:
        await failure(device.zeros(1, timeout=timeout), accel.DeadlineExceededError)
        with pytest.raises(accel.DeadlineExceededError):
            async with device.batch(timeout=timeout) as batch:
                batch.zeros(1)
        assert plan.count == 0
        assert used(device) == 0


@pytest.mark.parametrize("timeout", [float("nan"), "1", True, [1], 1j], ids=repr)
async def test_timeout_that_is_no_number_is_refused(timeout: Any) -> None:
    plan = FaultPlan()
    async with opened(plan) as device:
        await failure(device.zeros(1, timeout=timeout), accel.InvalidArgumentError)
        with pytest.raises(accel.InvalidArgumentError):
            async with device.batch(timeout=timeout) as batch:
                batch.zeros(1)
        with pytest.raises(accel.InvalidArgumentError):
            async with device.batch(timeout=timeout):
                pass
        assert plan.count == 0


@pytest.mark.parametrize("timeout", [5, 5.0, np.float64(5), float("inf"), None])
async def test_timeout_that_is_long_enough_changes_nothing(timeout: float | None, device: accel.Device) -> None:
    np.testing.assert_array_equal(await device.get(await device.full(2, 3.0, timeout=timeout), timeout=timeout), [3, 3])


async def test_batch_that_expires_on_the_device_ends_its_wait() -> None:
    plan = FaultPlan().hang_at(1)
    async with opened(plan, libraries="blas") as device:
        refs: list[accel.AccelRef] = []

        async def record() -> None:
            # Long enough to get to the device on a busy machine; there it hangs until the deadline has passed.
            async with device.batch(timeout=20 * SOON) as batch:
                refs.extend((batch.zeros(4), batch.full(4, 2.0)))

        with pytest.raises(accel.DeadlineExceededError) as caught:
            await record()
        assert plan.count == 2, "both ops had reached the device"
        assert caught.value.op == "batch"
        plan.release()
        # Their memory is theirs, and its contents come.
        np.testing.assert_array_equal(await device.get(refs[1]), np.full(4, 2, np.float32))
        refs.clear()
        del caught
        await until(lambda: used(device) == 0)


async def test_batch_that_expires_while_queued_is_void() -> None:
    plan = FaultPlan().hang_at(1)
    async with opened(plan, max_in_flight=1) as device:
        hanging = task(device.zeros(1))
        await in_flight(device, 1)
        with pytest.raises(accel.DeadlineExceededError):
            async with device.batch(timeout=SOON) as batch:
                ref = batch.zeros(4)
        assert ref.is_stale
        plan.release()
        await hanging
        await failure(device.get(ref), accel.StaleRefError)
        assert plan.count == 1
