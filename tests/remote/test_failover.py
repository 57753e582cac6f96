"""A device that begins in this process and goes on in a child when a fault has taken it from the process."""

from __future__ import annotations

import asyncio
import os

import numpy as np
import pytest

import accel
from accel.testing import FaultPlan

pytestmark = pytest.mark.usefixtures("nothing_left")

LOST = accel.DriverError("illegal address", code=700, scope=accel.FaultScope.PROCESS)


async def test_a_fault_of_the_process_moves_the_device_to_a_child() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", faults=FaultPlan().poison_at(3, LOST))
        assert (device.info().host, device.info().pid) == ("inline", None)
        x = await device.put(np.ones(4))
        y = await device.elementwise.unary("neg", x)
        with pytest.raises(accel.ContextPoisonedError) as caught:
            await asyncio.wait_for(device.elementwise.unary("neg", y), 30)
        assert (caught.value.code, caught.value.scope, caught.value.retryable) == (700, accel.FaultScope.PROCESS, True)
        with pytest.raises(accel.StaleRefError):
            await device.get(x)
        x = await asyncio.wait_for(device.put(np.arange(4.0)), 20)
        assert device.info().host == "process"
        assert device.info().pid != os.getpid()
        assert (device.generation, device.info().restarts) == (2, 1)
        np.testing.assert_array_equal(await device.get(await device.elementwise.unary("neg", x)), -np.arange(4.0))


async def test_what_was_queued_runs_in_the_child() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", faults=FaultPlan().poison_at(1, LOST))
        with pytest.raises(accel.ContextPoisonedError):
            await asyncio.wait_for(device.zeros(4), 30)
        made = await asyncio.wait_for(asyncio.gather(*(device.full(3, float(n), "float64") for n in range(50))), 20)
        assert device.info().host == "process"
        for n, ref in enumerate(made):
            np.testing.assert_array_equal(await device.get(ref), np.full(3, float(n)))
