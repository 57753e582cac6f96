"""Writes of durable buffers that are dropped before they are launched: the buffers are as sound as before, and nothing stays open in the lane."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

import accel
from accel.cpu.backend import CpuDevice
from accel.engine.libraries import Libraries
from accel.ops import Plan
from accel.testing import FaultPlan
from tests.device_support import cancelled, failure, generation, in_flight, opened, task, until

pytestmark = pytest.mark.usefixtures("nothing_left")


@dataclass(frozen=True, eq=False, slots=True)
class Write(accel.KernelOp):
    """Writes ones to a buffer."""

    library: ClassVar[str] = "slow"
    kind: ClassVar[str] = "write"

    target: accel.AccelRef

    def plan(self) -> Plan:
        return Plan((), (self.target,), ())


class Slow(accel.KernelLibrary):
    """Takes long to enqueue what it does, and then to do it."""

    name = "slow"
    blocking = True

    def __init__(self) -> None:
        self.enqueue, self.run = Slow.gates

    gates: ClassVar[tuple[threading.Event, threading.Event]]
    enqueued: ClassVar[int] = 0

    @accel.kernel(Write)
    def write(self, op: Write, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        type(self).enqueued += 1
        assert self.enqueue.wait(20)
        target = np.asarray(outputs[0])

        def work() -> None:
            assert self.run.wait(20)
            target.fill(1.0)

        stream.submit(work, 1.0)


@pytest.fixture
def gates() -> Any:
    """Return what lets the ops of :class:`Slow` be enqueued, and what lets them run."""
    Slow.gates, Slow.enqueued = (threading.Event(), threading.Event()), 0
    yield Slow.gates
    for gate in Slow.gates:
        gate.set()


async def drop_behind(device: accel.Device, first: accel.AccelRef, second: accel.AccelRef, gates: Any) -> Any:
    """Have one buffer written by what goes on, and drop the write of another one that comes after it in the lane. Return the first write."""
    enqueue, _ = gates
    writing = task(device.run(Write(first)))
    await until(lambda: Slow.enqueued)
    dropped = task(device.run(Write(second)))
    await in_flight(device, 2)
    await cancelled(dropped)
    enqueue.set()
    await in_flight(device, 1)
    assert Slow.enqueued == 1
    return writing


async def test_a_dropped_write_tears_nothing_while_its_lane_is_busy(gates: Any, rng: np.random.Generator) -> None:
    x = rng.standard_normal(5)
    async with opened(FaultPlan().poison_at(1, op="fill"), host="inline") as device:
        await device.register(Slow)
        other, ref = await device.put(x), await device.put(x, durable=True)
        writing = await drop_behind(device, other, ref, gates)
        await failure(device.full(3, 1.0), accel.ContextPoisonedError)
        await failure(writing, accel.ContextPoisonedError)
        gates[1].set()  # what was abandoned is waited for
        await generation(device, 2)
        np.testing.assert_array_equal(await device.get(ref), x)


async def test_a_dropped_write_does_not_hide_one_before_it_that_runs(gates: Any) -> None:
    async with opened(FaultPlan().poison_at(1, op="fill"), host="inline") as device:
        await device.register(Slow)
        ref = await device.put(np.zeros(5), durable=True)
        writing = await drop_behind(device, ref, ref, gates)
        await failure(device.full(3, 1.0), accel.ContextPoisonedError)
        await failure(writing, accel.ContextPoisonedError)
        gates[1].set()  # what was abandoned is waited for
        await generation(device, 2)
        assert (await failure(device.get(ref), accel.StaleRefError)).reason == "torn"


async def test_the_place_in_line_of_what_was_dropped_is_over_when_the_lane_is_through(gates: Any, device: accel.Device) -> None:
    await device.register(Slow)
    first, second = await device.zeros(5), await device.zeros(5)
    writing = await drop_behind(device, first, second, gates)
    lane = device._host.context.lanes.routes["slow"]
    assert not lane.is_idle()
    gates[1].set()
    await writing
    await until(lane.is_idle, "an idle lane")
    np.testing.assert_array_equal(await device.get(second), np.zeros(5))


async def test_a_ref_dropped_while_its_slab_is_mapped_keeps_the_slab_until_it_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    began, go_on, mapped = threading.Event(), threading.Event(), CpuDevice.import_slab

    def slowly(device: CpuDevice, fd: int, nbytes: int) -> Any:
        began.set()
        assert go_on.wait(20)
        return mapped(device, fd, nbytes)

    monkeypatch.setattr(CpuDevice, "import_slab", slowly)
    async with opened(FaultPlan().poison_at(1, op="gemm"), restart=accel.RestartStrategy(max_restarts=1)) as device:
        ref = await device.zeros(1 << 20, durable=True)
        await failure(device.blas.gemm(await device.zeros((2, 2)), await device.zeros((2, 2))), accel.ContextPoisonedError)
        await until(began.is_set, "the slab is being mapped")
        del ref
        assert device.info().restarts == 0, "and its memory is asked for"
        go_on.set()
        await generation(device, 2)
        assert device.info().memory.durable == 0


async def test_a_ref_dropped_while_a_library_opens_in_the_next_generation_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[accel.AccelRef] = []
    opened_before = Libraries.open

    async def opens(self: Libraries, library: str) -> None:
        await opened_before(self, library)
        if self._context.generation == 2:
            kept.clear()
            self._context.apply_frees()

    monkeypatch.setattr(Libraries, "open", opens)
    async with accel.System() as system:
        device = await system.open_device("cpu", host="inline", libraries=("blas",), faults=FaultPlan().poison_at(1, op="gemm"))
        kept.append(await device.put(np.zeros(1000), durable=True))
        x = await device.zeros((2, 2))
        await failure(device.blas.gemm(x, x), accel.ContextPoisonedError)
        await generation(device, 2)
        assert not kept
        assert device.info().memory.durable == 0
