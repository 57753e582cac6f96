"""What is made off the loop is given back, whoever stops waiting and when."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

import accel
from accel.actors.acquire import acquire
from accel.cpu.backend import CpuBackend, CpuDevice


async def test_what_is_made_is_returned() -> None:
    disposed: list[int] = []
    async with accel.System() as system:
        assert await acquire(system, lambda: 7, disposed.append) == 7
    assert disposed == []


async def test_what_is_made_after_the_wait_was_cancelled_is_disposed_of() -> None:
    started, go, disposed = threading.Event(), threading.Event(), threading.Event()

    def make() -> int:
        started.set()
        go.wait()
        return 7

    async with accel.System() as system:
        waiting = asyncio.ensure_future(acquire(system, make, lambda made: disposed.set()))
        await asyncio.to_thread(started.wait)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not disposed.is_set()
        go.set()
        await asyncio.to_thread(disposed.wait, 10)
        assert disposed.is_set()


async def test_a_device_whose_opening_was_cancelled_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    started, go, closed = threading.Event(), threading.Event(), threading.Event()
    original, close = CpuBackend.open, CpuDevice.close

    def slow_open(self: CpuBackend, index: int) -> CpuDevice:
        started.set()
        go.wait()
        return original(self, index)

    def seen_close(self: CpuDevice, *, abandon: bool = False) -> None:
        close(self, abandon=abandon)
        closed.set()

    monkeypatch.setattr(CpuBackend, "open", slow_open)
    monkeypatch.setattr(CpuDevice, "close", seen_close)
    async with accel.System() as system:
        opening = asyncio.ensure_future(system.open_device("cpu"))
        await asyncio.to_thread(started.wait)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        go.set()
        assert await asyncio.to_thread(closed.wait, 10)


async def test_a_large_array_that_is_rearranged_keeps_its_deadline() -> None:
    rng = np.random.default_rng()
    array = rng.standard_normal((600, 500)).T
    async with accel.System() as system:
        device = await system.open_device("cpu")
        with pytest.raises(accel.DeadlineExceededError):
            await device.put(array, timeout=1e-9)
        ref = await device.put(array, timeout=30)
        np.testing.assert_array_equal(await device.get(ref), array)


async def test_info_can_be_asked_for_from_another_thread() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu")
        ref = await device.put(np.ones(100))
        before = device.info().memory.used
        del ref
        # Not on its own loop it counts what it finds, and leaves the frees to the loop.
        assert (await asyncio.to_thread(device.info)).memory.used == before
        assert device.info().memory.used == 0
