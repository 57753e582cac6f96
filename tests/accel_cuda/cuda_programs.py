"""Programs that tests run in processes of their own: a fault ends CUDA for the process it happens in. ``python -m tests.accel_cuda.cuda_programs NAME ...``."""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

import accel
from accel.testing import FaultPlan, conformance
from accel_cuda import CudaBackend
from accel_cuda.core.driver import load_driver
from tests.accel_cuda.own_libraries import ByNvrtc, Scale, Stray

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from accel.completion import CompletionName

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 30.0
ILLEGAL_ADDRESS, DESTROYED = 700, 709

E = TypeVar("E", bound=Exception)


def run_program(name: str, *arguments: str, module: str = "tests.accel_cuda.cuda_programs", timeout: float = 55) -> None:
    """Run a program and fail unless it ends well; called by the tests."""
    command = [sys.executable, "-X", "faulthandler", "-m", module, name, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)
    print(done.stdout)
    assert done.returncode == 0, f"{name} {arguments} ended with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


async def failure(awaitable: Awaitable[object], kind: type[E]) -> E:
    try:
        value = await asyncio.wait_for(awaitable, PATIENCE)
    except kind as error:
        return error
    raise AssertionError(f"it gave {value!r} where {kind.__name__} was due")


def check(name: str) -> None:
    """Run one check of the conformance suite."""
    (found,) = (each for each in conformance.checks() if each.name == name)

    async def main() -> None:
        await found.run(conformance.Harness(CudaBackend()))

    asyncio.run(main())


def loses_the_device(completion: CompletionName) -> None:
    """A kernel that writes to an illegal address ends every wait with the driver's code, and the device, but not the system."""

    async def main() -> None:
        async with accel.System() as system:
            plan = FaultPlan().poison_at(3, op="gemm")
            device = await system.open_device("cuda", host="inline", completion=completion, faults=plan)
            x = np.eye(64, dtype=np.float32)
            a = await device.put(x)
            assert np.array_equal(await device.get(await device.blas.gemm(a, a)), x)
            await device.blas.gemm(a, a)
            ends: list[float] = []

            async def wait() -> accel.ContextPoisonedError:
                error = await failure(device.blas.gemm(a, a), accel.ContextPoisonedError)
                ends.append(time.perf_counter())
                return error

            with Surfacing() as surfacing:
                errors = await asyncio.gather(*(wait() for _ in range(4)))
            assert len({id(error) for error in errors}) == len(errors), "waiters share an error"
            late = max(ends) - surfacing.at
            print(f"{completion}: the last of {len(ends)} waits ended {late * 1e3:.2f} ms after the fault surfaced")
            assert late < 0.05, f"the fault was told {late} s after it had surfaced"
            for error in errors:
                told = (error.code, error.library, error.scope, error.retryable)
                assert told == (ILLEGAL_ADDRESS, "driver", accel.FaultScope.PROCESS, False), told
            await is_lost(device)
            again = await failure(system.open_device("cuda", host="inline"), accel.DeviceLostError)
            assert again.code == ILLEGAL_ADDRESS
            cpu = await system.open_device("cpu")
            assert np.array_equal(await cpu.get(await cpu.put(x)), x)

    asyncio.run(main())


class Surfacing:
    """When the driver first answers with a fault: seen from outside, by a thread that polls an event of its own.

    Attributes
    ----------
    at : float
        ``time.perf_counter()`` then; known once the block has ended.
    """

    def __enter__(self) -> Self:
        driver, releasing = load_driver(), ctypes.CDLL("libcuda.so.1")
        context = driver.call("cuDevicePrimaryCtxRetain", driver.call("cuDeviceGet", 0))
        with driver.section(int(context)):
            self._event = ctypes.c_void_p(int(driver.call("cuEventCreate", 2)))
            driver.call("cuEventRecord", self._event.value, driver.call("cuStreamCreate", 1))
        self._query = releasing.cuEventQuery
        self._stop = threading.Event()
        self.at = float("inf")
        self._thread = threading.Thread(target=self._poll)
        self._thread.start()
        return self

    def _poll(self) -> None:
        while not self._stop.wait(0.0003):
            if self._query(self._event) == ILLEGAL_ADDRESS:
                self.at = time.perf_counter()
                return

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        # A fault that the waits have seen is there for the thread to see.
        if kind is not None:
            self._stop.set()
        self._thread.join(PATIENCE)
        self._stop.set()
        assert kind is not None or self.at < float("inf"), "the driver never answered with the fault"


