"""Programs that the tests of this folder run in processes of their own: ``python -m tests.accel_cuda.hazard_programs NAME``.

A fault ends CUDA for the process that it happens in, and what other libraries do in a process stays there.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import gc
import importlib
import logging
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

import accel
from accel.ops import Plan, Spec
from tests.accel_cuda.cuda_programs import failure
from tests.accel_cuda.standby_programs import free_and_total

if TYPE_CHECKING:
    from collections.abc import Awaitable

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 30.0
MIB, GIB = 1 << 20, 1 << 30
ILLEGAL = 'extern "C" __global__ void illegal(float* x) { *(volatile int*)0x10 = 1; }'


def run_program(name: str, *, seconds: float = 50.0) -> str:
    """Run a program, fail unless it ends well, and return what it printed; called by the tests."""
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.accel_cuda.hazard_programs", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)
    print(done.stdout)
    assert done.returncode == 0, f"{name} ended with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def most_of() -> int:
    """Return 7 of 10 bytes of the GPU's memory."""
    return 7 * free_and_total()[1] // 10


async def fail_over(device: accel.Device) -> None:
    """Bring an illegal address about, and wait until the device is ready in a child."""
    x = await device.zeros(4, "float32")
    kernel = await device.compiler.compile(ILLEGAL, "illegal", parameters=("float32*",))
    assert (await failure(kernel.launch(1, 1, (x,)), accel.ContextPoisonedError)).code == 700
    async with asyncio.timeout(PATIENCE):
        async for generation in device.generations():
            if generation > 1:
                break
    assert device.info().host == "process"


async def _puts_again(array: Any) -> None:
    """Put page-locked memory of another library before a fail-over and after it."""
    expected = array.copy()
    async with accel.System() as system:
        device = await system.open_device("cuda", host="auto")
        np.testing.assert_array_equal(await device.get(await device.put(array)), expected)
        await fail_over(device)
        again = await device.put(array)
        np.testing.assert_array_equal(await device.get(again), expected)
        np.testing.assert_array_equal(array, expected)
        array += 1  # still its owner's, to write too
        np.testing.assert_array_equal(await device.get(await device.put(array)), expected + 1)


def puts_pinned_memory_of_torch() -> None:
    torch: Any = importlib.import_module("torch")
    asyncio.run(_puts_again(torch.arange(1 << 22, dtype=torch.float32).pin_memory().numpy()))


def puts_pinned_memory_of_cupy() -> None:
    cupy: Any = importlib.import_module("cupy")
    memory = cupy.cuda.alloc_pinned_memory(1 << 24)
    array = np.frombuffer(memory, np.float32, 1 << 22)
    array[:] = np.random.default_rng().standard_normal(1 << 22, np.float32)
    asyncio.run(_puts_again(array))


def gives_slabs_back() -> None:
    """A device that held 100 GiB finds them in its child, and the log says what stays."""
    told: list[str] = []

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    logging.getLogger("accel").addHandler(Listening())

    async def main() -> None:
        async with accel.System() as system:
            device = await system.open_device("cuda", host="auto")
            x = await device.put(np.eye(64, dtype=np.float32))
            await device.blas.gemm(x, x)
            await device.reduce("sum", x)
            count = most_of() // (10 * GIB)
            held = [await device.empty((10 * GIB,), "uint8") for _ in range(count)]
            before = device.info().memory
            assert before.used >= count * 10 * GIB
            assert before.workspace > 0
            await fail_over(device)
            held = [await device.empty((10 * GIB,), "uint8", timeout=PATIENCE) for _ in range(count)]
            assert device.info().memory.used >= count * 10 * GIB
            del held

    asyncio.run(main())
    kept = [text for text in told if text.startswith("dead_context_keeps_memory")]
    assert len(kept) == 1, told
    mib = int(kept[0].split("mib=")[1].split(":")[0])
    print(f"the dead context keeps {mib} MiB")
    assert 0 < mib < 2048


