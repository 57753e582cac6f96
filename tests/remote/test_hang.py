"""A device on which nothing ends any more: it is found out, its child is killed, and another one goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

import accel
from accel.ops import Plan, Spec
from accel.testing import FaultPlan
from tests.device_support import child_pid, generation

pytestmark = pytest.mark.usefixtures("nothing_left")

LOST = accel.DriverError("illegal address", code=700, scope=accel.FaultScope.PROCESS)


@dataclass(frozen=True, eq=False, slots=True)
class Sleep(accel.KernelOp):
    """Takes its time on the device."""

    library: ClassVar[str] = "slow"
    kind: ClassVar[str] = "sleep"

    x: accel.AccelRef
    seconds: float

    def plan(self) -> Plan:
        return Plan((self.x,), (), (Spec(self.x.shape, self.x.dtype),))


class Slow(accel.KernelLibrary):
    """Slow to open, and slow to compute."""

    name = "slow"

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def open(self, stream: Any) -> None:
        time.sleep(self.seconds)

    @accel.kernel(Sleep)
    def sleep(self, op: Sleep, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        stream.submit(lambda: time.sleep(op.seconds), op.seconds)


async def test_an_op_that_never_ends_is_ended_with_its_child() -> None:
    plan = FaultPlan().hang_at(2)
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", hang_timeout=0.3, faults=plan, streams=1)
        x = await device.put(np.ones(4))
        pid = child_pid(device)
        began = time.perf_counter()
        waits = [asyncio.ensure_future(device.elementwise.unary("neg", x)) for _ in range(3)]
        for wait in waits:
            with pytest.raises(accel.ContextPoisonedError) as caught:
                await asyncio.wait_for(wait, 20)
            error = caught.value
            assert "hung" in str(error)
            assert (error.executed, error.suspects, error.scope) == ("unknown", ("unary",) * 3, accel.FaultScope.CONTEXT)
            assert isinstance(error.__cause__, accel.HostDiedError)
        assert 0.3 <= time.perf_counter() - began < 3
        x = await asyncio.wait_for(device.put(np.arange(4.0)), 20)
        np.testing.assert_array_equal(await device.get(x), np.arange(4.0))
        assert (device.generation, device.info().restarts) == (2, 1)
        assert device.info().pid != pid
    plan.release()


async def test_it_is_honoured_once_an_auto_device_has_moved() -> None:
    plan = FaultPlan().poison_at(1, LOST).hang_at(2)
    async with accel.System() as system:
        device = await system.open_device("cpu", hang_timeout=0.3, faults=plan)
        for text in ("illegal address", "hung"):
            with pytest.raises(accel.ContextPoisonedError, match=text):
                await asyncio.wait_for(device.zeros(4), 20)
        await asyncio.wait_for(device.zeros(4), 20)
        assert device.generation == 3
    plan.release()


async def test_many_ops_one_after_the_other_are_no_hang() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", hang_timeout=0.4)
        await device.register(Slow, 0.0)
        x = await device.put(np.ones(4))
        await asyncio.gather(*(device.run(Sleep(x, 0.1)) for _ in range(8)))
        assert device.generation == 1


async def test_opening_a_library_does_not_count() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", hang_timeout=0.3)
        await device.register(Slow, 0.6)
        x = await device.put(np.ones(4))
        os.kill(child_pid(device), signal.SIGKILL)
        await generation(device, 2)
        x = await device.put(np.ones(4))
        began = time.perf_counter()
        await device.run(Sleep(x, 0.0))  # the library is opened at its first use
        assert time.perf_counter() - began >= 0.6
        assert device.generation == 2


async def test_that_this_process_was_stopped_does_not_count() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", hang_timeout=0.3)
        await device.register(Slow, 0.0)
        x = await device.put(np.ones(4))
        wait = asyncio.ensure_future(device.run(Sleep(x, 0.2)))
        async with asyncio.timeout(30):
            while not device.info().in_flight:
                await asyncio.sleep(0)
        time.sleep(0.6)
        await asyncio.wait_for(wait, 20)
        assert device.generation == 1


async def test_a_hang_in_one_stream_is_found_out_while_others_go_on() -> None:
    plan = FaultPlan().hang_at(1, op="gemm")
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", hang_timeout=0.3, faults=plan)
        x, y = await device.put(np.eye(4)), await device.put(np.ones(4))
        hanging = asyncio.ensure_future(device.blas.gemm(x, x))
        others = 0
        async with asyncio.timeout(30):
            while not hanging.done():
                try:
                    y = await device.elementwise.unary("neg", y)
                except (accel.ContextPoisonedError, accel.StaleRefError):
                    break
                others += 1
        error = (await asyncio.gather(hanging, return_exceptions=True))[0]
        assert isinstance(error, accel.ContextPoisonedError)
        assert others > 10, "nothing else went on meanwhile"
        plan.release()
