"""Products of cuBLASLt through the device: ranks, epilogues, views, graphs, small dtypes, and algorithms that are tried out."""

from __future__ import annotations

import secrets
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import accel
from accel import DType
from tests.accel_cuda.compute_support import close, random, unaligned, wide

pytestmark = pytest.mark.gpu

TOLERANCE = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 2e-5, "float64": 1e-12, "complex64": 2e-5, "complex128": 1e-12}
FUSED = ("float16", "bfloat16", "float32", "float64")
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def gelu(x: Any) -> Any:
    return x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2


@pytest.mark.parametrize("dtype", TOLERANCE)
async def test_ranks_broadcasting_and_transposes(device: accel.Device, dtype: str) -> None:
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    element = DType.of(dtype).numpy
    shapes = [
        ((33, 65), (65, 17)), ((65,), (65, 17)), ((33, 65), (65,)), ((65,), (65,)), ((3, 2, 33, 9), (9, 17)), ((2, 1, 7, 9), (3, 9, 5)),
        ((3, 1, 2, 4, 8), (2, 1, 8, 16)), ((9,), (3, 9, 5)), ((3, 5, 9), (9,)), ((1, 1), (1, 1)), ((0, 3), (3, 4)), ((4, 0), (0, 3)), ((0, 4, 3), (3, 4)),
    ]  # fmt: skip
    for shape_a, shape_b in shapes:
        a, b = random(rng, shape_a, element), random(rng, shape_b, element)
        got = await device.get(await device.linalg.matmul(await device.put(a), await device.put(b)))
        close(got, np.asarray(wide(a) @ wide(b)), TOLERANCE[dtype], f"{shape_a} @ {shape_b}, seed {seed}")
    a, b = random(rng, (3, 65, 33), element), random(rng, (17, 65), element)
    got = await device.get(await device.linalg.matmul(await device.put(a), await device.put(b), transpose_a="c", transpose_b=True))
    close(got, wide(a).swapaxes(1, 2).conj() @ wide(b).T, TOLERANCE[dtype], f"transposed, seed {seed}")


@pytest.mark.parametrize("dtype", FUSED)
async def test_epilogues_at_even_and_odd_sizes(device: accel.Device, dtype: str) -> None:
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    element = DType.of(dtype).numpy
    tolerance = max(TOLERANCE[dtype], 1e-4)  # an approximate tanh
    for lead, m, n, k in (((), 64, 128, 96), ((), 7, 5, 3), ((3,), 16, 24, 40), ((2, 3), 1, 8, 9), ((), 5, 1, 4)):
        a, b, bias = random(rng, (*lead, m, k), element), random(rng, (*lead[:1], k, n)[-3:], element), random(rng, (n,), element)
        b = b if len(lead) < 2 else random(rng, (k, n), element)
        product = wide(a) @ wide(b)
        ra, rb, rbias = await device.put(a), await device.put(b), await device.put(bias)
        case = f"{lead} {(m, n, k)}, seed {seed}"
        close(await device.get(await device.linalg.matmul(ra, rb, bias=rbias)), product + wide(bias), TOLERANCE[dtype], case)
        relu = await device.linalg.matmul(ra, rb, bias=rbias, activation="relu")
        close(await device.get(relu), np.maximum(product + wide(bias), 0), TOLERANCE[dtype], case)
        close(await device.get(await device.linalg.matmul(ra, rb, activation="relu")), np.maximum(product, 0), TOLERANCE[dtype], case)
        if n > 1:
            aux = await device.full(product.shape, np.nan, dtype)
            result = await device.linalg.matmul(ra, rb, bias=rbias, activation="gelu", aux=aux)
            close(await device.get(result), gelu(product + wide(bias)), tolerance, case)
            close(await device.get(aux), product + wide(bias), TOLERANCE[dtype], case)
        else:
            result = await device.linalg.matmul(ra, rb, bias=rbias, activation="gelu")
            close(await device.get(result), gelu(product + wide(bias)), tolerance, case)


@pytest.mark.parametrize("dtype", FUSED)
async def test_views_that_begin_anywhere(device: accel.Device, dtype: str) -> None:
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    element = DType.of(dtype).numpy
    a, b, bias = random(rng, (24, 40), element), random(rng, (40, 32), element), random(rng, (32,), element)
    expected = np.maximum(wide(a) @ wide(b) + wide(bias), 0)
    for skipped in (1, 2, 4):
        refs = [await unaligned(device, each, skipped) for each in (a, b, bias)]
        out = await unaligned(device, np.zeros((24, 32), element), skipped)
        await device.linalg.matmul(refs[0], refs[1], bias=refs[2], activation="relu", out=out)
        close(await device.get(out), expected, TOLERANCE[dtype], f"{skipped}, seed {seed}")


async def test_algorithms_are_tried_out_once(device: accel.Device) -> None:
    rng = np.random.default_rng()
    a, b = (random(rng, (512, 512), np.dtype(ml_dtypes.bfloat16)) for _ in range(2))
    ra, rb = await device.put(a), await device.put(b)
    for _ in range(3):
        result = await device.linalg.matmul(ra, rb, activation="relu", autotune=True)
        close(await device.get(result), np.maximum(wide(a) @ wide(b), 0), 1.6e-2, "tuned")


async def test_float8_with_scales_and_its_largest_value(device: accel.Device) -> None:
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((48, 128)).astype(E4M3), rng.standard_normal((64, 128)).astype(E4M3)
    product = a.astype(np.float64) @ b.astype(np.float64).T
    top = np.abs(product).max()
    ra, rb = await device.put(a), await device.put(b)
    half, many, amax = await device.full((), 0.5, "float32"), await device.full((), 1e4, "float32"), await device.full((), 1e9, "float32")
    for dtype in ("bfloat16", "float16", "float32"):
        got = (await device.get(await device.linalg.matmul(ra, rb, transpose_b=True, scale_a=half, out_dtype=dtype))).astype(np.float64)
        assert np.abs(got - product / 2).max() < 1e-2 * top, f"{dtype}, seed {seed}"
    y = await device.linalg.matmul(ra, rb, transpose_b=True, scale_b=half, scale_out=many, amax=amax, out_dtype=str(E4M3))
    assert abs(float(await device.get(amax)) - top / 2) < 1e-2 * top, f"seed {seed}"
    stored = (await device.get(y)).astype(np.float64)
    assert np.abs(stored).max() == 448, f"results saturate, seed {seed}"


async def test_what_the_library_has_no_kernel_for_is_refused_and_the_device_goes_on(device: accel.Device) -> None:
    a, b = await device.zeros((16, 32), str(E4M3)), await device.zeros((32, 16), str(E4M3))
    with pytest.raises(accel.UnsupportedError, match="cuBLASLt has no algorithm") as caught:
        await device.linalg.matmul(a, b)
    assert "transpose_b" in str(caught.value.remedy)
    assert not (await device.get(await device.linalg.matmul(a, await device.zeros((16, 32), str(E4M3)), transpose_b=True))).any()
    assert device.generation == 1
