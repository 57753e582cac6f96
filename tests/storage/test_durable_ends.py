"""What durable memory leaves behind: nothing, whatever ends it; and devices that have none."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import accel
from accel.cpu.backend import CpuBackend, CpuDevice
from accel.remote.context import RemoteContext
from accel.storage.durable import DurableBook
from accel.testing import FaultPlan
from tests.child_support import links_of
from tests.device_support import child_pid, failure
from tests.durable_support import EVERY_WAY, Way, opened

ROOT = Path(__file__).resolve().parents[2]


def slabs_of(pid: int | str) -> int:
    """Return how many descriptors of slabs a process has open."""
    return sum("memfd:accel-slab" in link for link in links_of(pid).values())


@EVERY_WAY
@pytest.mark.usefixtures("nothing_left")
async def test_each_descriptor_is_closed_on_both_sides(way: Way) -> None:
    gc.collect()
    before = slabs_of("self")
    async with opened(way) as patient:
        device = patient.device
        for _ in range(2):
            refs = [await device.zeros(70 << 20, "uint8", durable=True) for _ in range(3)]
            child = device.info().pid or os.getpid()
            assert slabs_of(child) >= 3
            assert slabs_of("self") - before >= 3
            await patient.fault()
            assert slabs_of("self") - before >= 3
            refs.clear()
            async with asyncio.timeout(20):
                while device.info().memory.reserved > 64 << 20:
                    await asyncio.sleep(0)
                child = device.info().pid or os.getpid()
                while slabs_of(child) > (1 if child != os.getpid() else before + 1):  # the reserve falls before the memory is unmapped
                    await asyncio.sleep(0)
                while slabs_of("self") - before > (1 if child == os.getpid() else 0):
                    await asyncio.sleep(0)
    assert slabs_of("self") == before


_PARENT = """
import asyncio, sys
import accel
async def main():
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process")
        kept = [await device.full(9 << 20, 7, "uint8", durable=True) for _ in range(3)]
        print(device.info().pid, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


def _runs(pid: int) -> bool:
    """Return whether a process has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_parent_that_is_killed_takes_the_memory_with_it() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True, env=env) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert slabs_of(child)
        assert slabs_of(parent.pid)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    deadline = time.monotonic() + 20
    while _runs(child):
        assert time.monotonic() < deadline, "the child lives on, and with it the memory"


@pytest.mark.usefixtures("nothing_left")
async def test_a_device_that_is_lost_keeps_them_until_it_is_closed() -> None:
    async with accel.System() as system:
        plan, once = FaultPlan().poison_at(1, op="unary"), accel.RestartStrategy(max_restarts=0)
        device = await system.open_device("cpu", host="process", faults=plan, restart=once)
        ref = await device.zeros(4, durable=True)
        await failure(device.elementwise.unary("neg", await device.zeros(4)), accel.ContextPoisonedError)
        await failure(device.get(ref), accel.DeviceLostError)
        assert device.info().memory.durable == ref.nbytes + 240  # of 256, the least that is reserved
        assert slabs_of("self") == 1
        await device.aclose()
        assert ref.is_stale
        assert device.info().memory.durable == 0
        assert slabs_of("self") == 0


@pytest.mark.usefixtures("nothing_left")
async def test_a_backend_that_cannot_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mortal(CpuDevice):  # a class of its own: what a class offers is remembered
        import_slab = None  # type: ignore[assignment]

    monkeypatch.setattr(CpuBackend, "open", lambda self, index: Mortal(self.devices()[index]))
    async with accel.System() as system:
        device = await system.open_device("cpu", host="inline")

        async def loader(device: accel.Device) -> accel.AccelRef:
            return await device.zeros(3, durable=True)

        for call in (
            device.put([1], durable=True),
            device.empty(1, durable=True),
            device.zeros(1, durable=True),
            device.full(1, 1, durable=True),
            device.resident("weights", loader, durable=True),
            device.resident("weights", loader),
        ):
            error = await failure(call, accel.UnsupportedError)
            assert error.remedy
            assert error.device == "cpu:0"
        np.testing.assert_array_equal(await device.get(await device.put(np.arange(3.0))), np.arange(3.0))


@pytest.mark.usefixtures("nothing_left")
async def test_graphs_and_batches_with_durable_buffers() -> None:
    async with opened("process") as patient:
        device = patient.device
        ref = await device.put(np.arange(4.0), durable=True)
        async with device.batch() as batch:
            made = batch.run(accel.ops.Fill((4,), accel.DType.FLOAT64, 3, None, True))
            batch.elementwise.binary("add", ref, made, out=ref)
        async with device.graph() as graph:
            graph.blas.scal(ref, 2.0)
            with pytest.raises(accel.InvalidArgumentError, match="durable"):
                graph.run(accel.ops.Empty((4,), accel.DType.FLOAT64, True))
        await graph.replay()
        assert made.durable
        await patient.fault()
        np.testing.assert_array_equal(await device.get(ref), [6, 8, 10, 12])
        np.testing.assert_array_equal(await device.get(made), np.full(4, 3.0))
        await failure(graph.replay(), accel.StaleRefError)


@pytest.mark.parametrize("checksum", [False, True])
async def test_a_child_that_dies_before_it_has_bound_is_followed_by_another(checksum: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    step = "verify_checksums" if checksum else "slabs_to_bind"
    target: type = RemoteContext if checksum else DurableBook
    proceed: Any = getattr(target, step)
    killed: list[int] = []

    async def die_first(*arguments: Any) -> Any:
        context = contexts[-1]
        if not killed:
            killed.append(context.pid)
            os.kill(context.pid, signal.SIGKILL)
            while context.fault is None:
                await asyncio.sleep(0)
        return await proceed(*arguments)

    contexts: list[Any] = []
    begin = RemoteContext.__init__

    def note(self: Any, *arguments: Any) -> None:
        begin(self, *arguments)
        contexts.append(self)

    monkeypatch.setattr(RemoteContext, "__init__", note)
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process")
        values = np.arange(100.0)
        x = await device.put(values, durable=True, checksum=checksum)
        monkeypatch.setattr(target, step, die_first)
        os.kill(child_pid(device), signal.SIGKILL)
        while device.state is accel.DeviceState.READY:
            await asyncio.sleep(0)
        np.testing.assert_array_equal(await asyncio.wait_for(device.get(x), 30), values)
        assert killed
