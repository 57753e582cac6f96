"""Libraries of the user's own in the child that holds the context."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import numpy as np
import pytest

import accel
from accel.testing import FaultPlan
from tests.device_support import bounded, failure, task, turns
from tests.own_library_support import Scale, Scaling, Stall, Where

pytestmark = pytest.mark.usefixtures("nothing_left")


async def test_a_library_runs_in_the_child_and_in_its_successor() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", faults=FaultPlan().kill_host_at(4))
        await device.register(Scaling, 3.0)
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
        await device.register(Scaling)
        x = await device.put(np.zeros(1, np.int64))
        with pytest.raises(accel.ContextPoisonedError):
            await device.run(Where(x))
        x = await asyncio.wait_for(device.put(np.zeros(1, np.int64)), 20)
        assert (await device.get(await device.run(Where(x))))[0] == device.info().pid != os.getpid()


async def works_again(device: accel.Device, generation: int) -> None:
    x = await asyncio.wait_for(device.put(np.ones(4)), 20)
    np.testing.assert_array_equal(await device.get(await device.run(Scale(x))), np.full(4, 2.0))
    assert device.generation == generation


async def test_a_call_that_keeps_the_interpreter_is_found_out_although_it_may_be_loading() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host=accel.ProcessHost(heartbeat_interval=0.05, heartbeat_timeout=0.2))
        await device.register(Scaling)
        x = await device.put(np.ones(4))
        with pytest.raises(accel.ContextPoisonedError, match="not answered"):
            await asyncio.wait_for(device.run(Stall(x, way="locked")), 20)
        await works_again(device, 2)


async def test_only_the_first_call_of_a_kernel_is_taken_for_one_that_loads_something() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", hang_timeout=1.0)
        await device.register(Scaling)
        x = await device.put(np.ones(4))
        await device.run(Stall(x))
        with pytest.raises(accel.ContextPoisonedError, match="hung"):
            await asyncio.wait_for(device.run(Stall(x, way="waits")), 20)
        await works_again(device, 2)


@pytest.mark.parametrize("way", ["answers", "looks"])
async def test_a_child_that_loses_answers_by_an_error_of_its_own_is_given_up(way: str) -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process")
        await device.register(Scaling)
        x = await device.put(np.ones((400, 400)))
        with pytest.raises(accel.ContextPoisonedError, match="this is broken") as caught:
            async with asyncio.timeout(20):
                await device.run(Stall(x, way=way))
                await device.blas.gemm(x, x)
        assert (caught.value.scope, caught.value.retryable) == (accel.FaultScope.CONTEXT, True)
        await works_again(device, 2)


async def test_what_cannot_be_opened_or_sent_is_refused_and_the_device_goes_on() -> None:
    class Local(Scaling):
        pass

    async with accel.System() as system:
        device = await system.open_device("cpu", host="process")
        with pytest.raises(accel.LibraryError, match="no such library"):
            await device.register(Scaling, fails=True)
        with pytest.raises(accel.UnsupportedError, match="cannot be sent"):
            await device.register(Local)
        x = await device.put(np.ones(4))
        with pytest.raises(accel.UnsupportedError, match="no library 'sent'"):
            await device.run(Scale(x))
        await device.register(Scaling)
        np.testing.assert_array_equal(await device.get(await device.run(Scale(x))), np.full(4, 2.0))
        assert device.generation == 1


async def test_ops_sent_after_an_unregistration_that_waits_are_refused() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", pinned_limit=1 << 20)
        await device.register(Scaling)
        x = await device.put(np.ones(4))
        async with device.graph() as graph:
            graph.run(Scale(x))
        await graph.replay()
        held = [await device.pinned((1 << 20,), "uint8")]
        putting = task(device.put(np.ones(1 << 18, np.float32)))
        await turns()
        leaving = task(device.unregister("sent"))
        await turns()
        later: list[asyncio.Future[Any]] = [task(device.run(Scale(x))), task(graph.replay()), task(batched(device, x))]
        await bounded(device.elementwise.unary("neg", x))  # ops of other libraries overtake
        assert not putting.done()
        assert not leaving.done()
        assert not any(waiting.done() for waiting in later)
        held.clear()
        for waiting in later:
            await failure(waiting, accel.UnsupportedError)
        await bounded(leaving)
        await bounded(putting)


async def batched(device: accel.Device, x: accel.AccelRef) -> None:
    """Run an op of the library in a batch."""
    async with device.batch() as batch:
        batch.run(Scale(x))
