"""Programs about faults that a device survives, each run in a process of its own: ``python -m tests.accel_cuda.standby_programs NAME ...``."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

import accel
from accel.testing import FaultPlan
from tests.accel_cuda.cuda_programs import ILLEGAL_ADDRESS, PATIENCE, failure
from tests.device_support import child_pid

if TYPE_CHECKING:
    from collections.abc import Callable

_ENDLESS = """
extern "C" __global__ void endless(float* x) { while (*(volatile float*)x == 0.0f) ; }
"""

_FREE = """
from accel_cuda.core.driver import load_driver
driver = load_driver()
context = driver.call("cuDevicePrimaryCtxRetain", driver.call("cuDeviceGet", 0))
with driver.section(int(context)):
    print(*map(int, driver.call("cuMemGetInfo")))
"""

Host = Literal["auto", "process"]
Standby = Literal["none", "imports", "context"]


def free_and_total() -> tuple[int, int]:
    """Return the GPU's free and whole memory, as a process that has only a context sees it."""
    done = subprocess.run([sys.executable, "-c", _FREE], capture_output=True, text=True, timeout=30, check=True)
    free, total = map(int, done.stdout.split())
    return free, total


async def spare_ready(device: accel.Device) -> None:
    async with asyncio.timeout(PATIENCE):
        assert await device.spare_ready()


async def computes(device: accel.Device) -> float:
    """Assert that the device computes, and return how long that took."""
    a = np.random.default_rng().standard_normal((128, 128)).astype(np.float32)
    began = time.perf_counter()
    x = await asyncio.wait_for(device.put(a), PATIENCE)
    result = await device.get(await device.blas.gemm(x, x))
    took = time.perf_counter() - began
    np.testing.assert_allclose(result, a @ a, rtol=1e-3, atol=1e-3)
    return took


