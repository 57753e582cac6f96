"""Reductions along one axis."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.compute import ReduceOp
from accel.cpu.families import sampling
from accel.cpu.families.precision import wider
from accel.cpu.views import array
from accel.dtype import DType
from accel.family import BackendPart, Sample

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accel.cpu.views import Array

__all__ = ["PART", "reduce"]

_UFUNC: dict[ReduceOp, np.ufunc] = {ReduceOp.SUM: np.add, ReduceOp.MEAN: np.add, ReduceOp.MAX: np.maximum, ReduceOp.MIN: np.minimum}
_MEAN = ReduceOp.MEAN


@np.errstate(all="ignore")
def reduce(op: ReduceOp, source: int, destination: int, outer: int, length: int, inner: int, dtype: np.dtype[Any]) -> None:
    """Reduce the middle axis of a C-contiguous ``[outer, length, inner]`` array to ``[outer, inner]``. ``length`` may be 0 for sums and means."""
    out = array(destination, (outer, inner), dtype)
    if length == 0:
        out[...] = np.nan if op is _MEAN else 0
        return
    # dtype= keeps numpy from widening integers (their sums wrap) and makes it widen the 16-bit floats.
    wide = wider(dtype)
    x = array(source, (outer, length, inner), dtype)
    result = _UFUNC[op].reduce(x, axis=1, dtype=wide, out=out if wide is dtype else None)
    if op is _MEAN:
        np.divide(result, length, out=result)
    if result is not out:
        out[...] = result


_NUMPY: dict[ReduceOp, Any] = {ReduceOp.SUM: np.sum, ReduceOp.MEAN: np.mean, ReduceOp.MAX: np.max, ReduceOp.MIN: np.min}


def _call(op: ReduceOp, axis: int | None, keepdims: bool, reduce: Any, x: Any) -> Any:
    return reduce(op, x, axis=axis, keepdims=keepdims)


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    for dtype in (*sampling.ALL_FLOATS, DType.INT32, DType.INT64):
        for op in ReduceOp:
            if op is _MEAN and dtype.is_integer:
                continue
            for shape, axis in (((7,), None), ((3, 5, 4), 1), ((3, 5, 4), -1), ((2000, 3), 0), ((1, 1), None)):
                x: Array = sampling.random(rng, shape, dtype)
                for keepdims in (False, True) if shape == (3, 5, 4) else (False,):
                    expected = np.asarray(_NUMPY[op](sampling.wide(x), axis=axis, keepdims=keepdims))
                    error = sampling.sums(dtype, x.size) if op in (ReduceOp.SUM, _MEAN) else 0.0
                    name = f"reduce {op.value} {dtype.value}{list(shape)} axis={axis} keepdims={keepdims}"
                    yield Sample(name, partial(_call, op, axis, keepdims), (x,), expected, error)


PART = BackendPart({}, samples=_samples)
