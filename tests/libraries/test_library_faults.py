"""A fault of the device that a library finds first, and raises as an error of its own, is the fault: with the driver's code, wherever it surfaces."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel.patterns import DynamicBatcher
from tests.op_bugs_support import Bug, Poisoned, PoisonedOnTheLoop

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

PATIENCE = 30.0
"""Seconds for what takes one, on a machine that has much else to do."""


@pytest.mark.parametrize("host", ["inline", "process"])
@pytest.mark.parametrize("library", [Poisoned, PoisonedOnTheLoop])
async def test_what_a_library_raises_of_a_dead_context_is_the_fault(host: Any, library: type[Poisoned]) -> None:
    async with accel.System(close_timeout=2) as system:
        device = await system.open_device("cpu", host=host)
        await device.register(library)
        x, durable = await device.put(np.ones(4)), await device.put(np.ones(3), durable=True)
        with pytest.raises(accel.ContextPoisonedError) as caught:
            await asyncio.wait_for(device.run(Bug(x, "poison")), PATIENCE)
        assert caught.value.code == 700
        assert "illegal address" in str(caught.value)
        assert "bug" in caught.value.suspects
        assert x.is_stale
        y = await asyncio.wait_for(device.run(Bug(await device.put(np.ones(4)))), PATIENCE)
        np.testing.assert_array_equal(await device.get(y), np.full(4, 2.0))
        np.testing.assert_array_equal(await device.get(durable), np.ones(3))
        assert (device.state, device.generation) == (accel.DeviceState.READY, 2)


@pytest.mark.parametrize("host", ["inline", "process"])
async def test_so_is_what_its_open_raises(host: Any) -> None:
    async with accel.System(close_timeout=2) as system:
        device = await system.open_device("cpu", host=host)
        with pytest.raises(accel.ContextPoisonedError) as caught:
            await asyncio.wait_for(device.register(Poisoned, False), PATIENCE)
        assert caught.value.code == 700
        x = await asyncio.wait_for(device.put(np.ones(4)), PATIENCE)
        np.testing.assert_array_equal(await device.get(x), np.ones(4))
        assert (device.state, device.generation) == (accel.DeviceState.READY, 2)


async def handler_on(device: accel.Device) -> Callable[[list[float]], Awaitable[list[float]]]:
    """Return the handler of a batch, for a device."""

    async def handle(batch: list[float]) -> list[float]:
        x = await device.put(np.asarray(batch))
        return [float(each) for each in await device.get(await device.run(Bug(x)))]

    return handle


async def test_the_quarantine_finds_the_one_input_and_all_others_are_answered() -> None:
    async with accel.System(close_timeout=2) as system:
        device = await system.open_device("cpu", host="process")
        await device.register(Poisoned)
        wanted = [float(n) for n in range(16)]
        wanted[5] = -1.0
        async with DynamicBatcher(
            await handler_on(device), max_items=16, idempotent=True, device=device, quarantine=handler_on, close_timeout=5
        ) as batcher:
            answers = await asyncio.wait_for(asyncio.gather(*(batcher.submit(each) for each in wanted), return_exceptions=True), PATIENCE)
        assert isinstance(answers[5], accel.PoisonedInputError)
        assert [answer for n, answer in enumerate(answers) if n != 5] == [each + 1 for each in wanted if each >= 0]
        assert device.state is accel.DeviceState.READY
