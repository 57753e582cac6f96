"""Products that come again and again with the same arguments: the numbers are right, whatever changes in between."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel import DType
from tests.accel_cuda.compute_support import close, opened, random, wide

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.gpu

TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 2e-5, "float64": 1e-12, "complex64": 2e-5, "complex128": 1e-12}
ROUNDS = 20


def fresh() -> np.random.Generator:
    """Return a generator whose seed a failed test shows."""
    seed = secrets.randbits(32)
    print("seed", seed)
    return np.random.default_rng(seed)


@pytest.mark.parametrize("dtype", TOLERANCE)
async def test_operands_may_change_between_two_of_the_same(device: accel.Device, dtype: str) -> None:
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    element = DType.of(dtype).numpy
    m, n, k = (int(each) for each in rng.integers(1, 300, 3))
    b = random(rng, (k, n), element)
    ra, rb, out = await device.empty((m, k), dtype), await device.put(b), await device.empty((m, n), dtype)
    for turn in range(ROUNDS):
        a = random(rng, (m, k), element)
        await device.put(a, out=ra)
        await device.blas.gemm(ra, rb, out=out)
        close(await device.get(out), wide(a) @ wide(b), TOLERANCE[dtype], f"turn {turn} of {(m, n, k)}, seed {seed}")


@pytest.mark.parametrize("streams", [8, 1, 2])
async def test_others_wait_for_them(streams: int) -> None:
    """Ops of other libraries wait for the stream of the products, and it for theirs, at any time."""
    rng = fresh()

    async def chain(gpu: accel.Device) -> None:
        a, b = rng.standard_normal((64, 64)), rng.standard_normal((64, 64))
        ra, rb = await gpu.put(a), await gpu.put(b)
        product, negative = await gpu.empty((64, 64), "float64"), await gpu.empty((64, 64), "float64")
        for _ in range(ROUNDS):
            await gpu.blas.gemm(ra, rb, out=product)
            await gpu.elementwise.unary("neg", product, out=negative)
            total = await gpu.reduce("sum", negative)
            np.testing.assert_allclose(await gpu.get(total), -(a @ b).sum(), rtol=1e-9, atol=1e-9)

    async with opened(streams=streams) as gpu, asyncio.TaskGroup() as group:
        for _ in range(24):
            group.create_task(chain(gpu))


async def test_results_may_come_to_lie_in_memory_that_was_given_back_and_taken_again() -> None:
    """Slabs are unmapped for lack of room, and new ones may come to lie where they were: a product knows addresses alone."""
    rng = fresh()
    n = 4096
    a = rng.standard_normal((n, n), np.float32).astype(np.float16)
    expected = wide(a[:8]) @ wide(a)
    async with opened(memory_limit=8 * a.nbytes) as gpu:  # one of them is the workspace
        ra = await gpu.put(a)
        for _ in range(4):
            out = await gpu.empty((n, n), "float16")
            for _ in range(ROUNDS):
                await gpu.zeros((8, n), "float16")
                await gpu.blas.gemm(ra, ra, out=out)
            close((await gpu.get(out))[:8], expected, TOLERANCE["float16"], "after the memory was given back")
            await gpu.free(out)
            large = await gpu.empty((3 * n, n), "float16")  # for which what is free has to be given back
            await gpu.free(large)


@contextlib.contextmanager
def waiting_for_the_device(torch: Any) -> Iterator[list[Exception]]:
    """Have two threads wait for the whole device, again and again; what they raise is in the list."""
    over, errors, rounds = threading.Event(), list[Exception](), [0, 0]

    def wait(number: int) -> None:
        while not over.is_set():
            try:
                torch.cuda.synchronize()
            except Exception as error:
                errors.append(error)
            rounds[number] += 1

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield errors
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert min(rounds) > 40


async def test_threads_that_wait_for_the_whole_device_are_not_disturbed(device: accel.Device) -> None:
    torch = pytest.importorskip("torch")
    rng = fresh()
    a, b = rng.standard_normal((32, 32)), rng.standard_normal((32, 32))
    ra, rb, shared = await device.put(a), await device.put(b), torch.ones(64, device="cuda")
    ref = await device.wrap(shared)
    outs = [await device.empty((32, 32), "float64") for _ in range(40)]

    async def multiply(times: int) -> None:
        for out in outs:
            for _ in range(times):
                await device.blas.gemm(ra, rb, out=out)
                await device.elementwise.unary("neg", ref, out=ref)
            np.testing.assert_allclose(await device.get(out), a @ b, rtol=1e-12, atol=1e-12)

    with waiting_for_the_device(torch) as errors:
        await multiply(2 * ROUNDS)
    assert errors == []
    np.testing.assert_array_equal(await device.get(ref), np.ones(64, np.float32))
