"""Ops on the GPU through the device, as users call them, against numpy."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nothing_left")]

FLOATS = ("float16", "bfloat16", "float32", "float64")
TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-4, "float64": 1e-11, "complex64": 1e-4, "complex128": 1e-11}


@contextlib.asynccontextmanager
async def opened(**options: Any) -> AsyncIterator[accel.Device]:
    async with accel.System() as system:
        yield await system.open_device("cuda", **options)


def random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    values: np.ndarray[Any, Any] = rng.standard_normal(shape)
    if dtype.startswith("complex"):
        values = values + 1j * rng.standard_normal(shape)
    return values.astype(accel.DType.of(dtype).numpy)


def wide(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def close(got: np.ndarray[Any, Any], expected: Any, dtype: str) -> None:
    tolerance = TOLERANCE[dtype]
    scale = float(np.max(np.abs(expected), initial=1.0))
    np.testing.assert_allclose(wide(got), expected, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("dtype", TOLERANCE)
async def test_linear_algebra(dtype: str, rng: np.random.Generator) -> None:
    m, n, k = (int(each) for each in rng.integers(1, 200, 3))
    a, b, batch = random(rng, (m, k), dtype), random(rng, (k, n), dtype), random(rng, (3, k, m), dtype)
    x = random(rng, (k,), dtype)
    async with opened() as device:
        ra, rb, rx = await device.put(a), await device.put(b), await device.put(x)
        close(await device.get(await device.blas.gemm(ra, rb, alpha=0.5)), 0.5 * wide(a) @ wide(b), dtype)
        close(await device.get(await device.blas.gemm(rb, ra, transpose_a=True, transpose_b=True)), (wide(a) @ wide(b)).T, dtype)
        batched = await device.blas.gemm_batched(await device.put(batch), await device.put(batch), transpose_a=True)
        close(await device.get(batched), wide(batch).swapaxes(1, 2) @ wide(batch), dtype)
        close(await device.get(await device.blas.gemv(ra, rx)), wide(a) @ wide(x), dtype)
        close(await device.get(await device.blas.dot(rx, rx)), np.sum(wide(x) * wide(x)), dtype)
        y = await device.blas.axpy(rx, await device.put(x), alpha=-3.0)
        close(await device.get(await device.blas.scal(y, 0.5)), -wide(x), dtype)
        if not dtype.startswith("complex"):
            close(await device.get(await device.blas.nrm2(rx)), np.linalg.norm(wide(x)), dtype)


@pytest.mark.parametrize("dtype", FLOATS)
async def test_functions_of_elements_and_reductions(dtype: str, rng: np.random.Generator) -> None:
    shape = tuple(int(each) for each in rng.integers(1, 40, 3))
    x, y = random(rng, shape, dtype), random(rng, shape, dtype)
    async with opened(libraries=("elementwise", "reduce")) as device:
        rx, ry = await device.put(x), await device.put(y)
        close(await device.get(await device.elementwise.unary("tanh", rx)), np.tanh(wide(x)), dtype)
        close(await device.get(await device.elementwise.unary("sigmoid", rx)), 1 / (1 + np.exp(-wide(x))), dtype)
        close(await device.get(await device.elementwise.binary("mul", rx, ry)), wide(x) * wide(y), dtype)
        close(await device.get(await device.elementwise.binary("max", rx, ry)), np.maximum(wide(x), wide(y)), dtype)
        for axis in range(3):
            close(await device.get(await device.reduce("sum", rx, axis=axis)), wide(x).sum(axis), dtype)
            close(await device.get(await device.reduce("max", rx, axis=axis)), wide(x).max(axis), dtype)
        close(await device.get(await device.reduce("mean", rx)), wide(x).mean(), dtype)


@pytest.mark.parametrize("dtype", FLOATS)
async def test_attention(dtype: str, rng: np.random.Generator) -> None:
    q, k, v = (random(rng, (2, 3, length, 64), dtype) for length in (17, 33, 33))
    scores = np.einsum("bhqd,bhkd->bhqk", wide(q), wide(k)) / 8
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("bhqk,bhkd->bhqd", weights / weights.sum(-1, keepdims=True), wide(v))
    async with opened(libraries=("dnn",)) as device:
        got = await device.dnn.attention(await device.put(q), await device.put(k), await device.put(v))
        close(await device.get(got), expected, dtype)


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 256 << 10, (256 << 10) + 1, (64 << 20) + 12345])
async def test_copies_of_any_size_come_back(nbytes: int, rng: np.random.Generator) -> None:
    x = rng.integers(0, 256, nbytes, np.uint8)
    async with opened(libraries=()) as device:
        ref = await device.put(x)
        out = np.zeros_like(x)
        assert await device.get(ref, out=out) is out
        assert np.array_equal(out, x)
        assert np.array_equal(await device.get(await device.put(x[::-1], out=ref)), x[::-1])


@pytest.mark.parametrize("completion", ["adaptive", "polled", "sync", "host_fn"])
@pytest.mark.parametrize("streams", [8, 1, 2])
async def test_every_way_to_wait_and_to_share_streams(completion: str, streams: int, rng: np.random.Generator) -> None:
    async with opened(completion=completion, streams=streams) as device:

        async def chain(x: np.ndarray[Any, Any]) -> None:
            ref = await device.put(x)
            ref = await device.blas.gemm(ref, await device.elementwise.unary("neg", ref))
            close(await device.get(await device.reduce("sum", ref, axis=0)), (-wide(x) @ wide(x)).sum(0), "float32")

        await asyncio.gather(*(chain(random(rng, (32, 32), "float32")) for _ in range(24)))
        assert device.info().in_flight == 0
