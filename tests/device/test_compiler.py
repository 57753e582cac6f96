"""Kernels of the user's own: what is checked before anything is sent, and the way of a launch, with a compiler that is a stand-in."""

from __future__ import annotations

import asyncio
import pickle
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel.cpu.backend import CpuDevice
from accel.ops import CompiledKernel, KernelLayout, Launch
from accel.testing import FaultPlan
from tests.device_support import cancelled, failure, generation, opened, task, until

if TYPE_CHECKING:
    from collections.abc import Sequence

LAYOUT = KernelLayout((8, 8, 8), 256, (256, 64, 4), (1000, 10, 10), 1024)
TYPES = ("float32*", "const float32*", "int64")


class StandIn:
    """A compiler for one kernel, ``copy(out, x, n)``, on the processor."""

    def __init__(self) -> None:
        self.layout = LAYOUT
        self.compiled: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.errors: list[Exception] = []
        self.cooperative: list[bool] = []

    def compile(self, device: CpuDevice, kernel: CompiledKernel) -> KernelLayout:
        self.compiled.append(threading.current_thread().name)
        self.gate.wait(10)
        if self.errors:
            raise self.errors.pop(0)
        return self.layout

    def launch(self, lane: Any, op: Launch, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        assert op.slots == (None, None, op.args[2])
        self.cooperative.append(op.cooperative)
        lane.stream.copy(outputs[0], inputs[1], 4 * op.args[2])


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made, original = StandIn(), CpuDevice.kernels

    def kernels(self: CpuDevice, library: str) -> Any:
        return {"launch": made.launch} if library == "compiler" else original(self, library)

    monkeypatch.setattr(CpuDevice, "kernels", kernels)
    monkeypatch.setattr(CpuDevice, "compile", lambda self, kernel: made.compile(self, kernel), raising=False)
    return made


async def test_a_device_without_a_compiler_says_what_to_do(device: accel.Device) -> None:
    error = await failure(device.compiler.compile("source", "name"), accel.UnsupportedError)
    assert "cpu:0 has no compiler" in error.message
    assert "open_device('cuda')" in error.remedy
    assert (error.op, error.device) == ("compile", "cpu:0")
    x = await device.zeros(4)
    error = await failure(device.run(Launch(CompiledKernel("source", "name"), 1, 1, (x,))), accel.UnsupportedError)
    assert "name" in error.message
    assert "open_device('cuda')" in error.remedy
    with pytest.raises(accel.UnsupportedError) as caught:
        async with device.batch() as batch:
            batch.compiler.launch(CompiledKernel("source", "name"), 1, 1, (x,))
    assert caught.value.op_index == 0


async def test_a_launch_gives_what_it_writes_and_is_ordered_like_any_op(compiler: StandIn, rng: np.random.Generator) -> None:
    x = rng.standard_normal(100).astype(np.float32)
    async with opened() as device:
        kernel = await device.compiler.compile("source", "copy", ["-DN=4"], headers={"b": "2", "a": "1"}, parameters=TYPES)
        assert compiler.compiled[0].startswith("accel-worker"), "it was compiled on the loop's thread"
        assert kernel.program == CompiledKernel("source", "copy", ("-DN=4",), (("a", "1"), ("b", "2")), TYPES, LAYOUT)
        out = await device.full(100, np.nan)
        source = await device.put(x)
        doubled = await asyncio.gather(
            device.elementwise.binary("add", source, source),
            kernel.launch(1, 100, (out, source, 100)),
            device.put(np.zeros_like(x), out=source),
            device.elementwise.unary("neg", out),
        )
        assert doubled[1] is out
        assert np.array_equal(await device.get(doubled[3]), -x)
        async with device.batch() as batch:
            y = batch.compiler.launch(kernel, (1,), (100, 1), (batch.empty(100), out, 100))
            z = batch.elementwise.unary("neg", y)
        assert np.array_equal(await device.get(z), -x)


async def test_the_result_is_every_ref_that_is_written_once(compiler: StandIn) -> None:
    untyped = CompiledKernel("source", "copy", layout=KernelLayout((8, 8, 8), 256, (256, 64, 4), (1000, 10, 10), 0))
    read_only = CompiledKernel("source", "copy", parameters=("const float32*", "const void*", "int64"), layout=LAYOUT)
    async with opened() as device:
        a, b = await device.zeros(4), await device.zeros(4)
        for kernel, args, reads, writes in (
            (untyped, (a, b, 4), (a, b), (a, b)),
            (untyped, (a, a, 4), (a, a), (a,)),
            (read_only, (a, b, 4), (a, b), ()),
        ):
            op = Launch(kernel, 1, 1, args)
            plan = op.plan()
            assert (plan.reads, plan.writes, plan.creates) == (reads, writes, ())
            assert op.result(plan.writes) == (None if not writes else writes[0] if len(writes) == 1 else writes)


def refusals(x: accel.AccelRef, wide: accel.AccelRef) -> list[tuple[Any, Any, tuple[Any, ...], Any, str]]:
    """Return what cannot be launched: grid, block, arguments, shared memory, and what the error says."""
    good: tuple[Any, ...] = (x, x, 4)
    return [
        (0, 1, good, 0, "at least 1"),
        (1, -1, good, 0, "at least 1"),
        (1.0, 1, good, 0, "an int"),
        ("1", 1, good, 0, "an int"),
        ((), 1, good, 0, "at least 1"),
        ((1, 1, 1, 1), 1, good, 0, "up to three"),
        (1001, 1, good, 0, "grid has 1001 in x"),
        ((1, 11), 1, good, 0, "grid has 11 in y"),
        (1, 257, good, 0, "block has 257 in x"),
        (1, (1, 1, 5), good, 0, "block has 5 in z"),
        (1, (256, 2), good, 0, "512 threads"),
        (1, 1, good, 1025, "1024 bytes"),
        (1, 1, good, -1, "shared_bytes"),
        (1, 1, good, True, "shared_bytes"),
        (1, 1, (x, x), 0, "3 argument(s), and 2"),
        (1, 1, (x, x, 4, 4), 0, "3 argument(s), and 4"),
        (1, 1, (x, wide, 4), 0, "float64 elements"),
        (1, 1, (x, x, x), 0, "is a ref"),
        (1, 1, (x, 7, 4), 0, "not an AccelRef"),
        (1, 1, (x, x.token(), 4), 0, "token"),
        (1, 1, (x, x, 4.0), 0, "Give an int"),
        (1, 1, (x, x, 1 << 63), 0, "cannot hold"),
        (1, 1, (x, x, None), 0, "Give an int"),
    ]


async def test_what_does_not_fit_is_refused_before_it_is_sent(compiler: StandIn, device: accel.Device) -> None:
    kernel = await device.compiler.compile("source", "copy", parameters=TYPES)
    x, wide = await device.zeros(4), await device.zeros(4, "float64")
    good: tuple[Any, ...] = (x, x, 4)
    before = device.info()
    for grid, block, args, shared, words in refusals(x, wide):
        for _ in range(2):  # a shape that is remembered must be a good one
            error = await failure(kernel.launch(grid, block, args, shared_bytes=shared), accel.InvalidArgumentError)
            assert words in str(error), f"{error} does not say {words!r}"
            assert error.op == "launch"
    await kernel.launch(1, 1, good)
    await failure(kernel.launch(1.0, 1, good), accel.InvalidArgumentError)  # type: ignore[arg-type]
    await failure(device.compiler.launch("copy", 1, 1, good), accel.InvalidArgumentError)  # type: ignore[arg-type]
    await device.free(x)
    await failure(kernel.launch(1, 1, good), accel.StaleRefError)
    assert device.info().queued == before.queued


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"source": ""}, "source"),
        ({"source": None}, "source"),
        ({"name": " "}, "name"),
        ({"name": ("a", "b")}, "name"),
        ({"options": "-DN=4"}, "list of strings"),
        ({"options": [4]}, "list of strings"),
        ({"headers": ["a.h"]}, "headers"),
        ({"headers": {"a.h": b""}}, "headers"),
        ({"parameters": "float32*"}, "list of strings"),
        ({"parameters": ("float*",)}, "not the type"),
        ({"parameters": ("float32**",)}, "not the type"),
        ({"parameters": ("float32* const",)}, "not the type"),
        ({"parameters": ("void",)}, "not the type"),
        ({"parameters": TYPES[:2]}, "3 parameter(s), and 2 types"),
        ({"parameters": (*TYPES[:2], "int32")}, "8 byte(s), and int32 has 4"),
        ({"timeout": "1"}, "timeout"),
    ],
)
async def test_what_cannot_be_compiled_is_refused(compiler: StandIn, arguments: dict[str, Any], words: str, device: accel.Device) -> None:
    error = await failure(device.compiler.compile(**{"source": "source", "name": "copy", **arguments}), accel.InvalidArgumentError)
    assert words in str(error)


