"""How reductions are cut, and what they give for any shape, axis and alignment."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import numpy as np
import pytest

import accel
from accel import DType, ReduceOp
from accel_cuda.families.kernels import CODES
from accel_cuda.families.reduce import BASIC, launches
from tests.accel_cuda.compute_support import bench, random, wide

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accel_cuda.families.reduce import ReductionLaunch
    from tests.accel_cuda.compute_support import Bench

_TILE, _SPAN = 24576, 2048


def test_plans_cover_every_element_and_result() -> None:
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    seen = set()
    for _ in range(6000):
        outer, length, inner = (int(2 ** rng.uniform(0, 22)) for _ in range(3))
        inner = 1 if rng.integers(3) == 0 else inner
        itemsize = int(rng.choice([1, 2, 4, 8, 16]))
        case = f"{(outer, length, inner, itemsize)} (seed {seed})"
        plan = launches(outer, length, inner, itemsize, 132)
        first, last = plan[0], plan[-1]
        seen.add(first.kind)
        assert len(plan) == 1 + first.is_partial, case
        assert first.block == (256, 1), case
        _check_first(first, outer, length, inner, itemsize, case)
        chunks = first.grid[1]
        if first.is_partial:
            assert chunks * outer * inner * 16 <= 32 << 20, case
            assert last.kind == "finish", case
            assert last.sizes == (chunks, outer * inner), case
            assert last.grid[0] * last.block[0] >= outer * inner, case
            assert last.block[0] * last.block[1] == 256, case
        assert chunks <= 65535, case
    assert seen == {"brief", "group", "rows", "slices", "spans"}, seed


def _check_first(first: ReductionLaunch, outer: int, length: int, inner: int, itemsize: int, case: str) -> None:
    blocks, chunks = first.grid
    if first.kind == "rows":
        chunk = first.sizes[-1]
        assert blocks == outer, case
        assert chunk * chunks >= length > chunk * (chunks - 1), case
        assert chunks == 1 or chunk * itemsize % 16 == 0, case
    elif first.kind == "spans":
        fold, tiles, columns, each, chunk = first.sizes[3:]
        spans = -(-length // fold)
        assert chunk * chunks >= spans > chunk * (chunks - 1), case
        assert columns * itemsize <= _SPAN, case
        assert (columns == fold * inner and tiles == each == 1) if fold > 1 else tiles * columns >= inner > (tiles - 1) * columns, case
        assert blocks * each >= outer * tiles > (blocks - 1) * each, case
    else:
        per_block = first.sizes[2 if inner == 1 else 3]
        assert blocks * per_block >= outer > (blocks - 1) * per_block, case
        assert per_block * length * inner * itemsize <= _TILE, case
        assert first.kind == "brief" or 0 <= first.sizes[-1] <= 5, case
        # The granules at a row's ends are two.
        assert first.kind != "group" or length * itemsize > 16, case


@pytest.fixture(scope="module")
def rig() -> Iterator[Bench]:
    with bench() as opened:
        yield opened


_SHAPES = [
    (1, 1), (5, 3), (3, 5), (4099, 2), (4099, 7), (1031, 10), (517, 31), (300, 33), (257, 100), (129, 127), (65, 255), (33, 1000), (17, 1025), (9, 4097),
    (3, 70001), (70001, 3), (1, 500_001), (7, 1003, 33), (13, 513, 101), (2, 40, 1021), (11, 3, 5), (1000, 2, 3), (501, 7, 33), (3, 2001, 17),
    (2, 5, 70_001), (40, 64, 64), (16, 4096), (64, 1024), (2, 300, 4096), (600, 40, 512), (5000, 4), (3001, 16), (901, 24), (700, 32), (400, 48),
    (61, 2, 2047), (1, 3, 300_001), (3, 400, 1021), (30, 9, 1100), (4, 700, 129), (1500, 8, 4), (700, 32, 4), (3, 1024, 256), (20, 9001),
]  # fmt: skip
_ROUNDING = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 3e-6, "float64": 1e-14, "complex64": 3e-6, "complex128": 1e-14}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [dtype.value for dtype in CODES if dtype is not DType.BOOL])
def test_reductions_of_any_shape_axis_and_alignment(rig: Bench, dtype: str) -> None:
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    element = DType.of(dtype)
    for shape in _SHAPES:
        x = random(rng, shape, element.numpy)
        for axis in range(len(shape)):
            ops = [op for op in ReduceOp if op in BASIC and element in rig.compute.CAPABILITIES[f"reduce.{op.value}"]]
            op = ops[int(rng.integers(len(ops)))]
            lead, lag = (int(each) for each in rng.integers(0, 2, 2) * rng.integers(1, 9, 2))
            case = f"{op} of {shape} along {axis}, {lead} and {lag} elements off, seed {seed}"
            result = shape[:axis] + shape[axis + 1 :]
            source, out = rig.put(x, lead), rig.poisoned(int(np.prod(result)), element.numpy, lag)
            rig.compute.reduce(op, source, out, shape, axis, dtype=element)
            got = rig.get(out, result, element.numpy)
            if op in (ReduceOp.MAX, ReduceOp.MIN):
                expected = x.max(axis) if op is ReduceOp.MAX else x.min(axis)
                assert np.array_equal(got, expected), case
            elif element.is_integer:
                assert np.array_equal(got, np.add.reduce(x, axis, dtype=element.numpy)), case
            else:
                scale = 1 if op is ReduceOp.SUM else 1 / shape[axis]
                error = (_ROUNDING[dtype] + 1e-7 * (element.itemsize < 8)) * np.abs(wide(x)).sum(axis) * scale
                assert np.all(np.abs(wide(got) - wide(x).sum(axis) * scale) <= error), case
            rig.clear()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_nan_is_the_result_of_its_own_reduction_alone(rig: Bench, dtype: str) -> None:
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    element = DType.of(dtype)
    for shape, axis in (((700, 5), 1), ((300, 127), 1), ((5, 9001), 1), ((50, 7, 33), 1), ((3, 400, 1021), 1), ((5001, 40), 0)):
        x = random(rng, shape, element.numpy)
        place = tuple(int(rng.integers(size)) for size in shape)
        x[place] = np.nan
        result = shape[:axis] + shape[axis + 1 :]
        expected = np.zeros(result, bool)
        expected[place[:axis] + place[axis + 1 :]] = True
        for op in BASIC:
            out = rig.poisoned(int(np.prod(result)), element.numpy)
            rig.compute.reduce(op, rig.put(x), out, shape, axis, dtype=element)
            got = rig.get(out, result, element.numpy)
            assert np.array_equal(np.isnan(wide(got)), expected), f"{op} of {shape} along {axis}, NaN at {place}, seed {seed}"
        rig.clear()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64", "int16"])
async def test_axes_that_are_no_neighbours_are_reduced(device: accel.Device, rng: np.random.Generator, dtype: str) -> None:
    element = DType.of(dtype)
    for shape, axes in (
        ((3, 50, 7, 40), (1, 3)),
        ((50, 3, 70, 5), (0, 2)),
        ((2, 3, 4, 5, 6), (0, 2, 4)),
        ((1500, 2, 1500), (0, 2)),
        ((900, 7, 1100), (0, 2)),
    ):
        x = rng.integers(-3, 4, shape).astype(element.numpy)
        ref = await device.put(x)
        for op in ("max", "min", "any"):
            expected = getattr(np, op)(x.astype(np.float64), axis=axes)
            np.testing.assert_array_equal(
                wide(await device.get(await device.reduce(op, ref, axis=axes))), expected, err_msg=f"{op} {shape} {axes}"
            )
        if element.is_floating:
            tolerance = 1e-2 if dtype == "bfloat16" else 1e-4
            for reduction in (ReduceOp.MEAN, ReduceOp.VAR, ReduceOp.STD):
                expected = getattr(np, reduction.value)(x.astype(np.float64), axis=axes)
                got = wide(await device.get(await device.reduce(reduction, ref, axis=axes)))
                np.testing.assert_allclose(got, expected, rtol=tolerance, atol=1e-3, err_msg=f"{reduction} {shape} {axes}")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64", "int8", "uint8", "int64"])
async def test_states_take_several_elements_at_once(device: accel.Device, rng: np.random.Generator, dtype: str) -> None:
    element = DType.of(dtype)
    for shape in ((64, 4096), (3, 40_960), (300, 136), (7, 24), (1000, 16), (2, 300, 264), (33, 1000), (1, 1_000_016)):
        x = (rng.standard_normal(shape) + 40 if element.is_floating else rng.integers(0, 100, shape)).astype(element.numpy)
        ref = await device.put(x)
        for axis in (-1, 0):
            case = f"{shape} along {axis}"
            for op in ("argmax", "argmin"):
                got = await device.get(await device.reduce(op, ref, axis=axis))
                np.testing.assert_array_equal(got, getattr(np, op)(x, axis=axis), err_msg=f"{op} {case}")
            spots = np.zeros(shape, element.numpy)
            spots[rng.random(shape) < 1 / shape[axis]] = 1
            got = await device.get(await device.reduce("any", await device.put(spots), axis=axis))
            np.testing.assert_array_equal(got, spots.astype(bool).any(axis), err_msg=f"any {case}")
            if element.is_floating:
                tolerance, narrow = 1e-2 if dtype == "bfloat16" else 1e-3, wide(x)
                got = wide(await device.get(await device.reduce("var", ref, axis=axis)))
                np.testing.assert_allclose(got, narrow.var(axis), rtol=tolerance, atol=1e-3, err_msg=f"var {case}")
                expected = np.log(np.exp(narrow - 40).sum(axis)) + 40
                got = wide(await device.get(await device.reduce("logsumexp", ref, axis=axis)))
                np.testing.assert_allclose(got, expected, rtol=tolerance, err_msg=f"logsumexp {case}")
