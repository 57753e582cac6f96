"""Arrays in order, what is found in them and how often, through numpy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu import costs
from accel.cpu.families import sampling
from accel.cpu.kernels import fill, kernel
from accel.dtype import DType
from accel.family import BackendPart

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accel.cpu.views import Array
    from accel.family import Sample

__all__ = ["PART"]

# Seconds for one comparison of a sort.
_COMPARISON = 4e-9
_INT64 = np.dtype(np.int64)


def _cost(op: Any, operands: list[Array], results: list[Array]) -> float:
    size = max(operand.size for operand in operands)
    return costs.elements(size, _INT64) + _COMPARISON * size * max(1.0, math.log2(max(size, 1)))


def _comparable(x: Array) -> Array:
    """Return the same values in a type that numpy sorts itself, NaN last."""
    return x if x.dtype.kind in "biuf" else np.asarray(x, np.float32)


def _order(x: Array, falls: bool) -> Array:
    """Return the indices that sort along axis 1. Stable; what falls is what rises, read from the end, of a reversed array."""
    x = _comparable(x)
    if not falls:
        return np.argsort(x, 1, kind="stable")
    found: Array = x.shape[1] - 1 - np.argsort(x[:, ::-1], 1, kind="stable")
    return found[:, ::-1]


def _sort(op: Any, operands: list[Array], results: list[Array]) -> None:
    x, out = (each.reshape(op.lines()) for each in (*operands, *results))
    made = np.sort(_comparable(x), 1)
    out[...] = made[:, ::-1] if op.falls else made


def _partition(op: Any, operands: list[Array], results: list[Array]) -> None:
    x, out = (each.reshape(op.lines()) for each in (*operands, *results))
    out[...] = np.partition(_comparable(x), op.kth, 1)


def _sort_segments(op: Any, operands: list[Array], results: list[Array]) -> None:
    (x, offsets), (out, status) = operands, results
    ends = np.concatenate([[0], offsets, [x.size]])
    wrong = (ends[1:] < ends[:-1]) | (ends[1:] > x.size)
    wrong[0], wrong[-1] = offsets[0] != 0, offsets[-1] != x.size
    if wrong.any():
        status[:] = 1, min(int(np.flatnonzero(wrong)[0]), offsets.size - 1)
        return
    order = _order(x[None], op.falls)[0]
    segment = np.searchsorted(offsets, order, "right")
    out[...] = x[order[np.argsort(segment, kind="stable")]]


def _argsort(op: Any, operands: list[Array], results: list[Array]) -> None:
    x, out = (each.reshape(op.lines()) for each in (*operands, *results))
    out[...] = _order(x, op.falls)


def _topk(op: Any, operands: list[Array], results: list[Array]) -> None:
    before, length, behind = op.lines()
    x, (values, indices) = operands[0].reshape(before, length, behind), [each.reshape(before, op.k, behind) for each in results]
    indices[...] = _order(x, op.falls)[:, : op.k]
    values[...] = np.take_along_axis(x, indices, 1)


def _searchsorted(op: Any, operands: list[Array], results: list[Array]) -> None:
    a, v = map(_comparable, operands)
    results[0][...] = np.searchsorted(a, v, op.side)


def _nonzero(op: Any, operands: list[Array], results: list[Array]) -> None:
    (x,), (*rooms, count) = operands, results
    found = np.nonzero(_comparable(x) if x.dtype.kind != "c" else x)
    for indices, room in zip(found, rooms, strict=True):
        fill(room, indices)
    count[...] = len(found[0])


def _compress(op: Any, operands: list[Array], results: list[Array]) -> None:
    (condition, x), (room, count) = operands, results
    fill(room.reshape(len(room), op.width()), x.reshape(condition.size, op.width())[condition.ravel()])
    count[...] = np.count_nonzero(condition)


def _different(x: Array) -> tuple[Array, Array]:
    """Return the indices that sort an array of one dimension, and which of the sorted elements differ from the one before."""
    order = _order(x[None], False)[0]
    made = _comparable(x)[order]
    is_first = np.ones(x.size, bool)
    is_first[1:] = (made[1:] != made[:-1]) & ~((made[1:] != made[1:]) & (made[:-1] != made[:-1]))
    return order, is_first


def _unique(op: Any, operands: list[Array], results: list[Array]) -> None:
    x, (values, *others, count) = operands[0].ravel(), results
    order, is_first = _different(x)
    first = order[is_first]
    fill(values, x[first])
    count[...] = len(first)
    if others:
        indices, inverse, counts = others
        fill(indices, first)
        inverse.reshape(-1)[order] = np.cumsum(is_first) - 1
        fill(counts, np.diff(np.flatnonzero(is_first), append=x.size))


def _bincount(op: Any, operands: list[Array], results: list[Array]) -> None:
    x, *weights = [operand.ravel() for operand in operands]
    out, status = results
    wrong = (x < 0) | (x >= op.length)
    if wrong.any():
        status[:] = 1, x[wrong][0].astype(np.int64)
    else:
        out[...] = np.bincount(x.astype(np.int64), weights[0] if weights else None, op.length)


def _histogram(op: Any, operands: list[Array], results: list[Array]) -> None:
    values = operands[0].astype(np.float64)
    results[0][...] = np.histogram(values[~np.isnan(values)], op.bins, op.range)[0]


_ORDERED = (
    *sampling.ALL_FLOATS,
    DType.BOOL,
    *(DType.INT8, DType.UINT8, DType.INT16, DType.UINT16, DType.INT32, DType.UINT32, DType.INT64, DType.UINT64),
)


def _operand(rng: np.random.Generator, shape: int | tuple[int, ...], dtype: DType) -> Array:
    """Return elements of which some are equal; of floats some are NaN, infinite, 0 and -0."""
    if dtype is DType.BOOL:
        return np.asarray(rng.random(shape) < 0.5)
    if dtype.is_integer:
        limits = np.iinfo(dtype.numpy)
        x = rng.integers(-50 if limits.min else 0, 50, shape).astype(dtype.numpy)
        x.flat[:2] = [limits.max, limits.min][: x.size]
        return np.asarray(x)
    x = np.round(rng.standard_normal(shape) * 8) / 4
    x.flat[: min(6, x.size // 2)] = [np.nan, -np.inf, np.inf, 0.0, -0.0, -np.nan][: min(6, x.size // 2)]
    return np.asarray(rng.permuted(x), dtype.numpy)


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    for dtype in _ORDERED:
        yield from _orders(rng, dtype)
        yield from _found(rng, dtype)
    for dtype in sampling.COMPLEX:
        x, condition = sampling.random(rng, (70, 11), dtype), np.asarray(rng.random((70, 11)) < 0.3)
        x[rng.random(x.shape) < 0.5] = 0
        yield sampling.sample("nonzero", dtype.value, (x,), tuple(np.nonzero(x)), size=x.size)
        yield sampling.sample("compress", dtype.value, (condition, x), x[condition], size=x.size)
    for dtype in _ORDERED:
        if dtype.is_integer:
            x = rng.integers(0, 100, 3000).astype(dtype.numpy)
            yield sampling.sample("bincount", dtype.value, (x,), np.bincount(x, minlength=120), length=120)
            for weights in (rng.standard_normal(3000).astype(np.float32), rng.standard_normal(3000)):
                expected, error = np.bincount(x, weights.astype(np.float64), 100), sampling.sums(DType.of(weights.dtype), 200)
                what = f"{dtype.value} {weights.dtype}"
                yield sampling.sample("bincount", what, (x, weights), expected, error, names=("weights",), length=100)
        if dtype is not DType.BOOL:
            for bins, limits in ((7, (-1.0, 2.5)), (20000, (-30.0, 30.0))):
                x = _operand(rng, 4000, dtype)
                values = x.astype(np.float64)
                expected = np.histogram(values[~np.isnan(values)], bins, limits)[0]
                yield sampling.sample("histogram", f"{dtype.value} {bins}", (x,), expected, arguments=(bins, limits))


def _orders(rng: np.random.Generator, dtype: DType) -> Iterator[Sample]:
    shapes: tuple[tuple[tuple[int, ...], int], ...] = (((1,), 0), ((0,), 0), ((3001,), -1), ((3, 70, 5), 1), ((40, 33), -1), ((2, 2), 0))
    for shape, axis in shapes:
        x = _operand(rng, shape, dtype)
        for falls in (False, True):
            order = _expected_order(x, axis, falls)
            name = f"{dtype.value}{list(shape)} axis={axis} {'falling' if falls else 'rising'}"
            yield sampling.sample("sort", name, (x,), np.take_along_axis(x, order, axis), axis=axis, descending=falls)
            yield sampling.sample("argsort", name, (x,), order, axis=axis, descending=falls)
            k = min(3, shape[axis])
            first = order.take(range(k), axis)
            yield sampling.sample("topk", name, (x,), (np.take_along_axis(x, first, axis), first), arguments=(k, axis), largest=falls)
    for size, count in ((500, 9), (300, 1), (0, 0), (40, 100)):
        x, offsets = _operand(rng, size, dtype), np.sort(rng.integers(0, size + 1, count + 1))
        offsets[0], offsets[-1] = 0, size
        for falls in (False, True):
            parts = [part.take(_expected_order(part, 0, falls)) for part in np.split(x, offsets[1:-1])]
            yield sampling.sample("segment_sort", f"{dtype.value}[{size}] {count}", (x, offsets), np.concatenate(parts), descending=falls)
    x = _operand(rng, (5, 2), dtype)  # of two elements, one place says all
    expected = np.take_along_axis(x, _expected_order(x, 1, False), 1)
    yield sampling.sample("partition", dtype.value, (x,), expected, arguments=(1,))


def _expected_order(x: Array, axis: int, falls: bool) -> Array:
    """Return the indices of a stable sort by two keys, whether it is NaN and the value, and none of numpy's own order of NaN."""
    values = x.astype(np.longdouble) if x.dtype.kind not in "iub" else x.astype(object).astype(np.longdouble)
    is_nan = np.isnan(values)
    values = np.where(is_nan, 0, values)
    if falls:
        values, is_nan = -values, ~is_nan
    return np.lexsort((values, is_nan), axis)