async def test_errors_cancellation_and_deadlines_of_a_compilation(compiler: StandIn, device: accel.Device) -> None:
    compiler.errors.append(accel.CompileError("copy.cu(1): error", log="all of it"))
    error = await failure(device.compiler.compile("source", "copy"), accel.CompileError)
    assert (error.log, error.op, error.device) == ("all of it", "compile", "cpu:0")
    compiler.gate.clear()
    waiting = task(device.compiler.compile("source", "copy"))
    await until(lambda: len(compiler.compiled) == 2)
    others = await asyncio.gather(device.zeros(3), device.zeros(4))
    assert len(others) == 2, "ops go on while a program is compiled"
    await cancelled(waiting)
    late = await failure(device.compiler.compile("source", "copy", timeout=0.01), accel.DeadlineExceededError)
    assert late.op == "compile"
    compiler.gate.set()
    assert (await device.compiler.compile("source", "copy")).name == "copy"


async def test_a_fault_that_surfaces_while_compiling_rebuilds_and_the_kernel_stays_valid(
    compiler: StandIn, rng: np.random.Generator
) -> None:
    x = rng.standard_normal(10).astype(np.float32)
    async with opened(FaultPlan().poison_at(2, op="launch")) as device:
        kernel = await device.compiler.compile("source", "copy", parameters=TYPES)
        compiler.errors.append(accel.DriverError("illegal address", code=700, library="driver", scope=accel.FaultScope.CONTEXT))
        error = await failure(device.compiler.compile("source", "copy"), accel.ContextPoisonedError)
        assert (error.code, error.executed, error.retryable) == (700, "no", True)
        await generation(device, 2)
        ref, out = await device.put(x), await device.zeros(10)
        assert np.array_equal(await device.get(await kernel.launch(1, 10, (out, ref, 10))), x)
        await failure(kernel.launch(1, 10, (out, ref, 10)), accel.ContextPoisonedError)
        await generation(device, 3)
        ref, out = await device.put(x), await device.zeros(10)
        assert np.array_equal(await device.get(await kernel.launch(1, 10, (out, ref, 10))), x)


