"""Backends whose queues are bounded, and whose libraries work in memory of the device's: ``CountsCommands`` and ``TakesWorkspace``."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

import accel
from accel.cpu.backend import CpuBackend, CpuDevice
from accel.cpu.stream import CpuStream
from accel.ops import Plan, Spec
from accel.testing import FaultPlan
from tests.device_support import bounded, failure, in_flight, opened, task, turns, until

pytestmark = pytest.mark.usefixtures("nothing_left")

MIB = 1 << 20


class Borrowing(CpuStream):
    """Wants two workspaces of 1 MiB for products."""

    __slots__ = ("lent",)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.lent: list[int] = []

    def workspace_wanted(self, library: str) -> int:
        return MIB if library == "blas" and len(self.lent) < 2 else 0

    def use_workspace(self, address: int, nbytes: int) -> None:
        assert nbytes == MIB
        self.lent.append(address)

    def release_workspaces(self) -> None:
        self.lent.clear()


class Lending(CpuDevice):
    """A context whose products work in memory that they are lent."""

    lent: ClassVar[list[Borrowing]]

    def create_stream(self, *, library: str = "") -> Borrowing:
        made = Borrowing(self._context, f"borrowing-{len(self.lent)}")
        self.lent.append(made)
        return made


class Counting(CpuDevice):
    """A context whose queues take 20 commands, of which a function of elements takes three."""

    queue_limit = 20
    commands: ClassVar[dict[tuple[str, str], int]] = {("elementwise", "unary"): 3}


def opens(monkeypatch: pytest.MonkeyPatch, device: type[CpuDevice]) -> None:
    monkeypatch.setattr(CpuBackend, "open", lambda self, index: device(self.devices()[index]))


@pytest.fixture
def computes(monkeypatch: pytest.MonkeyPatch) -> list[Borrowing]:
    Lending.lent = []
    opens(monkeypatch, Lending)
    return Lending.lent


async def test_workspaces_are_memory_of_the_device_and_shown(computes: list[Borrowing]) -> None:
    async with opened(libraries=("blas",), streams=8) as device:
        x = await device.put(np.eye(4))
        memory = device.info().memory
        assert (memory.used, memory.workspace) == (256, 2 * MIB)
        async with device.batch() as batch:
            batch.elementwise.unary("neg", x)
        assert device.info().memory.workspace == 2 * MIB, "nothing was multiplied in a batch yet"
        async with device.batch() as batch:
            y = batch.elementwise.unary("neg", batch.blas.gemm(x, x))
        np.testing.assert_array_equal(await device.get(y), -np.eye(4))
        assert device.info().memory.workspace == 2 * MIB, "a batch runs in the streams of awaited ops"
        assert len({address for each in computes for address in each.lent}) == 2, "no two share memory"


async def test_workspaces_count_in_the_limit(computes: list[Borrowing]) -> None:
    async with opened(memory_limit=8 * MIB) as device:
        x = await device.put(np.eye(4))
        held = await device.empty((7 * MIB,), "uint8")
        error = await failure(device.blas.gemm(x, x), accel.OutOfMemoryError)
        assert error.retryable
        assert error.limit == 8 * MIB
        await device.free(held)
        np.testing.assert_array_equal(await device.get(await device.blas.gemm(x, x)), np.eye(4))
        memory = device.info().memory
        assert memory.used + memory.workspace <= memory.reserved <= 8 * MIB


async def two_at_once(device: accel.Device, plan: FaultPlan, x: accel.AccelRef) -> None:
    """Let two products run at once, so that a second lane gets workspaces."""
    calls = [task(device.blas.gemm(x, x)) for _ in range(2)]
    await until(lambda: device.info().memory.workspace == 4 * MIB, "its workspaces")
    plan.release()
    await asyncio.gather(*calls)


async def test_a_second_lane_is_lent_workspaces_when_it_is_used_and_gives_them_back_in_a_shortage(computes: list[Borrowing]) -> None:
    plan = FaultPlan().hang_at(1, op="gemm")
    async with opened(plan, memory_limit=8 * MIB, streams=2) as device:
        x = await device.put(np.eye(4))
        await device.elementwise.unary("neg", x)
        assert len(device._host.context.lanes.pool) == 1, "one op at a time needs no second lane"
        assert device.info().memory.workspace == 0, "nothing was multiplied"
        await two_at_once(device, plan, x)
        large = await device.zeros(5 * MIB, "uint8")
        assert device.info().memory.workspace == 2 * MIB, "the first lane keeps its own"
        lent = [each.lent for each in computes if each.lent]
        assert len(lent) == 1
        await failure(device.zeros(2 * MIB, "uint8"), accel.OutOfMemoryError)
        np.testing.assert_array_equal(await device.get(await device.blas.gemm(x, x)), np.eye(4))
        await device.free(large)
        # The second lane is given no workspaces any more, and products still run, also at once.
        gate = threading.Event()
        device._host.context.lanes.routes["blas"].stream.submit(lambda: gate.wait(10), 1.0)
        calls = [task(device.blas.gemm(x, x)) for _ in range(4)]
        await in_flight(device, 4)
        async with device.graph() as graph:  # its stream is made after all that was asked for before
            graph.elementwise.unary("neg", x)
        assert device.info().memory.workspace == 2 * MIB
        gate.set()
        for each in await asyncio.gather(*calls):
            np.testing.assert_array_equal(await device.get(each), np.eye(4))


@pytest.mark.usefixtures("computes")
async def test_without_memory_for_another_lanes_workspaces_a_batch_waits_for_the_lane_that_has_them() -> None:
    plan = FaultPlan().hang_at(2, op="gemm")
    async with opened(plan, memory_limit=4 * MIB, streams=2) as device:
        x = await device.put(np.eye(4))
        full = await device.zeros(MIB, "uint8")
        await device.blas.gemm(x, x)
        busy = task(device.blas.gemm(x, x))
        await in_flight(device, 1)

        async def together() -> accel.AccelRef:
            async with device.batch() as batch:
                found: accel.AccelRef = batch.elementwise.unary("neg", batch.blas.gemm(x, x))
            return found

        calls = [task(together()) for _ in range(2)]
        await in_flight(device, 5)
        plan.release()
        for each in await asyncio.gather(*calls):
            np.testing.assert_array_equal(await device.get(each), -np.eye(4))
        await busy
        del full


class Preparing(Lending):
    """Makes what a library needs in a stream slowly, once that is asked for."""

    gate: ClassVar[threading.Event]
    steps: ClassVar[list[str]]

    def prepare(self, library: str, compute: Any) -> None:
        if library == "blas" and len([each for each in self.lent if each.lent]) > 1:
            self.steps.append("prepare begins")
            self.gate.wait(10)
            self.steps.append("prepare ends")

    def close(self, *, abandon: bool = False) -> None:
        self.steps.append("close")
        super().close(abandon=abandon)


async def test_a_stream_that_is_being_prepared_is_not_closed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    Lending.lent, Preparing.gate, Preparing.steps = [], threading.Event(), []
    opens(monkeypatch, Preparing)
    plan = FaultPlan().hang_at(1, op="gemm")
    async with opened(plan, libraries=("blas",), streams=2) as device:
        x = await device.put(np.eye(4))
        calls = [task(device.blas.gemm(x, x)) for _ in range(2)]
        await until(lambda: Preparing.steps)
        plan.release()
        await asyncio.gather(*calls)
        closing = task(device.aclose())
        await asyncio.wait({closing}, timeout=0.1)
        assert not closing.done()
        Preparing.gate.set()
        await bounded(closing)
    assert Preparing.steps == ["prepare begins", "prepare ends", "close"]


@dataclass(frozen=True, eq=False, slots=True)
class Step(accel.KernelOp):
    """``x + 1``."""

    library: ClassVar[str] = "six"
    kind: ClassVar[str] = "step"

    x: accel.AccelRef

    def plan(self) -> Plan:
        return Plan((self.x,), (), (Spec(self.x.shape, self.x.dtype),))


class Six(accel.KernelLibrary):
    """Says that each of its ops enqueues six commands."""

    name = "six"
    launches = 6

    @accel.kernel(Step)
    def step(self, op: Step, stream: Any, inputs: Any, outputs: Any) -> None:
        source, target = np.asarray(inputs[0]), np.asarray(outputs[0])
        stream.submit(lambda: np.add(source, 1, out=target), 1e-6)


@pytest.fixture
def bounded_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    opens(monkeypatch, Counting)


@pytest.mark.usefixtures("bounded_queue")
async def test_ops_in_flight_are_bounded_by_what_they_enqueue() -> None:
    plan = FaultPlan().hang_at(2)
    async with opened(plan, streams=1) as device:
        await device.register(Six)
        x = await device.put(np.zeros(4))
        hanging = task(device.zeros(3))
        ops = [task(device.run(Step(x)) if turn % 2 else device.elementwise.unary("neg", x)) for turn in range(60)]
        await until(lambda: device.info().in_flight > 4)
        await turns(400)
        # One command for zeros; then pairs of nine, until there are 20.
        assert device.info().in_flight == 6
        plan.release()
        results = await bounded(asyncio.gather(*ops))
        for turn, result in enumerate(results):
            np.testing.assert_array_equal(await device.get(result), np.full(4, turn % 2))
        await bounded(hanging)


@pytest.mark.usefixtures("bounded_queue")
async def test_a_batch_is_sent_in_parts_that_the_queue_takes() -> None:
    plan = FaultPlan().hang_at(2)
    async with opened(plan, streams=1) as device:
        await device.register(Six)
        x = await device.put(np.zeros(4))
        hanging = task(device.zeros(3))
        expected = np.zeros(4)

        async def work() -> accel.AccelRef:
            nonlocal expected
            async with device.batch() as batch:
                y: accel.AccelRef = x
                for turn in range(60):
                    y = batch.run(Step(y)) if turn % 2 else batch.elementwise.unary("neg", y)
                    expected = expected + 1 if turn % 2 else -expected
            return y

        working = task(work())
        await until(lambda: device.info().in_flight > 2)
        await turns(400)
        assert device.info().in_flight == 5, "parts of at most ten commands: two ops each"
        plan.release()
        np.testing.assert_array_equal(await device.get(await bounded(working)), expected)
        await bounded(hanging)


@pytest.mark.parametrize("launches", [0, -1, "many", None, True, 2.5])
async def test_a_library_says_its_launches_as_a_positive_int(launches: Any) -> None:
    wrong = type("Wrong", (Six,), {"launches": launches})
    async with opened() as device:
        error = await failure(device.register(wrong), accel.InvalidArgumentError)
        assert "launches" in error.message


class NoMemoryError(Exception):
    """How a library says that the device has none."""


class Knowing(CpuDevice):
    """A context that knows how."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, NoMemoryError)


