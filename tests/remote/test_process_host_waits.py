"""Callers that wait for a child: however their wait ends, the op is retired and no other caller is kept waiting."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

import accel
from tests.device_support import bounded, task, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
async def device() -> AsyncIterator[accel.Device]:
    async with accel.System() as system:
        yield await system.open_device("cpu", host="process")


async def test_cancelling_at_every_turn_leaves_nothing_in_flight(device: accel.Device) -> None:
    x = await device.put(np.ones(8))
    for turns in range(60):
        waiting = task(device.elementwise.unary("neg", x))
        for _ in range(turns):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        np.testing.assert_array_equal(await bounded(device.get(x)), np.ones(8))
    await until(lambda: device.info().in_flight == 0, "all answered")


async def test_many_at_once_are_all_answered_right(device: accel.Device) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    x = await device.put(np.ones(8))

    async def client() -> None:
        y = x
        for _ in range(rng.randrange(1, 20)):
            if rng.random() < 0.3:
                async with device.batch() as batch:
                    y = batch.elementwise.binary("add", y, x)
            else:
                y = await device.elementwise.binary("add", y, x)
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random() * 1e-3)
        got = await device.get(y)
        assert (got == got[0]).all(), f"{seed=}"
        assert got[0] >= 2.0, f"{seed=}"

    await bounded(asyncio.gather(*(client() for _ in range(20))))
    await until(lambda: device.info().in_flight == 0, "all answered")


async def test_closing_waits_for_the_answer() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process")
        x = await device.put(np.ones(8))
        waiting = task(device.elementwise.unary("neg", x))
        await asyncio.sleep(0)
        await device.aclose()
        (ended,) = await asyncio.gather(waiting, return_exceptions=True)
        assert isinstance(ended, accel.AccelRef)