async def test_a_rebuild_while_compiling_is_not_noticed(compiler: StandIn) -> None:
    async with opened(FaultPlan().poison_at(1)) as device:
        compiler.gate.clear()
        compiler.errors.append(accel.ClosedError("the context is closed"))
        waiting = task(device.compiler.compile("source", "copy"))
        await until(lambda: compiler.compiled)
        await failure(device.zeros(1), accel.ContextPoisonedError)
        await generation(device, 2)
        compiler.gate.set()
        assert (await waiting).program.layout == LAYOUT
        assert len(compiler.compiled) == 2


async def test_kernels_and_launches_pickle(compiler: StandIn, device: accel.Device) -> None:
    kernel = await device.compiler.compile("source", "copy", parameters=TYPES)
    x, y = await device.full(4, 3.0), await device.zeros(4)
    await kernel.launch(1, 4, (y, x, 4))
    again = pickle.loads(pickle.dumps(kernel.program))
    assert again == kernel.program
    assert again.key == kernel.program.key
    op = pickle.loads(pickle.dumps(Launch(kernel.program, 1, 4, (y, x, 4))))
    assert await device.run(op) is y
    assert np.array_equal(await device.get(y), np.full(4, 3.0, np.float32))


def test_the_key_covers_everything_that_makes_the_code() -> None:
    one = CompiledKernel("source", "name", ("-a", "-b"), (("h", "1"),))
    others = [
        CompiledKernel("sourc", "ename", ("-a", "-b"), (("h", "1"),)),
        CompiledKernel("source", "name", ("-a-b",), (("h", "1"),)),
        CompiledKernel("source", "name", ("-a",), (("-b", "h"), ("1", ""))),
        CompiledKernel("source", "name", ("-a", "-b"), (("h", "2"),)),
        CompiledKernel("source", "name", ("-a", "-b")),
    ]
    others += [CompiledKernel("", "name", code=code) for code in (b"a", b"b")]
    assert len({each.key for each in (one, *others)}) == 8
    assert CompiledKernel("source", "name", ("-a", "-b"), (("h", "1"),), ("int32",), LAYOUT).key == one.key


