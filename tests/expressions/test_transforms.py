"""``xp.fft``, ``xp.linalg`` without factorizations, and functions of the namespace whose values the standard's test suite does not compare, beside numpy's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("nothing_left")


async def same(got: accel.Array, expected: Any) -> None:
    np.testing.assert_allclose(await got.numpy(), expected, rtol=1e-9, atol=1e-9)
    assert got.shape == np.shape(expected)


async def test_transforms(device: accel.Device, rng: np.random.Generator) -> None:
    fft = device.xp.fft
    real = rng.standard_normal((3, 4, 5, 2))
    x = real + 1j * rng.standard_normal(real.shape)
    array, reals = device.xp.asarray(x), device.xp.asarray(real)
    for norm in ("backward", "ortho", "forward"):
        for n in (None, 3, 8):
            for axis in (-1, 1):
                await same(fft.fft(array, n=n, axis=axis, norm=norm), np.fft.fft(x, n, axis, norm))
                await same(fft.ifft(array, n=n, axis=axis, norm=norm), np.fft.ifft(x, n, axis, norm))
                await same(fft.rfft(reals, n=n, axis=axis, norm=norm), np.fft.rfft(real, n, axis, norm))
                await same(fft.hfft(array, n=n or 6, axis=axis, norm=norm), np.fft.hfft(x, n or 6, axis, norm))
                await same(fft.ihfft(reals, n=n, axis=axis, norm=norm), np.fft.ihfft(real, n, axis, norm))
        await same(fft.irfft(array, n=6, axis=1, norm=norm), np.fft.irfft(x, 6, 1, norm))
    await same(fft.fftn(array), np.fft.fftn(x))
    await same(fft.ifftn(array, s=(2, 7), axes=(0, 2)), np.fft.ifftn(x, (2, 7), (0, 2)))
    await same(fft.rfftn(reals), np.fft.rfftn(real))
    await same(fft.irfftn(array, axes=(2, 0, 1)), np.fft.irfftn(x, axes=(2, 0, 1)))
    await same(fft.irfftn(fft.rfftn(reals), s=real.shape, axes=(0, 1, 2, 3)), real)
    await same(fft.fftshift(array, axes=(0, 2)), np.fft.fftshift(x, (0, 2)))
    await same(fft.ifftshift(fft.fftshift(array)), x)
    await same(fft.fftfreq(7, d=0.5, dtype=device.xp.float64), np.fft.fftfreq(7, 0.5))
    await same(fft.rfftfreq(7, d=0.5, dtype=device.xp.float64), np.fft.rfftfreq(7, 0.5))
    refused: tuple[Callable[[], Any], ...] = (
        lambda: fft.fft(array, n=0),
        lambda: fft.fft(array, norm="both"),  # type: ignore[arg-type]
        lambda: fft.rfft(array),
        lambda: fft.fftn(array, s=(2,), axes=(0, 1)),
        lambda: fft.fft(device.xp.ones(3, dtype="int32")),
    )
    for wrong in refused:
        with pytest.raises(accel.InvalidArgumentError):
            wrong()


async def test_products_norms_and_diagonals(device: accel.Device, rng: np.random.Generator) -> None:
    xp, linalg = device.xp, device.xp.linalg
    x, y = rng.standard_normal((2, 4, 4)), rng.standard_normal((2, 4, 4))
    a, b = xp.asarray(x), xp.asarray(y)
    for order in (2, 1, 0, np.inf, -np.inf, 3):
        await same(linalg.vector_norm(a, axis=(0, 2), ord=order), _norm(x, order))
    orders: tuple[Any, ...] = ("fro", 1, -1, np.inf, -np.inf)
    for kind in orders:
        for keepdims in (False, True):
            await same(linalg.matrix_norm(a, ord=kind, keepdims=keepdims), np.linalg.matrix_norm(x, ord=kind, keepdims=keepdims))
    for power in range(6):
        await same(linalg.matrix_power(a, power), np.linalg.matrix_power(x, power))
    for offset in (-5, -4, -3, -1, 0, 1, 3, 4, 5):
        part, wide = x[:, :, :3], a[:, :, :3]
        await same(linalg.diagonal(wide, offset=offset), np.diagonal(part, offset, -2, -1))
        await same(linalg.trace(wide, offset=offset), np.trace(part, offset, -2, -1))
    await same(linalg.cross(a[..., :3], b[..., :3]), np.cross(x[..., :3], y[..., :3]))
    await same(linalg.outer(a[0, 0], b[1, 1]), np.outer(x[0, 0], y[1, 1]))
    await same(linalg.tensordot(a, b, axes=((0, 2), (0, 1))), np.tensordot(x, y, ((0, 2), (0, 1))))
    await same(linalg.matmul(a, linalg.matrix_transpose(b)), x @ y.swapaxes(-1, -2))
    await same(linalg.vecdot(a, b, axis=-2), (x * y).sum(-2))
    small = rng.integers(-100, 100, (3, 4)).astype(np.int8)
    product = xp.asarray(small) @ xp.asarray(small.T)
    assert product.dtype is accel.DType.INT8
    np.testing.assert_array_equal(await product.numpy(), small @ small.T)


def _norm(x: np.ndarray[Any, Any], order: float) -> Any:
    return np.linalg.vector_norm(x, axis=(0, 2), ord=order)


async def test_functions_beyond_the_standard(device: accel.Device, rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, 6))
    a = device.xp.asarray(x)
    powers = np.exp(x - x.max(-1, keepdims=True))
    await same(a.softmax(), powers / powers.sum(-1, keepdims=True))
    await same(a.logsumexp(axis=0), np.log(np.exp(x).sum(0)))
    values, indices = device.xp.topk(a * 2, 3, axis=0)
    await accel.evaluate(values, indices)
    await same(values, -np.sort(-x * 2, 0)[:3])
    await same(indices, np.argsort(-x, 0)[:3])
    await same(a.silu(), x / (1 + np.exp(-x)))
    await same(a.var(axis=1, correction=0.5), x.var(1) * 6 / 5.5)
    await same(a.std(axis=(), correction=0), np.zeros_like(x))
    await same(device.xp.diff(a, n=2, axis=0, prepend=a[:1]), np.diff(x, 2, 0, prepend=x[:1]))
