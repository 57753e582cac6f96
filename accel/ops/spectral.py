"""Eigenvalues and singular values of dense matrices, and what is made of them; their iterations may not converge."""

from __future__ import annotations

from dataclasses import KW_ONLY
from functools import partial

import numpy as np

from accel.dtype import DType
from accel.errors import InvalidArgumentError
from accel.ops.base import Plan, Spec, op, operand, same_dtype
from accel.ops.fields import to_flag
from accel.ops.matrices import REALS, OfMatrices, matrix, right_sides
from accel.ref import AccelRef
from accel.views import broadcast

__all__ = ["Eig", "Eigh", "Eigvals", "Eigvalsh", "Lstsq", "Pinv", "Svd", "Svdvals"]

_NOT_CONVERGED = "has elements that are not finite, or no solution that the iteration converges to (info {info})".format


def _of_pencil(n: int, *, info: int) -> str:
    if info > n:
        return f"has a b that is not positive definite: the leading minor of order {info - n} is not"
    return _NOT_CONVERGED(info=info)


@op(convert={"upper": to_flag})
class Eigh(OfMatrices):
    """Eigenvalues, in rising order, and eigenvectors of Hermitian matrices: ``w, v`` with ``a @ v = v * w``, or ``a @ v = b @ v * w``.

    Parameters
    ----------
    a
        (..., n, n), of float32, float64, complex64 or complex128. Only one triangle is read.
    b
        Hermitian positive definite matrices, of the shape and dtype of ``a``; then ``v.conj().T @ b @ v`` is the identity. ``None`` means the identity.
    upper
        Whether the upper triangles are read.
    check
        Whether an iteration that does not converge, elements that are not finite, or a ``b`` that is not positive definite, raise
        :class:`~accel.LinAlgError`. ``False`` returns ``w, v, info``, with ``info`` int32 (...): 0, or LAPACK's value, which is below 0 for elements that are
        not finite, and larger than n where ``b`` is not positive definite.
    """

    b: AccelRef | None = None
    _: KW_ONLY
    upper: bool = False

    def plan(self) -> Plan:
        a = matrix(self, "a", self.a)
        reads = (a,) if self.b is None else (a, operand("b", self.b))
        if reads[-1].shape != a.shape or reads[-1].dtype is not a.dtype:
            raise InvalidArgumentError(
                f"b is {reads[-1].dtype.value}{list(reads[-1].shape)}, and a is {a.dtype.value}{list(a.shape)}", remedy="Give both alike."
            )
        made = (Spec(a.shape[:-1], REALS[a.dtype]), Spec(a.shape, a.dtype))
        return self.checked(reads, made, a.shape[:-2], _NOT_CONVERGED if self.b is None else partial(_of_pencil, a.shape[-1]))


@op(convert={"upper": to_flag})
class Eigvalsh(OfMatrices):
    """Eigenvalues of Hermitian matrices, in rising order.

    Parameters
    ----------
    a, upper, check
        As for ``eigh``.
    """

    _: KW_ONLY
    upper: bool = False

    def plan(self) -> Plan:
        a = matrix(self, "a", self.a)
        return self.checked((a,), (Spec(a.shape[:-1], REALS[a.dtype]),), a.shape[:-2], _NOT_CONVERGED)


@op(convert={"full_matrices": to_flag})
class Svd(OfMatrices):
    """Singular values, in falling order, and singular vectors: ``u, s, vh`` with ``a = (u * s) @ vh``.

    Parameters
    ----------
    a
        (..., m, n), of float32, float64, complex64 or complex128.
    full_matrices
        Whether u is (..., m, m) and vh (..., n, n), and not (..., m, k) and (..., k, n) with k the smaller of m and n.
    check
        Whether an iteration that does not converge, or a matrix with NaN or infinities, raises :class:`~accel.LinAlgError`. ``False`` returns
        ``u, s, vh, info``, with ``info`` int32 (...): 0, or LAPACK's value, which is below 0 for elements that are not finite.
    """

    full_matrices: bool = True

    def plan(self) -> Plan:
        a = matrix(self, "a", self.a, square=False)
        *stack, m, n = a.shape
        k = min(m, n)
        rows, columns = (m, n) if self.full_matrices else (k, k)
        made = Spec((*stack, m, rows), a.dtype), Spec((*stack, k), REALS[a.dtype]), Spec((*stack, columns, n), a.dtype)
        return self.checked((a,), made, tuple(stack), _NOT_CONVERGED)


