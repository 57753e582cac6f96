"""``device.info().pid`` is a child's, or ``None``: what kills the process that it names never kills the service."""

from __future__ import annotations

import asyncio
import os
import signal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import accel
from accel.device.info import health_of
from accel.testing import FaultPlan
from tests.device_support import in_flight, opened, task, turns


async def test_an_inline_device_has_no_child() -> None:
    async with asyncio.timeout(45), accel.System(close_timeout=5) as system:
        for host in ("inline", "auto"):
            device = await system.open_device("cpu", host=host)
            assert device.info().pid is None


async def test_a_child_is_named_while_it_is_there() -> None:
    async with asyncio.timeout(45), accel.System(close_timeout=5) as system:
        once = accel.RestartStrategy(max_restarts=0)
        device = await system.open_device("cpu", host="process", restart=once)
        pid = device.info().pid
        assert pid is not None
        assert pid != os.getpid()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(accel.DeviceLostError):
            async for _ in device.generations():
                pass
        assert device.info().pid is None


async def test_there_is_none_between_two_children() -> None:
    lost = accel.DriverError("lost", scope=accel.FaultScope.PROCESS)
    async with asyncio.timeout(45), accel.System(close_timeout=5) as system:
        device = await system.open_device("cpu", host="auto", faults=FaultPlan().poison_at(1, lost, op="unary"))
        x = await device.put(np.ones(4))
        with pytest.raises(accel.ContextPoisonedError):
            await device.elementwise.unary("neg", x)
        assert (device.state, device.info().pid) == (accel.DeviceState.REBUILDING, None)
        await device.put(np.ones(4))
        assert device.info().pid not in (None, os.getpid())


async def test_a_device_that_closes_says_so() -> None:
    plan = FaultPlan().hang_at(1)
    async with opened(plan) as device:
        call = task(device.zeros(2))
        await in_flight(device, 1)
        closing = task(device.aclose())
        await turns()
        health = device.health()
        assert (health.is_live, health.is_ready, health.state, health.reason) == (True, False, accel.DeviceState.READY, "closing")
        plan.release()
        await closing
        await call
        assert device.health().reason == "closed"


class Changing:
    """The lifecycle of a device that another thread moves on at each look at its state."""

    generation, cause = 1, None

    def __init__(self) -> None:
        self._states = iter((accel.DeviceState.READY, accel.DeviceState.REBUILDING, accel.DeviceState.LOST, accel.DeviceState.CLOSED))

    @property
    def state(self) -> accel.DeviceState:
        return next(self._states)

    @property
    def is_final(self) -> bool:
        return self.state in (accel.DeviceState.LOST, accel.DeviceState.CLOSED)


def test_health_is_of_one_state() -> None:
    core: Any = SimpleNamespace(lifecycle=Changing(), is_closing=False, durable=SimpleNamespace(any_torn=False))
    assert health_of(core, None, {}) == accel.DeviceHealth(True, True, accel.DeviceState.READY, 1, "")
