"""What the death of a context costs: nothing while work is examined, or was found to be the cause; nothing for a shortage; else one restart."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel.process.spawning import start_error
from accel.remote.link import Link
from accel.testing import FaultPlan
from tests.device_support import bounded

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LOST, READY = accel.DeviceState.LOST, accel.DeviceState.READY
ONCE = accel.RestartStrategy(max_restarts=1, backoff=(0.001, 0.001))


@contextlib.asynccontextmanager
async def opened(deaths: int, **options: Any) -> AsyncIterator[accel.Device]:
    plan = FaultPlan()
    for n in range(1, deaths + 1):
        plan.poison_at(n, op="unary")
    async with asyncio.timeout(45), accel.System(close_timeout=5) as system:
        yield await system.open_device("cpu", **{"faults": plan, "host": "inline", "restart": ONCE, **options})


async def die(device: accel.Device, *, is_last: bool = False) -> None:
    x = await device.put(np.ones(4))
    with pytest.raises(accel.ContextPoisonedError) as caught:
        await device.elementwise.unary("neg", x)
    assert caught.value.retryable is not is_last
    if not is_last:
        await device.put(np.ones(1))
        assert device.state is READY


async def test_a_death_of_work_that_was_found_costs_nothing() -> None:
    async with opened(7) as device:
        for _ in range(5):
            with device.attribution() as work:
                work.hold()
                await die(device)
            work.release(found=True)
        assert device.info().restarts == 5
        await die(device)
        await die(device, is_last=True)


async def test_nothing_is_charged_before_all_of_the_work_is_examined() -> None:
    async with opened(7) as device:
        held = []
        for _ in range(5):
            with device.attribution() as work:
                work.hold()
                work.hold()
                await die(device)
            work.release()
            held.append(work)
        for work in held:
            work.release()
        assert device.state is READY, "what is charged later ends nothing by itself"
        await die(device, is_last=True)
        assert device.state is LOST


async def test_a_death_that_is_not_examined_after_all_is_charged_at_the_end_of_the_block() -> None:
    async with opened(2) as device:
        with device.attribution():
            await die(device)
        await die(device, is_last=True)


async def test_one_of_several_that_is_found_excuses_the_death_for_all() -> None:
    async with opened(3) as device:
        with device.attribution() as _, device.attribution() as second:
            second.hold()
            await die(device)
        second.release(found=True)
        await die(device)
        await die(device, is_last=True)


async def test_work_that_has_left_the_device_answers_for_no_later_death() -> None:
    async with opened(3) as device:
        with device.attribution() as work:
            work.hold()
            await die(device)
        await die(device)
        work.release(found=True)
        await die(device, is_last=True)


async def test_a_death_that_no_context_can_follow_loses_the_device_all_the_same() -> None:
    gone = accel.DriverError("gone", scope=accel.FaultScope.DEVICE)
    async with opened(0, faults=FaultPlan().poison_at(1, gone, op="unary")) as device:
        with device.attribution() as work:
            await die(device, is_last=True)
        assert (work.deaths, device.state) == (0, LOST)


async def test_a_shortage_delays_a_rebuild_and_spends_no_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    start, refused = Link.start, 0

    async def short(*args: Any) -> Link:
        nonlocal refused
        refused += 1
        if refused <= 6:
            raise start_error(OSError(errno.EMFILE, "Too many open files"))
        return await start(*args)

    async with opened(2, host="process") as device:
        monkeypatch.setattr(Link, "start", short)
        await die(device)
        assert (refused, device.generation) == (7, 2)
        assert device.state is READY
        await die(device, is_last=True)


async def test_closing_ends_the_wait_for_the_end_of_a_shortage(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = asyncio.Event()

    async def short(*args: Any) -> Link:
        refused.set()
        raise start_error(OSError(errno.EAGAIN, "Resource temporarily unavailable"))

    async with opened(1, host="process", restart=accel.RestartStrategy(backoff=(3600.0, 3600.0))) as device:
        monkeypatch.setattr(Link, "start", short)
        x = await device.put(np.ones(4))
        with pytest.raises(accel.ContextPoisonedError):
            await device.elementwise.unary("neg", x)
        await bounded(refused.wait())
        await bounded(device.aclose(timeout=0.0))
