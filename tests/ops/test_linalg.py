"""Products of any rank: ranks and dtypes, what follows a product, what else is written, and what is refused before anything is sent."""

from __future__ import annotations

import contextlib
import secrets
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

import accel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[accel.Device]:
    async with accel.System() as system:
        yield await system.open_device("cpu", libraries=("linalg",))


def gelu(x: Any) -> Any:
    return x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2


async def test_what_goes_into_the_gelu_is_written_too(device: accel.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    a, b, bias = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 5, 8), (2, 8, 16), (16,)))
    before = a.astype(np.float64) @ b + bias
    for workspace in (1 << 20, 300):  # at once, and in pieces
        monkeypatch.setattr("accel.cpu.families.precision.WORKSPACE", workspace)
        aux, out = await device.full((2, 5, 16), np.nan, "float32"), await device.full((2, 5, 16), np.nan, "float32")
        refs = [await device.put(each) for each in (a, b, bias)]
        result = await device.linalg.matmul(*refs[:2], bias=refs[2], activation="gelu", aux=aux, out=out)
        assert result is out
        np.testing.assert_allclose(await device.get(aux), before, rtol=1e-5, atol=1e-5, err_msg=f"seed {seed}")
        np.testing.assert_allclose(await device.get(out), gelu(before), rtol=1e-5, atol=1e-5, err_msg=f"seed {seed}")
        new = await device.linalg.matmul(*refs[:2], activation="gelu", aux=aux)
        np.testing.assert_allclose(await device.get(aux), before - bias, rtol=1e-5, atol=1e-5, err_msg=f"seed {seed}")
        assert new is not aux


async def test_float8_is_scaled_and_saturates_and_tells_its_largest(device: accel.Device) -> None:
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((16, 64)).astype(ml_dtypes.float8_e4m3fn), rng.standard_normal((16, 64)).astype(ml_dtypes.float8_e5m2)
    product = a.astype(np.float64) @ b.astype(np.float64).T
    amax, half = await device.full((), 1e9, "float32"), await device.full((), 0.5, "float32")
    many = await device.full((1,), 1e4, "float32")
    ra, rb = await device.put(a), await device.put(b)
    y = await device.linalg.matmul(
        ra, rb, transpose_b=True, out_dtype=E4M3, scale_a=half, scale_b=half, scale_out=many, amax=amax
    )  # fmt: skip
    assert np.isclose(float(await device.get(amax)), np.abs(product).max() / 4, rtol=1e-5), f"seed {seed}"
    assert np.abs((await device.get(y)).astype(np.float32)).max() == 448
    wide = await device.linalg.matmul(ra, rb, transpose_b=True, out_dtype="float32", scale_a=half)
    np.testing.assert_allclose(await device.get(wide), product / 2, rtol=1e-5, atol=1e-5, err_msg=f"seed {seed}")
    assert (await device.linalg.matmul(ra, rb, transpose_b=True)).dtype is accel.DType.BFLOAT16


async def test_sums_of_int8_are_exact_and_wrap_around(device: accel.Device) -> None:
    k = 140_000
    a, b = await device.full((1, k), 127, "int8"), await device.full((k, 1), 127, "int8")
    assert (await device.get(await device.linalg.matmul(a, b))).item() == 127 * 127 * k - (1 << 32)


SHAPES = {"a": (4, 8), "b": (8, 16), "wide": (4, 16), "bias": (16,), "cube": (3, 8, 16), "number": (), "vector": (8,)}


