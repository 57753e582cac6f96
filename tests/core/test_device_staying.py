"""Callers that look for the end of their op themselves, because it is near: however they end, the op is retired and nobody is kept waiting."""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

import accel
from accel import registry
from accel.testing import FaultPlan
from tests.device_support import bounded, failure, task, until
from tests.late_backend import LateDevice

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks are 100 us late: too long to hold the loop for, too short to sleep."""
    monkeypatch.setitem(registry._BUILT_IN, "late", "tests.late_backend:LateBackend")
    monkeypatch.setattr(LateDevice, "delay", 1e-4)


@pytest.fixture
async def device() -> AsyncIterator[accel.Device]:
    async with accel.System() as system:
        yield await system.open_device("late")


async def learned(device: accel.Device) -> accel.AccelRef:
    x = await device.put(np.ones(8))
    for _ in range(20):
        x = await device.elementwise.unary("neg", x)
    return x


async def test_a_timeout_ends_the_wait_of_who_looks_itself(device: accel.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    x = await learned(device)
    monkeypatch.setattr(LateDevice, "delay", 0.2)
    began = time.perf_counter()
    await failure(device.elementwise.unary("neg", x, timeout=0.01), accel.DeadlineExceededError)
    assert time.perf_counter() - began < 0.19
    await until(lambda: device.info().in_flight == 0, "the op retired")


async def test_cancelling_at_every_turn_leaves_nothing_in_flight(device: accel.Device) -> None:
    x = await learned(device)
    for turns in range(40):
        waiting = task(device.elementwise.unary("neg", x))
        for _ in range(turns):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        np.testing.assert_array_equal(await bounded(device.get(x)), np.ones(8))
    await until(lambda: device.info().in_flight == 0, "all retired")


async def test_many_at_once_are_all_answered_right(device: accel.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    x = await learned(device)
    seed = random.randrange(2**32)
    rng = random.Random(seed)

    async def client() -> None:
        y = x
        for _ in range(rng.randrange(1, 12)):
            monkeypatch.setattr(LateDevice, "delay", rng.choice((0.0, 5e-5, 1e-4, 1e-3)))
            y = await device.elementwise.binary("add", y, x)
            if rng.random() < 0.3:
                await asyncio.sleep(0)
        got = await device.get(y)
        assert (got == got[0]).all(), f"{seed=}"
        assert got[0] >= 2.0, f"{seed=}"

    await bounded(asyncio.gather(*(client() for _ in range(30))))
    await until(lambda: device.info().in_flight == 0, "all retired")


async def test_a_fault_is_told_to_who_looks_itself() -> None:
    async with accel.System() as system:
        device = await system.open_device("late", faults=FaultPlan().poison_at(21, op="unary"))
        x = await learned(device)
        error = await failure(bounded(device.elementwise.unary("neg", x)), accel.ContextPoisonedError)
        assert error.generation == 1
        y = await bounded(device.put(np.ones(8)))
        assert device.generation == 2
        await bounded(device.elementwise.unary("neg", y))
