"""Softmax, norms and pooling on the GPU: rows of any length at any alignment, in place, and large images; the samples of the family have small ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import accel
from tests.accel_cuda.compute_support import close, unaligned, wide

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nothing_left")]

ERRORS = {"float16": 2e-3, "bfloat16": 1e-2, "float32": 1e-5, "float64": 1e-12}
# Rows that lanes, warps and blocks hold, aligned and not, and rows that are read twice.
LENGTHS = (1, 5, 64, 127, 1000, 1024, 1025, 4096, 8191, 16_384, 16_392, 50_257, 131_072)

Array = np.ndarray[Any, Any]


def random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, mean: float = 0.0) -> Array:
    return np.asarray(2 * rng.standard_normal(shape) + mean, accel.DType.of(dtype).numpy)


def softmax(x: Array, axis: int) -> Array:
    powers = np.exp(x - x.max(axis, keepdims=True))
    result: Array = powers / powers.sum(axis, keepdims=True)
    return result


def normalized(x: Array, eps: float) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    result: Array = centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + eps)
    return result


@pytest.mark.parametrize("dtype", ERRORS)
async def test_rows_of_any_length_and_alignment(device: accel.Device, rng: np.random.Generator, dtype: str) -> None:
    error = ERRORS[dtype]
    for length in LENGTHS:
        for skipped in (0, 1):
            x, weight, bias = random(rng, (5, length), dtype, 3.0), random(rng, (length,), dtype), random(rng, (length,), dtype)
            ref, case = await unaligned(device, x, skipped), f"{length} {skipped}"
            w, b = await device.put(weight), await device.put(bias)
            close(await device.get(await device.dnn.softmax(ref)), softmax(wide(x), -1), error, case)
            close(await device.get(await device.dnn.log_softmax(ref)), np.log(softmax(wide(x), -1)), error, case)
            root = np.sqrt((wide(x) ** 2).mean(-1, keepdims=True) + 1e-6)
            close(await device.get(await device.dnn.rms_norm(ref, length, w)), wide(x) / root * wide(weight), error, case)
            expected = normalized(wide(x), 1e-5) * wide(weight) + wide(bias)
            close(await device.get(await device.dnn.layer_norm(ref, length, w, b)), expected, error, case)
            assert await device.dnn.layer_norm(ref, length, w, b, out=ref) is ref
            close(await device.get(ref), expected, error, f"{case} in place")


@pytest.mark.parametrize("dtype", ERRORS)
async def test_softmax_along_any_axis(device: accel.Device, rng: np.random.Generator, dtype: str) -> None:
    for shape, axis in (((3, 1000, 5), 1), ((3000, 64), 0), ((2, 21, 70, 33), 1), ((2, 9, 4096), 1), ((1, 20_000, 1), 1), ((100, 1, 7), 0)):
        x = random(rng, shape, dtype)
        for skipped in (0, 1):
            ref = await unaligned(device, x, skipped)
            close(await device.get(await device.dnn.softmax(ref, axis)), softmax(wide(x), axis), ERRORS[dtype], f"{shape} {axis}")
        await device.dnn.log_softmax(ref, axis, out=ref)
        close(await device.get(ref), np.log(softmax(wide(x), axis)), ERRORS[dtype], f"{shape} {axis} in place")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
async def test_rows_that_have_no_softmax(device: accel.Device, value: float) -> None:
    for shape, axis in (((3, 40), 1), ((3, 3001), 1), ((3, 40_000), 1), ((3, 50, 8), 1)):
        x = np.zeros(shape, np.float32)
        x[1] = value if value == -np.inf else 0
        x[1].flat[17] = value
        with np.errstate(all="ignore"):
            expected = softmax(x.astype(np.float64), axis)
        got = await device.get(await device.dnn.softmax(await device.put(x), axis))
        np.testing.assert_allclose(got, expected, rtol=1e-5, err_msg=f"{shape}")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
async def test_groups_and_channels(device: accel.Device, rng: np.random.Generator, dtype: str) -> None:
    for shape, groups in (((2, 64, 32, 32), 32), ((3, 6, 7, 9), 2), ((1, 320, 64, 64), 32), ((2, 12, 5), 12), ((4, 10), 5)):
        x, weight, bias = random(rng, shape, dtype, 1.0), random(rng, shape[1:2], dtype), random(rng, shape[1:2], dtype)
        ref, w, b = await device.put(x), await device.put(weight), await device.put(bias)
        fit = (shape[1], *(1,) * (len(shape) - 2))
        expected = normalized(wide(x).reshape(shape[0], groups, -1), 1e-5).reshape(shape) * wide(weight).reshape(fit) + wide(bias).reshape(
            fit
        )
        close(await device.get(await device.dnn.group_norm(ref, groups, w, b)), expected, ERRORS[dtype], f"{shape}")
        var = np.asarray(rng.uniform(0.5, 2, shape[1]), x.dtype)
        scaled = (wide(x) - wide(bias).reshape(fit)) / np.sqrt(wide(var).reshape(fit) + 1e-5) * wide(weight).reshape(fit)
        for skipped in (0, 1):
            x_ref = await unaligned(device, x, skipped)
            got = await device.dnn.batch_norm(x_ref, b, await device.put(var), w)
            close(await device.get(got), scaled, ERRORS[dtype], f"{shape} {skipped}")


async def test_pooling_has_the_results_of_the_cpu(device: accel.Device, rng: np.random.Generator) -> None:
    async with accel.System() as system:
        cpu = await system.open_device("cpu")
        for shape, window, stride, padding in (
            ((4, 32, 56, 56), 3, 2, 1),
            ((2, 8, 33, 20), (2, 3), (1, 2), ((1, 0), (0, 2))),
            ((2, 64, 1001), 5, 3, 2),
            ((1, 16, 9, 20, 17), (3, 2, 2), 2, (1, 0, 1)),
            ((3, 24, 7, 7), 7, None, 0),
        ):
            for channels_last in (False, True):
                for dtype in ("float32", "bfloat16"):
                    x = random(rng, (shape[0], *shape[2:], shape[1]) if channels_last else shape, dtype)
                    ref, other, case = await device.put(x), await cpu.put(x), f"{shape} {window} {channels_last} {dtype}"
                    made = await device.dnn.max_pool(ref, window, stride, padding, channels_last=channels_last)
                    expected = await cpu.dnn.max_pool(other, window, stride, padding, channels_last=channels_last)
                    np.testing.assert_array_equal(await device.get(made), await cpu.get(expected), err_msg=case)
                    for counts in (True, False):
                        made = await device.dnn.avg_pool(
                            ref, window, stride, padding, channels_last=channels_last, count_include_pad=counts
                        )
                        expected = await cpu.dnn.avg_pool(
                            other, window, stride, padding, channels_last=channels_last, count_include_pad=counts
                        )
                        close(await device.get(made), wide(await cpu.get(expected)), ERRORS[dtype], case)
