"""Every op of every library computes what numpy computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel import ops
from accel.enums import Transpose
from tests.device_support import Array, failure, opened

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

pytestmark = pytest.mark.usefixtures("nothing_left")


def applied(array: Array, how: Transpose) -> Array:
    return {Transpose.NONE: array, Transpose.TRANSPOSE: array.T, Transpose.CONJUGATE: array.conj().T}[how]


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("transpose_a", list(Transpose))
@pytest.mark.parametrize("transpose_b", list(Transpose))
async def test_gemm(device: accel.Device, rng: np.random.Generator, dtype: str, transpose_a: Transpose, transpose_b: Transpose) -> None:
    def random(*shape: int) -> Array:
        values = rng.standard_normal(shape) + (1j * rng.standard_normal(shape) if dtype.startswith("c") else 0)
        return values.astype(dtype)

    m, n, k = 5, 3, 4
    a = random(*((m, k) if transpose_a is Transpose.NONE else (k, m)))
    b = random(*((k, n) if transpose_b is Transpose.NONE else (n, k)))
    old = random(m, n)
    refs = await device.put(a), await device.put(b), await device.put(old)
    product = applied(a, transpose_a) @ applied(b, transpose_b)
    result = await device.blas.gemm(*refs[:2], transpose_a=transpose_a, transpose_b=transpose_b, alpha=0.5)
    np.testing.assert_allclose(await device.get(result), 0.5 * product, rtol=1e-4, atol=1e-5)
    same = await device.blas.gemm(*refs[:2], out=refs[2], beta=2.0, transpose_a=transpose_a, transpose_b=transpose_b)
    assert same is refs[2]
    np.testing.assert_allclose(await device.get(same), product + 2 * old, rtol=1e-4, atol=1e-5)


async def test_gemm_with_empty_dimensions(device: accel.Device) -> None:
    for m, k, n in ((0, 3, 2), (2, 0, 3), (3, 2, 0), (0, 0, 0)):
        a, b = await device.zeros((m, k)), await device.zeros((k, n))
        got = await device.get(await device.blas.gemm(a, b))
        np.testing.assert_array_equal(got, np.zeros((m, n), np.float32))


@pytest.mark.parametrize("way", ["bias", "bias and causal", "lengths", "causal", "window"])
async def test_a_query_whose_keys_are_all_hidden_has_0_in_every_way_that_hides_them(rng: np.random.Generator, way: str) -> None:
    q, k, v = (rng.standard_normal((2, 2, length, 4)) for length in (5, 3, 3))
    v[0] = np.nan if way == "lengths" else v[0]
    options: dict[str, Any] = {"causal": "bottom_right"} if way == "causal" else {"causal": True, "window": 1} if way == "window" else {}
    bias, hidden = np.zeros((2, 2, 5, 3)), np.zeros((2, 2, 5), bool)
    if way == "bias":
        bias[0, 1, 2] = -np.inf
        hidden[0, 1, 2] = True
    elif way == "bias and causal":  # the bias hides the keys that the triangle leaves
        options["causal"] = True
        bias[:, :, 1, :2] = -np.inf
        hidden[:, :, 1] = True
    elif way == "lengths":
        hidden[0] = True
    else:
        hidden[:, :, : 2 if way == "causal" else 0] = True
        hidden[:, :, 3 if way == "window" else 5 :] = True
    async with opened() as device:
        if way.startswith("bias"):
            options["bias"] = await device.put(bias)
        if way == "lengths":
            options["lengths_kv"] = await device.put(np.array([0, 3], np.int32))
        refs = [await device.put(each) for each in (q, k, v)]
        found = await device.get(await device.dnn.attention(*refs, **options))
    assert not found[hidden].any()
    assert np.isfinite(found).all()
    assert (found[~hidden] != 0).all()


async def test_run_takes_any_op(device: accel.Device, rng: np.random.Generator) -> None:
    x = rng.standard_normal((3, 3))
    ref = await device.run(ops.Put(x))
    out = await device.run(ops.Gemm(ref, ref), timeout=10)
    np.testing.assert_allclose(await device.get(out), x @ x)
    target = np.empty_like(x)
    assert await device.run(ops.Get(out, target)) is target
    np.testing.assert_allclose(target, x @ x)


async def test_operands_that_do_not_fit_are_refused_before_anything_is_sent() -> None:
    plan = accel.testing.FaultPlan()
    async with opened(plan) as device:
        a, b, v = await device.zeros((2, 3)), await device.zeros((2, 3)), await device.zeros(4)
        wide, count = await device.zeros((2, 3), "float64"), plan.count
        refused: tuple[Callable[[], Awaitable[Any]], ...] = (
            lambda: device.blas.gemm(a, b),
            lambda: device.blas.gemm(a, wide, transpose_b=True),
            lambda: device.blas.gemm(a, b, transpose_b=True, beta=1.0),
            lambda: device.blas.gemm(a, b, transpose_b=True, out=a),
            lambda: device.blas.gemm(a, b, transpose_b=True, alpha=1j),
            lambda: device.elementwise.binary("add", a, v),
            lambda: device.reduce("sum", a, axis=2),
            lambda: device.reduce("sum", a, axis=0, out=v),
            lambda: device.copy(a, v),
            lambda: device.copy(a, a),
            lambda: device.full((2,), "many", "float32"),
            lambda: device.zeros((-1, 2)),
            lambda: device.zeros((2, 2), "object"),
        )
        for wrong in refused:
            await failure(wrong(), accel.InvalidArgumentError)
        refused_names: tuple[Callable[[], Awaitable[Any]], ...] = (
            lambda: device.elementwise.unary("cube", a),  # type: ignore[arg-type]
            lambda: device.reduce("median", a),  # type: ignore[arg-type]
            lambda: device.blas.gemm(a, b, transpose_b="maybe"),  # type: ignore[arg-type]
        )
        for wrong in refused_names:
            with pytest.raises(accel.InvalidArgumentError):
                await wrong()
        error = await failure(device.blas.gemm(np.zeros((2, 2)), a), accel.InvalidArgumentError)  # type: ignore[arg-type]
        assert "device.put" in str(error)
        assert plan.count == count


@pytest.mark.parametrize("lengths", [(0, 10**30), (2**62, 0), (0, 2**40, 2**40)])
async def test_an_empty_array_whose_lengths_are_beyond_numpy_is_refused_where_it_is_asked_for(
    device: accel.Device, lengths: tuple[int, ...]
) -> None:
    none, shape = await device.zeros((0, 1)), tuple(lengths)
    refused: tuple[Callable[[], Awaitable[Any]], ...] = (
        lambda: device.zeros(shape),
        lambda: device.empty(shape),
        lambda: device.rng.normal(shape),
        lambda: device.arrays.eye(shape[0], shape[1] * shape[-1]),
        lambda: device.arrays.tile(none, (1, 2**62)),
    )
    for wrong in refused:
        await failure(wrong(), accel.InvalidArgumentError)
    with pytest.raises(accel.InvalidArgumentError):
        none.reshape(shape)
    assert none.reshape(0, 2**50).shape == (0, 2**50)


async def test_dtype_that_an_op_does_not_take_is_unsupported(device: accel.Device) -> None:
    x = await device.zeros((2, 2), "int32")
    error = await failure(device.blas.gemm(x, x), accel.UnsupportedError)
    assert error.op == "gemm"
    assert "float32" in str(error)


async def test_library_or_kernel_that_is_not_there_is_unsupported(device: accel.Device) -> None:
    class Strange(ops.Empty):
        library = "astrology"
        kind = "horoscope"

    class Odd(ops.Empty):
        kind = "odd"

    for op in (Strange((2,), accel.DType.FLOAT32), Odd((2,), accel.DType.FLOAT32)):
        error = await failure(device.run(op), accel.UnsupportedError)
        assert error.op == op.kind
    assert device.info().in_flight == 0
    np.testing.assert_array_equal(await device.get(await device.zeros(2)), np.zeros(2, np.float32))