def has_no_thread_for_a_copy() -> None:
    """Where no thread starts for a large copy the op fails with an error that may be tried again, and nothing else is lost."""

    async def main() -> None:
        rng = np.random.default_rng()
        async with accel.System() as system:
            device = await system.open_device("cuda", host="inline")
            keep = await device.put(np.arange(4.0))
            array = rng.integers(0, 256, 96 * MIB, np.uint8)
            start = threading.Thread.start

            def refuse(self: threading.Thread) -> None:
                if "copy" in self.name:
                    raise RuntimeError("can't start new thread")
                start(self)

            threading.Thread.start = refuse  # type: ignore[method-assign]
            try:
                for _ in range(3):
                    error = await failure(device.put(array), accel.AccelError)
                    assert error.retryable
                    assert error.scope is accel.FaultScope.OP
            finally:
                threading.Thread.start = start  # type: ignore[method-assign]
            assert device.state is accel.DeviceState.READY
            assert device.generation == 1
            np.testing.assert_array_equal(await device.get(keep), np.arange(4.0))
            ref = await asyncio.wait_for(device.put(array), PATIENCE)
            np.testing.assert_array_equal(await device.get(ref), array)

    asyncio.run(main())


@dataclass(frozen=True, eq=False, slots=True)
class Hungry(accel.KernelOp):
    """Asks a library of its own for memory."""

    library: ClassVar[str] = "hungry"
    kind: ClassVar[str] = "hungry"

    x: accel.AccelRef
    nbytes: int
    by: str = "torch"

    def plan(self) -> Plan:
        return Plan((self.x,), (), (Spec(self.x.shape, self.x.dtype),))


class HungryLibrary(accel.KernelLibrary):
    """Works in memory that torch or CuPy has for it."""

    name = "hungry"

    @accel.kernel(Hungry)
    def hungry(self, op: Hungry, stream: Any, inputs: Any, outputs: Any) -> None:
        if op.by == "torch":
            torch: Any = importlib.import_module("torch")
            with torch.cuda.stream(torch.cuda.ExternalStream(stream.handle)):
                work = torch.empty(op.nbytes, dtype=torch.uint8, device="cuda")
                work[:1] = 1
                torch.from_dlpack(outputs[0]).copy_(torch.from_dlpack(inputs[0]))
                del work
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
        else:
            cupy: Any = importlib.import_module("cupy")
            with cupy.cuda.ExternalStream(stream.handle):
                work = cupy.empty(op.nbytes, dtype=cupy.uint8)
                cupy.asarray(outputs[0])[...] = cupy.asarray(inputs[0])
                cupy.cuda.get_current_stream().synchronize()
                del work
                cupy.get_default_memory_pool().free_all_blocks()


def makes_room_for_other_libraries() -> None:
    """Memory that another library lacks is an error that may be tried again, and the second try finds our idle slabs given back."""

    async def main() -> None:
        async with accel.System() as system:
            device = await system.open_device("cuda", host="inline")
            await device.register(HungryLibrary)
            x = await device.put(np.arange(8.0))
            count = most_of() // (10 * GIB)
            for by in ("torch", "cupy"):
                held = [await device.empty((10 * GIB,), "uint8") for _ in range(count)]
                for ref in held:
                    await device.free(ref)
                assert device.info().memory.reserved >= count * 10 * GIB
                op = Hungry(x, 8 * count * GIB, by)
                error = await failure(device.run(op), accel.OutOfMemoryError)
                assert error.retryable, by
                assert error.op == "hungry", by
                async with asyncio.timeout(PATIENCE):
                    while device.info().memory.reserved >= GIB:
                        await asyncio.sleep(0)
                np.testing.assert_array_equal(await device.get(await asyncio.wait_for(device.run(op), PATIENCE)), np.arange(8.0))
                assert device.generation == 1

    asyncio.run(main())


@dataclass(frozen=True, eq=False, slots=True)
class Steps(accel.KernelOp):
    """Several launches of torch's, one after the other."""

    library: ClassVar[str] = "steps"
    kind: ClassVar[str] = "steps"

    x: accel.AccelRef

    def plan(self) -> Plan:
        return Plan((self.x,), (), (Spec(self.x.shape, self.x.dtype),))


