"""Vectors with BLAS increments: matrix times vector, sums, products, norms, scaling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu.families.precision import blocks, wider
from accel.cpu.views import Array, array

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["axpy", "dot", "nrm2", "scal"]

# Temporaries of this size stay in the second-level cache.
_CACHE = 1 << 18
_TINY, _HUGE = 1e-280, 1e300


@np.errstate(all="ignore")
def axpy(n: int, alpha: complex, x: int, incx: int, y: int, incy: int, dtype: np.dtype[Any]) -> None:
    """Compute ``y = alpha * x + y``; with ``alpha == 0`` x is not read."""
    if alpha == 0:
        return
    wide = wider(dtype)
    source, out = _vector(x, n, incx, dtype), _vector(y, n, incy, dtype)
    for part in blocks(n, wide.itemsize, _CACHE):
        product = np.multiply(source[part], wide.type(alpha), dtype=wide)
        np.add(product, out[part], out=out[part], dtype=wide, casting="unsafe")


@np.errstate(all="ignore")
def scal(n: int, alpha: complex, x: int, incx: int, dtype: np.dtype[Any]) -> None:
    """Compute ``x = alpha * x``; NaN and infinity times 0 are NaN."""
    wide = wider(dtype)
    out = _vector(x, n, incx, dtype)
    np.multiply(out, wide.type(alpha), out=out, dtype=wide, casting="unsafe")


@np.errstate(all="ignore")
def dot(n: int, x: int, incx: int, y: int, incy: int, result: int, dtype: np.dtype[Any]) -> None:
    """Store ``sum(x[i] * y[i])``; nothing is conjugated. ``n`` may be 0."""
    wide = wider(dtype)
    total = wide.type(0)
    if n:
        first, second = _vector(x, n, incx, dtype), _vector(y, n, incy, dtype)
        for part in blocks(n, 2 * wide.itemsize, _CACHE):
            total += np.dot(first[part].astype(wide, copy=False), second[part].astype(wide, copy=False))
    array(result, (), dtype)[...] = total


@np.errstate(all="ignore")
def nrm2(n: int, x: int, incx: int, result: int, dtype: np.dtype[Any]) -> None:
    """Store the Euclidean norm of x, as a real number of x's precision. Squares neither overflow nor vanish. ``n`` may be 0."""
    real = np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype
    norm = _norm(_parts(_vector(x, n, incx, dtype), real)) if n else 0.0
    array(result, (), real)[...] = norm


def _vector(pointer: int, n: int, increment: int, dtype: np.dtype[Any]) -> Array:
    size = dtype.itemsize
    if increment > 0:
        return array(pointer, (n,), dtype, (increment * size,))
    # BLAS walks backwards over the same memory: the first element is the one with the highest address.
    return array(pointer, (n,), dtype, (-increment * size,))[::-1]


def _parts(x: Array, real: np.dtype[Any]) -> Array:
    """Return the real and imaginary parts of x as one array, [n, 2]."""
    if x.dtype is real:
        return x
    return np.stack((x.real, x.imag), axis=1)


def _norm(x: Array) -> float:
    square = _sum_of(np.square, x)
    if _TINY < square < _HUGE:
        return float(np.sqrt(square))
    # Only a float64 gets here with a norm that fits, or one that is 0 or not finite: with the largest element as the unit, squares are at most 1.
    largest = float(np.max(np.absolute(x.astype(np.float64, copy=False))))
    if largest == 0 or not np.isfinite(largest):
        return largest
    return float(largest * np.sqrt(_sum_of(lambda part: np.square(part / largest), x)))


def _sum_of(function: Callable[[Array], Array], x: Array) -> float:
    total = 0.0
    for part in blocks(len(x), 16, _CACHE):
        total += float(np.sum(function(x[part].astype(np.float64, copy=False))))
    return total
