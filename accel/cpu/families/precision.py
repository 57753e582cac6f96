"""What the CPU kernels compute in, and how much memory they take for it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from accel.cpu.views import Array

__all__ = ["NARROW", "WORKSPACE", "accumulator", "blocks", "mean", "one_by_one", "pieces", "total", "wider"]

WORKSPACE = 16 << 20
"""Bytes that a kernel may take for intermediate results, except where a single row of them is larger."""

_FLOAT32 = np.dtype(np.float32)
_TWICE = {_FLOAT32: np.dtype(np.float64), np.dtype(np.complex64): np.dtype(np.complex128)}
_FEW = 256
"""Elements that are added one by one without much loss."""
_WIDER: dict[np.dtype[Any], np.dtype[Any]] = {np.dtype(np.float16): _FLOAT32, np.dtype(ml_dtypes.bfloat16): _FLOAT32}
NARROW = frozenset(_WIDER)
"""Types that are computed in a wider one."""


def wider(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type that ``dtype`` is computed in: float32 for the 16-bit floats, which are then rounded once; else itself."""
    return _WIDER.get(dtype, dtype)


def one_by_one(dtype: np.dtype[Any], count: int) -> np.dtype[Any]:
    """Return the type that elements are accumulated in one by one: :func:`wider`, or twice the precision for many, whose roundings add up to percents."""
    wide = wider(dtype)
    return wide if count <= _FEW else _TWICE.get(wide, wide)


def accumulator(x: Array, axes: tuple[int, ...]) -> np.dtype[Any]:
    """Return the type that sums along axes are accumulated in. numpy adds in pairs along the last axes of contiguous arrays, and else one by one."""
    in_pairs = x.flags.c_contiguous and axes == tuple(range(x.ndim - len(axes), x.ndim))
    return wider(x.dtype) if in_pairs else one_by_one(x.dtype, math.prod(x.shape[axis] for axis in axes))


def total(x: Array, axes: tuple[int, ...], *, keepdims: bool = False) -> Array:
    """Return sums along axes, in the type of ``x``; see :func:`accumulator`."""
    made: Array = x.sum(axis=axes, dtype=accumulator(x, axes), keepdims=keepdims)
    return made.astype(x.dtype, copy=False)


def mean(x: Array, axes: tuple[int, ...], *, keepdims: bool = False) -> Array:
    """Return means along axes, in the type of ``x``; see :func:`accumulator`."""
    made: Array = total(x, axes, keepdims=keepdims) / x.dtype.type(math.prod(x.shape[axis] for axis in axes))
    return made


def blocks(count: int, nbytes: int, workspace: int = WORKSPACE) -> Iterator[slice]:
    """Cut ``count`` rows, each of which needs ``nbytes`` of workspace, into slices that stay within it."""
    rows = max(1, workspace // max(1, nbytes))
    for start in range(0, count, rows):
        yield slice(start, min(count, start + rows))


def pieces(batch: tuple[int, ...], m: int, n: int, k: int, wide: np.dtype[Any]) -> Iterable[tuple[tuple[int, ...], slice]]:
    """Return what of a stack of m x n products is computed at a time, indices of the stack and rows: all of it, if it fits the workspace."""
    row = (k + 2 * n) * wide.itemsize
    if math.prod(batch) * (m * row + k * n * wide.itemsize) <= WORKSPACE:
        return (((), slice(None)),)
    return ((index, rows) for index in np.ndindex(batch) for rows in blocks(m, row))