async def _fill(device: accel.Device, nbytes: int) -> list[accel.AccelRef]:
    refs = [await asyncio.wait_for(device.full((nbytes // 8,), 7, "uint8"), PATIENCE) for _ in range(8)]
    assert (await device.get(refs[-1][-4:]))[-1] == 7
    return refs


def gives_its_memory_back(standby: Standby) -> None:
    """A device that held 80 % of the GPU, beside torch in the same process, moves to a child that takes as much; and so does that one's successor."""
    torch: Any = importlib.import_module("torch")
    before, total = free_and_total()
    kept = torch.ones(1 << 28, device="cuda")  # 1 GiB

    async def main() -> None:
        async with accel.System() as system:
            plan = FaultPlan().poison_at(1, op="gemm")
            device = await system.open_device("cuda", libraries=("blas",), standby=standby, faults=plan)
            pinned = await device.pinned((1 << 20,), "uint8")
            pinned[:] = 5
            refs = await _fill(device, int(total * 0.8))
            if standby != "none":
                await spare_ready(device)
            full, _ = free_and_total()
            assert before - full > 0.8 * total
            x = await device.put(np.ones((4, 4), np.float32))
            error = await failure(device.blas.gemm(x, x), accel.ContextPoisonedError)
            assert error.code == ILLEGAL_ADDRESS
            del refs
            took = await computes(device)
            free, _ = free_and_total()
            sizes = "free at first, when full, after the move: " + ", ".join(f"{each >> 20} MiB" for each in (before, full, free))
            print(f"MEMORY {standby}: {sizes}; good gemm after {took * 1e3:.0f} ms")
            # Two contexts of children at most, and little else.
            assert before - free < 3 << 30, (before, free)
            assert (pinned == 5).all()
            pinned[:] = 6
            await _fill(device, int(total * 0.8))
            os.kill(child_pid(device), signal.SIGKILL)
            async with asyncio.timeout(PATIENCE):
                async for generation in device.generations():
                    if generation == 3:
                        break
            await _fill(device, int(total * 0.8))

    asyncio.run(main())
    left, _ = free_and_total()
    print(f"MEMORY {standby}: {left >> 20} MiB free at the end")
    del kept


def inline_devices_move_together() -> None:
    """A fault of one device ends CUDA for the process: another one, of another system and idle, moves too; a third, inline for good, is lost."""

    async def main() -> None:
        async with accel.System() as one, accel.System() as two:
            first = await one.open_device("cuda", faults=FaultPlan().poison_at(2))
            second = await two.open_device("cuda")
            third = await two.open_device("cuda", host="inline")
            assert {each.info().host for each in (first, second, third)} == {"inline"}
            x, y = await first.put(np.ones(4)), await second.put(np.ones(4))
            await failure(first.elementwise.unary("neg", x), accel.ContextPoisonedError)
            async with asyncio.timeout(PATIENCE):
                async for generation in second.generations():
                    if generation == 2:
                        break
            stale = await failure(second.get(y), accel.StaleRefError)
            assert stale.reason == "generation"
            await computes(first)
            await computes(second)
            assert [each.info().host for each in (first, second)] == ["process", "process"]
            assert first.info().pid != second.info().pid
            assert third.state is accel.DeviceState.LOST
            fourth = await two.open_device("cuda")
            assert fourth.info().host == "process"
            await computes(fourth)
            lost = await failure(two.open_device("cuda", host="inline"), accel.DeviceLostError)
            assert (lost.code, "host='auto'" in lost.remedy) == (ILLEGAL_ADDRESS, True)

    asyncio.run(main())


def kernels_that_never_end(host: Host) -> None:
    """A kernel that never ends is ended with its child."""

    async def main() -> None:
        async with accel.System() as system:
            plan = FaultPlan().poison_at(1) if host == "auto" else None
            device = await system.open_device("cuda", host=host, standby="context", hang_timeout=1.0, libraries=("blas",), faults=plan)
            await spare_ready(device)
            if host == "auto":
                await failure(device.zeros(4), accel.ContextPoisonedError)
            kernel = await device.compiler.compile(_ENDLESS, "endless", parameters=("float32*",))
            x = await asyncio.wait_for(device.put(np.zeros(4, np.float32)), PATIENCE)
            await spare_ready(device)
            began = time.perf_counter()
            error = await failure(kernel.launch(1, 1, (x,)), accel.ContextPoisonedError)
            took = time.perf_counter() - began
            assert "hung" in str(error)
            assert error.executed == "unknown"
            assert 1.0 <= took < 5.0, took
            again = await computes(device)
            print(f"HANG {host}: told after {took:.2f} s, good gemm {again * 1e3:.1f} ms later")

    asyncio.run(main())


def lives_beside_torch_and_cupy() -> None:
    """torch's and cupy's objects of the dead context are destructed without harm, during the move and at the end of the process."""
    torch: Any = importlib.import_module("torch")
    cupy: Any = importlib.import_module("cupy")

    async def main() -> None:
        x = torch.randn(512, 512, device="cuda")
        y = x @ x  # what a library makes at its first use cannot be captured
        torch.cuda.synchronize()
        stream, event, graph = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x @ x
        mine = cupy.ones(1000)
        async with accel.System() as system:
            device = await system.open_device("cuda", faults=FaultPlan().poison_at(1, op="gemm"))
            ref = await device.put(np.ones((4, 4), np.float32))
            shown = torch.from_dlpack(ref)
            taken = await device.wrap(x)
            await failure(device.blas.gemm(ref, ref), accel.ContextPoisonedError)
            await computes(device)
            assert device.info().host == "process"
            await failure(_exported(device), accel.UnsupportedError)
            try:
                torch.cuda.synchronize()
            except Exception as error:  # torch raises what it likes
                print(f"torch: {type(error).__name__}")
            else:
                raise AssertionError("torch works after the fault?")
            del shown, taken, y, graph, event, stream
        del mine

    asyncio.run(main())
    print("TORCH ended well")


async def _exported(device: accel.Device) -> object:
    torch: Any = importlib.import_module("torch")
    return torch.from_dlpack(await device.zeros(4, "float32"))


PROGRAMS: dict[str, Callable[..., None]] = {
    program.__name__: program
    for program in (
        gives_its_memory_back,
        inline_devices_move_together,
        kernels_that_never_end,
        lives_beside_torch_and_cupy,
    )
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
