"""Reductions of a compute interface."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from accel.dtype import DType
from accel.enums import ReduceOp, result_dtype
from accel.errors import InvalidArgumentError
from accel.testing.conformance.harness import poison, sum_rounding, wide

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accel.compute import ComputeBackend
    from accel.testing.conformance.harness import Array, Case, Harness

__all__ = [
    "check_integer_sums_wrap",
    "check_reduce_accumulates_in_float32",
    "check_reduce_of_an_empty_axis",
    "check_reduce_propagates_nan_and_infinity",
    "check_reduce_to_nothing",
    "check_reduce_values",
]

_SHAPES = ((1,), (7,), (5, 3), (1, 9, 1), (2, 3, 4, 5), (3, 1000), (1000, 3), (40, 50, 60), (70_001,))
_NOTHING = {
    **dict.fromkeys((ReduceOp.MEAN, ReduceOp.VAR, ReduceOp.STD), math.nan),
    ReduceOp.PROD: 1,
    ReduceOp.ALL: 1,
    ReduceOp.LOGSUMEXP: -math.inf,
    ReduceOp.SUM: 0,
    ReduceOp.ANY: 0,
}
"""What reductions over no elements give; others are refused."""


def _pairs(compute: ComputeBackend) -> Iterator[tuple[ReduceOp, DType]]:
    for op in ReduceOp:
        for dtype in sorted(compute.capabilities().get(f"reduce.{op.value}", ()), key=lambda dtype: dtype.value):
            yield op, dtype


def _reference(op: ReduceOp, x: Array, axis: int, dtype: DType) -> tuple[Array, Array | float]:
    """Return the expected result, and how far off it may be before rounding."""
    if op is ReduceOp.MAX:
        return wide(np.asarray(wide(x).max(axis))), 0.0
    if op is ReduceOp.MIN:
        return wide(np.asarray(wide(x).min(axis))), 0.0
    if op in (ReduceOp.ANY, ReduceOp.ALL, ReduceOp.ARGMAX, ReduceOp.ARGMIN):
        return np.asarray(getattr(np, op.value)(wide(x), axis)), 0.0
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        return _others(op, x, axis, dtype)
    if dtype.is_integer:
        return np.asarray(np.add.reduce(x, axis, dtype=dtype.numpy)), 0.0
    length = x.shape[axis]
    total, size = np.asarray(wide(x).sum(axis)), np.asarray(np.abs(wide(x)).sum(axis))
    error = (length + 4) * sum_rounding(dtype) * size
    return (total, error) if op is ReduceOp.SUM else (total / length, error / length)


def _others(op: ReduceOp, x: Array, axis: int, dtype: DType) -> tuple[Array, Array | float]:
    """Return what :func:`_reference` does for products, deviations and logarithms of sums."""
    if dtype.is_integer:
        return np.asarray(np.multiply.reduce(x, axis, dtype=dtype.numpy)), 0.0
    values, unit = wide(x), (x.shape[axis] + 8) * sum_rounding(dtype)
    if op is ReduceOp.PROD:
        product = np.asarray(values.prod(axis))
        return product, unit * np.abs(product)
    if op is ReduceOp.LOGSUMEXP:
        most = values.max(axis)
        most = np.where(np.isfinite(most), most, 0.0)  # an infinity less itself is no number
        logarithm = most + np.log(np.exp(values - np.expand_dims(most, axis)).sum(axis))
        return logarithm, unit * (1 + np.abs(logarithm))
    variance, squares = values.var(axis), np.abs(values * values).mean(axis)
    if op is ReduceOp.VAR:
        return variance, unit * squares
    return np.sqrt(variance), np.sqrt(unit * squares)


def _check(case: Case, op: ReduceOp, x: Array, axis: int, dtype: DType) -> None:
    shape = x.shape[:axis] + x.shape[axis + 1 :]
    made = result_dtype(op, dtype)
    source, out = case.put(x), case.poisoned(shape, made)
    case.compute.reduce(op, source, out, x.shape, axis, dtype=dtype)
    with np.errstate(all="ignore"):
        expected, error = _reference(op, x, axis, dtype)
    case.close_to(case.get(out, shape, made), expected, error)
    case.same(case.get(source, x.shape, dtype), x, "the input")


async def check_reduce_values(harness: Harness) -> None:
    """Check every reduction, dtype, shape and axis; integer sums wrap around."""
    with harness.open_compute() as compute:
        for op, dtype in _pairs(compute):
            for shape in _SHAPES:
                for axis in range(len(shape)):
                    with harness.case(compute, f"reduce {op.value} {dtype.value} {shape} axis={axis}") as case:
                        _check(case, op, harness.random(shape, dtype), axis, dtype)


async def check_reduce_of_an_empty_axis(harness: Harness) -> None:
    """Check what reductions over nothing give, and that a maximum or minimum is refused before anything is written."""
    with harness.open_compute() as compute:
        for op, dtype in _pairs(compute):
            made = result_dtype(op, dtype)
            with harness.case(compute, f"reduce {op.value} {dtype.value} (3, 0, 2) axis=1") as case:
                source, out = case.put(np.zeros(1, dtype.numpy)), case.poisoned((3, 2), made)
                try:
                    compute.reduce(op, source, out, (3, 0, 2), 1, dtype=dtype)
                except InvalidArgumentError:
                    case.require(op not in _NOTHING, "was refused")
                    case.same(case.get(out, (3, 2), made), poison((3, 2), made))
                    continue
                case.require(op in _NOTHING, "was not refused")
                got = case.get(out, (3, 2), made)
                case.same(got, np.full((3, 2), _NOTHING[op], made.numpy)) if op is not ReduceOp.MEAN else case.require(
                    bool(np.isnan(wide(got)).all()), f"gave {got}"
                )


async def check_reduce_to_nothing(harness: Harness) -> None:
    """Check that nothing is written where another axis is empty."""
    with harness.open_compute() as compute:
        for op, dtype in _pairs(compute):
            for shape, axis in (((0, 4), 1), ((4, 0), 0), ((3, 0, 0), 1)):
                if math.prod(shape[axis : axis + 1]) == 0 and op not in _NOTHING:
                    continue
                with harness.case(compute, f"reduce {op.value} {dtype.value} {shape} axis={axis}") as case:
                    made = result_dtype(op, dtype)
                    out = case.poisoned(2, made)
                    compute.reduce(op, case.put(np.zeros(1, dtype.numpy)), out, shape, axis, dtype=dtype)
                    case.same(case.get(out, 2, made), poison(2, made))


async def check_reduce_propagates_nan_and_infinity(harness: Harness) -> None:
    """Check that one NaN makes its result NaN and no other, wherever it stands; an infinity wins or cancels as in numpy."""
    with harness.open_compute() as compute:
        for op, dtype in _pairs(compute):
            if not dtype.is_floating or op in (ReduceOp.PROD, ReduceOp.ANY, ReduceOp.ALL):
                continue
            for axis, length in ((0, 5), (1, 5), (0, 3000), (1, 3000)):
                with harness.case(compute, f"reduce {op.value} {dtype.value} of NaN length={length} axis={axis}") as case:
                    x = harness.random((4, length), dtype)
                    place = harness.rng.integers(0, length)
                    x[0, place], x[1, place] = np.nan, np.inf
                    x[2, place], x[2, (place + 1) % length] = -np.inf, np.inf
                    x = np.ascontiguousarray(x.T) if axis == 0 else x
                    _check_special(case, op, x, axis, dtype)


def _check_special(case: Case, op: ReduceOp, x: Array, axis: int, dtype: DType) -> None:
    made = result_dtype(op, dtype)
    out = case.poisoned(4, made)
    case.compute.reduce(op, case.put(x), out, x.shape, axis, dtype=dtype)
    got = wide(case.get(out, 4, made))
    with np.errstate(all="ignore"):
        expected, _ = _reference(op, x, axis, dtype)
    # Indices are whole numbers, of which all are compared.
    special = ~np.isfinite(expected) | (made is DType.INT64)
    case.require(bool((np.isfinite(got) == np.isfinite(expected)).all()), f"gave {got}, not {expected}")
    case.require(np.array_equal(got[special], expected[special], equal_nan=True), f"gave {got}, not {expected}")


async def check_reduce_accumulates_in_float32(harness: Harness) -> None:
    """Check sums of 5000 ones, and means of numbers whose sum has no float16, along both axes of a matrix."""
    with harness.open_compute() as compute:
        for dtype in (DType.FLOAT16, DType.BFLOAT16):
            for axis in (0, 1):
                for op, value in ((ReduceOp.SUM, 1.0), (ReduceOp.MEAN, 1000.0)):
                    if dtype not in compute.capabilities().get(f"reduce.{op.value}", ()):
                        continue
                    with harness.case(compute, f"reduce {op.value} {dtype.value} of {value}, axis={axis}") as case:
                        _check(case, op, np.full((5000, 3) if axis == 0 else (3, 5000), value, dtype.numpy), axis, dtype)


async def check_integer_sums_wrap(harness: Harness) -> None:
    """Check the largest integer added to itself."""
    with harness.open_compute() as compute:
        for dtype in compute.capabilities().get("reduce.sum", ()):
            if dtype.is_integer:
                with harness.case(compute, f"reduce sum {dtype.value} of the largest integers") as case:
                    _check(case, ReduceOp.SUM, np.full((3, 5), np.iinfo(dtype.numpy).max, dtype.numpy), 1, dtype)
