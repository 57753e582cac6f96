"""Sorting and scans: what is refused, and ops that find out how many elements their results have. Values are compared by the samples of the families."""

from __future__ import annotations

import numpy as np
import pytest

import accel
from accel import ops
from tests.device_support import failure

pytestmark = pytest.mark.usefixtures("nothing_left")


async def test_what_does_not_fit_is_refused(device: accel.Device) -> None:
    x, mask = await device.zeros((2, 3)), await device.zeros((2,), "bool")
    row, numbers = await device.zeros((3,)), await device.zeros((3,), "int32")
    for wrong in (
        device.sort.sort(x, 2),
        device.sort.sort(x, out=await device.zeros((3, 2))),
        device.sort.sort(x[0], out=x.ravel()[1:4]),
        device.sort.sort(x, descending=3),  # type: ignore[arg-type]
        device.sort.argsort(x, out=await device.zeros((2, 3))),
        device.sort.topk(x, 4),
        device.sort.topk(x, -1),
        device.sort.topk(x, 1, largest="yes"),  # type: ignore[arg-type]
        device.sort.partition(x, 3),
        device.sort.searchsorted(x, x),
        device.sort.searchsorted(row, numbers),
        device.sort.searchsorted(row, x, "middle"),  # type: ignore[arg-type]
        device.sort.nonzero(await device.zeros(())),
        device.sort.nonzero(x, size=-1),
        device.sort.nonzero(x, size=True),
        device.sort.nonzero(x, size=1.5),  # type: ignore[arg-type]
        device.sort.compress(x, x),
        device.sort.compress(mask, x[0]),
        device.sort.bincount(x, 3),
        device.sort.bincount(numbers, -1),
        device.sort.bincount(numbers, 3, x),
        device.sort.histogram(x, 0, (0, 1)),
        device.sort.histogram(x, 3, (1, 1)),
        device.sort.histogram(x, 3, (0, float("inf"))),
        device.sort.histogram(x, 3, (0, 1j)),  # type: ignore[arg-type]
        device.sort.histogram(x, 3, (0,)),  # type: ignore[arg-type]
        device.scan.cumsum(x, -3),
        device.scan.cumsum(x, exclusive=2),  # type: ignore[arg-type]
        device.scan.cumsum(x[0], out=x.ravel()[1:4]),
        device.scan.cummax(await device.zeros(())),
    ):
        await failure(wrong, accel.InvalidArgumentError)
    z = await device.zeros((3,), "complex64")
    for refused in (device.sort.sort(z), device.sort.unique(z), device.scan.cumprod(z), device.scan.cumsum(mask)):
        await failure(refused, accel.UnsupportedError)


async def test_offsets_that_cut_no_segments_are_the_ops_error(device: accel.Device) -> None:
    x = await device.put(np.arange(6.0))
    for wrong, where in (([0, 4, 2, 6], 1), ([0, 7], 0), ([-1, 6], 0)):
        offsets = await device.put(np.array(wrong))
        error = await failure(device.scan.segment_reduce("sum", x, offsets), accel.InvalidArgumentError)
        assert f"segment {where} is no part" in str(error)
    for wrong in ([0, 4, 2, 6], [0, 5], [1, 6], [0, 7]):
        error = await failure(device.sort.segment_sort(x, await device.put(np.array(wrong))), accel.InvalidArgumentError)
        assert "is no end of a segment" in str(error)
    offsets, short = await device.put(np.array([0, 6])), await device.put(np.array([0, 6], np.int32))
    for refused in (
        device.scan.segment_reduce("sum", x, short),
        device.scan.segment_reduce("sum", x, offsets.reshape(1, 2)),
        device.scan.segment_reduce("nosuch", x, offsets),  # type: ignore[arg-type]
        device.sort.segment_sort(x, short),
        device.sort.segment_sort(x.reshape(2, 3), offsets),
        device.sort.segment_sort(x, offsets, descending=1),  # type: ignore[arg-type]
    ):
        await failure(refused, accel.InvalidArgumentError)
    await failure(device.scan.segment_reduce("mean", x, offsets), accel.UnsupportedError)


