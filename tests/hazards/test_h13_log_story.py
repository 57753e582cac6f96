"""With the levels that logging has by default, who reads of a fault reads how it ended; a device that is lost promises nothing."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

import numpy as np
import pytest

import accel
from accel.testing import FaultPlan

if TYPE_CHECKING:
    import logging


def story(records: list[logging.LogRecord]) -> list[str]:
    """Return the names of accel's events, in order."""
    return [record.getMessage().split()[0] for record in records if record.name == "accel"]


async def test_a_rebuild_in_this_process_is_told_to_its_end(caplog: pytest.LogCaptureFixture) -> None:
    async with asyncio.timeout(45), accel.System(close_timeout=5) as system:
        device = await system.open_device("cpu", host="inline", faults=FaultPlan().poison_at(1, op="unary"))
        x = await device.put(np.ones(4))
        assert story(caplog.records) == [], "a start is no event that wakes anybody"
        with pytest.raises(accel.ContextPoisonedError):
            await device.elementwise.unary("neg", x)
        await device.put(np.ones(4))
    told = story(caplog.records)
    assert told.index("actor_failed") < told.index("context_ready")
    levels = {record.getMessage().split()[0]: record.levelno for record in caplog.records if record.name == "accel"}
    assert levels["context_ready"] >= levels["actor_failed"]


async def test_another_child_is_told_to_be_ready(caplog: pytest.LogCaptureFixture) -> None:
    async with asyncio.timeout(45), accel.System(close_timeout=5) as system:
        device = await system.open_device("cpu", host="process")
        pid = device.info().pid
        assert pid is not None
        assert story(caplog.records) == []
        os.kill(pid, signal.SIGKILL)
        async for generation in device.generations():
            if generation == 2:
                break
    told = story(caplog.records)
    assert told.index("actor_failed") < told.index("context_ready")


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
