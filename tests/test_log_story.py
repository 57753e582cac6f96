"""A rebuild is one warning, and its end is information; a device that is lost promises nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import signal

import numpy as np
import pytest

import accel
from accel.testing import FaultPlan


def story(records: list[logging.LogRecord]) -> list[str]:
    """Return the names of accel's events, in order."""
    return [record.getMessage().split()[0] for record in records if record.name == "accel"]


def levels(records: list[logging.LogRecord]) -> list[tuple[str, int]]:
    """Return the names and levels of accel's events that tell of a rebuild, in order."""
    told = [(record.getMessage().split()[0], record.levelno) for record in records if record.name == "accel"]
    return [(event, level) for event, level in told if event in ("actor_failed", "context_ready", "device_lost")]


REBUILT = [("context_ready", logging.INFO), ("actor_failed", logging.WARNING), ("context_ready", logging.INFO)]


async def test_a_rebuild_in_this_process_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "accel")
    async with asyncio.timeout(45), accel.System(close_timeout=5) as system:
        device = await system.open_device("cpu", host="inline", faults=FaultPlan().poison_at(1, op="unary"))
        x = await device.put(np.ones(4))
        with pytest.raises(accel.ContextPoisonedError):
            await device.elementwise.unary("neg", x)
        await device.put(np.ones(4))
    assert levels(caplog.records) == REBUILT


async def test_another_child_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "accel")
    async with asyncio.timeout(45), accel.System(close_timeout=5) as system:
        device = await system.open_device("cpu", host="process")
        pid = device.info().pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        async for generation in device.generations():
            if generation == 2:
                break
    assert levels(caplog.records) == REBUILT


async def test_a_lost_device_promises_no_new_host(caplog: pytest.LogCaptureFixture) -> None:
    async with asyncio.timeout(45), accel.System(close_timeout=5) as system:
        device = await system.open_device("cpu", host="process", restart=accel.RestartStrategy(max_restarts=0))
        pid = device.info().pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(accel.DeviceLostError) as caught:
            async for _ in device.generations():
                pass
    told = story(caplog.records)
    assert "device_lost" in told
    assert "context_ready" not in told
    for text in [record.getMessage() for record in caplog.records] + [str(caught.value), str(caught.value.__cause__)]:
        assert "new host" not in text
        assert "being rebuilt" not in text
        assert "being started" not in text
