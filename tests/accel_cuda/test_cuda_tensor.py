"""Sums of products on the GPU: large ones against numpy in higher precision, and what is copied for them; the samples of the family have all forms."""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
import pytest

import accel

pytestmark = pytest.mark.gpu

_LARGE: list[tuple[str, tuple[tuple[int, ...], ...]]] = [
    ("bqhd,bkhd->bhqk", ((2, 128, 8, 64), (2, 96, 8, 64))),
    ("ij,bjk->bik", ((300, 200), (5, 200, 70))),
    ("abcd,cdbe->ea", ((33, 8, 16, 20), (16, 20, 8, 45))),
    ("ij,jk,kl,lm->im", ((200, 10), (10, 300), (300, 20), (20, 100))),
    ("...ij,...jk->...ik", ((3, 1, 64, 65), (4, 65, 66))),
    ("bi,bi->b", ((4097, 33), (4097, 33))),
    ("ijk,k->ji", ((65, 66, 67), (67,))),
    ("iij->ji", ((129, 129, 33),)),
]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"])
async def test_large_sums_are_those_of_numpy(device: accel.Device, dtype: str) -> None:
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    kind = accel.DType.of(dtype)
    error = {2: 2.0**-7, 4: 1e-5, 8: 1e-12 if kind.is_floating else 1e-5, 16: 1e-12}[kind.itemsize]
    for subscripts, shapes in _LARGE:
        arrays: list[Any] = []
        for shape in shapes:
            values = rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if kind.is_complex else 0)
            arrays.append((values / 4).astype(kind.numpy))
        wide = [each.astype(np.complex128 if kind.is_complex else np.float64) for each in arrays]
        expected = np.einsum(subscripts, *wide, optimize=True)
        refs = [await device.put(each) for each in arrays]
        out = await device.full(expected.shape, np.nan, dtype)
        await device.tensor.einsum(subscripts, *refs, out=out)
        found = (await device.get(out)).astype(expected.dtype)
        sizes = np.einsum(subscripts, *[np.abs(each) for each in wide], optimize=True)
        wrong = float((np.abs(found - expected) / np.maximum(sizes, sizes.max() / 100)).max())
        assert wrong < error, f"{subscripts} {dtype}: {wrong} (seed {seed})"
