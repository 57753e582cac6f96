"""Programs about two GPUs of which one faults, each run in a process of its own: ``python -m tests.accel_cuda.two_gpu_programs NAME ...``."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, Self

import numpy as np

import accel
from accel.testing import FaultPlan
from tests.accel_cuda.cuda_programs import ILLEGAL_ADDRESS, PATIENCE, failure
from tests.accel_cuda.fault_programs import FAULTS, SOURCE, told
from tests.accel_cuda.standby_programs import computes, spare_ready
from tests.device_support import child_pid

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.accel_cuda.standby_programs import Standby

LATEST = 1.0
"""Seconds within which a GPU answers whose neighbour faults. It takes less than a millisecond; a rebuild takes 1.1 s."""
CLIENTS = 4
GIBIBYTE = 1 << 30
_FOREVER = accel.RestartStrategy(max_restarts=100, within=60.0, backoff=(0.0, 0.1))

_FREE = """
from accel_cuda.core.driver import load_driver
driver = load_driver()
for index in range(2):
    context = driver.call("cuDevicePrimaryCtxRetain", driver.call("cuDeviceGet", index))
    with driver.section(int(context)):
        print(int(driver.call("cuMemGetInfo")[0]))
"""


class Undisturbed:
    """A device under load, which must not notice what happens inside the block: ``async with Undisturbed(device) as other``.

    Parameters
    ----------
    device
        The device.
    """

    def __init__(self, device: accel.Device) -> None:
        self._device = device
        self._seed = int(np.random.SeedSequence().generate_state(1)[0])
        self._stop = False
        self._answers = 0
        self._slowest = 0.0
        self._generations: list[int] = []

    async def __aenter__(self) -> Self:
        device, rng = self._device, np.random.default_rng(self._seed)
        self._array = rng.standard_normal(50_001)
        self._kept = [await device.put(self._array), await device.put(self._array, durable=True)]
        self._before = device.info()
        self._listening = asyncio.ensure_future(self._listen())
        self._clients = [asyncio.ensure_future(self._serve([self._seed, number])) for number in range(CLIENTS)]
        await self.goes_on()
        self._slowest = 0.0  # what a library's first op takes is no matter
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        self._stop = True
        ended = await asyncio.wait_for(asyncio.gather(*self._clients, return_exceptions=kind is not None), PATIENCE)
        self._listening.cancel()
        if kind is not None:
            print(f"the other device's clients: {ended}, {self._answers} answers")
            return
        before, info = self._before, self._device.info()
        for name in ("state", "generation", "restarts", "host", "pid"):
            assert getattr(info, name) == getattr(before, name), f"{name} was {getattr(before, name)} and is {getattr(info, name)}"
        assert self._generations == [before.generation], self._generations
        for ref in self._kept:
            assert np.array_equal(await self._device.get(ref), self._array), f"seed {self._seed}"
        print(f"UNDISTURBED {info.name} {info.host}: {self._answers} answers, the slowest after {self._slowest * 1e3:.1f} ms")
        assert self._slowest < LATEST, f"an answer took {self._slowest} s"

    async def goes_on(self) -> None:
        """Wait until it has answered a number of requests more."""
        enough = self._answers + 10 * CLIENTS
        async with asyncio.timeout(PATIENCE):
            while self._answers < enough:
                await asyncio.sleep(0)
                for client in self._clients:
                    if client.done():
                        client.result()

    async def _listen(self) -> None:
        async for generation in self._device.generations():
            self._generations.append(generation)

    async def _serve(self, seed: list[int]) -> None:
        device, rng = self._device, np.random.default_rng(seed)
        while not self._stop:
            a = rng.standard_normal((64, 64)).astype(np.float32)
            began = time.perf_counter()
            x = await device.put(a)
            result = await device.get(await device.blas.gemm(x, x))
            self._slowest = max(self._slowest, time.perf_counter() - began)
            np.testing.assert_allclose(result, a.astype(np.float64) @ a, rtol=1e-3, atol=1e-3, err_msg=f"seed {seed}")
            self._answers += 1


async def reaches(device: accel.Device, number: int) -> None:
    """Wait for a generation."""
    async with asyncio.timeout(PATIENCE):
        async for generation in device.generations():
            if generation >= number:
                return


async def faults(device: accel.Device, kind: str) -> None:
    """Launch a kernel that faults, and see that the device says so and computes again."""
    kernel = await device.compiler.compile(SOURCE, kind, parameters=("float32*",))
    x = await device.put(np.zeros(4, np.float32))
    told(await failure(kernel.launch(1, 1, (x,)), accel.ContextPoisonedError), kind)
    await computes(device)


def children_of_two_gpus(faulty: str, standby: Standby) -> None:
    """With both contexts in children, every fault of one GPU leaves the other as it is, and so does the death of its child."""

    async def main() -> None:
        async with accel.System() as system:
            mine = int(faulty)
            first = await system.open_device(f"cuda:{mine}", host="process", standby=standby, libraries=("blas",), restart=_FOREVER)
            second = await system.open_device(f"cuda:{1 - mine}", host="process", libraries=("blas",), restart=_FOREVER)
            await computes(first)
            async with Undisturbed(second) as other:
                for kind in FAULTS:
                    if standby != "none":
                        await spare_ready(first)
                    await faults(first, kind)
                    await other.goes_on()
                generation = first.generation
                assert generation == 1 + len(FAULTS)
                os.kill(child_pid(first), signal.SIGKILL)
                await reaches(first, generation + 1)
                await computes(first)
                await other.goes_on()
            assert second.generation == 1
            await asyncio.gather(faults(first, "illegal_address"), faults(second, "trap"))
            assert (first.generation, second.generation) == (generation + 2, 2)

    asyncio.run(main())


def auto_on_two_gpus() -> None:
    """Of two devices with ``host="auto"`` one is kept in this process: neither notices what the other does."""

    async def main() -> None:
        async with accel.System() as system:
            first = await system.open_device("cuda:0", libraries=("blas",))
            second = await system.open_device("cuda:1", libraries=("blas",))
            assert [each.info().host for each in (first, second)] == ["inline", "process"]
            async with Undisturbed(first) as other:
                await faults(second, "illegal_address")
                await other.goes_on()
            array = np.random.default_rng().standard_normal(10_000)
            kept = await first.put(array, durable=True)
            async with Undisturbed(second) as other:
                await faults(first, "trap")
                await other.goes_on()
                assert np.array_equal(await first.get(kept), array)
            assert [each.info().host for each in (first, second)] == ["process", "process"]
            assert (first.generation, second.generation) == (2, 2)
            async with Undisturbed(second) as other:
                await faults(first, "illegal_address")
                await other.goes_on()
            await are_apart(first, second)

    asyncio.run(main())


async def are_apart(first: accel.Device, second: accel.Device) -> None:
    """Assert that each device takes memory of its own GPU, and of no other."""
    held = []
    for device, index in ((first, 0), (second, 1)):
        before = free_memory()
        held.append(await device.zeros(GIBIBYTE, "uint8"))
        taken = [earlier - later for earlier, later in zip(before, free_memory(), strict=True)]
        assert taken[index] >= GIBIBYTE > 2 * abs(taken[1 - index]), (device.info().name, taken)


def free_memory() -> list[int]:
    """Return the free bytes of both GPUs, asked by another process: CUDA may be over in this one."""
    done = subprocess.run([sys.executable, "-c", _FREE], capture_output=True, text=True, timeout=30, check=True)
    return [int(line) for line in done.stdout.split()]


def inline_devices_of_two_gpus() -> None:
    """A fault of one GPU ends CUDA for the process: a device in this process on the other GPU moves too, idle as it is, and keeps what is durable there."""

    async def main() -> None:
        async with accel.System() as one, accel.System() as two:
            first = await one.open_device("cuda:0", libraries=("blas",), faults=FaultPlan().poison_at(1, op="unary"))
            second = await two.open_device("cuda:1", libraries=("blas",))
            third = await two.open_device("cuda:1", host="inline")
            assert {each.info().host for each in (first, second, third)} == {"inline"}
            array = np.random.default_rng().standard_normal(1 << 20)
            kept = [await each.put(array, durable=True) for each in (first, second)]
            x, y = await first.put(np.ones(4)), await second.put(np.ones(4))
            error = await failure(first.elementwise.unary("neg", x), accel.ContextPoisonedError)
            assert error.code == ILLEGAL_ADDRESS, error
            await asyncio.gather(reaches(first, 2), reaches(second, 2))
            stale = await failure(second.get(y), accel.StaleRefError)
            assert stale.reason == "generation", stale
            for device, ref in zip((first, second), kept, strict=True):
                await computes(device)
                assert np.array_equal(await device.get(ref), array), device.info().name
                assert device.info().host == "process"
            assert len({first.info().pid, second.info().pid, os.getpid()}) == 3
            assert third.state is accel.DeviceState.LOST
            lost = await failure(two.open_device("cuda:1", host="inline"), accel.DeviceLostError)
            assert lost.code == ILLEGAL_ADDRESS, lost
            await are_apart(first, second)
            async with Undisturbed(second) as other:
                await faults(first, "illegal_address")
                await other.goes_on()

    asyncio.run(main())


PROGRAMS: dict[str, Callable[..., Any]] = {
    program.__name__: program for program in (children_of_two_gpus, auto_on_two_gpus, inline_devices_of_two_gpus)
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
