"""Work beside the loop: ops whose enqueuing may block keep their place in line, and what is made there is given back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

import accel
from accel.cpu.backend import CpuBackend, CpuDevice, CpuSlab
from accel.cpu.stream import CpuStream
from accel.engine.offloaded import OffloadedCalls
from accel.ops import Plan
from accel.testing import FaultPlan
from tests.device_support import bounded, failure, in_flight, opened, task
from tests.op_bugs_support import ODD, Bug, Bugs, BugsOnTheLoop, throw

Kernels = Mapping[str, Callable[..., None]]


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let gemms be enqueued beside the loop, and write down on which threads they are."""
    seen: list[str] = []
    original = CpuDevice.kernels

    def kernels(self: CpuDevice, library: str) -> Kernels:
        gemm = original(self, "blas")["gemm"]

        def noted(lane: Any, op: Any, plan: Any, inputs: Any, outputs: Any) -> None:
            seen.append(threading.current_thread().name)
            gemm(lane, op, plan, inputs, outputs)

        return {**original(self, library), **({"gemm": noted} if library == "blas" else {})}

    monkeypatch.setattr(CpuDevice, "kernels", kernels)
    monkeypatch.setattr(CpuDevice, "may_block", lambda self, lane, op: op.kind == "gemm")
    return seen


@pytest.mark.parametrize("streams", [8, 1])
async def test_they_run_on_a_worker_and_order_is_kept(threads: list[str], streams: int) -> None:
    seed = int(np.random.default_rng().integers(1 << 32))
    a = np.random.default_rng(seed).standard_normal((12, 12))
    async with accel.System() as system:
        device = await system.open_device("cpu", streams=streams)
        x, y = await device.put(a), await device.zeros(a.shape, "float64")
        # Sent together: the second reads what the first writes, and the third overwrites what the second reads.
        results = await asyncio.gather(device.blas.gemm(x, x, out=y), device.elementwise.unary("neg", y), device.copy(x, y))
        np.testing.assert_allclose(await device.get(results[1]), -(a @ a), err_msg=f"seed {seed}")
        np.testing.assert_array_equal(await device.get(y), a)
        async with device.batch() as batch:
            product = batch.blas.gemm(x, x)
            total = batch.reduce("sum", batch.elementwise.unary("abs", product), axis=0)
        np.testing.assert_allclose(await device.get(total), np.abs(a @ a).sum(axis=0), err_msg=f"seed {seed}")
    assert len(threads) == 2
    assert all(name.startswith("accel-worker") for name in threads), threads


async def test_a_fault_there_is_survived(threads: list[str]) -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", faults=FaultPlan().poison_at(1, op="gemm"))
        x = await device.put(np.eye(3))
        with pytest.raises(accel.ContextPoisonedError):
            await device.blas.gemm(x, x)
        x = await device.put(np.eye(3))
        np.testing.assert_array_equal(await device.get(await device.blas.gemm(x, x)), np.eye(3))
        assert device.generation == 2


