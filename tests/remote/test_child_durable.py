"""What a lying child says of durable memory costs its own buffers at most: the next child starts, with what was there before."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

import numpy as np
import pytest

import accel
from tests import lying_child

if TYPE_CHECKING:
    from pathlib import Path

PATIENCE = 20.0
"""Seconds for what takes a second, on a machine that has much else to do."""
SOME = accel.RestartStrategy(max_restarts=4, within=600.0, backoff=(0.01, 0.02))


def kill(device: accel.Device) -> None:
    """Kill the child of the day."""
    pid = device.info().pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


async def until_ready(device: accel.Device, generation: int) -> None:
    """Wait for a generation."""
    async with asyncio.timeout(PATIENCE):
        async for number in device.generations():
            if number >= generation:
                return


async def open_with_a_liar(
    system: accel.System, lie: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> tuple[accel.Device, accel.AccelRef]:
    """Open a device, put something durable there, and replace its child by one that lies. The one after it will not."""
    name = lying_child.install(monkeypatch, tmp_path)
    device = await system.open_device(name, host="process", restart=SOME)
    kept = await device.put(np.arange(1000.0), durable=True)
    lying_child.lie(monkeypatch, lie, once=tmp_path / "told")
    kill(device)
    await until_ready(device, 2)
    assert (tmp_path / "told").exists(), "no child has lied"
    return device, kept


@pytest.mark.parametrize(
    "lie",
    [
        "overlapping buffers",
        "nested buffers",
        "a buffer at an odd place",
        "the same memory twice",
        "more memory than there is",
        "memory that can shrink",
    ],
)
async def test_what_can_be_seen_to_be_wrong_ends_the_child(lie: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with accel.System(close_timeout=1.0) as system:
        device, kept = await open_with_a_liar(system, lie, monkeypatch, tmp_path)
        with pytest.raises(accel.ContextPoisonedError) as caught:
            _ = [await asyncio.wait_for(device.zeros(8, durable=True), PATIENCE) for _ in range(3)]
        cause = caught.value.__cause__
        assert isinstance(cause, accel.HostDiedError)
        assert (cause.exit_code, cause.signal) == (None, None), "the child has ended by itself"
        await until_ready(device, 3)
        np.testing.assert_array_equal(await asyncio.wait_for(device.get(kept), PATIENCE), np.arange(1000.0))
        await asyncio.wait_for(device.put(np.arange(5.0), durable=True), PATIENCE)


@pytest.mark.parametrize("lie", ["no memory", "no memory, and a lot of it"])
async def test_what_only_the_next_child_can_see_costs_those_buffers(lie: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with accel.System(close_timeout=1.0) as system:
        device, kept = await open_with_a_liar(system, lie, monkeypatch, tmp_path)
        before = device.info().memory.durable
        refs = [await asyncio.wait_for(device.zeros(8, durable=True), PATIENCE) for _ in range(2)]
        kill(device)
        await until_ready(device, 3)
        np.testing.assert_array_equal(await asyncio.wait_for(device.get(kept), PATIENCE), np.arange(1000.0))
        for ref in refs:
            assert ref.is_stale
            with pytest.raises(accel.StaleRefError) as caught:
                await asyncio.wait_for(device.get(ref), PATIENCE)
            assert caught.value.reason == "torn"
            with pytest.raises(accel.StaleRefError) as caught:
                await asyncio.wait_for(device.put(np.zeros(8, np.float32), out=ref), PATIENCE)
            assert caught.value.reason == "torn"
            assert "drop it" in caught.value.remedy.lower()
        assert device.info().memory.durable == before
        del ref, refs
        again = await asyncio.wait_for(device.put(np.arange(5.0), durable=True), PATIENCE)
        assert device.info().memory.durable > before
        np.testing.assert_array_equal(await asyncio.wait_for(device.get(again), PATIENCE), np.arange(5.0))
