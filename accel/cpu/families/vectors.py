"""BLAS on vectors: sums, products, norms, scaling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu.families.precision import blocks, wider

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.cpu.views import Array

__all__ = ["axpy", "dot", "nrm2", "scal"]

# Temporaries of this size stay in the second-level cache.
_CACHE = 1 << 18
_TINY, _HUGE = 1e-280, 1e300


@np.errstate(all="ignore")
def axpy(alpha: complex, x: Array, y: Array) -> None:
    """Compute ``y = alpha * x + y``; with ``alpha == 0`` x is not read."""
    if not alpha:
        return
    wide = wider(x.dtype)
    for part in blocks(x.size, wide.itemsize, _CACHE):
        product = np.multiply(x[part], wide.type(alpha), dtype=wide)
        np.add(product, y[part], out=y[part], dtype=wide, casting="unsafe")


@np.errstate(all="ignore")
def scal(alpha: complex, x: Array) -> None:
    """Compute ``x = alpha * x``; NaN and infinity times 0 are NaN."""
    wide = wider(x.dtype)
    np.multiply(x, wide.type(alpha), out=x, dtype=wide, casting="unsafe")


@np.errstate(all="ignore")
def dot(x: Array, y: Array, result: Array) -> None:
    """Store ``sum(x[i] * y[i])``; nothing is conjugated."""
    wide = wider(x.dtype)
    total = wide.type(0)
    for part in blocks(x.size, 2 * wide.itemsize, _CACHE):
        total += np.dot(x[part].astype(wide, copy=False), y[part].astype(wide, copy=False))
    result[...] = total


@np.errstate(all="ignore")
def nrm2(x: Array, result: Array) -> None:
    """Store the Euclidean norm of x, as a real number of x's precision. Squares neither overflow nor vanish."""
    result[...] = _norm(_parts(x, result.dtype)) if x.size else 0.0


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
