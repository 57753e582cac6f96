"""Broadcasting, numbers and conversions on the GPU, at any alignment and along many axes; the samples of the family have the values of functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import accel
from tests.accel_cuda.compute_support import unaligned

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nothing_left")]

DTYPES = ("float32", "bfloat16", "int8", "float64", "complex128")


def random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    """Return small whole numbers, whose sums are exact in every dtype."""
    return rng.integers(-8, 8, shape).astype(accel.DType.of(dtype).numpy)


@pytest.mark.parametrize("dtype", DTYPES)
async def test_operands_of_random_shapes_are_broadcast(device: accel.Device, rng: np.random.Generator, dtype: str) -> None:
    for _ in range(25):
        shape = tuple(int(n) for n in rng.choice([1, 2, 3, 4, 8, 16, 33], int(rng.integers(1, 6))))
        operands = [tuple(1 if rng.random() < 0.4 else n for n in shape[int(rng.integers(len(shape))) :]) for _ in range(2)]
        x, y = (random(rng, each, dtype) for each in operands)
        skipped = [int(n) for n in rng.integers(0, 3, 2)]
        refs = await unaligned(device, x, skipped[0]), await unaligned(device, y, skipped[1])
        case = f"{operands} {skipped}"
        got = await device.get(await device.elementwise.binary("add", *refs))
        np.testing.assert_array_equal(got, x + y, err_msg=case)
        got = await device.get(await device.elementwise.binary("equal", *refs))
        np.testing.assert_array_equal(got, x == y, err_msg=case)
        condition = rng.random(operands[0]) < 0.5
        got = await device.get(await device.elementwise.where(await device.put(condition), *refs))
        np.testing.assert_array_equal(got, np.where(condition, x, y), err_msg=case)


@pytest.mark.parametrize("dtype", DTYPES)
async def test_numbers_and_results_over_operands(device: accel.Device, rng: np.random.Generator, dtype: str) -> None:
    for count in (1, 7, 1001, 70_000):
        x = random(rng, (count,), dtype)
        ref = await unaligned(device, x, 1)
        assert await device.elementwise.binary("sub", 3, ref, out=ref) is ref
        np.testing.assert_array_equal(await device.get(ref), (3 - x).astype(x.dtype))
        await device.elementwise.binary("add", ref, await device.put(x[:1]), out=ref)
        np.testing.assert_array_equal(await device.get(ref), ((3 - x).astype(x.dtype) + x[:1]).astype(x.dtype))


async def test_many_elements_and_many_axes(device: accel.Device, rng: np.random.Generator) -> None:
    x, row, column = random(rng, (4096, 4097), "float32"), random(rng, (4097,), "float32"), random(rng, (4096, 1), "float32")
    rx, rrow, rcolumn = [await device.put(each) for each in (x, row, column)]
    np.testing.assert_array_equal(await device.get(await device.elementwise.binary("mul", rx, rrow)), x * row)
    np.testing.assert_array_equal(await device.get(await device.elementwise.binary("mul", rcolumn, rrow)), column * row)
    left, right = random(rng, (2, 1) * 4, "int32"), random(rng, (1, 3) * 4, "int32")
    got = await device.elementwise.binary("sub", await device.put(left), await device.put(right))
    np.testing.assert_array_equal(await device.get(got), left - right)
    left, right = random(rng, (2, 1) * 5, "int32"), random(rng, (1, 2) * 5, "int32")
    with pytest.raises(accel.UnsupportedError, match="too many axes"):
        await device.elementwise.binary("sub", await device.put(left), await device.put(right))
