"""BLAS besides products: what is refused, what is written in place, what is left alone, and what solves what. Values are compared by the family's samples."""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
import pytest

import accel
from tests.device_support import failure

pytestmark = pytest.mark.usefixtures("nothing_left")


async def test_what_does_not_fit_is_refused(device: accel.Device) -> None:
    blas: Any = device.blas
    a, b, x = await device.zeros((3, 3)), await device.zeros((3, 2)), await device.zeros((3,))
    stack, double, z = await device.zeros((2, 3, 3)), await device.zeros((3,), "float64"), await device.zeros((3, 3), "complex64")
    for wrong in (
        blas.asum(x, out=await device.zeros((1,))),
        blas.asum(x, out=x[0]),
        blas.asum(z, out=z[0, 0]),
        blas.iamax(x[:0]),
        blas.iamin(x, out=await device.zeros((), "int32")),
        blas.dotc(x, x[:2]),
        blas.swap(x, x),
        blas.swap(x, double),
        blas.rot(x, x, 1.0, 0.0),
        blas.rot(x[:1], x[1:2], 1j, 0.0),
        blas.rot(x[:1], x[1:2], 1.0, 1j),
        blas.ger(a, x),
        blas.ger(x, x, beta=1.0),
        blas.ger(x, x, conjugate=1),
        blas.trmv(b, x),
        blas.trsv(a, x[:2]),
        blas.trsv(a, x, lower=1),
        blas.trsv(a, x, trans="x"),
        blas.trsv(a, x, out=a[0]),
        blas.trmm(a, b, side="right"),
        blas.trsm(a, b, side="top"),
        blas.trsm(a, b, unit_diagonal=None),
        blas.trsm(a, b, alpha=1j),
        blas.trsm(a, x),
        blas.trsm(stack, await device.zeros((3, 3, 3))),
        blas.trsm(stack, b, out=b),
        blas.trsm(a, b, out=await device.zeros((2, 3))),
        blas.symm(b, b),
        blas.symm(a, b, side="right"),
        blas.symm(a, b, beta=2.0),
        blas.hemm(a, a, out=a),
        blas.syrk(z, trans="c"),
        blas.herk(z, trans="t"),
        blas.herk(z, alpha=1j),
        blas.syrk(b, out=b),
        blas.syrk(b, beta=1.0),
        blas.geam(a, b),
        blas.geam(b, b, transpose_a=True),
        blas.geam(a, a, transpose_a=True, out=a),
    ):
        error = await failure(wrong, accel.InvalidArgumentError)
        assert error.remedy, error
        assert error.op, error
    half, row = await device.zeros((3, 3), "float16"), await device.zeros((3,), "bfloat16")
    for refused in (
        *(blas.asum(row), blas.iamax(row), blas.iamin(row), blas.trmv(half, half[0]), blas.trsv(half, half[0]), blas.trmm(half, half)),
        *(blas.trsm(half, half), blas.symm(half, half), blas.hemm(half, half), blas.syrk(half), blas.herk(half), blas.geam(half, half)),
        *(blas.swap(row[:1], row[1:2]), blas.rot(row[:1], row[1:2], 1.0, 0.0)),
    ):
        await failure(refused, accel.UnsupportedError)


async def test_batches_that_do_not_fit_are_refused(device: accel.Device) -> None:
    blas: Any = device.blas
    a, b, x, stack, out = [await device.zeros(shape) for shape in ((3, 3), (3, 2), (3,), (2, 3, 3), (2, 3, 3))]
    for wrong in (
        blas.symm(x, b),
        blas.symm(stack, stack[:1]),
        blas.symm(stack, b, out=await device.zeros((3, 2))),
        blas.symm(stack, b, beta=1.0),
        blas.symm(a, stack, out=stack),
        blas.hemm(stack, b, side="right"),
        blas.syrk(x),
        blas.syrk(stack, out=await device.zeros((3, 3))),
        blas.herk(stack, beta=1.0),
        blas.herk(await device.zeros((1, 2, 3, 3))),
        blas.geam(stack, x),
        blas.geam(stack, stack[:1]),
        blas.geam(stack, b),
        blas.geam(a, stack, out=a),
        blas.geam(stack, a, out=a),
        blas.geam(stack, out[1], out=out),
        blas.trmm(stack, out[1], out=out),
        blas.geam(stack, stack, transpose_b=True, out=stack),
    ):
        error = await failure(wrong, accel.InvalidArgumentError)
        assert error.remedy, error
        assert error.op, error


def random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Any:
    values = rng.standard_normal(shape)
    return (values + 1j * rng.standard_normal(shape) if dtype.startswith("complex") else values).astype(dtype)


