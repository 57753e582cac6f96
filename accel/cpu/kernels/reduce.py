"""Reductions along one axis."""

from __future__ import annotations

from typing import Any

import numpy as np

from accel.compute import ReduceOp
from accel.cpu.kernels.precision import wider
from accel.cpu.views import array

__all__ = ["reduce"]

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
