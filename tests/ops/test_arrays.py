"""Arrays put together, taken apart and made: what is refused, and how CUDA moves elements. Values are compared by the samples of the family."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import accel
from tests.device_support import failure

pytestmark = pytest.mark.usefixtures("nothing_left")


async def test_what_does_not_fit_is_refused(device: accel.Device) -> None:
    x, y, other = await device.zeros((2, 3)), await device.zeros((2, 4)), await device.zeros((2, 3), "float64")
    for wrong in (
        device.arrays.transpose(x, (0,)),
        device.arrays.transpose(x, (0, 0)),
        device.arrays.transpose(x, out=await device.zeros((2, 3))),
        device.arrays.flip(x, 2),
        device.arrays.part(x, (0, 3)),
        device.arrays.part(x, (0, 0, 0)),
        device.arrays.part(x, [0, 1]),  # type: ignore[arg-type]
        device.arrays.part(x, slice(None), out=await device.zeros(3)),
        device.arrays.flip(x, out=x),
        device.arrays.roll(x, (1, 2), 0),
        device.arrays.roll(x, 1.5),  # type: ignore[arg-type]
        device.arrays.broadcast_to(x, (3,)),
        device.arrays.broadcast_to(x, (2, 4)),
        device.arrays.tile(x, -1),
        device.arrays.repeat(x, -1),
        device.arrays.pad(x, -1),
        device.arrays.pad(x, ((1, 1),)),
        device.arrays.pad(x, 1, 1j),
        device.arrays.concatenate(()),
        device.arrays.concatenate((x, y)),
        device.arrays.concatenate((x, other)),
        device.arrays.concatenate((x, x), out=x[:1]),
        device.arrays.concatenate((x, x[0])),
        device.arrays.stack((x, y)),
        device.arrays.stack((x, x), 3),
        device.arrays.split(x, 2, 1),
        device.arrays.split(x, (2, 1), 1),
        device.arrays.split(x, (4,), 1),
        device.arrays.tril(x[0]),
        device.arrays.eye(-1),
        device.arrays.arange(0, 10, 0),
        device.arrays.arange(300, dtype="uint8"),
        device.arrays.linspace(0, 1, -1),
    ):
        await failure(wrong, accel.InvalidArgumentError)
    await failure(device.arrays.arange(0.5, 3, dtype="int32"), accel.UnsupportedError)
    await failure(device.arrays.linspace(0, 1, dtype="int32"), accel.UnsupportedError)
    assert "device.put" in str(await failure(device.arrays.stack((x, np.zeros((2, 3)))), accel.InvalidArgumentError))  # type: ignore[arg-type]


async def test_windows_overlap_and_those_that_do_not_fit_are_refused(device: accel.Device) -> None:
    signal = await device.put(np.arange(10))
    frames = await device.arrays.unfold(signal, 4, 3)
    np.testing.assert_array_equal(await device.get(frames), [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]])
    rows = await device.arrays.unfold(await device.zeros((5, 0, 2)), 2, axis=0)
    assert rows.shape == (4, 0, 2, 2)
    for size, step, axis in ((0, 1, 0), (2, 0, 0), (11, 1, 0), (2, 1, 1)):
        await failure(device.arrays.unfold(signal, size, step, axis), accel.InvalidArgumentError)


async def test_an_empty_axis_is_not_cut_into_sections_without_end(device: accel.Device) -> None:
    x = await device.zeros(0)
    assert len(await device.arrays.split(x, 1)) == 1
    with pytest.raises(accel.InvalidArgumentError):
        await device.arrays.split(x, 1 << 40)


@pytest.mark.parametrize("wrong", [10**400, math.inf, math.nan, 1j])
async def test_a_range_of_what_is_no_finite_number_is_refused(device: accel.Device, wrong: Any) -> None:
    for arguments in ((wrong,), (0, wrong), (0, 5, wrong)):
        with pytest.raises(accel.InvalidArgumentError):
            await device.arrays.arange(*arguments)
    if isinstance(wrong, (int, complex)):  # numpy takes infinities and NaN, too
        with pytest.raises(accel.InvalidArgumentError):
            await device.arrays.linspace(0.0, wrong, 3)  # type: ignore[arg-type]


async def test_the_dtype_of_a_range_is_that_of_its_numbers(device: accel.Device) -> None:
    for made, expected in (
        (device.arrays.arange(5), np.arange(5)),
        (device.arrays.arange(2, 3, 0.25), np.arange(2, 3, 0.25).astype(np.float32)),
        (device.arrays.arange(250, 256, dtype="uint8"), np.arange(250, 256, dtype=np.uint8)),
        (device.arrays.arange(2**63 - 3, 2**63), np.array([2**63 - 3, 2**63 - 2, 2**63 - 1])),
    ):
        got = await device.get(await made)
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)


async def test_elements_of_any_dtype_are_moved_bit_by_bit(device: accel.Device, rng: np.random.Generator) -> None:
    for dtype in accel.DType:
        x = rng.integers(0, 2, (3, 5 * dtype.itemsize), np.uint8)
        ref = (await device.put(x)).view("bool").view(dtype)
        (first, second) = await device.arrays.split(await device.arrays.flip(ref, 0), (1,))
        np.testing.assert_array_equal((await device.get(first)).view(np.uint8), x[2:])
        np.testing.assert_array_equal((await device.get(second)).view(np.uint8), x[1::-1])


async def test_what_does_not_fit_indices_is_refused(device: accel.Device) -> None:
    x, indices, values = await device.zeros((4, 5)), await device.zeros((4, 2), "int32"), await device.zeros((4, 2))
    rows = await device.zeros(3, "int64")
    for wrong in (
        device.arrays.take(x, x),
        device.arrays.take(x, indices, axis=2),
        device.arrays.take(x, rows, mode="drop"),  # type: ignore[arg-type]
        device.arrays.take(x, rows, out=await device.zeros((3, 5))),
        device.arrays.take(await device.zeros((0, 5)), rows, axis=0, mode="clip"),
        device.arrays.take_along_axis(x, indices, axis=0),
        device.arrays.take_along_axis(x, rows),
        device.arrays.put_along_axis(x, indices, values, axis=0),
        device.arrays.put_along_axis(x, indices, await device.zeros((4, 3))),
        device.arrays.put_along_axis(x, indices, await device.zeros((4, 2), "float64")),
        device.arrays.put_along_axis(x, indices, 1j),
        device.arrays.put_along_axis(x, rows, await device.zeros((3, 4)), axis=0),
        device.arrays.scatter_add(x, rows, x[:3], axis=0),
        device.arrays.scatter_add(await device.zeros(()), rows, 1),
    ):
        await failure(wrong, accel.InvalidArgumentError)
    await failure(device.arrays.scatter_add(await device.zeros(4, "int8"), rows, 1), accel.UnsupportedError)


@pytest.mark.parametrize("bad", [5, -6, 2**31 - 1])
async def test_an_index_out_of_range_fails_its_op_alone(device: accel.Device, bad: int) -> None:
    x, indices = await device.put(np.arange(5.0)), await device.put(np.array([1, bad, 0], np.int32))
    for failing in (device.arrays.take(x, indices), device.arrays.take_along_axis(x, indices)):
        assert f"index {bad} " in str(await failure(failing, accel.InvalidArgumentError))
    np.testing.assert_array_equal(await device.get(await device.arrays.take(x, indices, mode="wrap")), [1, bad % 5, 0])
    target = await device.zeros(5)
    for failing in (device.arrays.put_along_axis(target, indices, 1), device.arrays.scatter_add(target, indices, 1)):
        await failure(failing, accel.InvalidArgumentError)
    np.testing.assert_array_equal(await device.get(x), np.arange(5.0))
    async with device.graph() as graph:
        made = graph.arrays.take(x, indices)
    with pytest.raises(accel.InvalidArgumentError):
        await graph.replay()
    await device.put(np.array([1, -1, 0], np.int32), out=indices)
    await graph.replay()
    np.testing.assert_array_equal(await device.get(made), [1, 4, 0])
    await graph.aclose()


async def test_values_at_equal_indices_are_all_added(device: accel.Device) -> None:
    x, rows = await device.zeros((3, 2), "int64"), await device.put(np.array([2, 0, 2, -1]))
    assert await device.arrays.scatter_add(x, rows, await device.put(np.arange(8).reshape(4, 2))) is x
    np.testing.assert_array_equal(await device.get(x), [[2, 3], [0, 0], [10, 13]])
    await device.arrays.scatter_add(x, rows, 10)
    np.testing.assert_array_equal(await device.get(x), [[12, 13], [0, 0], [40, 43]])


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "symmetric", "wrap"])
async def test_there_is_nothing_to_pad_of_one_number(device: accel.Device, mode: Any) -> None:
    x = await device.put(np.float32(2.5))
    for width in (3, ()):
        found = await device.get(await device.arrays.pad(x, width, mode=mode))
        assert (found.shape, float(found)) == ((), 2.5)
    async with device.graph() as graph:
        made = graph.arrays.pad(x, 1, mode=mode)
    await graph.replay()
    assert float(await device.get(made)) == 2.5
    await graph.aclose()


async def test_pad_modes_that_do_not_fit_are_refused(device: accel.Device) -> None:
    x, empty = await device.zeros((2, 3)), await device.zeros((2, 0))
    for call in (
        device.arrays.pad(x, 1, mode="mean"),  # type: ignore[arg-type]
        device.arrays.pad(x, 1, 2, mode="edge"),
        device.arrays.pad(empty, 1, mode="wrap"),
        device.arrays.pad(x, -1, mode="edge"),
    ):
        assert (await failure(call, accel.InvalidArgumentError)).remedy
    array: Any = np.ones(2)  # which `in` compares element by element
    await failure(device.arrays.pad(await device.zeros(()), 1, mode=array), accel.InvalidArgumentError)
    assert (await device.arrays.pad(empty, ((1, 1), (0, 0)), mode="reflect")).shape == (4, 0)