async def test_results_are_written_over_operands_that_are_given_as_out(device: accel.Device, rng: np.random.Generator) -> None:
    a, b = rng.standard_normal((4, 4)) + 4 * np.eye(4), rng.standard_normal((4, 4))
    ra, rb = await device.put(a), await device.put(b)
    assert await device.blas.trsm(ra, rb, out=rb) is rb
    np.testing.assert_allclose(await device.get(rb), np.linalg.solve(np.triu(a), b), rtol=1e-10)
    x = await device.put(b[0])
    assert await device.blas.trmv(ra, x, out=x, lower=True) is x
    np.testing.assert_allclose(await device.get(x), np.tril(a) @ b[0], rtol=1e-10)
    first, second = await device.put(a[0]), await device.put(a[1])
    made = await device.blas.swap(first, second)
    assert made[0] is first
    assert made[1] is second
    np.testing.assert_array_equal(await device.get(first), a[1])


async def test_the_other_triangle_is_neither_read_nor_written(device: accel.Device, rng: np.random.Generator) -> None:
    a = rng.standard_normal((5, 5)) + 4 * np.eye(5)
    holed = np.where(np.tri(5, dtype=bool), a, np.nan)
    ra, rb = await device.put(holed), await device.put(np.eye(5))
    for made in (
        await device.blas.trmm(ra, rb, lower=True),
        await device.blas.trsm(ra, rb, lower=True, trans=True),
        await device.blas.symm(ra, rb, lower=True),
    ):
        assert np.isfinite(await device.get(made)).all()
    unit = await device.put(np.where(np.tri(5, k=-1, dtype=bool), a, np.nan))
    assert np.isfinite(await device.get(await device.blas.trsm(unit, rb, lower=True, unit_diagonal=True))).all()
    out = await device.put(np.full((5, 5), np.nan))
    got = await device.get(await device.blas.syrk(rb, out=out, lower=True))
    np.testing.assert_array_equal(np.isnan(got), ~np.tri(5, dtype=bool))


async def test_a_zero_on_the_diagonal_gives_infinities_and_no_error(device: accel.Device) -> None:
    a, x = await device.put(np.diag([1.0, 0.0])), await device.put(np.ones(2))
    np.testing.assert_array_equal(await device.get(await device.blas.trsv(a, x, lower=True)), [1.0, np.inf])
    np.testing.assert_array_equal(await device.get(await device.blas.trsm(a, x.reshape(2, 1), alpha=0.0)), np.zeros((2, 1)))


async def test_extremes_are_counted_from_zero_in_c_order(device: accel.Device) -> None:
    x = await device.put(np.array([[1 + 1j, -3j], [2 + 2j, 0.5j]], np.complex64))
    assert (await device.get(await device.blas.iamax(x))).item() == 2  # not the largest absolute value, which is 3
    assert (await device.get(await device.blas.iamin(x.T))).item() == 3


async def test_groups_of_products_are_refused_where_they_do_not_fit(device: accel.Device) -> None:
    grouped: Any = device.blas.gemm_grouped
    a, b = await device.zeros((2, 3)), await device.zeros((3, 4))
    out, double, vector = await device.zeros((2, 4)), await device.zeros((3, 4), "float64"), await device.zeros(3)
    for arguments, options in (
        (((), ()), {}),
        (((a, a), (b,)), {}),
        ((a, b), {}),
        (((a,), (a,)), {}),
        (((a,), (double,)), {}),
        (((a,), (vector,)), {}),
        (((a, a), (b, b)), {"out": (out,)}),
        (((a, a), (b, b)), {"out": (out, out)}),
        (((a,), (b,)), {"out": (b,)}),
        (((a,), (b[:, :2],)), {"out": (b[:2, 1:3],)}),
        (((a,), (b,)), {"beta": 1.0}),
        (((a,), (b,)), {"alpha": 1j}),
        (((double,), (double,)), {"transpose_a": True, "allow_tf32": True}),
    ):
        error = await failure(grouped(*arguments, **options), accel.InvalidArgumentError)
        assert error.op == "gemm_grouped", (arguments, options)


async def test_groups_take_views_and_give_a_tuple(device: accel.Device, rng: np.random.Generator) -> None:
    x = rng.standard_normal((6, 8))
    ref = await device.put(x)
    a, b = [ref[1:4, ::2], ref.T[:, 2:5]], [ref[2:, 1:3], ref[::-1, ::-1][3:, :4]]
    host_a, host_b = [x[1:4, ::2], x.T[:, 2:5]], [x[2:, 1:3], x[::-1, ::-1][3:, :4]]
    made = await device.blas.gemm_grouped(a, b)
    assert isinstance(made, tuple)
    for got, left, right in zip(made, host_a, host_b, strict=True):
        np.testing.assert_allclose(await device.get(got), left @ right, atol=1e-12)
    whole = await device.full((10, 10), 1.0, "float64")
    async with device.batch() as batch:
        (one,) = batch.blas.gemm_grouped((ref,), (ref,), transpose_b=True)
        batch.blas.gemm_grouped(a[:1], b[:1], out=(whole[2:8:2, 4:8:2],), beta=-1.0)
    np.testing.assert_allclose(await device.get(one), x @ x.T, atol=1e-12)
    found = await device.get(whole)
    np.testing.assert_allclose(found[2:8:2, 4:8:2], host_a[0] @ host_b[0] - 1, atol=1e-12)
    found[2:8:2, 4:8:2] = 1
    assert (found == 1).all()


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
