"""A child that does not end although it was killed, as one does that sits in the kernel: what waits for it ends all the same, and says so."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

import accel
from accel.actors import ActorSystem
from accel.process import child as child_module
from accel.process.child import ChildProcess
from accel.remote import actor
from benchmarks.chaos_parts.processes import children as everything
from tests.child_support import OURS, no_child_left, workers
from tests.device_support import bounded, child_pid, failure, generation, turns, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["no_child_left"]

pytestmark = pytest.mark.usefixtures("unkillable")


def give_up(device: accel.Device) -> None:
    """Stop the device's child, and have it found out, as the heartbeat does after a while."""
    os.kill(child_pid(device), signal.SIGSTOP)
    device._host.context.report_fault(accel.HostDiedError("silent", scope=accel.FaultScope.CONTEXT))


@pytest.fixture
async def unkillable(nothing_left: None, no_child_left: None, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Have signals by descriptor end nobody; the test's children are ended for real afterwards, and seen to be collected."""
    monkeypatch.setattr(child_module, "_KILL_TIMEOUT", 0.3)
    monkeypatch.setattr(actor, "_CLOSE_TIMEOUT", 0.3)
    before = everything()
    with monkeypatch.context() as patch:
        patch.setattr("signal.pidfd_send_signal", lambda *_: None)
        yield
    left = everything() - before
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    await until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in left), "the end of those that were left")
    await turns()  # in which it is told


async def test_closing_a_child_ends_with_an_error() -> None:
    async with ActorSystem() as system:
        child = await ChildProcess.start(system, f"{OURS}unbound_sleeps_in_c")
        await until(lambda: child._has_unread(), "ready")
        began = time.monotonic()
        for _ in range(2):
            error = await failure(child.aclose(grace=0.1), accel.HostDiedError)
            assert str(child.pid) in str(error)
            assert "kernel" in (error.remedy or "")
        assert time.monotonic() - began < 5
        assert child.exit is None
        os.kill(child.pid, signal.SIGKILL)
        assert (await bounded(child.wait())).signal == signal.SIGKILL
        assert (await child.aclose()).signal == signal.SIGKILL


async def test_closing_a_device_ends_and_the_log_says_what_it_left(caplog: pytest.LogCaptureFixture) -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process")
        await device.zeros(3)
        pid = child_pid(device)
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        with caplog.at_level(logging.ERROR):
            await bounded(device.aclose())
        assert time.monotonic() - began < 5
        assert caplog.text.count("child_not_ended") == 1
        assert str(pid) in caplog.text
        assert device.state is accel.DeviceState.CLOSED


async def test_a_rebuild_goes_on_without_it(caplog: pytest.LogCaptureFixture) -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process")
        x = await device.put(np.arange(3.0))
        first = child_pid(device)
        give_up(device)
        await asyncio.wait_for(generation(device, 2), 20)
        assert x.is_stale
        assert device.info().pid != first
        assert "child_not_ended" in caplog.text
        np.testing.assert_array_equal(await device.get(await device.put(np.arange(3.0))), np.arange(3.0))


async def test_durable_memory_is_not_given_to_another_one(caplog: pytest.LogCaptureFixture) -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", restart=accel.RestartStrategy(max_restarts=1))
        x = await device.put(np.arange(3.0), durable=True)
        give_up(device)
        await until(lambda: device.state is accel.DeviceState.LOST, "the loss")
        error = await failure(device.get(x), accel.DeviceLostError)
        assert "does not end" in f"{error} {error.__cause__}"


async def test_a_spare_that_was_given_up_and_does_not_end_is_not_promoted() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host=accel.ProcessHost(heartbeat_interval=0.05, heartbeat_timeout=0.2), standby="imports")
        assert await device.spare_ready()
        (spare,) = workers() - {child_pid(device)}
        os.kill(spare, signal.SIGSTOP)
        await until(lambda: device.info().standby == "none", "its end")
        give_up(device)
        await asyncio.wait_for(generation(device, 2), 20)
        assert child_pid(device) != spare
