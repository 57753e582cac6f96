"""Expressions on the GPU: the values of chains, products and cuts, NaN in all of them, and how long a chain takes beside one function."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import accel

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nothing_left")]


def single(rng: np.random.Generator, *shape: int) -> np.ndarray[Any, Any]:
    return rng.standard_normal(shape).astype(np.float32)


async def test_layers(device: accel.Device, rng: np.random.Generator) -> None:
    xp = device.xp
    x, w, b, v = single(rng, 64, 33), single(rng, 33, 128), single(rng, 128), single(rng, 128, 10)
    x[3, 5] = np.nan
    hidden = (xp.asarray(x) @ xp.asarray(w) + xp.asarray(b)).relu()
    gelu = (xp.asarray(x) @ xp.asarray(w) + xp.asarray(b)).gelu_tanh()
    y = (hidden @ xp.asarray(v)).softmax()
    await accel.evaluate(hidden, gelu, y)
    wide = x.astype(np.float64) @ w + b
    np.testing.assert_allclose(await hidden.numpy(), np.maximum(wide, 0), rtol=1e-4, atol=1e-4)
    tanh = 0.5 * wide * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))
    np.testing.assert_allclose(await gelu.numpy(), tanh, rtol=1e-4, atol=1e-4)
    powers = np.maximum(wide, 0) @ v
    powers = np.exp(powers - powers.max(-1, keepdims=True))
    np.testing.assert_allclose(await y.numpy(), powers / powers.sum(-1, keepdims=True), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
async def test_relu_of_a_product_keeps_nan(device: accel.Device, rng: np.random.Generator, dtype: str) -> None:
    xp = device.xp
    for m, k, n in ((1, 7, 3), (17, 4096, 16), (256, 784, 1024), (1024, 1024, 1024)):
        x, w, b = (single(rng, *shape).astype(accel.DType.of(dtype).numpy) for shape in ((m, k), (k, n), (n,)))
        x[m // 2, k // 2] = np.nan
        y = (await (xp.asarray(x) @ xp.asarray(w) + xp.asarray(b)).relu().numpy()).astype(np.float64)
        lost = np.isnan(y).sum(axis=1)
        assert lost[m // 2] == n, f"of a product of {m} x {k} x {n}"
        assert lost.sum() == n
        assert (np.delete(y, m // 2, axis=0) >= 0).all()


@pytest.mark.parametrize("host", ["inline", "process"])
async def test_a_network_becomes_a_recorded_graph(host: Any, rng: np.random.Generator) -> None:
    w, b, v = single(rng, 33, 128), single(rng, 128), single(rng, 128, 10)
    async with accel.System() as system:
        device = await system.open_device("cuda", host=host)
        xp = device.xp
        layers = await accel.evaluate(xp.asarray(w), xp.asarray(b), xp.asarray(v))
        found = []
        for _ in range(12):
            x = single(rng, 64, 33)
            there = await xp.asarray(x)
            y = await ((there @ layers[0] + layers[1]).relu() @ layers[2]).softmax()
            found.append((x, y))
        assert [each.function is not None for each in xp.recordings._structures.values()].count(True) == 1
        for x, y in found:
            powers = np.maximum(x.astype(np.float64) @ w + b, 0) @ v
            powers = np.exp(powers - powers.max(-1, keepdims=True))
            np.testing.assert_allclose(await y.numpy(), powers / powers.sum(-1, keepdims=True), rtol=1e-3, atol=1e-4)


async def test_a_factorization_that_fails_is_not_recorded(device: accel.Device, rng: np.random.Generator) -> None:
    """An expression that may raise LinAlgError is sent as a batch each time; each await raises on its own."""
    xp = device.xp
    for number in range(8):
        x = np.zeros((4, 4)) if number % 2 else rng.standard_normal((4, 4)) + 4 * np.eye(4)
        made = xp.linalg.inv(await xp.asarray(x)) * 2
        if number % 2:
            with pytest.raises(accel.LinAlgError):
                await made
        else:
            np.testing.assert_allclose(await made.numpy(), 2 * np.linalg.inv(x))


async def test_expm1_of_a_complex_zero(device: accel.Device) -> None:
    for dtype in ("complex64", "complex128"):
        zeros = np.array([complex(-0.0, 0.0), complex(0.0, 0.0), complex(-0.0, -0.0), complex(0.0, -0.0)], dtype)
        got = await device.xp.asarray(zeros).expm1().numpy()
        np.testing.assert_array_equal(np.signbit(got.real), False)
        np.testing.assert_array_equal(np.signbit(got.imag), [False, False, True, True])