@op()
class Svdvals(OfMatrices):
    """Singular values, in falling order.

    Parameters
    ----------
    a, check
        As for ``svd``.
    """

    def plan(self) -> Plan:
        a = matrix(self, "a", self.a, square=False)
        *stack, m, n = a.shape
        return self.checked((a,), (Spec((*stack, min(m, n)), REALS[a.dtype]),), tuple(stack), _NOT_CONVERGED)


def tolerance(name: str, value: object) -> None:
    """See that a tolerance is a number that is not negative, or ``None``."""
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 <= float(value) < np.inf):  # type: ignore[arg-type]
        raise InvalidArgumentError(
            f"{name} is {value!r}", remedy="Give a number from 0, or None for the larger side times the dtype's rounding."
        )


@op()
class Pinv(OfMatrices):
    """The pseudo-inverse of each matrix, by its singular values.

    Parameters
    ----------
    a
        (..., m, n), of float32, float64, complex64 or complex128. The result is (..., n, m).
    rtol
        Singular values up to ``rtol`` times the largest one count as 0. ``None``: the larger one of m and n, times the rounding of the dtype.
    check
        As for ``svd``: ``False`` returns the result and ``info``.
    """

    rtol: float | None = None

    def plan(self) -> Plan:
        a = matrix(self, "a", self.a, square=False)
        tolerance("rtol", self.rtol)
        *stack, m, n = a.shape
        return self.checked((a,), (Spec((*stack, n, m), a.dtype),), tuple(stack), _NOT_CONVERGED)


@op()
class Lstsq(OfMatrices):
    """The x that make ``a @ x`` closest to b, and of these the smallest: ``x, residuals, rank, s``.

    Parameters
    ----------
    a
        (..., m, n), of float32, float64, complex64 or complex128.
    b
        (m,), or (..., m, k), of the dtype of ``a``; dimensions before the last two are broadcast.
    rcond
        Singular values up to ``rcond`` times the largest one count as 0. ``None``: the larger one of m and n, times the rounding of the dtype.
    check
        As for ``svd``: ``False`` returns the results and ``info``, int32 for each matrix of the stack of x.

    Notes
    -----
    ``residuals``, (...) or (..., k), are the squared lengths of ``b - a @ x``; numpy leaves them out where the rank is below n, or m is not above it. ``rank``,
    int64, and the singular values ``s`` are of the stack of x.
    """

    b: AccelRef
    rcond: float | None = None

    def plan(self) -> Plan:
        a, b = matrix(self, "a", self.a, square=False), operand("b", self.b)
        same_dtype(a=a, b=b)
        tolerance("rcond", self.rcond)
        m, n = a.shape[-2:]
        sides, k = right_sides("a", m, b)
        stack = broadcast(a.shape[:-2], sides)
        columns = () if b.ndim == 1 else (k,)
        real = REALS[a.dtype]
        made = (
            Spec((*stack, n, *columns), a.dtype),
            Spec((*stack, *columns), real),
            Spec(stack, DType.INT64),
            Spec((*stack, min(m, n)), real),
        )
        return self.checked((a, b), made, stack, _NOT_CONVERGED)


_COMPLEX = {
    DType.FLOAT32: DType.COMPLEX64,
    DType.FLOAT64: DType.COMPLEX128,
    DType.COMPLEX64: DType.COMPLEX64,
    DType.COMPLEX128: DType.COMPLEX128,
}


@op()
class Eig(OfMatrices):
    """Eigenvalues and right eigenvectors of length 1: ``w, v`` with ``a @ v = v * w``; both are complex, and in no order.

    Parameters
    ----------
    a
        (..., n, n), of float32, float64, complex64 or complex128.
    check
        As for ``eigh``: ``False`` returns ``w, v, info``.
    """

    def plan(self) -> Plan:
        a = matrix(self, "a", self.a)
        made = _COMPLEX[a.dtype]
        return self.checked((a,), (Spec(a.shape[:-1], made), Spec(a.shape, made)), a.shape[:-2], _NOT_CONVERGED)


@op()
class Eigvals(OfMatrices):
    """Eigenvalues; they are complex, and in no order.

    Parameters
    ----------
    a, check
        As for ``eig``.
    """

    def plan(self) -> Plan:
        a = matrix(self, "a", self.a)
        return self.checked((a,), (Spec(a.shape[:-1], _COMPLEX[a.dtype]),), a.shape[:-2], _NOT_CONVERGED)