class StepsLibrary(accel.KernelLibrary):
    """Launches 20 kernels for an op, and does not say so."""

    name = "steps"

    def open(self, stream: Any) -> None:
        self.torch: Any = importlib.import_module("torch")

    @accel.kernel(Steps)
    def steps(self, op: Steps, stream: Any, inputs: Any, outputs: Any) -> None:
        torch = self.torch
        with torch.cuda.stream(torch.cuda.ExternalStream(stream.handle)), torch.inference_mode():
            out = torch.from_dlpack(outputs[0])
            out.copy_(torch.from_dlpack(inputs[0]))
            for _ in range(19):
                out += 1


class Gaps:
    """The longest time that a second Python thread, and the loop, had to wait for a turn, in seconds."""

    def __init__(self) -> None:
        # Or a collection walks through the modules that were imported, and holds every thread for 50 ms.
        gc.collect()
        gc.freeze()
        self.thread = self.loop = 0.0
        self._is_over = False

    def watch_thread(self) -> None:
        last = time.perf_counter()
        while not self._is_over:
            time.sleep(0.001)
            now = time.perf_counter()
            self.thread, last = max(self.thread, now - last - 0.001), now

    async def watch_loop(self) -> None:
        last = time.perf_counter()
        while not self._is_over:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            self.loop, last = max(self.loop, now - last - 0.001), now

    def end(self) -> None:
        self._is_over = True


def fills_the_queue() -> None:
    """3,000 transforms and 3,000 ops of a torch library, behind work that keeps the device busy: no Python thread waits for the device."""

    async def main() -> None:
        async with accel.System() as system:
            device = await system.open_device("cuda", host="inline", libraries=("fft", "blas"))
            await device.register(StepsLibrary)
            signal = await device.put(np.ones((64, 1 << 14), np.complex64))
            large = await device.put(np.ones((8192, 8192), np.float32))
            x = await device.put(np.ones(1 << 16, np.float32))
            await device.fft.fft(signal, axes=(0,))
            await device.blas.gemm(large, large)
            await device.run(Steps(x))
            gaps = Gaps()
            thread = threading.Thread(target=gaps.watch_thread)
            thread.start()
            watching = asyncio.create_task(gaps.watch_loop())

            async def transforms() -> None:
                for _ in range(30):
                    await device.fft.fft(signal, axes=(0,))

            async def steps() -> None:
                for _ in range(30):
                    await device.run(Steps(x))

            async def products() -> None:
                for _ in range(5):
                    await device.blas.gemm(large, large)

            await asyncio.gather(*(client() for _ in range(100) for client in (transforms, steps)), *(products() for _ in range(8)))
            gaps.end()
            await watching
            thread.join()
            print(f"worst gap of a second thread {gaps.thread * 1e3:.1f} ms, of the loop {gaps.loop * 1e3:.1f} ms")
            assert max(gaps.thread, gaps.loop) <= 0.010, (gaps.thread, gaps.loop)

    asyncio.run(main())


def multiplies_new_shapes() -> None:
    """Products that differ from those before in how the result lies, or in being added to it, load their kernels beside the loop."""

    async def main() -> None:
        async with accel.System() as system:
            device = await system.open_device("cuda", host="inline", libraries=("blas",))
            gaps = Gaps()
            watching = asyncio.create_task(gaps.watch_loop())
            for size in range(1, 201):
                m, n, k = 16 * size, 8 * (1 + size % 7), 8 * (1 + size % 5)
                a, b = await device.empty((m, k), "float16"), await device.empty((k, n), "float16")
                room = await device.empty((m * n + 8,), "float16")
                await device.blas.gemm(a, b)
                await device.blas.gemm(a, b, out=room[1 : 1 + m * n].reshape((m, n)))
                await device.blas.gemm(a, b, out=room[: m * n].reshape((m, n)), beta=1.0)
            gaps.end()
            await watching
            print(f"worst gap of the loop {gaps.loop * 1e3:.1f} ms over 200 shapes")
            assert gaps.loop <= 0.010

    asyncio.run(main())


def _calls_back_by_cupy(is_over: threading.Event, count: list[int]) -> None:
    cupy: Any = importlib.import_module("cupy")
    cupy.cuda.Device(0).use()
    stream = cupy.cuda.Stream(non_blocking=True)
    nothing = cupy.RawKernel('extern "C" __global__ void nothing() {}', "nothing")

    def call(_: object) -> None:
        count[0] += 1

    while not is_over.is_set():
        for _ in range(50):
            with stream:
                nothing((1,), (1,), ())
            stream.launch_host_func(call, None)
        stream.synchronize()


