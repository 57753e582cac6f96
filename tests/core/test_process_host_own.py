"""Libraries of the user's own in the child that holds the context."""

from __future__ import annotations

import asyncio
import os

import numpy as np
import pytest

import accel
from accel.testing import FaultPlan
from tests.own_library_support import Scale, Sent, Where

pytestmark = pytest.mark.usefixtures("nothing_left")


async def test_a_library_runs_in_the_child_and_in_its_successor() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", faults=FaultPlan().kill_host_at(4))
        await device.register(Sent, 3.0)
        x = await device.put(np.arange(4.0))
        np.testing.assert_array_equal(await device.get(await device.run(Scale(x))), 6 * np.arange(4.0))
        with pytest.raises(accel.ContextPoisonedError):
            await device.run(Where(x))
        x = await asyncio.wait_for(device.put(np.zeros(1, np.int64)), 20)
        where = await device.get(await device.run(Where(x)))
        assert where[0] == device.info().pid != os.getpid()
        y = await device.put(np.ones(4))
        async with device.batch() as batch:
            h = batch.run(Scale(batch.elementwise.unary("neg", y)))
        np.testing.assert_array_equal(await device.get(h), np.full(4, -6.0))


async def test_a_library_goes_with_the_device_to_a_child() -> None:
    async with accel.System() as system:
        gone = accel.DriverError("gone", code=700, scope=accel.FaultScope.PROCESS)
        device = await system.open_device("cpu", faults=FaultPlan().poison_at(2, gone))
        await device.register(Sent)
        x = await device.put(np.zeros(1, np.int64))
        with pytest.raises(accel.ContextPoisonedError):
            await device.run(Where(x))
        x = await asyncio.wait_for(device.put(np.zeros(1, np.int64)), 20)
        assert (await device.get(await device.run(Where(x))))[0] == device.info().pid != os.getpid()


async def test_what_cannot_be_opened_or_sent_is_refused_and_the_device_goes_on() -> None:
    class Local(Sent):
        pass

    async with accel.System() as system:
        device = await system.open_device("cpu", host="process")
        with pytest.raises(accel.LibraryError, match="no such library"):
            await device.register(Sent, fails=True)
        with pytest.raises(accel.UnsupportedError, match="cannot be sent"):
            await device.register(Local)
        x = await device.put(np.ones(4))
        with pytest.raises(accel.UnsupportedError, match="no library 'sent'"):
            await device.run(Scale(x))
        await device.register(Sent)
        np.testing.assert_array_equal(await device.get(await device.run(Scale(x))), np.full(4, 2.0))
        assert device.generation == 1
