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
from tests.accel_cuda.compute_support import close, random, wide

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

pytestmark = pytest.mark.gpu

TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 2e-5, "float64": 1e-12, "complex64": 2e-5, "complex128": 1e-12}
ROUNDS = 20


@contextlib.asynccontextmanager
async def opened(**options: Any) -> AsyncIterator[accel.Device]:
    async with accel.System() as system:
        yield await system.open_device("cuda", **options)


def fresh() -> np.random.Generator:
    """Return a generator whose seed a failed test shows."""
    seed = secrets.randbits(32)
    print("seed", seed)
    return np.random.default_rng(seed)


@pytest.mark.parametrize("dtype", TOLERANCE)
async def test_operands_may_change_between_two_of_the_same(dtype: str) -> None:
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    element = DType.of(dtype).numpy
    m, n, k = (int(each) for each in rng.integers(1, 300, 3))
    async with opened() as gpu:
        b = random(rng, (k, n), element)
        ra, rb, out = await gpu.empty((m, k), dtype), await gpu.put(b), await gpu.empty((m, n), dtype)
        for turn in range(ROUNDS):
            a = random(rng, (m, k), element)
            await gpu.put(a, out=ra)
            await gpu.blas.gemm(ra, rb, out=out)
            close(await gpu.get(out), wide(a) @ wide(b), TOLERANCE[dtype], f"turn {turn} of {(m, n, k)}, seed {seed}")


async def test_each_way_of_calling_is_a_call_of_its_own() -> None:
    rng = fresh()
    a, b = rng.standard_normal((40, 40)), rng.standard_normal((40, 40))
    async with opened() as gpu:
        ra, rb, out = await gpu.put(a), await gpu.put(b), await gpu.empty((40, 40), "float64")
        ways: list[tuple[dict[str, Any], Any]] = [
            ({}, a @ b),
            ({"alpha": -2.0}, -2 * (a @ b)),
            ({"transpose_a": True}, a.T @ b),
            ({"transpose_b": True}, a @ b.T),
        ]
        for _ in range(ROUNDS):
            for options, expected in ways:
                await gpu.blas.gemm(ra, rb, out=out, **options)
                np.testing.assert_allclose(await gpu.get(out), expected, rtol=1e-12, atol=1e-12, err_msg=repr(options))


async def test_every_one_of_them_is_computed() -> None:
    """Each adds to what is there: one too few or too many is seen."""
    rng = fresh()
    a, b = (rng.integers(-9, 9, (64, 64)).astype(np.float64) for _ in range(2))
    async with opened() as gpu:
        ra, rb, total = await gpu.put(a), await gpu.put(b), await gpu.zeros((64, 64), "float64")
        for turn in range(1, 4 * ROUNDS):
            await gpu.blas.gemm(ra, rb, out=total, beta=1.0)
            np.testing.assert_array_equal(await gpu.get(total), turn * (a @ b))


async def test_batched_products_and_batches() -> None:
    rng = fresh()
    a, b = rng.standard_normal((5, 30, 20)), rng.standard_normal((5, 20, 10))
    async with opened() as gpu:
        ra, rb, out, bias = await gpu.put(a), await gpu.put(b), await gpu.empty((5, 30, 10), "float64"), await gpu.put(np.ones((5, 30, 10)))
        for _ in range(ROUNDS):
            await gpu.blas.gemm_batched(ra, rb, out=out)
            np.testing.assert_allclose(await gpu.get(out), a @ b, rtol=1e-12, atol=1e-12)
            async with gpu.batch() as batch:
                batch.elementwise.binary("add", batch.blas.gemm_batched(ra, rb, out=out), bias, out=out)
            np.testing.assert_allclose(await gpu.get(out), a @ b + 1, rtol=1e-12, atol=1e-12)


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


async def test_a_recorded_graph_has_the_library_s_own_kernels() -> None:
    rng = fresh()
    a, b = rng.standard_normal((32, 32)), rng.standard_normal((32, 32))
    async with opened() as gpu:
        ra, rb, out = await gpu.put(a), await gpu.put(b), await gpu.empty((32, 32), "float64")
        for _ in range(ROUNDS):
            await gpu.blas.gemm(ra, rb, out=out)
        async with gpu.graph() as graph:
            for _ in range(ROUNDS):
                graph.blas.gemm(ra, rb, out=out)
        for _ in range(3):
            a = rng.standard_normal((32, 32))
            await gpu.put(a, out=ra)
            await graph.replay()
            np.testing.assert_allclose(await gpu.get(out), a @ b, rtol=1e-12, atol=1e-12)


async def test_on_a_process_host() -> None:
    rng = fresh()
    b = rng.standard_normal((50, 50))
    async with opened(host="process") as gpu:
        ra, rb, out = await gpu.empty((50, 50), "float64"), await gpu.put(b), await gpu.empty((50, 50), "float64")
        for _ in range(ROUNDS):
            a = rng.standard_normal((50, 50))
            await gpu.put(a, out=ra)
            await gpu.blas.gemm(ra, rb, out=out)
            np.testing.assert_allclose(await gpu.get(out), a @ b, rtol=1e-12, atol=1e-12)


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


async def test_threads_that_wait_for_the_whole_device_are_not_disturbed() -> None:
    torch = pytest.importorskip("torch")
    rng = fresh()
    a, b = rng.standard_normal((32, 32)), rng.standard_normal((32, 32))
    async with opened() as gpu:
        ra, rb, shared = await gpu.put(a), await gpu.put(b), torch.ones(64, device="cuda")
        ref = await gpu.wrap(shared)
        outs = [await gpu.empty((32, 32), "float64") for _ in range(40)]

        async def multiply(times: int) -> None:
            for out in outs:
                for _ in range(times):
                    await gpu.blas.gemm(ra, rb, out=out)
                    await gpu.elementwise.unary("neg", ref, out=ref)
                np.testing.assert_allclose(await gpu.get(out), a @ b, rtol=1e-12, atol=1e-12)

        with waiting_for_the_device(torch) as errors:
            await multiply(2 * ROUNDS)
        assert errors == []
        np.testing.assert_array_equal(await gpu.get(ref), np.ones(64, np.float32))
