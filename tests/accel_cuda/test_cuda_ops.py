"""Ops on the GPU through the device, as users call them, against numpy."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import accel
from tests.accel_cuda.compute_support import opened

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nothing_left")]

TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-4, "float64": 1e-11, "complex64": 1e-4, "complex128": 1e-11}


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