async def is_lost(device: accel.Device) -> None:
    """Assert that a device is lost and says so."""
    lost = await failure(device.zeros(1), accel.DeviceLostError)
    assert lost.code == ILLEGAL_ADDRESS
    assert device.state is accel.DeviceState.LOST
    assert not device.health().is_live
    assert device.generation == 1
    async with asyncio.timeout(PATIENCE):
        while device.info().in_flight:
            await asyncio.sleep(0)


def ends_batches_and_generations() -> None:
    """A fault inside a batch ends the batch; whoever listens for generations is told that there will be none."""

    async def main() -> None:
        async with accel.System() as system:
            device = await system.open_device("cuda", host="inline", faults=FaultPlan().poison_at(3))
            seen: list[int] = []

            async def listen() -> None:
                async for generation in device.generations():
                    seen.append(generation)  # noqa: PERF401 - seen as they come

            listening = asyncio.ensure_future(listen())

            async def batch() -> None:
                async with device.batch() as recorded:
                    for _ in range(5):
                        recorded.zeros(4)

            error = await failure(batch(), accel.ContextPoisonedError)
            assert error.code == ILLEGAL_ADDRESS
            await failure(listening, accel.DeviceLostError)
            assert seen == [1]
            await is_lost(device)

    asyncio.run(main())


def gives_memory_back() -> None:
    """Devices that were opened, used and closed leave no device memory behind."""
    driver = load_driver()
    CudaBackend().open(0).close()
    # Only before cuBLAS is used: it holds the primary context until the process ends.
    assert not driver.call("cuDevicePrimaryCtxGetState", driver.call("cuDeviceGet", 0))[1], "the primary context is still there"
    keep = CudaBackend().open(0)

    async def use() -> None:
        async with accel.System() as system:
            device = await system.open_device("cuda", host="inline")
            a = await device.put(np.ones((1024, 1024), np.float32))
            for _ in range(3):
                a = await device.blas.gemm(a, a, alpha=1e-3)
            await device.reduce("sum", await device.elementwise.unary("relu", a))
            await device.get(await device.full((64, 1 << 20), 1.0))

    def used_and_free() -> int:
        asyncio.run(use())
        keep.enter()
        return int(driver.call("cuMemGetInfo")[0])

    used_and_free()  # cuBLAS loads its kernels into the context
    free = [used_and_free() for _ in range(4)]
    assert len(set(free)) == 1, f"bytes free after each device: {free}"
    keep.close()


def shares_the_context_with_torch() -> None:
    """torch in the same process computes before, during and after, and captures a graph while our ops run."""
    torch: Any = importlib.import_module("torch")

    async def main() -> None:
        async with accel.System() as system:
            device = await system.open_device("cuda", host="inline")
            a = np.random.default_rng().standard_normal((256, 256)).astype(np.float32)
            ref = await device.put(a)
            total, stop = torch.zeros(8, device="cuda"), asyncio.Event()
            total += 1
            torch.cuda.synchronize()

            async def load() -> None:
                while not stop.is_set():
                    await device.elementwise.unary("neg", ref, out=ref)
                    await device.elementwise.unary("neg", ref, out=ref)

            task = asyncio.ensure_future(load())
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                total += 1
                await asyncio.sleep(0)
            graph.replay()
            torch.cuda.synchronize()
            stop.set()
            await task
            assert total[0].item() == 2.0
            assert np.array_equal(await device.get(ref), a)

    x = torch.randn(512, 512, device="cuda")
    y = x @ x
    asyncio.run(main())
    assert torch.equal(y, x @ x)
    torch.cuda.synchronize()