async def test_a_result_has_as_many_elements_as_are_found(device: accel.Device) -> None:
    values = np.array([0, 7, 0, 9, 9], np.int32)
    x = await device.put(values)
    (places,) = await device.sort.nonzero(x)
    assert isinstance(places, accel.AccelRef)
    assert (await device.get(places)).tolist() == [1, 3, 4]
    assert (await device.get(await device.sort.unique(x, size=3))).tolist() == [0, 7, 9]
    found, first, inverse, counts = await device.sort.unique_all(x)
    assert [(await device.get(each)).tolist() for each in (found, first, inverse, counts)] == [
        [0, 7, 9],
        [0, 1, 3],
        [0, 1, 0, 2, 2],
        [2, 1, 2],
    ]
    doubled = await device.elementwise.binary("add", places, places)  # a view is an operand like any other
    assert (await device.get(doubled)).tolist() == [2, 6, 8]


async def test_a_size_that_is_too_small_is_an_error_that_names_the_number(device: accel.Device) -> None:
    x = await device.put(np.arange(5))
    error = await failure(device.sort.unique(x, size=4), accel.InvalidArgumentError)
    assert "5 elements" in str(error)
    assert "size is 4" in str(error)


async def test_a_batch_gets_what_there_is_room_for_and_the_number(device: accel.Device) -> None:
    x = await device.put(np.array([3, 1, 3, 2]))
    async with device.batch() as batch:
        with pytest.raises(accel.InvalidArgumentError, match="size="):
            batch.sort.unique(x)
        few, number = batch.sort.unique(x, size=2)
        many, _ = batch.sort.unique(x, size=6)
        indices, also = batch.sort.nonzero(x, size=0)
    assert (await device.get(few)).tolist() == [1, 2]
    assert (await device.get(many)).tolist() == [1, 2, 3, 0, 0, 0]
    assert int(await device.get(number)) == 3
    assert indices.shape == (0,)
    assert int(await device.get(also)) == 4
    values, count = await device.run(ops.Unique(x, size=1))
    assert ((await device.get(values)).tolist(), int(await device.get(count))) == ([1], 3)


@pytest.mark.parametrize("limits", [(1.0, float(np.nextafter(1.0, 2))), (0.0, 5e-324), (1e300, float(np.nextafter(1e300, np.inf)))])
async def test_a_range_without_room_for_its_bins_is_refused(device: accel.Device, limits: tuple[float, float]) -> None:
    x = await device.put(np.full(3, limits[0]))
    with pytest.raises(accel.InvalidArgumentError, match="has no 10 parts"):
        await device.sort.histogram(x, 10, limits)
    with pytest.raises(ValueError, match="Too many bins"):
        np.histogram(np.full(3, limits[0]), 10, limits)
    assert (await device.get(await device.sort.histogram(x, 1, limits))).tolist() == [3]
    for bins in (2**40, 2**62):  # no array of as many edges is made
        with pytest.raises(accel.InvalidArgumentError, match=f"has no {bins} parts"):
            await device.sort.histogram(x, bins, limits)


async def test_the_timeout_covers_the_number_too(device: accel.Device) -> None:
    x = await device.put(np.arange(5))
    await failure(device.sort.unique(x, timeout=0.0), accel.DeadlineExceededError)
    assert (await device.get(await device.sort.unique(x, timeout=5.0))).size == 5


async def test_a_number_that_is_counted_out_of_range_is_the_ops_error(device: accel.Device) -> None:
    for wrong in (-1, 4):
        x = await device.put(np.array([0, wrong, 3]))
        error = await failure(device.sort.bincount(x, 4), accel.InvalidArgumentError)
        assert f"{wrong} is out of range" in str(error)
