"""A device that is LOST can be reopened: with its budget renewed, its durable data kept, and never in a process that a fault has poisoned."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel.testing import FaultPlan

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LOST, READY = accel.DeviceState.LOST, accel.DeviceState.READY


@contextlib.asynccontextmanager
async def opened(plan: FaultPlan | None = None, **options: Any) -> AsyncIterator[accel.Device]:
    """Open a device whose first fault loses it."""
    async with asyncio.timeout(45), accel.System(close_timeout=5) as system:
        options.setdefault("restart", accel.RestartStrategy(max_restarts=0))
        yield await system.open_device("cpu", faults=plan, **options)


def dead(scope: accel.FaultScope) -> accel.DriverError:
    return accel.DriverError("dead", code=719, scope=scope)


async def lose(device: accel.Device, ref: accel.AccelRef) -> None:
    """Send the op that the plan poisons."""
    with pytest.raises(accel.ContextPoisonedError):
        await device.elementwise.unary("neg", ref)
    assert device.state is LOST


@pytest.mark.parametrize("host", ["inline", "process"])
async def test_durable_data_is_kept_and_the_budget_is_as_new(host: str) -> None:
    plan = FaultPlan().poison_at(1, op="unary").poison_at(2, op="unary").poison_at(3, op="unary")
    async with opened(plan, host=host, restart=accel.RestartStrategy(max_restarts=1, within=3600.0)) as device:
        weights = await device.put(np.arange(4.0), durable=True)
        with pytest.raises(accel.ContextPoisonedError):
            await device.elementwise.unary("neg", weights)
        x = await device.put(np.ones(4))  # of the rebuild that the budget had
        await lose(device, x)
        assert device.info().memory.durable > 0
        assert device.info().pid is None
        assert not device.health().is_live

        await device.reopen()

        assert (device.state, device.generation) == (READY, 3)
        assert device.health().is_ready
        assert x.is_stale
        np.testing.assert_array_equal(await device.get(weights), np.arange(4.0))
        with pytest.raises(accel.ContextPoisonedError) as caught:
            await device.elementwise.unary("neg", weights)
        assert caught.value.retryable, "one rebuild is left again"
        np.testing.assert_array_equal(await device.get(weights), np.arange(4.0))
        assert device.generation == 4


async def test_iterators_of_before_end_and_new_ones_go_on() -> None:
    async with opened(FaultPlan().poison_at(1, op="unary"), host="inline") as device:
        seen: list[int] = []

        async def follow() -> None:
            async for generation in device.generations():
                seen.append(generation)  # noqa: PERF401 - it is looked at meanwhile

        follower = asyncio.ensure_future(follow())
        x = await device.put(np.ones(4))
        assert seen == [1]
        await lose(device, x)
        await device.reopen()
        with pytest.raises(accel.DeviceLostError):
            await follower
        assert seen == [1]
        assert await anext(device.generations()) == 2


async def test_all_who_call_share_one_attempt_and_ops_wait_for_it() -> None:
    async with opened(FaultPlan().poison_at(1, op="unary"), host="process") as device:
        await lose(device, await device.put(np.ones(4)))
        with pytest.raises(accel.DeviceLostError):
            await device.put(np.ones(4))
        first, second, impatient = (asyncio.ensure_future(device.reopen()) for _ in range(3))
        await asyncio.sleep(0)
        assert device.state is not LOST
        waiting = asyncio.ensure_future(device.put(np.full(4, 7.0)))
        impatient.cancel()
        with pytest.raises(asyncio.CancelledError):
            await impatient
        await asyncio.gather(first, second)
        assert (device.state, device.generation, device.info().restarts) == (READY, 2, 1)
        np.testing.assert_array_equal(await device.get(await waiting), np.full(4, 7.0))


async def test_an_attempt_goes_on_when_all_who_wait_are_cancelled() -> None:
    async with opened(FaultPlan().poison_at(1, op="unary"), host="process") as device:
        await lose(device, await device.put(np.ones(4)))
        only = asyncio.ensure_future(device.reopen())
        await asyncio.sleep(0)
        only.cancel()
        with pytest.raises(asyncio.CancelledError):
            await only
        assert await anext(device.generations()) == 2
        assert device.state is READY


async def test_the_end_of_the_last_context_may_be_told_after_the_device_is_reopened(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(FaultPlan().poison_at(1, op="unary"), host="process") as device:
        given_up, told = device._host.on_actor_stopped, list[BaseException | None]()
        monkeypatch.setattr(device._host, "on_actor_stopped", told.append)
        await lose(device, await device.put(np.ones(4)))
        while not told:
            await asyncio.sleep(0)
        reopened = asyncio.ensure_future(device.reopen())
        await asyncio.sleep(0)
        given_up(told[0])
        assert device.state is not LOST
        await reopened
        np.testing.assert_array_equal(await device.get(await device.put(np.ones(4))), np.ones(4))


async def test_only_a_lost_device_is_reopened() -> None:
    async with opened(host="inline") as device:
        with pytest.raises(accel.AccelError, match="ready"):
            await device.reopen()
        assert device.state is READY
        await device.aclose()
        with pytest.raises(accel.ClosedError):
            await device.reopen()


@pytest.mark.parametrize("scope", [accel.FaultScope.PROCESS, accel.FaultScope.DEVICE])
async def test_a_poisoned_process_gets_no_second_context(scope: accel.FaultScope) -> None:
    async with opened(FaultPlan().poison_at(1, dead(scope), op="unary"), host="inline") as device:
        await lose(device, await device.put(np.ones(4)))
        for _ in range(2):
            with pytest.raises(accel.UnsupportedError) as caught:
                await device.reopen()
            assert "process" in (caught.value.remedy or "")
            assert device.state is LOST
    with pytest.raises(accel.ClosedError):
        await device.reopen()


async def test_a_device_of_a_poisoned_process_reopens_in_a_child() -> None:
    plan = FaultPlan().poison_at(1, dead(accel.FaultScope.DEVICE), op="unary")
    async with opened(plan, host="auto") as device:
        weights = await device.put(np.arange(4.0), durable=True)
        assert device.info().host == "inline"
        await lose(device, weights)
        await device.reopen()
        assert device.info().host == "process"
        assert device.info().pid is not None
        np.testing.assert_array_equal(await device.get(weights), np.arange(4.0))


async def test_closing_ends_an_attempt() -> None:
    async with opened(FaultPlan().poison_at(1, op="unary"), host="process") as device:
        await lose(device, await device.put(np.ones(4)))
        attempt = asyncio.ensure_future(device.reopen())
        await asyncio.sleep(0)
        await device.aclose(timeout=0.0)
        with pytest.raises(accel.ClosedError):
            await attempt
        assert device.state is accel.DeviceState.CLOSED


async def test_an_attempt_that_fails_leaves_the_device_lost_with_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(FaultPlan().poison_at(1, op="unary"), host="process") as device:
        weights = await device.put(np.arange(4.0), durable=True)
        await lose(device, weights)
        monkeypatch.setattr("sys.executable", "/nonexistent/python")
        with pytest.raises(accel.DeviceLostError) as caught:
            await device.reopen()
        assert isinstance(caught.value.__cause__, accel.AccelError)
        assert device.state is LOST
        monkeypatch.undo()
        await device.reopen()
        np.testing.assert_array_equal(await device.get(weights), np.arange(4.0))


async def test_a_spare_child_is_there_again() -> None:
    async with opened(FaultPlan().poison_at(1, op="unary"), host="process", standby="imports") as device:
        await lose(device, await device.put(np.ones(4)))
        await device.reopen()
        assert await device.spare_ready()  # bounded by the timeout of opened()
