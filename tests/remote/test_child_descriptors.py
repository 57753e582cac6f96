"""Descriptors that a child sends: few are kept, none unasked, and closing one never blocks the loop, however long that takes."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import accel
from tests import lying_child

PATIENCE = 20.0
"""Seconds for what takes a second, on a machine that has much else to do."""
GAP = 2.5
"""Seconds for which no other callback of the loop may run, on such a machine. The socket lingers for five."""


async def until_ready(device: accel.Device, generation: int) -> None:
    """Wait for a generation."""
    async with asyncio.timeout(PATIENCE):
        async for number in device.generations():
            if number >= generation:
                return


async def worst_gap(done: asyncio.Event) -> float:
    """Return the longest time between two turns of the loop until ``done``."""
    worst, last = 0.0, time.monotonic()
    while not done.is_set():
        await asyncio.sleep(0)
        now = time.monotonic()
        worst, last = max(worst, now - last), now
    return worst


@pytest.mark.parametrize(
    "lie",
    [
        "a connection that lingers",
        "a connection that lingers, many times",
        "a connection that lingers, announced by nothing",
        "a connection that lingers, after nonsense",
    ],
)
async def test_a_descriptor_that_nobody_asked_for_ends_the_child_and_blocks_nothing(
    lie: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = lying_child.install(monkeypatch, tmp_path)
    lying_child.lie(monkeypatch, lie, once=tmp_path / "told")
    async with accel.System(close_timeout=1.0) as system:
        device = await system.open_device(name, host="process")
        done = asyncio.Event()
        gap = asyncio.ensure_future(worst_gap(done))
        try:
            await asyncio.wait_for(asyncio.gather(device.zeros(4), return_exceptions=True), PATIENCE)
            await until_ready(device, 2)
            await asyncio.wait_for(device.zeros(4), PATIENCE)
        finally:
            done.set()
            worst = await gap
        assert worst < GAP
        assert device.state is accel.DeviceState.READY


def run_program(name: str, descriptors: int) -> None:
    """Run a function of this file in a process with a limit of descriptors."""
    code = f"import asyncio; from {__name__} import {name} as program; asyncio.run(program())"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors)),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]


def open_descriptors() -> int:
    """Count them."""
    return len(os.listdir("/proc/self/fd"))


async def flooded() -> None:
    """Have a child announce more memory than there may be descriptors."""
    with pytest.MonkeyPatch.context() as monkeypatch, tempfile.TemporaryDirectory() as folder:
        name = lying_child.install(monkeypatch, Path(folder))
        lying_child.lie(monkeypatch, "memory without end", once=Path(folder) / "told")
        async with accel.System(close_timeout=1.0) as system:
            device = await system.open_device(name, host="process")
            before = most = open_descriptors()
            asked = asyncio.gather(device.zeros(4), return_exceptions=True)
            async with asyncio.timeout(PATIENCE):
                while not asked.done():
                    await asyncio.sleep(0)
                    most = max(most, open_descriptors())
            (error,) = await asked
            assert isinstance(error, accel.ContextPoisonedError), repr(error)
            assert most <= before + 256 // 2 + 64, f"{most} descriptors, {before} before"
            await until_ready(device, 2)
            await asyncio.wait_for(device.zeros(4), PATIENCE)
            async with asyncio.timeout(PATIENCE):
                while open_descriptors() > before + 16:
                    await asyncio.sleep(0)


def test_a_child_cannot_fill_the_table_of_descriptors() -> None:
    run_program("flooded", 256)


async def many_slabs() -> None:
    """Make more durable slabs than there may be, in a child that may have any number of descriptors."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (48, 1024))
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process")
        for pid in (device.info().pid, os.getpid()):
            assert pid is not None
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (1024, 1024))
        refs = [await device.empty((60 << 20,), "int8", durable=True) for _ in range(24)]
        with pytest.raises(accel.DriverError, match="ulimit -n") as caught:
            await device.empty((60 << 20,), "int8", durable=True)
        assert (caught.value.code, caught.value.retryable) == ("EMFILE", True)
        del refs[-3:]
        refs.append(await asyncio.wait_for(device.empty((60 << 20,), "int8", durable=True), PATIENCE))
        assert (device.state, device.generation) == (accel.DeviceState.READY, 1)


def test_an_honest_child_is_told_how_many_slabs_there_may_be() -> None:
    run_program("many_slabs", 1024)
