"""Callers that wait for a device: however their wait ends, the op is retired and no other caller is kept waiting."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

import accel
from accel import registry
from accel.testing import FaultPlan
from tests.device_support import bounded, failure, task, until
from tests.late_backend import LateDevice, LateEvent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(autouse=True, params=[1e-4, 5e-3], ids=["polled", "slept for"])
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    """Marks are so late that they are polled in each loop iteration, or that the poller sleeps."""
    monkeypatch.setitem(registry._BUILT_IN, "late", "tests.late_backend:LateBackend")
    monkeypatch.setattr(LateDevice, "delay", request.param)
    seconds: float = request.param
    return seconds


@pytest.fixture(params=["op", "batch"])
def way(request: pytest.FixtureRequest) -> str:
    """How an op is sent."""
    return str(request.param)


async def negated(device: accel.Device, x: accel.AccelRef, way: str, timeout: float | None = None) -> accel.AccelRef:
    if way == "op":
        return await device.elementwise.unary("neg", x, timeout=timeout)
    async with device.batch(timeout=timeout) as batch:
        return batch.elementwise.unary("neg", x)


@pytest.fixture
async def device() -> AsyncIterator[accel.Device]:
    async with accel.System() as system:
        yield await system.open_device("late")


async def learned(device: accel.Device, way: str) -> accel.AccelRef:
    x = await device.put(np.ones(8))
    for _ in range(20):
        x = await negated(device, x, way)
    return x


async def test_a_timeout_ends_the_wait(device: accel.Device, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = await learned(device, way)
    query, is_held = LateEvent.query, True
    monkeypatch.setattr(LateEvent, "query", lambda event: not is_held and query(event))
    await failure(negated(device, x, way, 0.01), accel.DeadlineExceededError)
    is_held = False
    await until(lambda: device.info().in_flight == 0, "the op retired")


async def test_cancelling_at_every_turn_leaves_nothing_in_flight(device: accel.Device, way: str) -> None:
    x = await learned(device, way)
    for turns in range(40):
        waiting = task(negated(device, x, way))
        for _ in range(turns):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        np.testing.assert_array_equal(await bounded(device.get(x)), np.ones(8))
    await until(lambda: device.info().in_flight == 0, "all retired")


async def test_many_at_once_are_all_answered_right(device: accel.Device, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = await learned(device, way)
    seed = random.randrange(2**32)
    rng = random.Random(seed)

    async def client() -> None:
        y = x
        for _ in range(rng.randrange(1, 12)):
            monkeypatch.setattr(LateDevice, "delay", rng.choice((0.0, 5e-5, 1e-4, 1e-3, 5e-3)))
            y = await device.elementwise.binary("add", y, x)
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random() * 1e-3)
        got = await device.get(y)
        assert (got == got[0]).all(), f"{seed=}"
        assert got[0] >= 2.0, f"{seed=}"

    await bounded(asyncio.gather(*(client() for _ in range(30))))
    await until(lambda: device.info().in_flight == 0, "all retired")


async def test_a_fault_ends_other_waits(way: str) -> None:
    async with accel.System() as system:
        device = await system.open_device("late", faults=FaultPlan().poison_at(1, op="fill"))
        x = await learned(device, way)
        waiting = task(negated(device, x, way))
        await until(lambda: device.info().in_flight == 1, "it waits")
        await failure(bounded(device.full(4, 1.0)), accel.ContextPoisonedError)
        (ended,) = await asyncio.gather(waiting, return_exceptions=True)
        assert isinstance(ended, (accel.ContextPoisonedError, accel.AccelRef))
        y = await bounded(device.put(np.ones(8)))
        assert device.generation == 2
        np.testing.assert_array_equal(await device.get(await bounded(negated(device, y, way))), -np.ones(8))


async def test_closing_the_device_waits_for_the_result(device: accel.Device, way: str) -> None:
    x = await learned(device, way)
    waiting = task(negated(device, x, way))
    await until(lambda: device.info().in_flight == 1, "it waits")
    await device.aclose()
    (ended,) = await asyncio.gather(waiting, return_exceptions=True)
    assert isinstance(ended, accel.AccelRef)


async def test_tiny_ops_of_one_task_let_others_run(device: accel.Device, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where an op has ended in the call that sends it, as small ones on the CPU do."""
    monkeypatch.setattr(LateDevice, "delay", 0.0)
    async with accel.System() as system:
        for each in (device, await system.open_device("cpu", host="inline")):
            x = await each.put(np.ones(8))
            iterations = 0

            async def count() -> None:
                nonlocal iterations
                while True:
                    iterations += 1
                    await asyncio.sleep(0)

            counting = task(count())
            for _ in range(50):
                before = iterations
                x = await negated(each, x, way)
                assert iterations > before
            counting.cancel()
            await asyncio.gather(counting, return_exceptions=True)
