"""Linear algebra: ``xp.linalg`` of the array API standard."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from accel.errors import InvalidArgumentError
from accel.expressions.array import Array, AxisError, Shape, broadcast, cast
from accel.expressions.functions import axis_of, call_op, explained, named
from accel.expressions.manipulation import axes_of, known
from accel.expressions.promotion import COMPLEX, DEFAULT, FLOATS, promoted
from accel.ops.fields import flag
from accel.ops.matrices import REALS
from accel.ops.spectral import tolerance
from accel.values import check_choice

if TYPE_CHECKING:
    from accel.dtype import DType
    from accel.expressions.linear import LinearFunctions

__all__ = ["EighResult", "LinalgFunctions", "QRResult", "SVDResult", "SlogdetResult"]


class EighResult(NamedTuple):
    """Eigenvalues in rising order, and the eigenvectors as columns."""

    eigenvalues: Array
    eigenvectors: Array


class QRResult(NamedTuple):
    """Orthonormal columns and triangular matrices."""

    Q: Array
    R: Array


class SlogdetResult(NamedTuple):
    """Signs of determinants, and logarithms of their absolute values."""

    sign: Array
    logabsdet: Array


class SVDResult(NamedTuple):
    """Left singular vectors as columns, singular values in falling order, and right singular vectors, conjugated, as rows."""

    U: Array
    S: Array
    Vh: Array


@explained("xp.linalg")
class LinalgFunctions:
    """Products, norms and diagonals of matrices, and their factorizations by ``device.solver``.

    Factorizations take float32, float64, complex64 and complex128. What has no such solution, such as the inverse of a singular matrix, raises
    :class:`~accel.LinAlgError` at the ``await``. Several results of one function are computed once if one await computes them.

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
        """Return norms of a stack of matrices.

        ``"fro"``; 1, -1, inf and -inf, the largest or smallest sum of absolute values of a column or row; 2, -2 and ``"nuc"``, the largest, the smallest
        and the sum of the singular values.
        """
        axes = axes_of((-2, -1), x.ndim)
        if ord == "fro":
            return self.vector_norm(x, axis=axes, keepdims=keepdims)
        if ord in (2, -2, "nuc"):
            reduced = self._xp.sum if ord == "nuc" else self._xp.max if ord == 2 else self._xp.min
            norm = reduced(self.svdvals(x), axis=-1, keepdims=keepdims)
            return self._xp.expand_dims(norm, -1) if keepdims else norm
        if ord not in (1, -1, math.inf, -math.inf):
            raise InvalidArgumentError(f"ord is {ord!r}", remedy="Use 'fro', 'nuc', 1, -1, 2, -2, inf or -inf.")
        summed, kept = axes if abs(ord) == 1 else axes[::-1]
        sums = self._xp.sum(self._xp.abs(x), axis=summed, keepdims=True)
        made = (self._xp.max if ord > 0 else self._xp.min)(sums, axis=kept, keepdims=True)
        return made if keepdims else self._xp.squeeze(made, axes)

    def matrix_power(self, x: Array, n: int, /) -> Array:
        """Return the products of ``n`` times the same matrix; negative powers are those of the inverse."""
        n = operator.index(n)
        if x.ndim < 2 or x.shape[-1] != x.shape[-2]:
            raise InvalidArgumentError(f"shape {x.shape} is not that of square matrices", remedy="Give as many rows as columns.")
        if n < 0:
            x, n = self.inv(x), -n
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

    # -- what factorizations solve

    def solve(self, x1: Array, x2: Array, /) -> Array:
        """Return the solutions of ``x1 @ x == x2``; ``x2`` is a vector if it has one dimension, else it has a right-hand side in each column."""
        dtype = promoted(x1.dtype, x2.dtype)
        a, b = cast(x1, dtype), cast(x2, dtype)
        n, _ = _sides(a, is_square=True)
        if not b.ndim or b.shape[0 if b.ndim == 1 else -2] not in (n, None):
            raise InvalidArgumentError(f"x2 has shape {b.shape}, and x1 has {n} rows", remedy="Give (n,), or (..., n, k).")
        shape = (*a.shape[:-2], n) if b.ndim == 1 else (*broadcast(a.shape[:-2], b.shape[:-2]), n, b.shape[-1])
        return self._xp.make(shape, dtype, call_op, (a, b), named("solver", "solve"))

    def inv(self, x: Array, /) -> Array:
        """Return the inverses of a stack of matrices."""
        _sides(x, is_square=True)
        return self._one("inv", x, x.shape, x.dtype)

    def pinv(self, x: Array, /, *, rtol: float | Array | None = None) -> Array:
        """Return pseudo-inverses. Singular values count as 0 up to ``rtol`` times the largest one; by default as in ``matrix_rank``."""
        m, n = _sides(x)
        if not isinstance(rtol, Array):
            tolerance("rtol", rtol)
            return self._one("pinv", x, (*x.shape[:-2], n, m), x.dtype, rtol=rtol)
        u, s, vh = self.svd(x, full_matrices=False)
        inverse = self._xp.where(self._counting(x, s, rtol), 1 / s, 0.0)
        rows = self._xp.expand_dims(inverse, -1) * self._xp.conj(self._xp.matrix_transpose(u))
        return self._xp.matmul(self._xp.conj(self._xp.matrix_transpose(vh)), rows)

    def det(self, x: Array, /) -> Array:
        """Return determinants: 0 of a singular matrix."""
        _sides(x, is_square=True)
        return self._one("det", x, x.shape[:-2], x.dtype)

    def slogdet(self, x: Array, /) -> SlogdetResult:
        """Return the signs of determinants, and the logarithms of their absolute values: 0 and -infinity of a singular matrix."""
        _sides(x, is_square=True)
        return SlogdetResult(*self._several("slogdet", x, (x.shape[:-2], x.dtype), (x.shape[:-2], REALS[x.dtype])))

    def matrix_rank(self, x: Array, /, *, rtol: float | Array | None = None) -> Array:
        """Return how many singular values are above ``rtol`` times the largest one; by default the longer side times the rounding of the dtype."""
        if not isinstance(rtol, Array):
            tolerance("rtol", rtol)
        return self._xp.sum(self._counting(x, self.svdvals(x), rtol), axis=-1, dtype=DEFAULT["integral"])

    def _counting(self, x: Array, s: Array, rtol: float | Array | None) -> Array:
        """Return which singular values do not count as 0."""
        if rtol is None:
            rtol = max(_sides(x)) * float(np.finfo(s.dtype.numpy).eps)
        elif isinstance(rtol, Array):  # one for each matrix
            rtol = self._xp.expand_dims(rtol, -1)
        return s > self._xp.indexed(s, (..., slice(0, 1))) * rtol

    # -- factorizations

    def cholesky(self, x: Array, /, *, upper: bool = False) -> Array:
        """Return triangular factors: l of ``l @ conj(l.mT)``, or u of ``conj(u.mT) @ u``. Only that triangle of ``x``, which is positive definite, is read."""
        _sides(x, is_square=True)
        return self._one("cholesky", x, x.shape, x.dtype, upper=flag("upper", upper))

    def qr(self, x: Array, /, *, mode: Literal["reduced", "complete"] = "reduced") -> QRResult:
        """Return ``x == Q @ R``; with ``mode="complete"`` Q is square, and else no side is longer than the shorter one of ``x``."""
        m, n = _sides(x)
        check_choice("mode", mode, "reduced", "complete")
        stack, k = x.shape[:-2], m if mode == "complete" else min(m, n)
        return QRResult(*self._several("qr", x, ((*stack, m, k), x.dtype), ((*stack, k, n), x.dtype), mode=mode))

    def eigh(self, x: Array, /) -> EighResult:
        """Return eigenvalues, in rising order, and eigenvectors of Hermitian matrices, of which the lower triangles are read."""
        _sides(x, is_square=True)
        return EighResult(*self._several("eigh", x, (x.shape[:-1], REALS[x.dtype]), (x.shape, x.dtype)))

    def eigvalsh(self, x: Array, /) -> Array:
        """Return eigenvalues of Hermitian matrices, in rising order; the lower triangles are read."""
        _sides(x, is_square=True)
        return self._one("eigvalsh", x, x.shape[:-1], REALS[x.dtype])

    def svd(self, x: Array, /, *, full_matrices: bool = True) -> SVDResult:
        """Return ``x == (U * S) @ Vh``; U and Vh are square with ``full_matrices``, and else have as many vectors as there are singular values."""
        m, n = _sides(x)
        stack, k = x.shape[:-2], min(m, n)
        rows, columns = (m, n) if flag("full_matrices", full_matrices) else (k, k)
        parts = ((*stack, m, rows), x.dtype), ((*stack, k), REALS[x.dtype]), ((*stack, columns, n), x.dtype)
        return SVDResult(*self._several("svd", x, *parts, full_matrices=bool(full_matrices)))

    def svdvals(self, x: Array, /) -> Array:
        """Return singular values, in falling order."""
        m, n = _sides(x)
        return self._one("svdvals", x, (*x.shape[:-2], min(m, n)), REALS[x.dtype])

    def _one(self, name: str, x: Array, shape: Shape, dtype: DType, **options: Any) -> Array:
        return self._xp.make(shape, dtype, call_op, (x,), named("solver", name, **options))

    def _several(self, name: str, x: Array, *parts: tuple[Shape, DType], **options: Any) -> list[Array]:
        return self._xp.several(call_op, (x,), *parts, arguments=named("solver", name, **options))


def _sides(x: Array, *, is_square: bool = False) -> tuple[int, int]:
    """Return the sides of matrices that can be factored."""
    if x.ndim < 2:
        raise AxisError(f"an array of {x.ndim} dimension(s) is no matrix", remedy="Give two dimensions or more.")
    if x.dtype not in REALS:
        raise InvalidArgumentError(f"x is {x.dtype.value}", remedy="Give float32, float64, complex64 or complex128: xp.astype(x, dtype).")
    m, n = known(x.shape[-2:])
    if is_square and m != n:
        raise InvalidArgumentError(f"shape {x.shape} is not that of square matrices", remedy="Give as many rows as columns.")
    return m, n
