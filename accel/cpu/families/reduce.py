"""Reductions along axes."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu import costs
from accel.cpu.families import sampling
from accel.cpu.families.precision import accumulator, mean, total, wider
from accel.cpu.views import array, operand
from accel.dtype import DType
from accel.enums import CAPABILITIES, EXTREMES, ReduceOp, result_dtype
from accel.family import BackendPart, Sample

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from accel.cpu.views import Array

__all__ = ["PART"]

_UFUNC: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.MAX: np.maximum,
    ReduceOp.MIN: np.minimum,
    ReduceOp.PROD: np.multiply,
}
_MEAN = ReduceOp.MEAN
_NOTHING = {ReduceOp.PROD: 1, ReduceOp.ALL: 1, ReduceOp.LOGSUMEXP: -math.inf}
_NOTHING |= dict.fromkeys((ReduceOp.MEAN, ReduceOp.VAR, ReduceOp.STD), math.nan)


def _result(op: ReduceOp, dtype: np.dtype[Any]) -> np.dtype[Any]:
    return result_dtype(op, DType.of(dtype)).numpy


@np.errstate(all="ignore")
def _reduce(op: ReduceOp, x: Array, axes: tuple[int, ...], ddof: int, out: Array) -> None:
    """Reduce axes of an array."""
    dtype, count = x.dtype, math.prod(x.shape[axis] for axis in axes)
    if not count:
        out[...] = _NOTHING.get(op, 0)
        return
    wide = wider(dtype)
    ufunc = _UFUNC.get(op)
    if ufunc is None:
        out[...] = _others(op, x.astype(wide, copy=False), axes, count - ddof)
        return
    if op not in EXTREMES:
        wide = accumulator(x, axes)
    # dtype= keeps numpy from widening integers (their sums wrap) and makes it widen the 16-bit floats.
    result = ufunc.reduce(x, axis=axes, dtype=wide, out=out if wide is dtype else None)
    if op is _MEAN:
        result = np.divide(result, count, out=out if wide is dtype else None)
    if result is not out:
        out[...] = result


def _others(op: ReduceOp, x: Array, axes: tuple[int, ...], divisor: int) -> Any:
    if op in (ReduceOp.ANY, ReduceOp.ALL):
        return (x != 0).any(axes) if op is ReduceOp.ANY else (x != 0).all(axes)
    if op in (ReduceOp.ARGMAX, ReduceOp.ARGMIN):
        find = np.argmax if op is ReduceOp.ARGMAX else np.argmin
        return find(x, axis=None if len(axes) == x.ndim else axes[0])
    if op is ReduceOp.LOGSUMEXP:
        most = x.max(axes, keepdims=True)
        # An infinity less itself is no number.
        shift = np.where(np.isfinite(most), most, x.dtype.type(0))
        return np.log(total(np.exp(x - shift), axes)) + np.squeeze(shift, axes)
    deviations = x - mean(x, axes, keepdims=True)
    variance = total(deviations * deviations, axes) / x.dtype.type(max(divisor, 0))
    return np.sqrt(variance) if op is ReduceOp.STD else variance


def _kernel(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    x, middle = op.x, op.middle()
    if middle is None:
        source, axes, kept = operand(inputs[0], x), op.axes(), tuple([x.shape[axis] for axis in range(x.ndim) if axis not in op.axes()])
    else:  # neighbouring axes of a contiguous array are one
        source, axes, kept = array(inputs[0], middle, x.dtype.numpy), (1,), (middle[0], middle[2])
    if 0 not in kept:
        work = partial(_reduce, op.op, source, axes, op.ddof, array(outputs[0], kept, _result(op.op, source.dtype)))
        lane.stream.submit(work, costs.elements(x.size, source.dtype))


def _log_of_sum(x: Array, axis: Any = None, keepdims: bool = False) -> Any:
    return np.log(np.sum(np.exp(x), axis=axis, keepdims=keepdims))


_NUMPY: dict[ReduceOp, Any] = {
    **{op: getattr(np, op.value) for op in ReduceOp if op is not ReduceOp.LOGSUMEXP},
    ReduceOp.LOGSUMEXP: _log_of_sum,
}
_INDICES = frozenset({ReduceOp.ARGMAX, ReduceOp.ARGMIN})
_SPREADS = frozenset({ReduceOp.VAR, ReduceOp.STD})
_EXACT = frozenset({ReduceOp.MAX, ReduceOp.MIN, ReduceOp.ANY, ReduceOp.ALL}) | _INDICES


def _call(op: ReduceOp, axis: Any, keepdims: bool, ddof: int, reduce: Any, x: Any) -> Any:
    return reduce(op, x, axis=axis, keepdims=keepdims, ddof=ddof)


def _operand(rng: np.random.Generator, op: ReduceOp, shape: tuple[int, ...], dtype: DType) -> Array:
    if op in (ReduceOp.ANY, ReduceOp.ALL):
        return (rng.random(shape) < (0.95 if op is ReduceOp.ALL else 0.05)).astype(dtype.numpy)
    x: Array = np.asarray(sampling.random(rng, shape, dtype))
    # Products of many elements stay near 1; of integers they wrap.
    if op is ReduceOp.PROD and dtype.is_floating:
        return np.exp(x.astype(np.float64) / max(8.0, math.sqrt(x.size))).astype(dtype.numpy)
    return x


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    shapes: tuple[tuple[tuple[int, ...], Any], ...] = (
        *(
            ((7,), None),
            ((3, 5, 4), 1),
            ((3, 5, 4), -1),
            ((2000, 3), 0),
            ((1, 1), None),
            ((3, 5, 4), (0, 2)),
            ((3, 5, 4), (-1, 1)),
            ((3, 5), ()),
        ),
        *(((2, 70, 3, 40), (1, 3)), ((40, 2, 70, 3), (0, 2)), ((3000,), None)),
    )
    for dtype in (*sampling.ALL_FLOATS, DType.INT32, DType.INT64, DType.UINT8, DType.BOOL, DType.COMPLEX64):
        for op in ReduceOp:
            if dtype not in CAPABILITIES[f"reduce.{op.value}"]:
                continue
            for shape, axis in shapes:
                if op in _INDICES and isinstance(axis, tuple):
                    continue
                x = _operand(rng, op, shape, dtype)
                for keepdims, ddof in ((False, 0), (True, 1 if op in _SPREADS else 0)) if shape == (3, 5, 4) else ((False, 0),):
                    yield _sample(op, x, axis, keepdims, ddof, dtype)
            x = _operand(rng, op, (6, 40, 5), dtype)
            for axis in (0, -1, None):
                yield _strided_sample(op, x, axis, dtype)


@np.errstate(all="ignore")
def _strided_sample(op: ReduceOp, x: Array, axis: Any, dtype: DType) -> Sample:
    def call(reduce: Any, x: Any) -> Any:
        return reduce(op, x.T[1:4, ::-3], axis=axis)

    expected = np.asarray(_NUMPY[op](sampling.wide(x.T[1:4, ::-3]), axis=axis))
    error = 0.0 if op in _EXACT else sampling.sums(dtype, x.size)
    name = f"reduce {op.value} {dtype.value} strided axis={axis}"
    return Sample(name, call, (x,), expected, error, _terms(op, x.T[1:4, ::-3], expected))


@np.errstate(all="ignore")
def _sample(op: ReduceOp, x: Array, axis: Any, keepdims: bool, ddof: int, dtype: DType) -> Sample:
    options = {"ddof": ddof} if ddof else {}
    # Products of integers are compared modulo 2**64.
    expected = np.asarray(_NUMPY[op](sampling.wide(x), axis=axis, keepdims=keepdims, **options))
    error = 0.0 if op in _EXACT else sampling.sums(dtype, x.size)
    name = f"reduce {op.value} {dtype.value}{list(x.shape)} axis={axis} keepdims={keepdims} ddof={ddof}"
    return Sample(name, partial(_call, op, axis, keepdims, ddof), (x,), expected, error, _terms(op, x, expected))


def _terms(op: ReduceOp, x: Array, expected: Array) -> float:
    """Return how large what is added up is: a sum of few or of many random numbers may be close to 0."""
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        return 0.0
    largest = float(np.abs(sampling.wide(x)).max())
    return largest if op is ReduceOp.SUM else largest * expected.size / x.size


PART = BackendPart({"reduce": _kernel}, samples=_samples)
