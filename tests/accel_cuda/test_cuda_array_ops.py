"""Elements that are moved on the GPU, from and to any alignment; the samples of the family have the values of all ops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import accel
from tests.accel_cuda.compute_support import unaligned

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nothing_left")]


def random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    return rng.integers(0, 100, shape).astype(accel.DType.of(dtype).numpy)


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "float64", "complex128"])
async def test_random_shapes_at_any_alignment(device: accel.Device, rng: np.random.Generator, dtype: str) -> None:
    for _ in range(15):
        shape = tuple(int(n) for n in rng.choice([1, 2, 3, 4, 8, 33], int(rng.integers(1, 5))))
        x, skipped = random(rng, shape, dtype), int(rng.integers(0, 4))
        ref, order, axis = (
            await unaligned(device, x, skipped),
            tuple(int(n) for n in rng.permutation(len(shape))),
            int(rng.integers(len(shape))),
        )
        case = f"{shape} {skipped} {order} {axis}"
        for got, expected in (
            (device.arrays.transpose(ref, order), x.transpose(order)),
            (device.arrays.flip(ref, axis), np.flip(x, axis)),
            (device.arrays.roll(ref, 3, axis), np.roll(x, 3, axis)),
            (device.arrays.tile(ref, (2,) * len(shape)), np.tile(x, (2,) * len(shape))),
            (device.arrays.repeat(ref, 3, axis), np.repeat(x, 3, axis)),
            (device.arrays.pad(ref, 2, 7), np.pad(x, 2, constant_values=7)),
            (device.arrays.concatenate([ref, ref], axis), np.concatenate([x, x], axis)),
            (device.arrays.stack([ref, ref], axis), np.stack([x, x], axis)),
        ):
            np.testing.assert_array_equal(await device.get(await got), expected, err_msg=case)
        parts = await device.arrays.split(ref, (shape[axis] // 2,), axis)
        for part, expected in zip(parts, np.split(x, (shape[axis] // 2,), axis), strict=True):
            np.testing.assert_array_equal(await device.get(part), expected, err_msg=case)


@pytest.mark.parametrize("kind", ["int32", "int64"])
async def test_many_elements_at_indices(device: accel.Device, rng: np.random.Generator, kind: str) -> None:
    table, indices = random(rng, (5003, 257), "float32"), rng.integers(-5003, 5003, 20_011).astype(kind)
    rtable, rindices = await device.put(table), await device.put(indices)
    np.testing.assert_array_equal(await device.get(await device.arrays.take(rtable, rindices, axis=0)), table[indices])
    counts = await device.zeros(5003, "int32")
    await device.arrays.scatter_add(counts, rindices, 1)
    np.testing.assert_array_equal(await device.get(counts), np.bincount(indices % 5003, minlength=5003))
    added, sums = random(rng, (20_011, 257), "float32"), await device.zeros((5003, 257))
    await device.arrays.scatter_add(sums, rindices, await device.put(added))
    expected = np.zeros((5003, 257), np.float32)
    np.add.at(expected, indices, added)
    np.testing.assert_array_equal(await device.get(sums), expected)
    places = np.argsort(rng.random(table.shape), axis=1)[:, :100].astype(kind)
    rplaces = await device.put(places)
    np.testing.assert_array_equal(
        await device.get(await device.arrays.take_along_axis(rtable, rplaces)), np.take_along_axis(table, places.astype(np.int64), 1)
    )
    await device.arrays.put_along_axis(rtable, rplaces, -1)
    np.put_along_axis(table, places.astype(np.int64), -1, 1)
    np.testing.assert_array_equal(await device.get(rtable), table)


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "complex128"])
async def test_pads_of_elements(device: accel.Device, rng: np.random.Generator, dtype: str) -> None:
    modes: tuple[Any, ...] = ("edge", "reflect", "symmetric", "wrap")
    for _ in range(8):
        shape = tuple(int(n) for n in rng.choice([1, 2, 3, 7, 40], int(rng.integers(1, 5))))
        widths = tuple((int(rng.integers(0, 9)), int(rng.integers(0, 9))) for _ in shape)
        x = random(rng, shape, dtype)
        ref = await unaligned(device, x, int(rng.integers(0, 4)))
        for mode in modes:
            got = await device.get(await device.arrays.pad(ref, widths, mode=mode))
            np.testing.assert_array_equal(got, np.pad(x, widths, mode), err_msg=f"{shape} {widths} {mode}")
            got = await device.get(await device.arrays.pad(ref.T[::-1], widths[::-1], mode=mode))
            np.testing.assert_array_equal(got, np.pad(x.T[::-1], widths[::-1], mode), err_msg=f"{shape} {widths} {mode} strided")


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "complex128"])
async def test_rows_at_indices_of_any_length_and_alignment(device: accel.Device, rng: np.random.Generator, dtype: str) -> None:
    for length in (1, 2, 3, 8, 24, 1000, 1024):
        x, skipped = random(rng, (30, length), dtype), int(rng.integers(0, 3))
        ref = await unaligned(device, x, skipped)
        indices = rng.integers(-30, 30, 50)
        rows = await device.put(indices)
        np.testing.assert_array_equal(await device.get(await device.arrays.take(ref, rows, 0)), x[indices], err_msg=f"{length} {skipped}")
        places = rng.permutation(30)[:9]
        values = random(rng, (9, length), dtype)
        await device.arrays.put_along_axis(ref, await device.put(places), await device.put(values), 0)
        x[places] = values
        np.testing.assert_array_equal(await device.get(ref), x, err_msg=f"{length} {skipped}")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
async def test_sums_of_16_bit_floats_at_indices(device: accel.Device, rng: np.random.Generator, dtype: str) -> None:
    sums = np.zeros((37, 3))
    indices, values = rng.integers(0, 37, 1000), random(rng, (1000, 3), "int32") % 5
    np.add.at(sums, indices, values)  # below 256, so that no sum is rounded
    ref = await device.zeros((37, 3), dtype)
    added = values.astype(accel.DType.of(dtype).numpy)
    await device.arrays.scatter_add(ref, await device.put(indices), await device.put(added), axis=0)
    assert sums.max() < 256
    np.testing.assert_array_equal((await device.get(ref)).astype(np.float64), sums)
