"""Memory that kernels of a backend work in: the context's own, counted, bounded, and anybody's as soon as the op is over."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import pytest

import accel
from accel.cpu.backend import CpuDevice
from accel.cpu.views import operand
from accel.dtype import DType
from accel.family import BackendPart
from accel.ops import Family, FamilyOp, OpNamespace, Plan, Spec, Status, method
from accel.testing import FaultPlan
from tests.device_support import bounded, cancelled, failure, in_flight, opened, task, turns, used

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel.backend import Kernel

pytestmark = pytest.mark.usefixtures("nothing_left")

M = TypeVar("M")

MIB = 1 << 20


class Worked:
    """What the kernels and the device were asked."""

    def __init__(self) -> None:
        self.addresses: list[int] = []
        self.of_nothing: list[int] = []
        self.known: dict[Any, int] = {}
        self.measured: list[threading.Thread] = []


@pytest.fixture
def worked(monkeypatch: pytest.MonkeyPatch) -> Worked:
    """Let ``unary`` work in as much memory as its operand has, and a reduction in none; how much is measured once for each shape."""
    said = Worked()
    original = CpuDevice.kernels

    def unary(lane: Any, op: Any, plan: Any, inputs: Any, outputs: Any) -> None:
        result, work = outputs
        said.addresses.append(work)
        lane.stream.copy(work, inputs[0], op.x.nbytes)
        original(lane.device, "elementwise")["unary"](lane, op, plan, [work], [result])

    def binary(lane: Any, op: Any, plan: Any, inputs: Any, outputs: Any) -> None:
        said.of_nothing.append(outputs[-1])
        original(lane.device, "elementwise")["binary"](lane, op, plan, inputs, outputs)

    kernels: dict[str, Kernel] = {"unary": unary, "binary": binary}

    def measure(self: CpuDevice, op: Any) -> None:
        said.measured.append(threading.current_thread())
        if op.x.size == 13:
            raise accel.LibraryError("unlucky")
        said.known[op.kind, op.x.shape] = op.x.nbytes if op.kind == "unary" else 0

    monkeypatch.setattr(CpuDevice, "kernels", lambda self, library: kernels if library == "elementwise" else original(self, library))
    scratch = {("elementwise", kind): lambda op: said.known.get((op.kind, op.x.shape)) for kind in kernels}
    monkeypatch.setattr(CpuDevice, "scratch", scratch, raising=False)
    monkeypatch.setattr(CpuDevice, "measure_scratch", measure, raising=False)
    return said


@dataclass(frozen=True, eq=False, slots=True)
class Doubled(FamilyOp):
    """``2 * x``, by way of scratch memory of its size."""

    library: ClassVar[str] = "doubling"
    kind: ClassVar[str] = "doubled"

    x: accel.AccelRef
    says: Any = None

    def plan(self) -> Plan:
        return Plan((self.x,), (), (Spec(self.x.shape, self.x.dtype),), status=Status(Spec((3,), DType.UINT8), lambda status: None))


class DoublingOps(OpNamespace[M]):
    """Works in scratch memory."""

    __slots__ = ()
    library: ClassVar[str] = "doubling"
    doubled = method(Doubled)


def _doubled(lane: Any, op: Doubled, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    result, status, work = outputs
    assert status != work
    assert work % 256 == 0
    lane.stream.copy(work, inputs[0], op.x.nbytes)
    source, target = operand(work, op.x), operand(result, op.x)
    lane.stream.submit(lambda: np.add(source, source, target), 0.0)
    lane.stream.fill(status, b"\xff", 3)


def _size(op: Doubled) -> Any:
    if isinstance(op.says, BaseException):
        raise op.says
    return op.x.nbytes if op.says is None else op.says


DOUBLING = Family(DoublingOps, parts={"cpu": BackendPart({"doubled": _doubled}, scratch=_size)})


@pytest.mark.parametrize("host", ["inline", "process"])
async def test_a_family_from_outside_has_it_too(host: Any, rng: np.random.Generator) -> None:
    x = rng.standard_normal(MIB // 8)
    async with accel.System() as system:
        device = await system.open_device("cpu", host=host, memory_limit=24 * MIB)
        ref = await device.put(x)
        async with device.graph() as graph:
            replayed = graph.family(DoublingOps).doubled(ref)
        doubling = device.family(DoublingOps)
        result = await doubling.doubled(ref)
        np.testing.assert_array_equal(await device.get(result), 2 * x)
        async with device.batch() as batch:
            first = batch.family(DoublingOps).doubled(ref)
            second = batch.family(DoublingOps).doubled(first)
        np.testing.assert_array_equal(await device.get(second), 4 * x)
        await graph.replay()
        np.testing.assert_array_equal(await device.get(replayed), 2 * x)
        await failure(doubling.doubled(ref, 25 * MIB), accel.OutOfMemoryError)
        for wrong in (-1, 1.5, "much"):
            error = await failure(doubling.doubled(ref, wrong), accel.InvalidArgumentError)
            assert (error.op, error.library) == ("doubled", "doubling")
        np.testing.assert_array_equal(await device.get(await doubling.doubled(ref, MIB)), 2 * x)


async def test_it_is_there_for_the_op_and_then_for_the_next(worked: Worked, rng: np.random.Generator, device: accel.Device) -> None:
    x = rng.standard_normal(1000)
    ref = await device.put(x)
    before = used(device)
    for _ in range(3):
        result = await device.elementwise.unary("neg", ref)
        np.testing.assert_array_equal(await device.get(result), -x)
        del result
        assert used(device) == before
    assert len(worked.measured) == 1
    assert worked.measured[0] is not threading.current_thread()
    np.testing.assert_array_equal(await device.get(await device.elementwise.binary("add", ref, ref)), x + x)
    assert len(set(worked.addresses)) <= 2, "it and the result change places, at most"


async def test_an_op_that_works_in_no_bytes_takes_no_memory(worked: Worked) -> None:
    async with opened() as device:
        ref = await device.zeros(1000)
        for _ in range(3):
            await device.elementwise.binary("add", ref, ref)
        async with device.batch() as batch:
            batch.elementwise.binary("add", ref, ref)
    assert worked.of_nothing == [0] * 4


async def test_it_counts_against_the_limit(worked: Worked) -> None:
    async with opened(memory_limit=4 * MIB) as device:
        x = await device.zeros((3 * MIB // 8,), "float64")
        error = await failure(device.elementwise.unary("neg", x, out=x), accel.OutOfMemoryError)
        assert error.limit == 4 * MIB
        assert not worked.addresses
        small = await device.zeros((1000,), "float64")
        await device.elementwise.unary("neg", small, out=small)


async def test_what_is_in_use_is_nobody_elses(worked: Worked, rng: np.random.Generator) -> None:
    """In a slab that is full, so that what was given back is what is had next: whoever has it comes after the op."""
    n = MIB // 8
    plan = FaultPlan().hang_at(2, op="unary")
    async with opened(plan, memory_limit=4 * MIB) as device:
        x = rng.standard_normal(n)
        ref, out = await device.put(x), await device.zeros((n,), "float64")
        await device.elementwise.unary("neg", ref, out=out)
        hanging = task(device.elementwise.unary("neg", ref, out=out))
        await in_flight(device, 1)
        others = [task(device.full((n,), 7.0, "float64")) for _ in range(2)]
        await turns()
        plan.release()
        await bounded(hanging)
        for other in others:
            np.testing.assert_array_equal(await device.get(await other), np.full(n, 7.0))
        np.testing.assert_array_equal(await device.get(out), -x)


async def test_batches_and_graphs_have_it_too(worked: Worked, rng: np.random.Generator, device: accel.Device) -> None:
    x, y = rng.standard_normal((2, 500))
    ref = await device.put(x)
    before = used(device)
    async with device.batch() as batch:
        result = batch.elementwise.unary("neg", batch.elementwise.binary("add", ref, ref))
    np.testing.assert_array_equal(await device.get(result), -(x + x))
    del result, batch
    assert used(device) == before
    async with device.graph() as graph:
        half = graph.elementwise.unary("abs", ref[:250])
        result = graph.elementwise.unary("neg", graph.elementwise.unary("abs", ref))
    for each in (x, y):
        await device.put(each, out=ref)
        await graph.replay()
        # Between two replays no other op is given the graph's scratch memory.
        fillers = [await device.full((500,), 9.0, "float64") for _ in range(8)]
        np.testing.assert_array_equal(await device.get(result), -abs(each))
        np.testing.assert_array_equal(await device.get(half), abs(each[:250]))
        assert not {worked.addresses[-1]} & {device._host.context.buffers.address(filler) for filler in fillers}
        del fillers
    del graph, half, result
    assert used(device) == before


async def test_what_cannot_be_measured_fails_its_op_alone(worked: Worked, device: accel.Device) -> None:
    x, good = await device.put(np.ones(13)), await device.put(np.ones(14))
    await failure(device.elementwise.unary("neg", x), accel.LibraryError)
    with pytest.raises(accel.LibraryError) as caught:
        async with device.batch() as batch:
            batch.elementwise.unary("neg", good)
            batch.elementwise.unary("neg", x)
    assert caught.value.op_index == 1
    with pytest.raises(accel.LibraryError):
        async with device.graph() as graph:
            graph.elementwise.unary("neg", x)
    np.testing.assert_array_equal(await device.get(await device.elementwise.unary("neg", good)), -np.ones(14))


@pytest.mark.parametrize("error", [ValueError("odd"), asyncio.CancelledError(), GeneratorExit()])
async def test_what_a_familys_size_raises_fails_its_op_alone(error: BaseException) -> None:
    async with opened(host="inline") as device:
        x = await device.put(np.ones(13))
        assert type((await failure(device.run(Doubled(x, error)), accel.LibraryError)).__cause__) is type(error)
        with pytest.raises(accel.LibraryError) as caught:
            async with device.batch() as batch:
                first = batch.run(Doubled(x))
                batch.run(Doubled(x, error))
        assert caught.value.op_index == 1
        np.testing.assert_array_equal(await device.get(first), np.full(13, 2.0))
        with pytest.raises(accel.LibraryError):
            async with device.graph() as graph:
                graph.run(Doubled(x, error))
        np.testing.assert_array_equal(await device.get(await device.run(Doubled(x))), np.full(13, 2.0))


async def test_whoever_goes_while_it_is_measured_leaves_nothing(worked: Worked, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, measure = threading.Event(), threading.Event(), CpuDevice.measure_scratch  # type: ignore[attr-defined]

    def slowly(self: CpuDevice, op: Any) -> None:
        begun.set()
        assert go_on.wait(10)
        measure(self, op)

    monkeypatch.setattr(CpuDevice, "measure_scratch", slowly, raising=False)
    async with opened() as device:
        x = await device.put(np.ones(14))
        before = used(device)
        waiting = task(device.elementwise.unary("neg", x))
        await asyncio.to_thread(begun.wait, 10)
        await cancelled(waiting)
        go_on.set()
        np.testing.assert_array_equal(await bounded(device.get(x)), np.ones(14))
        assert used(device) == before


async def test_it_is_given_back_when_the_op_cannot_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    def result(self: Doubled, refs: Any) -> Any:
        raise ValueError("unlucky")

    async with opened() as device:
        x = await device.put(np.zeros(MIB // 8))
        doubling = device.family(DoublingOps)
        await doubling.doubled(x)
        monkeypatch.setattr(Doubled, "result", result)
        await failure(doubling.doubled(x), accel.LibraryError)
        await turns()
        assert used(device) == x.nbytes


async def test_an_op_is_answered_although_the_fault_came_while_it_was_measured(worked: Worked, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, measure = asyncio.get_running_loop(), CpuDevice.measure_scratch  # type: ignore[attr-defined]

    def measure_and_fault(self: CpuDevice, op: Any) -> None:
        measure(self, op)
        loop.call_soon_threadsafe(device._host.context.report_fault, accel.DriverError("gone", scope=accel.FaultScope.CONTEXT))

    async with opened() as device:
        await device.elementwise.unary("neg", await device.put(np.zeros(3)))
        x = await device.put(np.zeros(4))
        monkeypatch.setattr(CpuDevice, "measure_scratch", measure_and_fault)
        error = await failure(bounded(device.elementwise.unary("neg", x)), accel.StaleRefError)
        assert error.reason == "generation"
