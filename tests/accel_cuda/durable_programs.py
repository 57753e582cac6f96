"""Durable buffers under faults of an inline device, each in a process of its own. ``python -m tests.accel_cuda.durable_programs NAME ...``."""

from __future__ import annotations

import asyncio
import importlib
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import accel
from accel.testing import FaultPlan
from tests.accel_cuda.cuda_programs import ILLEGAL_ADDRESS, PATIENCE, failure

if TYPE_CHECKING:
    from collections.abc import Callable

_FREE = (
    "from accel_cuda.core.driver import load_driver as l; d = l(); c = d.call('cuDevicePrimaryCtxRetain', d.call('cuDeviceGet', 0));\n"
    "with d.section(int(c)): print(int(d.call('cuMemGetInfo')[0]))"
)
_STRAY = """
extern "C" __global__ void stray(unsigned char *x, long long offset) { x[offset] ^= 1; }
"""


def free_memory() -> int:
    """Return the device's free bytes, asked by another process: CUDA may be over in this one."""
    done = subprocess.run([sys.executable, "-c", _FREE], capture_output=True, text=True, check=True, timeout=PATIENCE)
    return int(done.stdout)


def intact(mebibytes: str) -> None:
    """Data on an inline device is there after an illegal address, in the child that takes over; and its memory is given back at the end."""
    nbytes = int(mebibytes) << 20
    rng = np.random.default_rng(7)

    async def main() -> None:
        before = 0
        async with accel.System() as system:
            device = await system.open_device("cuda", faults=FaultPlan().poison_at(1, op="unary"))
            array = rng.integers(0, 1 << 62, nbytes // 8, np.int64)
            weights = await device.put(array, durable=True)
            small = await device.put(np.eye(64, dtype=np.float32), durable=True)
            view = weights[1000:2000]
            assert device.info().memory.durable >= nbytes
            fault = await failure(device.elementwise.unary("neg", await device.zeros(4)), accel.ContextPoisonedError)
            began = time.perf_counter()
            assert (fault.code, fault.retryable) == (ILLEGAL_ADDRESS, True)
            assert not weights.is_stale
            product = await asyncio.wait_for(device.blas.gemm(small, small), PATIENCE)
            seconds = time.perf_counter() - began
            assert device.info().host == "process"
            assert np.array_equal(await device.get(product), np.eye(64, dtype=np.float32))
            assert np.array_equal(await device.get(weights), array)
            assert np.array_equal(await device.get(view), array[1000:2000])
            print(f"{mebibytes} MiB intact; a gemm of durable data answered {seconds * 1e3:.0f} ms after the fault was told")
            held, reserved = free_memory(), device.info().memory.reserved
            del weights, view
            async with asyncio.timeout(PATIENCE):
                while device.info().memory.reserved > reserved - nbytes:
                    await asyncio.sleep(0)
            deadline = time.monotonic() + PATIENCE
            while (dropped := free_memory()) - held < nbytes:  # the child tells before it has unmapped
                assert time.monotonic() < deadline, f"{(dropped - held) >> 20} MiB came back when the ref was dropped"
            again = await device.put(array, durable=True)
            before = free_memory()
            assert device.info().memory.durable >= nbytes
        after = free_memory()
        assert after - before >= nbytes, f"{(after - before) >> 20} MiB came back when the device was closed"
        assert again.is_stale

    asyncio.run(main())


def torn() -> None:
    """What was being written when the context faulted says so, until it is written anew."""

    async def main() -> None:
        async with accel.System() as system:
            device = await system.open_device("cuda", faults=FaultPlan().poison_at(1, op="unary"))
            x = np.arange(1000, dtype=np.float32)
            sound, written = await device.put(x, durable=True), await device.put(x, durable=True)
            await failure(device.elementwise.unary("neg", sound, out=written), accel.ContextPoisonedError)
            error = await failure(device.get(written), accel.StaleRefError)
            assert error.reason == "torn"
            assert np.array_equal(await asyncio.wait_for(device.get(sound), PATIENCE), x)
            await device.elementwise.unary("neg", sound, out=written)
            assert np.array_equal(await device.get(written), -x)

    asyncio.run(main())


def wild_write() -> None:
    """A kernel that writes where it should not is found out by a checksum."""

    async def main() -> None:
        async with accel.System() as system:
            device = await system.open_device("cuda", faults=FaultPlan().poison_at(1, op="unary"))
            x = np.random.default_rng(3).integers(0, 255, 1 << 20, np.uint8)
            hit = await device.put(x, durable=True, checksum=True)
            missed = await device.put(x, durable=True, checksum=True)
            other = await device.zeros(4, "uint8")
            start = other.__cuda_array_interface__["data"][0]
            offset = hit.__cuda_array_interface__["data"][0] + 777_777 - start
            kernel = await device.compiler.compile(_STRAY, "stray")
            await kernel.launch(1, 1, [other, np.int64(offset)])
            await failure(device.elementwise.unary("neg", await device.zeros(4)), accel.ContextPoisonedError)
            await asyncio.wait_for(device.zeros(1), PATIENCE)
            error = await failure(device.get(hit), accel.StaleRefError)
            assert error.reason == "torn"
            assert "checksum" in str(error)
            assert np.array_equal(await device.get(missed), x)

    asyncio.run(main())


def with_torch() -> None:
    """Torch's CUDA dies with the fault, and the device goes on with its durable data."""
    torch: Any = importlib.import_module("torch")

    async def main() -> None:
        mine = torch.ones(1000, device="cuda")
        async with accel.System() as system:
            device = await system.open_device("cuda", faults=FaultPlan().poison_at(1, op="unary"))
            x = np.arange(1 << 20, dtype=np.float32)
            ref = await device.put(x, durable=True)
            shared = torch.from_dlpack(ref)
            assert float(shared[-1]) == x[-1]
            await failure(device.elementwise.unary("neg", await device.zeros(4)), accel.ContextPoisonedError)
            assert np.array_equal(await asyncio.wait_for(device.get(ref), PATIENCE), x)
            try:
                torch.cuda.synchronize()
            except Exception as error:
                print("torch:", type(error).__name__)
            else:
                raise AssertionError("torch goes on in a process whose CUDA is over")
        del mine, shared
        sys.stdout.flush()
        os._exit(0)  # torch would wait for its dead context

    asyncio.run(main())


PROGRAMS: dict[str, Callable[..., None]] = {program.__name__: program for program in (intact, torn, wild_write, with_torch)}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
