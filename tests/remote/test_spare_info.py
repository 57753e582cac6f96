"""What a device says of its spare child."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

import accel
from tests.child_support import until_so, workers
from tests.device_support import child_pid, generation

pytestmark = pytest.mark.usefixtures("nothing_left")


def anonymous(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) << 10


async def test_the_spare_and_its_memory_are_known() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", standby="context")
        assert await device.spare_ready()
        first = device.info().spare
        assert first is not None
        assert first.pid != child_pid(device)
        assert first.pid in workers()
        # The kernel counts pages in batches.
        np.testing.assert_allclose(first.host_nbytes, anonymous(first.pid), atol=4 << 20)
        assert first.host_nbytes > 4 << 20
        os.kill(child_pid(device), signal.SIGKILL)
        await generation(device, 2)
        assert child_pid(device) == first.pid
        assert await device.spare_ready()
        second = device.info().spare
        assert second is not None
        assert second.pid != first.pid
    assert device.info().spare is None


async def test_a_device_without_a_spare_says_so() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process")
        assert device.info().spare is None


async def test_a_spare_that_died_is_not_told_of() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", standby="context")
        assert await device.spare_ready()
        spare = device.info().spare
        assert spare is not None
        os.kill(spare.pid, signal.SIGKILL)
        await until_so(lambda: (now := device.info().spare) is None or now.pid != spare.pid, "the death of the spare is seen")
        assert await device.spare_ready()
        last = device.info().spare
        assert last is not None
        assert last.pid != spare.pid