def _calls_back_by_ctypes(is_over: threading.Event, count: list[int]) -> None:
    """Do what numba's ``Stream.add_callback`` does; its own does not work with cuda-bindings 13.3, whose streams have no ``value``."""
    cupy: Any = importlib.import_module("cupy")
    cupy.cuda.Device(0).use()
    stream = cupy.cuda.Stream(non_blocking=True)
    add = ctypes.CDLL("libcuda.so.1").cuStreamAddCallback

    def call(_stream: int, _status: int, _argument: int) -> None:
        count[1] += 1

    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)(call)
    while not is_over.is_set():
        for _ in range(50):
            assert add(ctypes.c_void_p(stream.ptr), function, None, 0) == 0
        stream.synchronize()


def works_beside_python_callbacks(seconds: float = 60.0) -> None:
    """16 tasks beside two threads whose libraries call Python from the driver's threads: nothing hangs, and no await takes long."""
    faulthandler.dump_traceback_later(seconds + 45, exit=True)

    async def main() -> None:
        async with accel.System() as system:
            device = await system.open_device("cuda", host="inline", libraries=("blas", "elementwise"))
            x = await device.put(np.ones((256, 256), np.float32))
            await device.get(await device.blas.gemm(x, x))
            is_over, count, worst, ops = threading.Event(), [0, 0], 0.0, 0
            threads = [threading.Thread(target=each, args=(is_over, count)) for each in (_calls_back_by_cupy, _calls_back_by_ctypes)]
            for thread in threads:
                thread.start()
            async with asyncio.timeout(30):
                while not all(count):  # both have imported their libraries
                    assert all(thread.is_alive() for thread in threads)
                    await asyncio.sleep(0.01)
            before, end = list(count), time.perf_counter() + seconds

            async def timed(awaitable: Awaitable[T]) -> T:
                nonlocal worst, ops
                began = time.perf_counter()
                value = await awaitable
                worst, ops = max(worst, time.perf_counter() - began), ops + 1
                return value

            async def client() -> None:
                while time.perf_counter() < end:
                    assert (await timed(device.get(await timed(device.blas.gemm(x, x)))))[0, 0] == 256
                    await timed(device.put(np.ones(1000)))

            await asyncio.gather(*(client() for _ in range(16)))
            is_over.set()
            for thread in threads:
                await asyncio.to_thread(thread.join, 10)
            calls = [after - start for after, start in zip(count, before, strict=True)]
            print(f"{ops} ops and {calls} callbacks in {seconds:g} s; the longest await took {worst * 1e3:.0f} ms")
            assert min(calls) > 1000
            assert ops > 10_000
            assert worst <= 0.25, worst

    asyncio.run(main())


def reopens_in_a_child() -> None:
    """Lose two inline devices by one illegal address, and reopen them: one goes on in a child with its durable data, the other may not."""

    async def main() -> None:
        once = accel.RestartStrategy(max_restarts=0)
        async with asyncio.timeout(PATIENCE), accel.System() as system:
            device = await system.open_device("cuda", host="auto", restart=once)
            other = await system.open_device("cuda", host="inline", restart=once)
            weights = await device.put(np.arange(1000.0), durable=True)
            x = await device.zeros(4, "float32")
            kernel = await device.compiler.compile(ILLEGAL, "illegal", parameters=("float32*",))
            assert (await failure(kernel.launch(1, 1, (x,)), accel.ContextPoisonedError)).code == 700
            assert device.state is accel.DeviceState.LOST
            await device.reopen()
            assert (device.info().host, device.generation) == ("process", 2)
            np.testing.assert_array_equal(await device.get(weights), np.arange(1000.0))
            while other.state is not accel.DeviceState.LOST:
                await asyncio.sleep(0.01)
            await failure(other.reopen(), accel.UnsupportedError)

    asyncio.run(main())


if __name__ == "__main__":
    globals()[sys.argv[1]](*(float(each) for each in sys.argv[2:]))