class Held:
    """A gemm that is enqueued beside the loop and does not return before it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.let_go, self.returned = threading.Event(), threading.Event(), threading.Event()
        self.closed: list[str] = []
        original, close_stream, close_slab = CpuDevice.kernels, CpuStream.close, CpuSlab.close

        def gemm(lane: Any, op: Any, plan: Any, inputs: Any, outputs: Any) -> None:
            self.entered.set()
            self.let_go.wait(30)
            self.closed.append("the kernel returned")
            self.returned.set()

        def noting_stream(stream: CpuStream, *, abandon: bool = False) -> None:
            self.closed.append("stream")
            close_stream(stream, abandon=abandon)

        def noting_slab(slab: CpuSlab) -> None:
            self.closed.append("slab")
            close_slab(slab)

        monkeypatch.setattr(
            CpuDevice, "kernels", lambda device, library: {**original(device, library), **({"gemm": gemm} if library == "blas" else {})}
        )
        monkeypatch.setattr(CpuDevice, "may_block", lambda self, lane, op: op.kind == "gemm")
        monkeypatch.setattr(CpuStream, "close", noting_stream)
        monkeypatch.setattr(CpuSlab, "close", noting_slab)


async def test_nothing_is_given_back_under_a_call_that_was_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    async with accel.System(close_timeout=0.05) as system:
        device = await system.open_device("cpu")
        x = await device.put(np.eye(3))
        product = asyncio.ensure_future(device.blas.gemm(x, x))
        while not held.entered.is_set():
            await asyncio.sleep(0)
        await device.aclose(timeout=0.05)
        with pytest.raises(accel.ClosedError):
            await product
        assert held.closed == [], "given back under the kernel"
        held.let_go.set()
    assert await asyncio.to_thread(held.returned.wait, 30)
    async with asyncio.timeout(30):
        while "slab" not in held.closed:
            await asyncio.sleep(0)
    assert held.closed[0] == "the kernel returned"
    assert "stream" in held.closed


async def test_a_fault_gives_nothing_back_under_a_call_either(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    async with accel.System() as system:
        device = await system.open_device("cpu", faults=FaultPlan().poison_at(1, op="unary"))
        x = await device.put(np.eye(3))
        product = asyncio.ensure_future(device.blas.gemm(x, x))
        while not held.entered.is_set():
            await asyncio.sleep(0)
        y = await device.zeros((3, 3), "float64")
        with pytest.raises(accel.ContextPoisonedError):
            await device.elementwise.unary("neg", y)
        with pytest.raises(accel.ContextPoisonedError):
            await product
        np.testing.assert_array_equal(await device.get(await device.put(np.eye(2))), np.eye(2))
        assert device.generation == 2
        assert held.closed == [], "given back under the kernel"
        held.let_go.set()
        async with asyncio.timeout(30):
            while "slab" not in held.closed:
                await asyncio.sleep(0)
        assert held.closed[0] == "the kernel returned"


async def test_a_backend_that_cannot_say_does_not_keep_an_op_from_its_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def may_block(self: CpuDevice, lane: Any, op: Any) -> bool:
        if op.kind == "gemm":
            raise AttributeError("no such field")
        return False

    monkeypatch.setattr(CpuDevice, "may_block", may_block)
    async with accel.System() as system:
        device = await system.open_device("cpu")
        x = await device.put(np.eye(3))
        np.testing.assert_array_equal(await device.get(await device.blas.gemm(x, x)), np.eye(3))
        async with device.batch() as batch:
            y = batch.blas.gemm(x, x)
        np.testing.assert_array_equal(await device.get(y), np.eye(3))
    assert "may_block_failed" in caplog.text


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


async def test_info_can_be_asked_for_from_another_thread(device: accel.Device) -> None:
    ref = await device.put(np.ones(100))
    before = device.info().memory.used
    del ref
    # Not on its own loop it counts what it finds, and leaves the frees to the loop.
    assert (await asyncio.to_thread(device.info)).memory.used == before
    assert device.info().memory.used == 0


@dataclass(frozen=True, eq=False, slots=True)
class Nothing(accel.KernelOp):
    """Has no operands, and does nothing."""

    library: ClassVar[str] = "mine"
    kind: ClassVar[str] = "nothing"

    def plan(self) -> Plan:
        return Plan((), (), ())


class Mine(accel.KernelLibrary):
    """A library of the user's own whose ``open`` and ``close`` are given by the test."""

    name = "mine"

    def __init__(self, on_open: Callable[[], object], on_close: Callable[[], object]) -> None:
        self.on_open = on_open
        self.on_close = on_close

    def open(self, stream: Any) -> None:
        self.on_open()

    @accel.kernel(Nothing)
    def nothing(self, op: Nothing, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        pass

    def close(self) -> None:
        self.on_close()


def raise_broken() -> None:
    raise RuntimeError("broken")


async def test_a_context_is_not_closed_under_a_library_that_could_not_be_opened_and_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, context_closes, device_closed = threading.Event(), threading.Event(), threading.Event()
    close_calls, close_device = OffloadedCalls.close, CpuDevice.close
    order: list[str] = []

    def seen_close_calls(self: OffloadedCalls, release_all: Callable[[], None], *, wait: bool) -> None:
        context_closes.set()
        close_calls(self, release_all, wait=wait)

    def seen_close_device(self: CpuDevice, *, abandon: bool = False) -> None:
        close_device(self, abandon=abandon)
        order.append("device")
        device_closed.set()

    def slow_close() -> None:
        begun.set()
        context_closes.wait(10)
        device_closed.wait(0.2)  # in vain: the context waits for this call
        order.append("library")

    monkeypatch.setattr(OffloadedCalls, "close", seen_close_calls)
    monkeypatch.setattr(CpuDevice, "close", seen_close_device)
    async with opened(host="inline") as device:
        registering = task(device.register(Mine, raise_broken, slow_close))
        assert await asyncio.to_thread(begun.wait, 10)
        await bounded(device.aclose())
        await failure(registering, accel.ClosedError)
    assert order == ["library", "device"]


async def test_a_library_is_not_closed_while_it_is_opened() -> None:
    opens, go, opened_last = threading.Event(), threading.Event(), threading.Event()
    order: list[str] = []

    def slow_open() -> None:
        opens.set()
        go.wait(10)
        order.append("open")
        opened_last.set()

    async with opened(host="inline") as device:
        registering = task(device.register(Mine, slow_open, lambda: order.append("close")))
        assert await asyncio.to_thread(opens.wait, 10)
        await bounded(device.aclose())
        await failure(registering, accel.ClosedError)
        go.set()
        assert await asyncio.to_thread(opened_last.wait, 10)
    assert order == ["open"], "the instance is abandoned"


@pytest.mark.parametrize("library", [Bugs, BugsOnTheLoop])
async def test_an_op_that_fails_while_another_library_is_unregistered_gets_its_own_error(library: type[Bugs]) -> None:
    plan = FaultPlan().hang_at(1, op="nothing")
    async with opened(plan, host="inline") as device:
        await device.register(Mine, lambda: None, lambda: None)
        await device.register(library)
        x = await device.put(np.arange(4.0))
        hung = task(device.run(Nothing()))
        await in_flight(device, 1)
        leaving = task(device.unregister("mine"))
        await in_flight(device, 2)
        error = await failure(device.run(Bug(x, "kernel:value")), accel.LibraryError)
        assert isinstance(error.__cause__, ValueError)
        await in_flight(device, 2)
        plan.release()
        await bounded(asyncio.gather(hung, leaving))
        np.testing.assert_array_equal(await device.get(await device.run(Bug(x))), np.arange(4.0) + 1)


@pytest.mark.parametrize("kind", ["value", *ODD])
async def test_whatever_the_close_of_a_library_raises_ends_nothing_else(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    async with opened(host="inline") as device:
        await device.register(Mine, lambda: None, lambda: throw(kind))
        await device.run(Nothing())
        await bounded(device.unregister("mine"))
        assert caplog.text.count("library_not_closed") == 1
        await bounded(device.register(Mine, lambda: None, lambda: throw(kind)))
        await device.run(Nothing())
    assert caplog.text.count("library_not_closed") == 2, "the device was closed with the library"
