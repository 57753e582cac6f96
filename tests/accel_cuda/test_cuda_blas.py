"""Linear algebra on the GPU through the device: every dtype, sizes from nothing to many blocks, factors, and TF32 only where it is allowed."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest

import accel
from accel import DType, Transpose
from accel_cuda.families.cublas import blas_of
from tests.accel_cuda.compute_support import bench, close, random, wide

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accel_cuda.core.stream import CudaStream
    from tests.accel_cuda.compute_support import Array, Bench

pytestmark = pytest.mark.gpu

TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 2e-5, "float64": 1e-12, "complex64": 2e-5, "complex128": 1e-12}
REAL = ("float16", "bfloat16", "float32", "float64")


@pytest.fixture(scope="module")
def rig() -> Iterator[Bench]:
    with bench() as opened:
        yield opened


def applied(transpose: Transpose, a: Array) -> Array:
    turned = wide(a).swapaxes(-1, -2)
    return wide(a) if transpose is Transpose.NONE else turned.conj() if transpose is Transpose.CONJUGATE else turned


@pytest.mark.parametrize("dtype", TOLERANCE)
async def test_products_with_every_transpose_and_factor(device: accel.Device, dtype: str) -> None:
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    element = DType.of(dtype).numpy
    for ta in Transpose:
        for tb in Transpose:
            m, n, k = (int(each) for each in rng.integers(1, 70, 3))
            batch = int(rng.integers(1, 4))
            case = f"{(m, n, k, batch)} {ta} {tb}, seed {seed}"
            a = random(rng, (batch, m, k) if ta is Transpose.NONE else (batch, k, m), element)
            b = random(rng, (k, n) if tb is Transpose.NONE else (n, k), element)
            c = random(rng, (batch, m, n), element)
            alpha, beta = ((0.5 - 2j, 1j) if element.kind == "c" else (-1.5, 0.25)) if rng.integers(2) else (1.0, 0.0)
            expected = alpha * (applied(ta, a) @ applied(tb, b)) + beta * wide(c)
            ra, rb, rc = await device.put(a), await device.put(b), await device.put(c)
            await device.blas.gemm_batched(ra, rb, out=rc, alpha=alpha, beta=beta, transpose_a=ta, transpose_b=tb)
            close(await device.get(rc), expected, TOLERANCE[dtype], case)
            ra, rc = await device.put(a[0]), await device.put(c[0])
            await device.blas.gemm(ra, rb, out=rc, alpha=alpha, beta=beta, transpose_a=ta, transpose_b=tb)
            close(await device.get(rc), expected[0], TOLERANCE[dtype], case)
            x = random(rng, (a.shape[1] if ta is not Transpose.NONE else a.shape[2],), element)
            y = random(rng, (m,), element)
            ry = await device.blas.gemv(ra, await device.put(x), out=await device.put(y), alpha=alpha, beta=beta, transpose_a=ta)
            close(await device.get(ry), alpha * (applied(ta, a[0]) @ wide(x)) + beta * wide(y), TOLERANCE[dtype], case)


@pytest.mark.parametrize("dtype", TOLERANCE)
async def test_products_of_nothing(device: accel.Device, dtype: str) -> None:
    rng = np.random.default_rng()
    element = DType.of(dtype).numpy
    y, nothing = random(rng, (5,), element), np.zeros((5, 0), element)
    ry = await device.blas.gemv(await device.put(nothing), await device.put(nothing[0]), out=await device.put(y), beta=0.5)
    close(await device.get(ry), 0.5 * wide(y), TOLERANCE[dtype], "beta * y")
    infinite = await device.put(np.full((5, 5), np.nan, element))
    assert not np.any(await device.get(await device.blas.gemv(infinite, await device.put(y), alpha=0.0)))
    assert not np.any(
        await device.get(await device.blas.gemm(infinite, infinite, out=await device.put(np.full((5, 5), np.nan, element)), alpha=0.0))
    )
    assert (await device.get(await device.blas.gemm(await device.put(nothing.T), await device.put(nothing.T), transpose_b=True))).shape == (
        0,
        0,
    )


@pytest.mark.parametrize("alpha", [1e300, -1e300])
async def test_factors_beyond_the_range_are_infinite(device: accel.Device, alpha: float) -> None:
    one = np.ones((2, 2), np.float32)
    r = await device.put(one)
    expected = np.full((2, 2), np.inf if alpha > 0 else -np.inf)
    assert np.array_equal(await device.get(await device.blas.gemm(r, r, alpha=alpha)), expected)
    assert np.array_equal(await device.get(await device.blas.scal(r, alpha)), expected)


async def test_tf32_only_where_it_is_allowed(device: accel.Device) -> None:
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    a, b = (rng.uniform(0.5, 1, (3, 256, 256)).astype(np.float32) for _ in range(2))
    expected = wide(a) @ wide(b)
    ra, rb = await device.put(a), await device.put(b)
    r0, r1 = await device.put(a[0]), await device.put(b[0])
    errors = {}
    for allowed in (False, True):
        batched = await device.get(await device.blas.gemm_batched(ra, rb, allow_tf32=allowed))
        single = await device.get(await device.blas.gemm(r0, r1, allow_tf32=allowed))
        errors[allowed] = [float(np.max(np.abs(got - want) / want)) for got, want in ((batched, expected), (single, expected[0]))]
    assert max(errors[False]) < 2e-6, (errors, seed)
    # Rounded factors, and yet not worse than 10 bits of mantissa.
    assert all(5e-6 < error < 1e-3 for error in errors[True]), (errors, seed)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_vectors_of_any_size_and_alignment(rig: Bench, dtype: str) -> None:
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    element, blas = DType.of(dtype), blas_of(cast("CudaStream", rig.compute.stream))
    for n in (1, 7, 255, 4097, 40_001, 3_000_017):
        first, second = (int(each) for each in rng.integers(0, 9, 2))
        case = f"{n} elements, {first} and {second} off, seed {seed}"
        x, y = (random(rng, (n,), element.numpy) for _ in range(2))
        if n > 1000:
            x = (wide(x) / 16).astype(element.numpy)
        px, py, out = rig.put(x, first), rig.put(y, second), rig.poisoned(1, element.numpy)
        blas.dot(n, px, py, out, element)
        error = (TOLERANCE[dtype] + 1e-6) * float(np.abs(wide(x) * wide(y)).sum()) + 1e-300
        assert abs(wide(rig.get(out, (), element.numpy)) - (wide(x) * wide(y)).sum()) <= error, case
        if not element.is_complex:
            blas.nrm2(n, px, out, element)
            close(rig.get(out, (), element.numpy), np.sqrt(np.square(wide(x)).sum()), TOLERANCE[dtype], case)
        target = rig.poisoned(n, element.numpy, second)
        rig.compute.copy_htod(target, y.view(np.uint8).data)
        alpha = 0.5 - 2j if element.is_complex else -1.5
        blas.axpy(n, alpha, px, target, element)
        close(rig.get(target, (n,), element.numpy), alpha * wide(x) + wide(y), TOLERANCE[dtype], case)
        rig.compute.copy_htod(target, y.view(np.uint8).data)
        blas.scal(n, alpha, target, element)
        close(rig.get(target, (n,), element.numpy), alpha * wide(y), TOLERANCE[dtype], case)
        rig.clear()


@pytest.mark.parametrize("dtype", REAL)
def test_norms_at_the_ends_of_the_range(rig: Bench, dtype: str) -> None:
    element, blas = DType.of(dtype), blas_of(cast("CudaStream", rig.compute.stream))
    largest = {"float16": 3e4, "bfloat16": 1e38, "float32": 1e38, "float64": 1e307}[dtype]
    smallest = {"float16": 6e-8, "bfloat16": 1e-38, "float32": 1e-44, "float64": 1e-310}[dtype]
    for value in (largest, smallest):
        for n in (4, 1 << 18):
            shown = np.full(n, value).astype(element.numpy)
            x = shown[:4] if value == largest else shown
            out = rig.poisoned(1, element.numpy)
            blas.nrm2(len(x), rig.put(x), out, element)
            expected = float(x[0].astype(np.float64)) * np.sqrt(len(x))
            got = float(rig.get(out, (), element.numpy).astype(np.float64))
            assert got == pytest.approx(expected, rel=TOLERANCE[dtype]), (value, n)
            rig.clear()
    for bad in (np.nan, np.inf):
        x = np.array([1.0, bad, largest, 0.0]).astype(element.numpy)
        out = rig.poisoned(1, element.numpy)
        blas.nrm2(4, rig.put(x), out, element)
        got = float(rig.get(out, (), element.numpy).astype(np.float64))
        assert np.isnan(got) if np.isnan(bad) else got == np.inf
        rig.clear()