class Hungry(Six):
    """Finds no memory, in its kernel or while it is opened, as often as it is told."""

    failures: ClassVar[list[str]] = []

    def open(self, stream: Any) -> None:
        if "open" in self.failures:
            self.failures.remove("open")
            raise NoMemoryError("2 GiB")

    @accel.kernel(Step)
    def step(self, op: Step, stream: Any, inputs: Any, outputs: Any) -> None:
        if "step" in self.failures:
            self.failures.remove("step")
            raise NoMemoryError("3 GiB")
        super().step(op, stream, inputs, outputs)


@pytest.mark.parametrize("where", ["open", "step"])
async def test_a_library_s_own_shortage_gives_idle_slabs_back_and_may_be_tried_again(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    opens(monkeypatch, Knowing)
    async with opened() as device:
        x = await device.put(np.zeros(4))
        await device.free(await device.empty((200 * MIB,), "uint8"))
        assert device.info().memory.reserved >= 200 * MIB
        Hungry.failures[:] = [where]
        if where == "step":
            await device.register(Hungry)
            error = await failure(device.run(Step(x)), accel.OutOfMemoryError)
        else:
            error = await failure(device.register(Hungry), accel.OutOfMemoryError)
            await device.register(Hungry)
        assert error.retryable
        assert error.scope is accel.FaultScope.OP
        assert "NoMemoryError" in error.message
        assert isinstance(error.__cause__, NoMemoryError)
        await until(lambda: device.info().memory.reserved < 200 * MIB)
        np.testing.assert_array_equal(await device.get(await device.run(Step(x))), np.ones(4))
        assert device.generation == 1
