"""``allow_tf32`` is a permission: full float32 honours it, and no other dtype can have it."""

from __future__ import annotations

import secrets

import numpy as np
import pytest

import accel


async def test_full_precision_honours_the_permission(device: accel.Device) -> None:
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    a, b = (rng.uniform(0.5, 1, (2, 24, 24)).astype(np.float32) for _ in range(2))
    expected = a.astype(np.float64) @ b
    ra, rb = await device.put(a), await device.put(b)
    got = await device.get(await device.blas.gemm_batched(ra, rb, allow_tf32=True))
    assert np.max(np.abs(got - expected) / expected) < 1e-6, seed
    first = await device.blas.gemm(await device.put(a[0]), await device.put(b[0]), allow_tf32=True)
    assert np.max(np.abs(await device.get(first) - expected[0]) / expected[0]) < 1e-6, seed
    async with device.batch() as batch:
        both = batch.blas.gemm_batched(ra, rb, allow_tf32=True)
    assert np.array_equal(await device.get(both), got), seed


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "complex64", "complex128"])
async def test_other_dtypes_are_refused(device: accel.Device, dtype: str) -> None:
    a, b = await device.zeros((3, 3), dtype), await device.zeros((2, 3, 3), dtype)
    for call in (device.blas.gemm(a, a, allow_tf32=True), device.blas.gemm_batched(b, b, allow_tf32=True)):
        with pytest.raises(accel.InvalidArgumentError, match="allow_tf32") as caught:
            await call
        assert "float32" in str(caught.value)
    assert (await device.get(await device.blas.gemm(a, a, allow_tf32=False))).shape == (3, 3)
