"""Arrays in order, what is found in them and how often, through numpy."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu import costs
from accel.cpu.families import sampling
from accel.cpu.views import array
from accel.dtype import DType
from accel.family import BackendPart, Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from accel.cpu.views import Array

__all__ = ["PART"]

# Seconds for one comparison of a sort.
_COMPARISON = 4e-9
_INT64 = np.dtype(np.int64)


def _enqueue(lane: Any, size: int, work: Callable[[], None]) -> None:
    lane.stream.submit(work, costs.elements(size, _INT64) + _COMPARISON * size * max(1.0, math.log2(max(size, 1))))


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


def _sorted(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    if op.x.size:
        x, out = (array(address, op.lines(), op.x.dtype.numpy) for address in (inputs[0], outputs[0]))
        _enqueue(lane, x.size, partial(_sort, x, out, op.falls))


def _sort(x: Array, out: Array, falls: bool) -> None:
    made = np.sort(_comparable(x), 1)
    out[...] = made[:, ::-1] if falls else made


def _partition(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    if op.x.size:
        x, out = (array(address, op.lines(), op.x.dtype.numpy) for address in (inputs[0], outputs[0]))
        _enqueue(lane, x.size, lambda: np.copyto(out, np.partition(_comparable(x), op.kth, 1), casting="unsafe"))


def _segments(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    x, offsets = array(inputs[0], op.x.shape, op.x.dtype.numpy), array(inputs[1], op.offsets.shape, _INT64)
    out, status = array(outputs[0], x.shape, x.dtype), array(outputs[1], (2,), _INT64)

    def work() -> None:
        ends = np.concatenate([[0], offsets, [x.size]])
        wrong = (ends[1:] < ends[:-1]) | (ends[1:] > x.size)
        wrong[0], wrong[-1] = offsets[0] != 0, offsets[-1] != x.size
        if wrong.any():
            status[:] = 1, min(int(np.flatnonzero(wrong)[0]), offsets.size - 1)
            return
        order = _order(x[None], op.falls)[0]
        segment = np.searchsorted(offsets, order, "right")
        out[...] = x[order[np.argsort(segment, kind="stable")]]

    _enqueue(lane, x.size, work)


def _indices(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    if op.x.size:
        x, out = array(inputs[0], op.lines(), op.x.dtype.numpy), array(outputs[0], op.lines(), _INT64)
        _enqueue(lane, x.size, lambda: np.copyto(out, _order(x, op.falls)))


def _topk(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    before, length, behind = op.lines()
    if before * op.k * behind:
        x = array(inputs[0], (before, length, behind), op.x.dtype.numpy)
        values = array(outputs[0], (before, op.k, behind), x.dtype)
        indices = array(outputs[1], values.shape, _INT64)
        _enqueue(lane, x.size, partial(_take_first, x, values, indices, op.falls))


def _take_first(x: Array, values: Array, indices: Array, falls: bool) -> None:
    indices[...] = _order(x, falls)[:, : indices.shape[1]]
    values[...] = np.take_along_axis(x, indices, 1)


def _searchsorted(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    if op.v.size:
        a, v = array(inputs[0], op.a.shape, op.a.dtype.numpy), array(inputs[1], op.v.shape, op.a.dtype.numpy)
        out = array(outputs[0], op.v.shape, _INT64)
        _enqueue(lane, v.size, lambda: np.copyto(out, np.searchsorted(_comparable(a), _comparable(v), op.side)))


def _write(found: Array, room: Array) -> None:
    """Write as much as there is room for, and zeros behind it."""
    room[: len(found)] = found[: len(room)]
    room[len(found) :] = 0


def _nonzero(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    x = array(inputs[0], op.x.shape, op.x.dtype.numpy)
    rooms = [array(address, (op.room(op.x.size),), _INT64) for address in outputs[:-1]]
    count = array(outputs[-1], (), _INT64)

    def work() -> None:
        found = np.nonzero(_comparable(x) if x.dtype.kind != "c" else x)
        for indices, room in zip(found, rooms, strict=True):
            _write(indices, room)
        count[...] = len(found[0])

    _enqueue(lane, x.size, work)


def _compress(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    condition = array(inputs[0], (op.condition.size,), np.dtype(bool))
    x = array(inputs[1], (op.condition.size, op.width()), op.x.dtype.numpy)
    room, count = array(outputs[0], (op.room(op.condition.size), op.width()), x.dtype), array(outputs[1], (), _INT64)

    def work() -> None:
        _write(x[condition], room)
        count[...] = np.count_nonzero(condition)

    _enqueue(lane, x.size, work)


def _different(x: Array) -> tuple[Array, Array]:
    """Return the indices that sort an array of one dimension, and which of the sorted elements differ from the one before."""
    order = _order(x[None], False)[0]
    made = _comparable(x)[order]
    is_first = np.ones(x.size, bool)
    is_first[1:] = (made[1:] != made[:-1]) & ~((made[1:] != made[1:]) & (made[:-1] != made[:-1]))
    return order, is_first


def _unique(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    x = array(inputs[0], (op.x.size,), op.x.dtype.numpy)
    room = (op.room(x.size),)
    values, count = array(outputs[0], room, x.dtype), array(outputs[-1 if op.kind == "unique" else 4], (), _INT64)
    others = (
        [array(outputs[1], room, _INT64), array(outputs[2], x.shape, _INT64), array(outputs[3], room, _INT64)] if len(outputs) > 2 else []
    )

    def work() -> None:
        order, is_first = _different(x)
        first = order[is_first]
        _write(x[first], values)
        count[...] = len(first)
        if others:
            indices, inverse, counts = others
            _write(first, indices)
            inverse[order] = np.cumsum(is_first) - 1
            _write(np.diff(np.flatnonzero(is_first), append=x.size), counts)

    _enqueue(lane, x.size, work)


def _bincount(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    x = array(inputs[0], (op.x.size,), op.x.dtype.numpy)
    weights = None if op.weights is None else array(inputs[1], x.shape, op.weights.dtype.numpy)
    out = array(outputs[0], (op.length,), _INT64 if weights is None else weights.dtype)
    status = array(outputs[1], (2,), _INT64)

    def work() -> None:
        wrong = (x < 0) | (x >= op.length)
        if wrong.any():
            status[:] = 1, x[wrong][0].astype(np.int64)
        else:
            out[...] = np.bincount(x.astype(np.int64), weights, op.length)

    _enqueue(lane, x.size, work)


def _histogram(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    x, out = array(inputs[0], (op.x.size,), op.x.dtype.numpy), array(outputs[0], (op.bins,), _INT64)

    def work() -> None:
        values = x.astype(np.float64)
        out[...] = np.histogram(values[~np.isnan(values)], op.bins, op.range)[0]

    _enqueue(lane, x.size, work)


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


def _call(kind: str, arguments: tuple[Any, ...], options: dict[str, Any], sort: Any, *refs: Any) -> Any:
    return getattr(sort, kind)(*refs, *arguments, **options)


def _weighted(sort: Any, x: Any, weights: Any) -> Any:
    return sort.bincount(x, 100, weights)


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    for dtype in _ORDERED:
        yield from _orders(rng, dtype)
        yield from _found(rng, dtype)
    for dtype in sampling.COMPLEX:
        x, condition = sampling.random(rng, (70, 11), dtype), np.asarray(rng.random((70, 11)) < 0.3)
        x[rng.random(x.shape) < 0.5] = 0
        yield Sample(f"nonzero {dtype.value}", partial(_call, "nonzero", (), {"size": x.size}), (x,), tuple(np.nonzero(x)))
        yield Sample(f"compress {dtype.value}", partial(_call, "compress", (), {"size": x.size}), (condition, x), x[condition])
    for dtype in _ORDERED:
        if dtype.is_integer:
            x = rng.integers(0, 100, 3000).astype(dtype.numpy)
            yield Sample(f"bincount {dtype.value}", partial(_call, "bincount", (120,), {}), (x,), np.bincount(x, minlength=120))
            for weights in (rng.standard_normal(3000).astype(np.float32), rng.standard_normal(3000)):
                expected, error = np.bincount(x, weights.astype(np.float64), 100), sampling.sums(DType.of(weights.dtype), 200)
                yield Sample(f"bincount {dtype.value} {weights.dtype}", _weighted, (x, weights), expected, error)
        if dtype is not DType.BOOL:
            for bins, limits in ((7, (-1.0, 2.5)), (20000, (-30.0, 30.0))):
                x = _operand(rng, 4000, dtype)
                values = x.astype(np.float64)
                expected = np.histogram(values[~np.isnan(values)], bins, limits)[0]
                yield Sample(f"histogram {dtype.value} {bins}", partial(_call, "histogram", (bins, limits), {}), (x,), expected)


def _orders(rng: np.random.Generator, dtype: DType) -> Iterator[Sample]:
    shapes: tuple[tuple[tuple[int, ...], int], ...] = (((1,), 0), ((0,), 0), ((3001,), -1), ((3, 70, 5), 1), ((40, 33), -1), ((2, 2), 0))
    for shape, axis in shapes:
        x = _operand(rng, shape, dtype)
        for falls in (False, True):
            order = _expected_order(x, axis, falls)
            values, name = np.take_along_axis(x, order, axis), f"{dtype.value}{list(shape)} axis={axis} {'falling' if falls else 'rising'}"
            yield Sample(f"sort {name}", partial(_call, "sort", (axis,), {"descending": falls}), (x,), values)
            yield Sample(f"argsort {name}", partial(_call, "argsort", (axis,), {"descending": falls}), (x,), order)
            k = min(3, shape[axis])
            first = order.take(range(k), axis)
            call = partial(_call, "topk", (k, axis), {"largest": falls})
            yield Sample(f"topk {name}", call, (x,), (np.take_along_axis(x, first, axis), first))
    for size, count in ((500, 9), (300, 1), (0, 0), (40, 100)):
        x, offsets = _operand(rng, size, dtype), np.sort(rng.integers(0, size + 1, count + 1))
        offsets[0], offsets[-1] = 0, size
        for falls in (False, True):
            parts = [part.take(_expected_order(part, 0, falls)) for part in np.split(x, offsets[1:-1])]
            call = partial(_call, "segment_sort", (), {"descending": falls})
            yield Sample(f"segment_sort {dtype.value}[{size}] {count}", call, (x, offsets), np.concatenate(parts))
    x = _operand(rng, (5, 2), dtype)  # of two elements, one place says all
    yield Sample(
        f"partition {dtype.value}", partial(_call, "partition", (1,), {}), (x,), np.take_along_axis(x, _expected_order(x, 1, False), 1)
    )


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
        yield Sample(f"nonzero {name}", partial(_call, "nonzero", (), {"size": size}), (x,), tuple(np.nonzero(values)))
        condition = np.asarray(rng.random(shape) < 0.3)
        yield Sample(f"compress {name}", partial(_call, "compress", (), {"size": size}), (condition, x), x[condition])
        row = np.asarray(rng.random(shape[0]) < 0.6)
        yield Sample(f"compress rows {name}", partial(_call, "compress", (), {"size": shape[0]}), (row, x), x[row])
        made = np.unique(values, return_index=True, return_inverse=True, return_counts=True)
        yield Sample(f"unique {name}", partial(_call, "unique", (), {"size": size}), (x,), made[0])
        all_made = (made[0], made[1], made[2].reshape(shape), made[3])
        yield Sample(f"unique_all {name}", partial(_call, "unique_all", (), {"size": size}), (x,), all_made)
    for length in (0, 1, 1000):
        a, v = np.sort(_plain(_operand(rng, length, dtype))), _plain(_operand(rng, (5, 40), dtype))
        for side in ("left", "right"):
            expected = np.asarray(np.searchsorted(a, v, side))
            call = partial(_call, "searchsorted", (side,), {})
            yield Sample(f"searchsorted {dtype.value}[{length}] {side}", call, (a.astype(dtype.numpy), v.astype(dtype.numpy)), expected)


def _plain(x: Array) -> Array:
    return x.astype(np.float64) if x.dtype.kind not in "iub" else x


PART = BackendPart(
    {
        "sort": _sorted,
        "argsort": _indices,
        "segment_sort": _segments,
        "topk": _topk,
        "partition": _partition,
        "searchsorted": _searchsorted,
        "nonzero": _nonzero,
        "compress": _compress,
        "unique": _unique,
        "unique_all": _unique,
        "bincount": _bincount,
        "histogram": _histogram,
    },
    samples=_samples,
)
