"""Factorizations of ``xp.linalg``, and what needs them, beside numpy's in float64 and complex128."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from tests.device_support import failure

if TYPE_CHECKING:
    from collections.abc import Callable

    Matrices = np.ndarray[Any, Any]

pytestmark = pytest.mark.usefixtures("nothing_left")

STACKS: tuple[tuple[int, ...], ...] = ((), (3,), (2, 1, 2), (0,), (2, 0))
DTYPES = ("float64", "complex128")


async def same(got: accel.Array, expected: Any, rtol: float = 1e-9) -> None:
    shape, dtype = got.shape, got.dtype  # as they were said beforehand
    values = await got.numpy()
    np.testing.assert_allclose(values, expected, rtol=rtol, atol=rtol)
    assert shape == values.shape == np.shape(expected)
    assert dtype.numpy == values.dtype == np.asarray(expected).dtype


def drawn(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Matrices:
    x = rng.standard_normal(shape)
    return (x + 1j * rng.standard_normal(shape) if dtype == "complex128" else x).astype(dtype)


def turned(x: Matrices) -> Matrices:
    return x.conj().swapaxes(-1, -2)


def units(stack: tuple[int, ...], n: int, dtype: str) -> Matrices:
    return np.broadcast_to(np.eye(n, dtype=dtype), (*stack, n, n))


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 4])
async def test_square(device: accel.Device, rng: np.random.Generator, stack: tuple[int, ...], dtype: str, n: int) -> None:
    xp, linalg = device.xp, device.xp.linalg
    x = drawn(rng, (*stack, n, n), dtype) + 4 * np.eye(n)
    a = xp.asarray(x)
    await same(linalg.inv(a), np.linalg.inv(x))
    await same(linalg.det(a), np.linalg.det(x))
    signed, expected = linalg.slogdet(a), np.linalg.slogdet(x)
    await accel.evaluate(*signed)
    await same(signed.sign, expected.sign)
    await same(signed.logabsdet, expected.logabsdet)
    for power in (-3, -1, 0, 2):
        await same(linalg.matrix_power(a, power), np.linalg.matrix_power(x, power))
    vector, sides = drawn(rng, (n,), dtype), drawn(rng, (*stack, n, 2), dtype)
    await same(linalg.solve(a, xp.asarray(vector)), np.linalg.solve(x, np.broadcast_to(vector[:, None], (*stack, n, 1)))[..., 0])
    await same(linalg.solve(a, xp.asarray(sides)), np.linalg.solve(x, sides))
    await same(linalg.solve(a[..., :, :], xp.asarray(sides[..., :1].real)), np.linalg.solve(x, sides[..., :1].real))

    h = x @ turned(x) + np.eye(n)
    b = xp.asarray(h)
    lower = np.linalg.cholesky(h)
    await same(linalg.cholesky(b), lower)
    await same(linalg.cholesky(b, upper=True), turned(lower))
    values = np.linalg.eigvalsh(h)
    await same(linalg.eigvalsh(b), values)
    w, v = linalg.eigh(b)
    await same(w, values)
    await same((v * xp.expand_dims(w, -2)) @ xp.conj(v.mT), h)
    assert linalg.eigh(b)._fields == ("eigenvalues", "eigenvectors")


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n"), [(4, 3), (2, 5), (3, 3), (0, 2), (3, 0)])
async def test_any(device: accel.Device, rng: np.random.Generator, stack: tuple[int, ...], dtype: str, m: int, n: int) -> None:
    xp, linalg = device.xp, device.xp.linalg
    x = drawn(rng, (*stack, m, n), dtype)
    x[..., -1:] = x[..., :1]  # which makes the rank smaller
    a = xp.asarray(x)
    k = min(m, n)
    for mode in ("reduced", "complete"):
        q, r = found = linalg.qr(a, mode=mode)
        assert found._fields == ("Q", "R")
        assert q.shape[-1] == r.shape[-2] == (k if mode == "reduced" else m)
        await same(q @ r, x)
        await same(xp.conj(q.mT) @ q, units(stack, k if mode == "reduced" else m, dtype))
        await same(r, np.triu(await r.numpy()))
    values = np.linalg.svdvals(x)
    await same(linalg.svdvals(a), values)
    for is_full in (True, False):
        u, s, vh = decomposed = linalg.svd(a, full_matrices=is_full)
        assert decomposed._fields == ("U", "S", "Vh")
        assert u.shape == (*stack, m, m if is_full else k)
        assert vh.shape == (*stack, n if is_full else k, n)
        await same(s, values)
        await same((u[..., :k] * xp.expand_dims(s, -2)) @ vh[..., :k, :], x)
        await same(xp.conj(u.mT) @ u, units(stack, m if is_full else k, dtype))
        await same(vh @ xp.conj(vh.mT), units(stack, n if is_full else k, dtype))
    await same(linalg.pinv(a), np.linalg.pinv(x, rtol=1e-13))
    await same(linalg.matrix_rank(a), np.linalg.matrix_rank(x) if k else np.zeros(stack, np.int64))
    if not k:
        return
    tolerances = rng.uniform(0.01, 0.9, stack)
    for rtol in (0.5, tolerances):
        given = rtol if isinstance(rtol, float) else xp.asarray(rtol)
        await same(linalg.matrix_rank(a, rtol=given), np.linalg.matrix_rank(x, rtol=rtol))
        await same(linalg.pinv(a, rtol=given), np.linalg.pinv(x, rtol=rtol))
    for order in (2, -2, "nuc"):
        for keepdims in (False, True):
            await same(linalg.matrix_norm(a, ord=order, keepdims=keepdims), np.linalg.matrix_norm(x, ord=order, keepdims=keepdims))


async def test_single_precision(device: accel.Device, rng: np.random.Generator) -> None:
    xp, linalg = device.xp, device.xp.linalg
    for dtype, real in (("float32", "float32"), ("complex64", "float32")):
        a = xp.asarray(drawn(rng, (2, 3, 3), "complex128" if dtype == "complex64" else "float64").astype(dtype))
        u, s, vh = linalg.svd(a)
        w, v = linalg.eigh(a)
        sign, size = linalg.slogdet(a)
        rank = linalg.matrix_rank(a)
        inverse = linalg.pinv(a, rtol=xp.asarray(np.full(2, 1e-6)))  # float64 beside float32
        await accel.evaluate(u, s, vh, w, v, sign, size, rank, inverse)
        assert [each.dtype.value for each in (s, w, size)] == [real] * 3
        assert [each.dtype.value for each in (u, vh, v, sign, inverse)] == [dtype] * 5
        assert rank.dtype is accel.DType.INT64
        np.testing.assert_allclose(await (a @ inverse).numpy(), np.broadcast_to(np.eye(3), (2, 3, 3)), atol=1e-3)


async def test_an_expression_is_one_batch(device: accel.Device, rng: np.random.Generator) -> None:
    """What comes before and behind a factorization, and all of its results, belong to the same batch."""
    xp, linalg = device.xp, device.xp.linalg
    x = rng.standard_normal((5, 3))
    a = xp.asarray(x)
    u, s, vh = linalg.svd(2 * a, full_matrices=False)
    rebuilt, first = (u * s) @ vh + 1, s[0]
    batches: list[Any] = []
    batch = type(device).batch

    def counted(device: accel.Device, **options: Any) -> Any:
        batches.append(device)
        return batch(device, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(device), "batch", counted)
        await accel.evaluate(rebuilt, first, s)
    assert len(batches) == 1
    await same(rebuilt, 2 * x + 1)
    await same(first, np.linalg.svdvals(2 * x)[0])
    # Views, and lengths of the stack that values tell.
    stack = rng.standard_normal((4, 3, 3)) + 3 * np.eye(3)
    kept = xp.asarray(np.array([True, False, True, True]))
    await same(linalg.inv(xp.asarray(stack).mT[1:]), np.linalg.inv(stack.swapaxes(-1, -2)[1:]))
    inverse = linalg.inv(xp.asarray(stack)[kept])
    assert inverse.shape == (None, 3, 3)
    np.testing.assert_allclose(await inverse.numpy(), np.linalg.inv(stack[[0, 2, 3]]))


async def test_without_a_solution(device: accel.Device) -> None:
    """The await raises, and the arrays are as before."""
    xp, linalg = device.xp, device.xp.linalg
    singular = np.stack([np.eye(3), np.diag([1.0, 0, 2])])
    a, nan = xp.asarray(singular), xp.asarray(np.full((2, 2), np.nan))
    for wrong in (
        linalg.inv(a) + 1,
        linalg.solve(a, xp.ones(3, dtype="float64")),
        linalg.matrix_power(a, -2),
        linalg.cholesky(a).sum(),
        linalg.svd(nan).S,
        linalg.eigh(nan).eigenvectors,
        linalg.matrix_norm(nan, ord="nuc"),
    ):
        for _ in range(2):
            await failure(wrong, accel.LinAlgError)
    await same(linalg.det(a), np.linalg.det(singular))
    await same(linalg.slogdet(a)[1], np.array([0, -np.inf]))
    await same(linalg.pinv(a), np.linalg.pinv(singular))
    await same(linalg.matrix_rank(a), np.array([3, 2]))


async def test_refused(device: accel.Device) -> None:
    xp, linalg = device.xp, device.xp.linalg
    a, wide, vector, mask = xp.ones((3, 3)), xp.ones((2, 3)), xp.ones(3), xp.ones(3, dtype="bool")
    refused: tuple[Callable[[], Any], ...] = (
        lambda: linalg.inv(vector),
        lambda: linalg.inv(wide),
        lambda: linalg.det(wide),
        lambda: linalg.slogdet(wide),
        lambda: linalg.cholesky(wide),
        lambda: linalg.eigh(wide),
        lambda: linalg.eigvalsh(wide),
        lambda: linalg.solve(wide, xp.ones(2)),
        lambda: linalg.solve(a, xp.ones(2)),
        lambda: linalg.solve(a, xp.ones((3, 2, 1))),
        lambda: linalg.matrix_power(wide, -1),
        lambda: linalg.inv(xp.ones((2, 2), dtype="int32")),
        lambda: linalg.svdvals(xp.ones((2, 2), dtype="float16")),
        lambda: linalg.qr(a, mode="raw"),  # type: ignore[arg-type]
        lambda: linalg.svd(a, full_matrices=1),  # type: ignore[arg-type]
        lambda: linalg.cholesky(a, upper=None),  # type: ignore[arg-type]
        lambda: linalg.pinv(a, rtol=-1.0),
        lambda: linalg.matrix_rank(a, rtol=np.nan),
        lambda: linalg.matrix_norm(a, ord=3),
        lambda: linalg.svd(a[mask]),
    )
    for wrong in refused:
        with pytest.raises(accel.InvalidArgumentError):
            wrong()
    with pytest.raises(AttributeError):
        a.several  # noqa: B018


async def test_expm1_of_a_complex_zero(device: accel.Device) -> None:
    for dtype in ("complex64", "complex128"):
        zeros = np.array([complex(-0.0, 0.0), complex(0.0, 0.0), complex(-0.0, -0.0), complex(0.0, -0.0)], dtype)
        got = await device.xp.asarray(zeros).expm1().numpy()
        np.testing.assert_array_equal(np.signbit(got.real), False)
        np.testing.assert_array_equal(np.signbit(got.imag), [False, False, True, True])