def _found(rng: np.random.Generator, dtype: DType) -> Iterator[Sample]:
    for shape in ((1,), (0,), (3001,), (7, 11, 5)):
        x = _operand(rng, shape, dtype)
        values = _plain(x)
        size, name = x.size + 3, f"{dtype.value}{list(shape)}"
        yield sampling.sample("nonzero", name, (x,), tuple(np.nonzero(values)), size=size)
        condition = np.asarray(rng.random(shape) < 0.3)
        yield sampling.sample("compress", name, (condition, x), x[condition], size=size)
        row = np.asarray(rng.random(shape[0]) < 0.6)
        yield sampling.sample("compress", f"rows {name}", (row, x), x[row], size=shape[0])
        made = np.unique(values, return_index=True, return_inverse=True, return_counts=True)
        yield sampling.sample("unique", name, (x,), made[0], size=size)
        yield sampling.sample("unique_all", name, (x,), (made[0], made[1], made[2].reshape(shape), made[3]), size=size)
    for length in (0, 1, 1000):
        a, v = np.sort(_plain(_operand(rng, length, dtype))), _plain(_operand(rng, (5, 40), dtype))
        operands = a.astype(dtype.numpy), v.astype(dtype.numpy)
        for side in ("left", "right"):
            expected = np.asarray(np.searchsorted(a, v, side))
            yield sampling.sample("searchsorted", f"{dtype.value}[{length}] {side}", operands, expected, arguments=(side,))


def _plain(x: Array) -> Array:
    return x.astype(np.float64) if x.dtype.kind not in "iub" else x


_COMPUTED = {
    "sort": _sort,
    "argsort": _argsort,
    "segment_sort": _sort_segments,
    "topk": _topk,
    "partition": _partition,
    "searchsorted": _searchsorted,
    "nonzero": _nonzero,
    "compress": _compress,
    "unique": _unique,
    "unique_all": _unique,
    "bincount": _bincount,
    "histogram": _histogram,
}

PART = BackendPart({kind: kernel(compute, _cost) for kind, compute in _COMPUTED.items()}, samples=_samples)
