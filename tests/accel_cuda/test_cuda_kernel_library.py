"""Kernel libraries of the user's own on the GPU, around cuda-core, CuPy and torch: order, batches, graphs, cancelling, errors and faults."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

import accel
from tests.accel_cuda.cuda_programs import ROOT, failure, run_program
from tests.accel_cuda.own_libraries import LIBRARIES, Break, ByNvrtc, ByTorch, Scale
from tests.device_support import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # what the other libraries warn of is theirs

SLOW = 100_000_000  # clock cycles: about 0.05 s


def installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent
        return False


@contextlib.asynccontextmanager
async def opened(library: type[accel.KernelLibrary], **options: Any) -> AsyncIterator[accel.Device]:
    async with accel.System() as system:
        device = await system.open_device("cuda", libraries=("elementwise",), **options)
        await device.register(library)
        yield device


@pytest.fixture(params=list(LIBRARIES))
async def device(request: pytest.FixtureRequest) -> AsyncIterator[accel.Device]:
    if not installed(request.param):
        pytest.skip(f"{request.param} is not installed")
    async with opened(LIBRARIES[request.param]) as device:
        yield device


def numbers(rng: np.random.Generator, n: int) -> np.ndarray[Any, Any]:
    return rng.standard_normal(n).astype(np.float32)


async def poisoned(device: accel.Device, shape: tuple[int, ...]) -> accel.AccelRef:
    return await device.full(shape, float("nan"), "float32")


async def test_results_are_right_in_new_and_in_given_buffers(device: accel.Device, rng: np.random.Generator) -> None:
    for n in (1, 255, 256, 100_003):
        a = numbers(rng, n)
        x = await device.put(a)
        assert np.array_equal(await device.get(await device.run(Scale(x, 3.0))), a * np.float32(3))
        out = await poisoned(device, (n,))
        assert await device.run(Scale(x, 0.5, out=out)) is out
        assert np.array_equal(await device.get(out), a * np.float32(0.5))
        assert np.array_equal(await device.get(x), a), "the input was written"


async def test_others_wait_for_a_slow_kernel_and_it_for_them(device: accel.Device, rng: np.random.Generator) -> None:
    a = numbers(rng, 1 << 16)
    x, y, z = await device.put(a), await poisoned(device, a.shape), await poisoned(device, a.shape)
    waits = [
        device.run(Scale(x, 3.0, SLOW, y)),  # slow; the others go into other streams, and would be through long before
        device.elementwise.unary("neg", y, out=z),
        device.elementwise.unary("abs", y, out=x),  # x may not be overwritten while the slow one reads it
        device.run(Scale(z, 2.0, SLOW, y)),  # nor y while the two before read it
    ]
    await asyncio.gather(*waits)
    got = [await device.get(ref) for ref in (x, y, z)]
    for found, expected in zip(got, (np.abs(a * 3), -a * 6, -a * 3), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


async def test_batches_mix_libraries(device: accel.Device, rng: np.random.Generator) -> None:
    a = numbers(rng, 10_000)
    x = await device.put(a)
    async with device.batch() as batch:
        h = batch.elementwise.unary("neg", x)
        h = batch.run(Scale(h, 3.0, SLOW))
        h = batch.elementwise.unary("abs", h)
        total = batch.reduce("sum", batch.run(Scale(h, 0.5)))
    np.testing.assert_allclose(await device.get(total), np.abs(a.astype(np.float64) * 1.5).sum(), rtol=1e-5)


async def test_graphs_capture_them(device: accel.Device, rng: np.random.Generator) -> None:
    a = numbers(rng, 10_000)
    x = await device.put(a)
    await device.run(Scale(x))  # what a library loads at its first kernel cannot be captured
    async with device.graph() as graph:
        h = graph.run(Scale(x, 3.0))
        h = graph.elementwise.unary("neg", h)
    for _ in range(3):
        a = numbers(rng, 10_000)
        await device.put(a, out=x)
        await graph.replay()
        np.testing.assert_allclose(await device.get(h), -3 * a, rtol=1e-6)


async def test_what_a_kernel_raises_is_its_ops_error(device: accel.Device, rng: np.random.Generator) -> None:
    a = numbers(rng, 1000)
    x = await device.put(a)
    error = await failure(device.run(Break(x)), accel.LibraryError)
    assert (error.op, error.library) == ("break", "own")
    assert isinstance(error.__cause__, ValueError)
    assert np.array_equal(await device.get(await device.run(Scale(x))), a * 2)
    assert (device.generation, device.info().in_flight) == (1, 0)


async def test_cancelling_frees_nothing_too_early(device: accel.Device, rng: np.random.Generator) -> None:
    a = numbers(rng, 1 << 16)
    x = await device.put(a)
    used = device.info().memory.used
    slow = asyncio.ensure_future(device.run(Scale(x, 2.0, SLOW)))
    await until(lambda: device.info().memory.used > used, "it was not dispatched")
    slow.cancel()
    with pytest.raises(asyncio.CancelledError):
        await slow
    # Memory of the cancelled op that was given out too early would be overwritten by it.
    others = [await device.put(a) for _ in range(8)]
    await until(lambda: not device.info().in_flight, "it did not end")
    for other in others:
        assert np.array_equal(await device.get(other), a)
    del others, other
    await until(lambda: device.info().memory.used <= used, "not all memory came back")


async def test_a_launch_that_the_driver_refuses_costs_its_op_only(rng: np.random.Generator) -> None:
    class TooLarge(ByNvrtc):
        def enqueue(self, op: Scale, stream: Any, x: accel.Operand, out: accel.Operand) -> None:
            if op.factor < 0:
                self._device()
                config = self._core.LaunchConfig(grid=1, block=1024, shmem_size=1 << 30)
                self._core.launch(stream, config, self._scale, 0, 0, np.int64(0), np.float32(0), np.int64(0))
            super().enqueue(op, stream, x, out)

    a = numbers(rng, 1000)
    async with opened(TooLarge) as device:
        x = await device.put(a)
        await failure(device.run(Scale(x, -1.0)), accel.LibraryError)
        assert np.array_equal(await device.get(await device.run(Scale(x))), a * 2)
        assert device.generation == 1


@pytest.mark.skipif(not installed("torch"), reason="torch is not installed")
async def test_torch_takes_bfloat16_by_dlpack(rng: np.random.Generator) -> None:
    a = rng.integers(-100, 100, 999).astype(ml_dtypes.bfloat16)
    async with opened(ByTorch) as device:
        x = await device.put(a)
        assert np.array_equal(await device.get(await device.run(Scale(x, 2.0))), a + a)


@pytest.mark.skipif(not installed("torch"), reason="torch is not installed")
async def test_torch_in_another_stream_is_refused(rng: np.random.Generator) -> None:
    class Elsewhere(ByTorch):
        def enqueue(self, op: Scale, stream: Any, x: accel.Operand, out: accel.Operand) -> None:
            self._torch.from_dlpack(x)

    async with opened(Elsewhere) as device:
        x = await device.put(numbers(rng, 10))
        error = await failure(device.run(Scale(x)), accel.LibraryError)
        assert isinstance(error.__cause__, BufferError)
        assert device.generation == 1


@pytest.mark.parametrize("name", ["cuda_torch_library.py", "cuda_nvrtc_library.py"])
def test_the_examples_run(name: str) -> None:
    if "torch" in name and not installed("torch"):
        pytest.skip("torch is not installed")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, f"examples/{name}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=50, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("way", ["op", "batch", "graph"])
def test_a_fault_in_a_kernel_of_the_users_loses_the_device(way: str) -> None:
    run_program("own_kernel_faults", way)