async def test_what_does_not_fit_is_refused(device: accel.Device) -> None:
    f32 = {name: await device.zeros(shape, "float32") for name, shape in SHAPES.items()}
    f64 = {name: await device.zeros(shape, "float64") for name, shape in SHAPES.items()}
    f8 = {name: await device.zeros(shape, E4M3) for name, shape in SHAPES.items()}
    c64 = {name: await device.zeros(shape, "complex64") for name, shape in SHAPES.items()}
    e5 = {name: await device.zeros(shape, E5M2) for name, shape in SHAPES.items()}
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        (f32, {"b": f32["wide"]}, "8 columns and op.b. has 4 rows"),
        (f32, {"b": f64["b"]}, "float32 and float64 is not offered"),
        (f32, {"a": f32["number"]}, "a has no dimensions"),
        (f32, {"a": f32["vector"], "transpose_a": True}, "transpose_a is given for a vector"),
        (f32, {"bias": f32["vector"]}, r"bias is float32\[8\]"),
        (f32, {"bias": f64["bias"]}, "the product takes float32"),
        (f32, {"activation": "tanh"}, "activation is 'tanh'"),
        (c64, {"bias": c64["bias"]}, "bias is not offered for complex64"),
        (c64, {"activation": "relu"}, "activation is not offered for complex64"),
        (f32, {"activation": "relu", "aux": f32["wide"]}, "aux takes what goes into the GELU"),
        (f32, {"activation": "gelu", "aux": f32["b"]}, r"aux is float32\[8, 16\]"),
        (f8, {"activation": "gelu", "aux": f8["wide"]}, "aux takes what goes into the GELU"),
        (f32, {"activation": "gelu", "aux": f32["wide"], "out": f32["wide"]}, "overlaps"),
        (f32, {"out": f32["b"]}, "out is float32"),
        (f32, {"b": f32["b"], "a": f32["cube"], "transpose_a": True, "out": f32["cube"]}, "out is float32"),
        (f32, {"out_dtype": "float16"}, "out_dtype is float16"),
        (f8, {"out_dtype": "int32"}, "out_dtype is int32"),
        (f32, {"scale_a": f32["number"]}, "scale_a is for operands of float8"),
        (f8, {"scale_out": f32["number"]}, "scale_out is for results of float8"),
        (f8, {"out_dtype": "float32", "bias": f32["bias"]}, "the product takes bfloat16"),
        (f8, {"scale_a": f64["number"]}, "scale_a is float64"),
        (f8, {"scale_b": f32["bias"]}, r"scale_b is float32\[16\]"),
        (f8, {"amax": f32["number"]}, "amax is for results of float8"),
        (f8, {"b": f8["cube"], "amax": f32["number"], "out_dtype": E4M3}, "amax is given for several products"),
        (f32, {"b": f32["vector"], "activation": "gelu", "aux": f32["number"]}, "one column"),
        (e5, {}, "float8_e5m2 and float8_e5m2 is not offered"),
        (f64, {"allow_tf32": True}, "allow_tf32 is given for float64"),
        (f32, {"allow_tf32": []}, r"allow_tf32 is \[\]"),
        (f32, {"autotune": 0}, "autotune is 0"),
        (f32, {"transpose_a": "x"}, "'x' is not a transpose"),
        (f32, {"bias": 3}, "bias is a int"),
    ]
    for which, options, message in cases:
        with pytest.raises(accel.AccelError, match=message) as caught:
            await device.linalg.matmul(**{"a": which["a"], "b": which["b"], **options})
        assert caught.value.remedy, message
        assert caught.value.op == "matmul"


async def test_a_result_is_not_written_over_an_operand(device: accel.Device) -> None:
    x = await device.zeros((4, 4), "float32")
    with pytest.raises(accel.InvalidArgumentError, match="out overlaps a"):
        await device.linalg.matmul(x, await device.zeros((4, 4), "float32"), out=x)
    amax, y = await device.zeros((), "float32"), await device.zeros((4, 4), E4M3)
    with pytest.raises(accel.InvalidArgumentError, match="amax overlaps scale_a"):
        await device.linalg.matmul(y, y, scale_a=amax, amax=amax, out_dtype=E4M3)


async def test_a_bias_of_sums_of_nothing_is_refused(device: accel.Device) -> None:
    a, b, bias = await device.zeros((4, 0), "float32"), await device.zeros((0, 3), "float32"), await device.zeros(3, "float32")
    assert not (await device.get(await device.linalg.matmul(a, b, activation="gelu"))).any()
    with pytest.raises(accel.InvalidArgumentError, match="of no products"):
        await device.linalg.matmul(a, b, bias=bias)
