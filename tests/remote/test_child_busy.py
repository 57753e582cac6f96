"""A child that says that it is busy, or says nothing: each thing that it is asked for ends."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

import accel
from accel.ops import Plan, Spec
from tests import lying_child

if TYPE_CHECKING:
    from pathlib import Path

PATIENCE = 20.0
"""Seconds for what takes a second, on a machine that has much else to do."""


@pytest.mark.parametrize("lie", ["busy", "toggling"])
async def test_what_a_child_says_of_being_busy_puts_a_hang_off_only_so_long(
    lie: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = lying_child.install(monkeypatch, tmp_path)
    lying_child.lie(monkeypatch, lie, once=tmp_path / "told")
    async with accel.System(close_timeout=1.0) as system:
        device = await system.open_device(name, host=accel.ProcessHost(busy_timeout=1.0), hang_timeout=0.3)
        began = time.monotonic()
        with pytest.raises(accel.ContextPoisonedError, match="hung"):
            await asyncio.wait_for(device.zeros(4), PATIENCE)
        assert time.monotonic() - began >= 1.0, "being busy counts for nothing"
        await asyncio.wait_for(device.zeros(4), PATIENCE)
        assert (device.state, device.generation) == (accel.DeviceState.READY, 2)


@pytest.mark.parametrize("lie", ["deaf", "deaf to ops"])
async def test_a_successor_that_does_not_take_durable_memory_over_is_replaced(
    lie: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = lying_child.install(monkeypatch, tmp_path)
    async with accel.System(close_timeout=1.0) as system:
        device = await system.open_device(name, host=accel.ProcessHost(busy_timeout=1.0))
        kept = await device.put(np.arange(8.0), durable=True, checksum=True)
        lying_child.lie(monkeypatch, lie, once=tmp_path / "told")
        pid = device.info().pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until_ready(device, 2)
        assert (tmp_path / "told").exists(), "no child has lied"
        np.testing.assert_array_equal(await asyncio.wait_for(device.get(kept), PATIENCE), np.arange(8.0))


@dataclass(frozen=True, eq=False, slots=True)
class Noop(accel.KernelOp):
    """Does nothing."""

    library: ClassVar[str] = "idle"
    kind: ClassVar[str] = "noop"

    x: accel.AccelRef

    def plan(self) -> Plan:
        return Plan((self.x,), (), (Spec(self.x.shape, self.x.dtype),))


class Idle(accel.KernelLibrary):
    """A library that does nothing."""

    name = "idle"

    @accel.kernel(Noop)
    def noop(self, op: Noop, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        pass


@pytest.mark.parametrize("step", ["register", "compile"])
async def test_a_step_that_is_never_answered_ends(step: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = lying_child.install(monkeypatch, tmp_path)
    lying_child.lie(monkeypatch, "deaf", once=tmp_path / "told")
    async with accel.System(close_timeout=1.0) as system:
        device = await system.open_device(name, host=accel.ProcessHost(busy_timeout=0.5))
        asked = device.register(Idle) if step == "register" else device.compiler.compile("void nothing() {}", "nothing", parameters=())
        with pytest.raises(accel.ContextPoisonedError, match="hung"):
            await asyncio.wait_for(asked, PATIENCE)
        await asyncio.wait_for(device.zeros(4), PATIENCE)
        assert (device.state, device.generation) == (accel.DeviceState.READY, 2)


@pytest.mark.parametrize("what", ["a layout that is none", "a layout that is deeply nested", "no layout"])
async def test_a_child_that_lies_about_a_kernel_is_replaced(what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = lying_child.install(monkeypatch, tmp_path)
    lying_child.lie(monkeypatch, what, once=tmp_path / "told")
    async with accel.System(close_timeout=1.0) as system:
        device = await system.open_device(name, host="process")
        with pytest.raises(accel.ContextPoisonedError):
            await asyncio.wait_for(device.compiler.compile("void nothing() {}", "nothing", parameters=()), PATIENCE)
        await asyncio.wait_for(device.zeros(4), PATIENCE)
        assert (device.state, device.generation) == (accel.DeviceState.READY, 2)


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), "soon"])
def test_a_bound_that_is_none_is_refused(seconds: Any) -> None:
    with pytest.raises(accel.InvalidArgumentError, match="busy_timeout"):
        accel.ProcessHost(busy_timeout=seconds)


async def until_ready(device: accel.Device, generation: int) -> None:
    """Wait for a generation."""
    async with asyncio.timeout(PATIENCE):
        async for number in device.generations():
            if number >= generation:
                return
