"""Libraries of the user's own: ops run by them are ops like all others."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

import accel
from accel import dlpack, ops
from accel.cpu.backend import CpuDevice
from accel.ops import Plan, Spec
from accel.testing import FaultPlan


@dataclass(frozen=True, eq=False, slots=True)
class Scale(accel.KernelOp):
    """``factor * x``."""

    library: ClassVar[str] = "mine"
    kind: ClassVar[str] = "scale"

    x: accel.AccelRef
    factor: float = 2.0
    out: accel.AccelRef | None = None

    def plan(self) -> Plan:
        if self.out is None:
            return Plan((self.x,), (), (Spec(self.x.shape, self.x.dtype),))
        return Plan((self.x,), (self.out,), ())


@dataclass(frozen=True, eq=False, slots=True)
class Break(Scale):
    """Does not work."""

    kind: ClassVar[str] = "break"


class Mine(accel.KernelLibrary):
    """Scales with numpy, on the stream's thread."""

    name = "mine"
    made: ClassVar[list[Mine]] = []

    def __init__(self, extra: float = 1.0, *, fails: bool = False) -> None:
        self.extra = extra
        self.fails = fails
        self.opened: list[str] = []
        self.closed: list[str] = []
        self.threads: set[str] = set()
        self.streams: list[Any] = []
        type(self).made.append(self)

    def open(self, stream: Any) -> None:
        if self.fails:
            raise RuntimeError("no such library")
        self.opened.append(threading.current_thread().name)

    @accel.kernel(Scale)
    def scale(self, op: Scale, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        self.threads.add(threading.current_thread().name)
        self.streams.append(stream)
        (x,), (y,) = inputs, outputs
        assert not x.is_output
        assert y.is_output
        source, target = np.asarray(x), np.asarray(y)
        stream.submit(lambda: np.multiply(source, op.factor * self.extra, out=target), 1.0)

    @accel.kernel(Break)
    def break_it(self, op: Break, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        raise ZeroDivisionError("broken")

    def close(self) -> None:
        self.closed.append(threading.current_thread().name)


class Quick(Mine):
    """The same on the loop's thread."""

    blocking = False
    made: ClassVar[list[Mine]] = []


@pytest.fixture(autouse=True)
def no_instances() -> None:
    Mine.made.clear()
    Quick.made.clear()


async def test_ops_of_a_registered_library_run_like_others() -> None:
    rng = np.random.default_rng(np.random.SeedSequence().entropy)
    async with accel.System() as system:
        device = await system.open_device("cpu")
        await device.register(Mine, 3.0)
        a = rng.standard_normal((5, 7))
        x = await device.put(a)
        y = await device.run(Scale(x))
        np.testing.assert_allclose(await device.get(y), a * 6)
        z = await device.empty((5, 7), "float64")
        assert await device.run(Scale(x, 0.5, z)) is z
        np.testing.assert_allclose(await device.get(z), a * 1.5)
        async with device.batch() as batch:
            h = batch.elementwise.unary("neg", x)
            h = batch.run(Scale(h))
            h = batch.elementwise.unary("neg", h)
        np.testing.assert_allclose(await device.get(h), a * 6)
        async with device.graph() as graph:
            g = graph.run(Scale(x))
        await graph.replay()
        np.testing.assert_allclose(await device.get(g), a * 6)
        (instance,) = Mine.made
        assert len(instance.opened) == 1
        assert instance.opened[0] != threading.current_thread().name
        assert threading.current_thread().name not in instance.threads, "it may block, so it is called elsewhere"
        assert "mine" in str(system.tree())
        assert not instance.closed
    assert len(instance.closed) == 1


@pytest.mark.parametrize("streams", [8, 1])
async def test_a_batch_of_one_library_runs_in_the_stream_of_its_other_ops(streams: Any) -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", streams=streams)
        await device.register(Mine)
        x = await device.put(np.ones(4))
        await device.run(Scale(x))
        async with device.batch() as batch:
            found = batch.get(batch.run(Scale(batch.put(np.full(4, 2.0)), 3.0)))
        np.testing.assert_array_equal(found, np.full(4, 6.0))
        (instance,) = Mine.made
        first, second = instance.streams
        assert first is second, "what a library keeps is ordered by its stream"


async def test_what_does_not_block_is_called_on_the_loops_thread(device: accel.Device) -> None:
    await device.register(Quick)
    x = await device.put(np.ones(4))
    np.testing.assert_array_equal(await device.get(await device.run(Scale(x))), np.full(4, 2.0))
    (instance,) = Quick.made
    assert instance.threads == {threading.current_thread().name}


@pytest.mark.parametrize("library", [Mine, Quick])
async def test_the_backend_is_not_asked_about_ops_that_are_not_its_own(library: type[Mine], monkeypatch: pytest.MonkeyPatch) -> None:
    def may_block(self: CpuDevice, lane: Any, op: Any) -> bool:
        assert op.library != "mine", "its kinds may be called like the backend's, with other fields"
        return False

    monkeypatch.setattr(CpuDevice, "may_block", may_block)
    async with accel.System() as system:
        device = await system.open_device("cpu")
        await device.register(library)
        x = await device.put(np.ones(4))
        np.testing.assert_array_equal(await device.get(await device.run(Scale(x))), np.full(4, 2.0))
        async with device.batch() as batch:
            y = batch.run(Scale(x, 3.0))
        np.testing.assert_array_equal(await device.get(y), np.full(4, 3.0))


async def test_a_library_that_cannot_be_closed_keeps_nothing_else_from_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    closed: list[bool] = []
    close = CpuDevice.close

    def noted(self: CpuDevice, *, abandon: bool = False) -> None:
        closed.append(abandon)
        close(self, abandon=abandon)

    def broken(self: Mine) -> None:
        raise ZeroDivisionError("broken")

    monkeypatch.setattr(CpuDevice, "close", noted)
    monkeypatch.setattr(Mine, "close", broken)
    async with accel.System() as system:
        device = await system.open_device("cpu")
        await device.register(Mine)
        await device.run(Scale(await device.put(np.ones(4))))
    assert closed == [False]
    assert "library_not_closed" in caplog.text


async def test_order_with_other_libraries_is_kept(device: accel.Device) -> None:
    await device.register(Mine)
    x = await device.put(np.ones(1 << 15))
    waits: list[asyncio.Future[object]] = []
    for _ in range(10):
        waits.append(asyncio.ensure_future(device.run(Scale(x, 2.0, x))))
        waits.append(asyncio.ensure_future(device.elementwise.binary("add", x, x, out=x)))
    await asyncio.gather(*waits)
    np.testing.assert_array_equal(await device.get(x), np.full(1 << 15, 4.0**10))


async def test_every_context_gets_an_instance_of_its_own() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", faults=FaultPlan().poison_at(2))
        await device.register(Mine)
        x = await device.put(np.ones(4))
        with pytest.raises(accel.ContextPoisonedError):
            await device.run(Scale(x))
        x = await device.put(np.ones(4))
        assert device.generation == 2
        np.testing.assert_array_equal(await device.get(await device.run(Scale(x))), np.full(4, 2.0))
        first, second = Mine.made
        assert not first.closed, "nothing is given back of a dead context"
    assert len(second.closed) == 1


async def test_classes_that_do_not_fit_are_refused() -> None:
    class Nameless(accel.KernelLibrary):
        pass

    class Empty(accel.KernelLibrary):
        name = "empty"

    class Wrong(accel.KernelLibrary):
        name = "wrong"

        @accel.kernel(Scale)
        def scale(self, *args: object) -> None: ...

    class Taken(accel.KernelLibrary):
        name = "blas"

        @accel.kernel(ops.Gemm)
        def gemm(self, *args: object) -> None: ...

    async with accel.System() as system:
        device = await system.open_device("cpu")
        for library, words in (
            (Nameless, "no name"),
            (Wrong, "is of library 'mine'"),
            (Taken, "has a library 'blas'"),
            (int, "not a Kernel"),
        ):
            with pytest.raises(accel.InvalidArgumentError, match=words):
                await device.register(library)  # type: ignore[arg-type]
        with pytest.raises(accel.UnsupportedError, match="no kernels"):
            await device.register(Empty)
        await device.register(Mine)
        with pytest.raises(accel.InvalidArgumentError, match="has a library 'mine'"):
            await device.register(Mine)


async def test_operands_are_views_of_what_the_processor_can_read() -> None:
    operand = accel.Operand(4096, (2, 3), accel.DType.FLOAT32, False, "cuda")
    assert operand.nbytes == 24
    assert operand.__cuda_array_interface__["data"] == (4096, True)
    with pytest.raises(TypeError, match="numpy cannot read"):
        np.asarray(operand)
    assert not hasattr(accel.Operand(4096, (2,), accel.DType.BFLOAT16, False, "cuda"), "__cuda_array_interface__")
    assert not hasattr(accel.Operand(4096, (2,), accel.DType.FLOAT32, False, "cpu"), "__cuda_array_interface__")
    empty = accel.Operand(0, (0, 3), accel.DType.FLOAT32, False, "cpu")
    assert np.asarray(empty).shape == (0, 3)


async def test_operands_speak_dlpack_in_the_kernels_stream_only() -> None:
    class Stream:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, 77

    operand = accel.Operand(4096, (2, 3), accel.DType.BFLOAT16, True, "cuda", 1, Stream())
    assert operand.__dlpack_device__() == (2, 1)
    for version in (None, (1, 0)):
        tensor = dlpack.read(operand.__dlpack__(stream=77, max_version=version))
        assert (tensor.address, tensor.shape, tensor.dtype, tensor.device) == (4096, (2, 3), accel.DType.BFLOAT16, (2, 1))
        assert not tensor.read_only
    operand.__dlpack__(stream=-1)
    refused: list[dict[str, Any]] = [{"stream": 1}, {"stream": None}, {"stream": 77, "copy": True}, {"stream": 77, "dl_device": (2, 0)}]
    for wrong in refused:
        with pytest.raises(BufferError):
            operand.__dlpack__(**wrong)
    with pytest.raises(BufferError, match="toy"):
        accel.Operand(4096, (2,), accel.DType.FLOAT32, False, "toy").__dlpack_device__()
    empty = accel.Operand(0, (0, 3), accel.DType.FLOAT32, True, "cuda", 0, Stream())
    assert dlpack.read(empty.__dlpack__(stream=77)).shape == (0, 3)


async def test_operands_are_taken_by_dlpack_on_the_cpu() -> None:
    array = np.arange(6.0)
    operand = accel.Operand(array.ctypes.data, (2, 3), accel.DType.FLOAT64, True, "cpu")
    np.from_dlpack(operand)[1, 0] = 7.0
    assert array[3] == 7.0


async def test_a_library_knows_its_device(device: accel.Device) -> None:
    await device.register(Mine)
    (instance,) = Mine.made
    assert (instance.description.backend, instance.description.index) == ("cpu", 0)


async def test_a_library_that_cannot_be_captured_is_refused_where_graphs_are(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = CpuDevice.kernels
    captured: list[str] = []

    def with_graphs(self: CpuDevice, library: str) -> Any:
        return {"capture": lambda *_: captured.append("capture")} if library == "capture" else kernels(self, library)

    monkeypatch.setattr(CpuDevice, "kernels", with_graphs)
    async with accel.System() as system:
        device = await system.open_device("cpu")
        await device.register(Mine)
        x = await device.put(np.ones(4))
        with pytest.raises(accel.UnsupportedError, match="can be captured"):
            async with device.graph() as graph:
                graph.run(Scale(x))
        assert not captured
        monkeypatch.setattr(Mine, "capturable", True)
        async with device.graph() as graph:
            graph.run(Scale(x))
        assert captured == ["capture"]


async def test_a_fault_plan_knows_ops_of_the_users_own() -> None:
    plan = FaultPlan().fail_at(2, accel.LibraryError("asked for", code=13), op="scale")
    async with accel.System() as system:
        device = await system.open_device("cpu", faults=plan)
        await device.register(Mine)
        x = await device.put(np.ones(3))
        np.testing.assert_array_equal(await device.get(await device.run(Scale(x))), np.full(3, 2.0))
        with pytest.raises(accel.LibraryError) as caught:
            await device.run(Scale(x))
        assert (caught.value.code, caught.value.op) == (13, "scale")
        assert plan.fired == 1
    for unknown in ("scael", "free", "last_use", 3):
        with pytest.raises(accel.InvalidArgumentError) as refused:
            FaultPlan().hang_at(1, op=unknown)  # type: ignore[arg-type]
        assert "scale" in (refused.value.remedy or "")
