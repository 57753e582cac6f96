"""BLAS on vectors: sums, products, norms, scaling, rotations."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu.families.precision import blocks, wider
from accel.cpu.kernels import kernel, touches

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from accel.backend import Kernel
    from accel.cpu.views import Array

__all__ = ["KERNELS"]

# Temporaries of this size stay in the second-level cache.
_CACHE = 1 << 18
_TINY, _HUGE = 1e-280, 1e300


def _sizes(x: Array) -> Array:
    """Return the sizes that BLAS gives elements: complex ones the sum of those of their parts."""
    sizes: Array = np.abs(x.real) + np.abs(x.imag) if x.dtype.kind == "c" else np.abs(x)
    return sizes


def _axpy(op: Any, operands: list[Array], results: list[Array]) -> None:
    """Compute ``y = alpha * x + y``; with ``alpha == 0`` x is not read."""
    if not op.alpha:
        return
    x, y = operands[0].reshape(-1), results[0].reshape(-1)
    wide = wider(x.dtype)
    for part in blocks(x.size, wide.itemsize, _CACHE):
        product = np.multiply(x[part], wide.type(op.alpha), dtype=wide)
        np.add(product, y[part], out=y[part], dtype=wide, casting="unsafe")


def _scal(op: Any, operands: list[Array], results: list[Array]) -> None:
    """Compute ``x = alpha * x``; NaN and infinity times 0 are NaN."""
    x = results[0]
    wide = wider(x.dtype)
    np.multiply(x, wide.type(op.alpha), out=x, dtype=wide, casting="unsafe")


def _dot(op: Any, operands: list[Array], results: list[Array]) -> None:
    """Store ``sum(x[i] * y[i])``; nothing is conjugated."""
    x, y = (operand.reshape(-1) for operand in operands)
    wide = wider(x.dtype)
    total = wide.type(0)
    for part in blocks(x.size, 2 * wide.itemsize, _CACHE):
        total += np.dot(x[part].astype(wide, copy=False), y[part].astype(wide, copy=False))
    results[0][...] = total


def _dotc(op: Any, operands: list[Array], results: list[Array]) -> None:
    if op.x.dtype.is_complex:
        results[0][...] = np.vdot(*operands)
    else:
        _dot(op, operands, results)


def _nrm2(op: Any, operands: list[Array], results: list[Array]) -> None:
    """Store the Euclidean norm of x, as a real number of x's precision. Squares neither overflow nor vanish."""
    x, result = operands[0].reshape(-1), results[0]
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


def _asum(op: Any, operands: list[Array], results: list[Array]) -> None:
    results[0][...] = _sizes(operands[0]).sum()


def _extreme(find: Callable[[Array], Any], op: Any, operands: list[Array], results: list[Array]) -> None:
    results[0][...] = find(_sizes(operands[0]))


def _rot(op: Any, operands: list[Array], results: list[Array]) -> None:
    x, y = results
    kind = x.dtype.type
    turned = kind(op.c) * y - kind(op.s.conjugate()) * x
    x[...] = kind(op.c) * x + kind(op.s) * y
    y[...] = turned


def _swap(op: Any, operands: list[Array], results: list[Array]) -> None:
    x, y = results
    kept = x.copy()
    x[...] = y
    y[...] = kept


KERNELS: Mapping[str, Kernel] = {
    "axpy": kernel(_axpy, touches(3)),
    "scal": kernel(_scal, touches(2)),
    "dot": kernel(_dot, touches(2)),
    "nrm2": kernel(_nrm2, touches(2)),
    "asum": kernel(_asum, touches(2)),
    "dotc": kernel(_dotc, touches(2)),
    "iamax": kernel(partial(_extreme, np.argmax), touches(2)),
    "iamin": kernel(partial(_extreme, np.argmin), touches(2)),
    "rot": kernel(_rot, touches(6)),
    "swap": kernel(_swap, touches(4)),
}