def faults_in_a_copy(way: str) -> None:
    """A fault under a large copy ends it with the driver's code; host arrays stay readable, and the memory that was staged through comes back."""

    async def main() -> None:
        async with accel.System() as system:
            device = await system.open_device("cuda", host="inline", faults=FaultPlan().poison_at(2))
            pinned = await device.pinned(1 << 20, "uint8")
            pinned[:] = 7
            array = np.random.default_rng().integers(0, 256, 256 << 20, np.uint8)
            before = array[:: 1 << 12].copy()
            ref = await device.put(array)
            target = np.empty_like(array)
            copy = device.put(array, out=ref) if way == "put" else device.get(ref, out=target)
            context: Any = device._host.context.device
            error = await failure(copy, accel.ContextPoisonedError)
            assert error.code == ILLEGAL_ADDRESS, error
            assert (pinned == 7).all()
            await is_lost(device)
        async with asyncio.timeout(PATIENCE):
            while context.staging.statistics().reserved:
                await asyncio.sleep(0.01)
        assert (pinned == 7).all()
        pinned[:] = 8
        assert np.array_equal(array[:: 1 << 12], before)

    asyncio.run(main())


def own_kernel_faults(way: str) -> None:
    """A kernel of the user's own that writes to an illegal address ends all that is in flight with the driver's code, and the device."""

    async def send(device: accel.Device, x: accel.AccelRef) -> None:
        if way == "op":
            await device.run(Stray(x))
            return
        recording = device.batch() if way == "batch" else device.graph()
        async with recording as recorded:
            recorded.run(Scale(recorded.run(Stray(x))))
        if isinstance(recorded, accel.Graph):
            await recorded.replay()

    async def main() -> None:
        async with accel.System() as system:
            device = await system.open_device("cuda", host="inline")
            await device.register(ByNvrtc)
            x = await device.put(np.ones(64, np.float32))
            assert np.array_equal(await device.get(await device.run(Scale(x))), np.full(64, 2.0, np.float32))
            error = await failure(send(device, x), accel.ContextPoisonedError)
            told = (error.code, error.library, error.scope, error.retryable)
            assert told == (ILLEGAL_ADDRESS, "driver", accel.FaultScope.PROCESS, False), told
            await is_lost(device)

    asyncio.run(main())


def moves_to_a_child() -> None:
    """After a fault in this process the device goes on in a child, and gives its own memory in this process back."""

    async def main() -> None:
        async with accel.System() as system:
            device = await system.open_device("cuda", faults=FaultPlan().poison_at(2))
            x = await device.put(np.ones(4))
            assert device.info().host == "inline"
            fault = await failure(device.elementwise.unary("neg", x), accel.ContextPoisonedError)
            assert (fault.code, fault.retryable) == (ILLEGAL_ADDRESS, True)
            x = await asyncio.wait_for(device.put(np.arange(4.0)), PATIENCE)
            assert device.info().host == "process"
            np.testing.assert_array_equal(await device.get(x), np.arange(4.0))

    asyncio.run(main())


def outlives_its_context() -> None:
    """Who resets the device (torch's or numba's ``cudaDeviceReset``) destroys the context under us: that is told, and another is made."""

    async def main() -> None:
        async with accel.System() as system:
            device = await system.open_device("cuda", host="inline")
            x = await device.put(np.ones(64, np.float32))
            await device.elementwise.unary("neg", x)
            driver = load_driver()
            driver.call("cuDevicePrimaryCtxReset", driver.call("cuDeviceGet", 0))
            error = await failure(device.get(x), accel.ContextPoisonedError)
            print("after a reset of the device:", error)
            assert (error.code, error.scope) == (DESTROYED, accel.FaultScope.CONTEXT)
            x = await asyncio.wait_for(device.put(np.arange(64.0)), PATIENCE)
            assert device.generation == 2
            assert np.array_equal(await device.get(await device.elementwise.unary("neg", x)), -np.arange(64.0))

    asyncio.run(main())


PROGRAMS: dict[str, Callable[..., None]] = {
    program.__name__: program
    for program in (
        check,
        loses_the_device,
        ends_batches_and_generations,
        gives_memory_back,
        shares_the_context_with_torch,
        faults_in_a_copy,
        own_kernel_faults,
        moves_to_a_child,
        outlives_its_context,
    )
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
