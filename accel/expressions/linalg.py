"""Linear algebra without factorizations: the part of ``xp.linalg`` of the array API standard that needs none."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from accel.errors import InvalidArgumentError, UnsupportedError
from accel.expressions.array import Array, AxisError, cast
from accel.expressions.manipulation import axes_of, axis_of, known
from accel.expressions.promotion import COMPLEX, FLOATS

if TYPE_CHECKING:
    from accel.expressions.linear import LinearFunctions

__all__ = ["LinalgFunctions"]


class LinalgFunctions:
    """Products, norms and diagonals of matrices.

    Parameters
    ----------
    xp
        The namespace.
    """

    def __init__(self, xp: LinearFunctions) -> None:
        self._xp = xp

    def matmul(self, x1: Array, x2: Array, /) -> Array:
        """Return ``x1 @ x2``."""
        return self._xp.matmul(x1, x2)

    def matrix_transpose(self, x: Array, /) -> Array:
        """Return the transposes of a stack of matrices."""
        return self._xp.matrix_transpose(x)

    def tensordot(self, x1: Array, x2: Array, /, *, axes: Any = 2) -> Array:
        """Return sums of products along axes of both."""
        return self._xp.tensordot(x1, x2, axes=axes)

    def vecdot(self, x1: Array, x2: Array, /, *, axis: int = -1) -> Array:
        """Return the sums along ``axis`` of products of the conjugates of ``x1`` and of ``x2``."""
        return self._xp.vecdot(x1, x2, axis=axis)

    def outer(self, x1: Array, x2: Array, /) -> Array:
        """Return the products of all elements of one vector and all of another."""
        if x1.ndim != 1 or x2.ndim != 1:
            raise InvalidArgumentError(f"shapes {x1.shape} and {x2.shape} are not those of vectors", remedy="Give one dimension each.")
        return self._xp.expand_dims(x1, 1) * x2

    def cross(self, x1: Array, x2: Array, /, *, axis: int = -1) -> Array:
        """Return the cross products of vectors of three elements along ``axis``."""
        x1, x2 = self._xp.broadcast_arrays(x1, x2) if x1.shape != x2.shape else (x1, x2)
        place = axis_of(axis, x1.ndim)
        if x1.shape[place] != 3:
            raise InvalidArgumentError(f"axis {axis} has {x1.shape[place]} elements", remedy="Give three.")
        a, b = self._xp.unstack(x1, axis=place), self._xp.unstack(x2, axis=place)
        parts = [a[i] * b[j] - a[j] * b[i] for i, j in ((1, 2), (2, 0), (0, 1))]
        return self._xp.stack(parts, axis=place)

    def diagonal(self, x: Array, /, *, offset: int = 0) -> Array:
        """Return a diagonal of each matrix of a stack: the main one, or one that many columns to its right."""
        if x.ndim < 2:
            raise AxisError(f"an array of {x.ndim} dimension(s) is no matrix", remedy="Give two dimensions or more.")
        rows, columns = known(x.shape[-2:])
        first, count = (offset, min(rows, columns - offset)) if offset >= 0 else (-offset * columns, min(rows + offset, columns))
        stacks = known(x.shape[:-2])
        flat = self._xp.reshape(x, (*stacks, rows * columns))
        step, count = columns + 1, max(count, 0)
        return (
            self._xp.indexed(flat, (..., slice(first, first + step * count, step)))
            if count
            else self._xp.zeros((*stacks, 0), dtype=x.dtype)
        )

    def trace(self, x: Array, /, *, offset: int = 0, dtype: Any = None) -> Array:
        """Return the sums of a diagonal."""
        return self._xp.sum(self.diagonal(x, offset=offset), axis=-1, dtype=dtype)

    def vector_norm(self, x: Array, /, *, axis: Any = None, keepdims: bool = False, ord: float = 2) -> Array:  # the standard's name
        """Return norms of vectors along axes: the ``ord``-th root of the sum of powers, the largest and the smallest absolute value for infinity."""
        if x.dtype not in FLOATS and x.dtype not in COMPLEX:
            raise InvalidArgumentError(f"x is {x.dtype.value}", remedy="Give floats or complex numbers.")
        size, xp = self._xp.abs(x), self._xp
        if math.isinf(ord):
            return (xp.max if ord > 0 else xp.min)(size, axis=axis, keepdims=keepdims)
        if ord == 0:
            return cast(xp.count_nonzero(size, axis=axis, keepdims=keepdims), size.dtype)
        if ord == 1:
            return xp.sum(size, axis=axis, keepdims=keepdims)
        if ord == 2:  # squares need no power
            return xp.sqrt(xp.sum(size * size, axis=axis, keepdims=keepdims))
        return xp.pow(xp.sum(xp.pow(size, ord), axis=axis, keepdims=keepdims), 1 / ord)

    def matrix_norm(self, x: Array, /, *, keepdims: bool = False, ord: Any = "fro") -> Array:  # the standard's name
        """Return norms of a stack of matrices: ``"fro"``, or 1, -1, inf and -inf, the largest or smallest sum of absolute values of a column or row."""
        axes = axes_of((-2, -1), x.ndim)
        if ord == "fro":
            return self.vector_norm(x, axis=axes, keepdims=keepdims)
        if ord not in (1, -1, math.inf, -math.inf):
            raise UnsupportedError(
                f"the norm {ord!r} needs singular values, which are not offered", remedy="Use 'fro', 1, -1, inf or -inf."
            )
        summed, kept = axes if abs(ord) == 1 else axes[::-1]
        sums = self._xp.sum(self._xp.abs(x), axis=summed, keepdims=True)
        made = (self._xp.max if ord > 0 else self._xp.min)(sums, axis=kept, keepdims=True)
        return made if keepdims else self._xp.squeeze(made, axes)

    def matrix_power(self, x: Array, n: int, /) -> Array:
        """Return the products of ``n`` times the same matrix, of 0 or more."""
        if x.ndim < 2 or x.shape[-1] != x.shape[-2]:
            raise InvalidArgumentError(f"shape {x.shape} is not that of square matrices", remedy="Give as many rows as columns.")
        if n < 0:
            raise UnsupportedError("negative powers need the inverse, which is not offered", remedy="Give 0 or more.")
        result: Array | None = None
        while n:
            if n % 2:
                result = x if result is None else self._xp.matmul(result, x)
            n //= 2
            x = self._xp.matmul(x, x) if n else x
        if result is None:
            identity = self._xp.eye(known(x.shape[-1:])[0], dtype=x.dtype)
            return self._xp.broadcast_to(identity, known(x.shape))
        return result