@pytest.mark.parametrize("code", [".version 8.0", b"\x7fELF", bytearray(b".version 8.0"), memoryview(b".version 8.0")])
async def test_code_that_was_compiled_elsewhere_is_loaded_and_launched(compiler: StandIn, code: Any, rng: np.random.Generator) -> None:
    x = rng.standard_normal(10).astype(np.float32)
    async with opened() as device:
        kernel = await device.compiler.load(code, "copy", parameters=TYPES)
        assert kernel.program == CompiledKernel("", "copy", parameters=TYPES, layout=LAYOUT, code=kernel.program.code)
        assert kernel.program.code == (code.encode() if isinstance(code, str) else bytes(code))
        ref, out = await device.put(x), await device.zeros(10)
        assert np.array_equal(await device.get(await kernel.launch(1, 10, (out, ref, 10))), x)
        again = pickle.loads(pickle.dumps(kernel.program))
        assert (again, again.key) == (kernel.program, kernel.program.key)


async def test_what_cannot_be_loaded_is_refused(compiler: StandIn) -> None:
    async with opened() as device:
        for arguments, words in (
            ((3, "copy"), "code is a int"),
            ((b"", "copy"), "code is empty"),
            (("  ", "copy"), "code is empty"),
            ((b"code", ""), "name is ''"),
            ((b"code", None), "name is None"),
        ):
            error = await failure(device.compiler.load(*arguments), accel.InvalidArgumentError)
            assert words in str(error)
            assert error.op == "load"
        error = await failure(device.compiler.load(b"code", "copy", parameters=TYPES[:2]), accel.InvalidArgumentError)
        assert "3 parameter(s), and 2 types" in str(error)
        compiler.errors.append(accel.CompileError("invalid PTX", log="line 3"))
        found = await failure(device.compiler.load(b"code", "copy"), accel.CompileError)
        assert (found.log, found.op) == ("line 3", "load")
    async with opened() as device:
        late = task(device.compiler.load(b"code", "copy", timeout=5.0))
        await late


async def test_a_launch_may_be_cooperative(compiler: StandIn, device: accel.Device) -> None:
    kernel = await device.compiler.compile("source", "copy", parameters=TYPES)
    x, y = await device.zeros(4), await device.zeros(4)
    await kernel.launch(1, 4, (y, x, 4), cooperative=True)
    await device.compiler.launch(kernel, 1, 4, (y, x, 4))
    async with device.batch() as batch:
        batch.compiler.launch(kernel, 1, 4, (y, x, 4), cooperative=True)
    assert compiler.cooperative == [True, False, True]
    error = await failure(kernel.launch(1, 4, (y, x, 4), cooperative=1), accel.InvalidArgumentError)  # type: ignore[arg-type]
    assert "cooperative is 1" in str(error)
