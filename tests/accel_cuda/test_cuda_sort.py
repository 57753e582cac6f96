"""Sorting and scans on the GPU: long arrays, many lines, graphs, and what is there at the first use; the samples of the families have all dtypes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import accel
from tests.accel_cuda.compute_support import longest_gap, unaligned

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nothing_left")]

LIBRARIES = ("sort",)  # its algorithms are built side by side


async def test_long_arrays_are_sorted(device: accel.Device, rng: np.random.Generator) -> None:
    for dtype, size in (("float32", 3_000_017), ("float64", 1_000_003), ("int16", 2_000_003), ("uint64", 1_500_001), ("bfloat16", 700_001)):
        kind = accel.DType.of(dtype).numpy
        x = (rng.standard_normal(size) * 1000).astype(kind) if kind.kind not in "iu" else rng.integers(0, 30_000, size).astype(kind)
        ref = await device.put(x)
        wide = x.astype(np.float64) if kind.kind not in "iu" else x
        order = np.argsort(wide, kind="stable")
        np.testing.assert_array_equal(await device.get(await device.sort.sort(ref)), x[order], err_msg=dtype)
        np.testing.assert_array_equal(await device.get(await device.sort.argsort(ref)), order, err_msg=dtype)
        got = await device.get(await device.sort.sort(ref, descending=True, out=ref))
        np.testing.assert_array_equal(got, x[order][::-1], err_msg=dtype)


async def test_many_lines_are_sorted_at_once(device: accel.Device, rng: np.random.Generator) -> None:
    for dtype in ("float32", "float64", "int8"):
        x = (rng.standard_normal((700, 301, 3)) * 50).astype(dtype)
        ref = await device.put(x)
        order = np.argsort(x, 1, kind="stable")
        np.testing.assert_array_equal(await device.get(await device.sort.argsort(ref, 1)), order, err_msg=dtype)
        values, indices = await device.sort.topk(ref, 10, 1, largest=False)
        np.testing.assert_array_equal(await device.get(indices), order[:, :10], err_msg=dtype)
        np.testing.assert_array_equal(await device.get(values), np.take_along_axis(x, order[:, :10], 1), err_msg=dtype)
        parted = await device.get(await device.sort.partition(ref, 100, 1))
        np.testing.assert_array_equal(parted[:, 100], np.sort(x, 1)[:, 100], err_msg=dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bool", "int64"])
async def test_the_first_elements_of_lines_are_selected_or_sorted(device: accel.Device, rng: np.random.Generator, dtype: str) -> None:
    for shape, k in (((3, 1_000_003), 7), ((200, 4097), 10), ((40, 70_001), 1024), ((9, 2000), 2000), ((5000, 20), 3)):
        x = np.round(rng.standard_normal(shape) * 100).astype(dtype)
        if dtype.startswith("float"):
            x.flat[::1001] = np.nan
        ref = await device.put(x)
        for largest in (True, False):
            wide = np.where(np.isnan(x), np.inf, x).astype(np.float64) if dtype.startswith("float") else x.astype(np.float64)
            order = np.argsort(-wide if largest else wide, 1, kind="stable")[:, :k]
            values, indices = await device.sort.topk(ref, k, largest=largest)
            np.testing.assert_array_equal(await device.get(indices), order, err_msg=f"{shape} {k} {largest}")
            np.testing.assert_array_equal(await device.get(values), np.take_along_axis(x, order, 1))


async def test_what_is_found_in_long_arrays(device: accel.Device, rng: np.random.Generator) -> None:
    x = rng.integers(-1000, 1000, (1003, 1001)).astype(np.int32)
    ref = await device.put(x)
    made = await device.sort.unique_all(ref)
    for got, expected in zip(made, np.unique(x, True, True, True), strict=True):
        np.testing.assert_array_equal(await device.get(got), expected)
    mask = await device.elementwise.binary("greater", ref, 900)
    np.testing.assert_array_equal(await device.get(await device.sort.compress(mask, ref)), x[x > 900])
    for got, expected in zip(await device.sort.nonzero(mask), np.nonzero(x > 900), strict=True):
        np.testing.assert_array_equal(await device.get(got), expected)
    np.testing.assert_array_equal(
        await device.get(await device.sort.histogram(ref, 77, (-500, 501.5))), np.histogram(x, 77, (-500, 501.5))[0]
    )
    shifted = await device.put(x + 1000)
    np.testing.assert_array_equal(
        await device.get(await device.sort.bincount(shifted, 2000)), np.bincount((x + 1000).ravel(), minlength=2000)
    )
    error = None
    try:
        await device.sort.bincount(ref, 2000)
    except accel.InvalidArgumentError as raised:
        error = raised
    assert error is not None
    assert "out of range" in str(error)


@pytest.mark.parametrize("shape", [(3_000_017,), (5, 400_003), (400_003, 5), (70, 3001), (2, 33, 1025)])
async def test_scans_of_any_lines(device: accel.Device, rng: np.random.Generator, shape: tuple[int, ...]) -> None:
    x = rng.integers(-3, 4, shape).astype(np.int32)
    noise = rng.standard_normal(shape)
    for axis in range(len(shape)):
        ref, floats = await device.put(x), await device.put(noise)
        np.testing.assert_array_equal(await device.get(await device.scan.cumsum(ref, axis)), np.cumsum(x, axis, dtype=np.int32))
        np.testing.assert_array_equal(await device.get(await device.scan.cummin(floats, axis)), np.minimum.accumulate(noise, axis))
        got = await device.get(await device.scan.cumsum(floats, axis))
        np.testing.assert_allclose(got, np.cumsum(noise, axis), rtol=1e-9, atol=1e-8)
        got = await device.get(await device.scan.cumsum(ref, axis, exclusive=True, out=ref))
        np.testing.assert_array_equal(got, np.cumsum(x, axis, dtype=np.int32) - x)


async def test_segments_of_any_length(device: accel.Device, rng: np.random.Generator) -> None:
    ends = np.sort(rng.integers(0, 1_000_003, 5000))
    offsets = np.concatenate([[0], ends, ends[-1:], [1_000_003]])
    refs = await device.put(offsets)
    for dtype in ("int32", "float64"):
        x = rng.integers(-1000, 1000, 1_000_003).astype(dtype)
        ref = await device.put(x)
        parts = np.split(x, offsets[1:-1])
        got = await device.get(await device.scan.segment_reduce("sum", ref, refs))
        np.testing.assert_array_equal(got, [part.sum() for part in parts])
        got = await device.get(await device.sort.segment_sort(ref, refs, descending=True))
        np.testing.assert_array_equal(got, np.concatenate([np.sort(part)[::-1] for part in parts]))
        wrong = await device.put(np.array([0, 5, 3, 1_000_003]))
        for call in (device.scan.segment_reduce("max", ref, wrong), device.sort.segment_sort(ref, wrong)):
            with pytest.raises(accel.InvalidArgumentError):
                await call


@pytest.mark.parametrize("dtype", ["bool", "float16", "int32", "uint64"])
async def test_segments_of_arrays_of_any_length(device: accel.Device, rng: np.random.Generator, dtype: str) -> None:
    for size, count in ((1, 3), (500, 9), (1001, 200), (5003, 2), (300_001, 70_000)):
        x = rng.integers(-50, 50, size).astype(dtype)
        offsets = np.sort(rng.integers(0, size + 1, count + 1))
        offsets[0], offsets[-1] = 0, size
        number = np.repeat(np.arange(count), np.diff(offsets))
        expected = x[np.lexsort((x, number))]
        refs = [await device.put(each) for each in (x, offsets)]
        for _ in range(2):
            np.testing.assert_array_equal(await device.get(await device.sort.segment_sort(*refs)), expected, err_msg=f"{size} {count}")
        async with device.graph() as graph:
            made = graph.sort.segment_sort(*refs, out=refs[0])
        await graph.replay()
        np.testing.assert_array_equal(await device.get(made), expected, err_msg=f"{size} {count} replayed")
        await graph.aclose()


async def test_float16_is_summed_in_float32(device: accel.Device) -> None:
    for size in (5000, (1 << 20) + 5):
        x = await device.put(np.full(size, 2.0**-10, np.float16))
        got = await device.get(await device.scan.cumsum(x))
        np.testing.assert_array_equal(got, (np.arange(1, size + 1) * 2.0**-10).astype(np.float16))


async def test_replays_sort_what_is_there_then(device: accel.Device, rng: np.random.Generator) -> None:
    ref = await device.put(np.zeros((50, 1000), np.float32))
    line = ref.ravel()
    async with device.graph() as graph:
        values, indices = graph.sort.topk(ref, 5)
        found, count = graph.sort.unique(line, size=60_000)
        sums = graph.scan.cumsum(line)
    for _ in range(2):
        x = np.round(rng.standard_normal((50, 1000)), 2).astype(np.float32)
        await device.put(x, out=ref)
        await graph.replay()
        order = np.argsort(-x, 1, kind="stable")[:, :5]
        np.testing.assert_array_equal(await device.get(indices), order)
        np.testing.assert_array_equal(await device.get(values), np.take_along_axis(x, order, 1))
        expected = np.unique(x)
        assert int(await device.get(count)) == expected.size
        np.testing.assert_array_equal((await device.get(found))[: expected.size], expected)
        np.testing.assert_allclose(await device.get(sums), np.cumsum(x.ravel(), dtype=np.float64), rtol=1e-3, atol=1e-2)
    await graph.aclose()


async def test_operands_begin_anywhere(device: accel.Device, rng: np.random.Generator) -> None:
    for dtype in ("uint8", "float16", "float64"):
        x = rng.integers(0, 10, 5003).astype(dtype)
        ref = await unaligned(device, x, 1)
        np.testing.assert_array_equal(await device.get(await device.sort.sort(ref)), np.sort(x))
        np.testing.assert_array_equal(await device.get(await device.sort.unique(ref)), np.unique(x))
        wide: Any = np.cumsum(x.astype(np.float32) if dtype == "float16" else x, dtype=np.float32 if dtype == "float16" else dtype)
        np.testing.assert_array_equal(await device.get(await device.scan.cumsum(ref)), wide.astype(dtype))


async def test_the_loop_goes_on_while_an_algorithm_is_built(device: accel.Device, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing is kept there
    x = await device.put(np.ones((1 << 20) + 1, np.float64))
    got, longest = await longest_gap(device.scan.cumprod(x))
    assert (await device.get(got)).max() == 1
    assert longest < 0.1, "the import, which holds the GIL, was over when the device was open"
