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
async def test_large_sums_are_those_of_numpy(dtype: str) -> None:
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    kind = accel.DType.of(dtype)
    error = {2: 2.0**-7, 4: 1e-5, 8: 1e-12 if kind.is_floating else 1e-5, 16: 1e-12}[kind.itemsize]
    async with accel.System() as system:
        device = await system.open_device("cuda")
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


async def test_a_chain_is_recorded_and_replayed() -> None:
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal(shape) for shape in ((40, 30, 50), (50, 40, 20), (20, 70))]
    async with accel.System() as system:
        device = await system.open_device("cuda")
        refs = [await device.put(each) for each in arrays]
        async with device.graph() as graph:
            made = graph.tensor.einsum("aij,jak,kl->lia", *refs)
        for _ in range(3):
            a = rng.standard_normal((40, 30, 50))
            await device.put(a, out=refs[0])
            await graph.replay()
            expected = np.einsum("aij,jak,kl->lia", a, *arrays[1:], optimize=True)
            np.testing.assert_allclose(await device.get(made), expected, rtol=0, atol=1e-9 * np.abs(expected).max(), err_msg=f"seed {seed}")
        await graph.aclose()
