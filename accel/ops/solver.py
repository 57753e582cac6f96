"""Factorizations of dense matrices, and what is solved by them."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import KW_ONLY
from typing import Any, ClassVar, Literal

from accel.dtype import DType
from accel.enums import Transpose
from accel.errors import InvalidArgumentError
from accel.ops.base import FamilyOp, Plan, Shape, Spec, op, operand, same_dtype, status_of_places
from accel.ops.blas_operands import TransposeField, to_transpose
from accel.ops.family import Family
from accel.ops.fields import to_flag, to_int
from accel.ops.matrices import REALS, OfMatrices, matrix, right_sides
from accel.ops.namespace import M, OpNamespace, method
from accel.ops.spectral import Eig, Eigh, Eigvals, Eigvalsh, Lstsq, Pinv, Svd, Svdvals
from accel.ref import AccelRef
from accel.values import check_choice
from accel.views import broadcast

__all__ = [
    "ChoSolve",
    "Cholesky",
    "CholeskyInverse",
    "Det",
    "Inv",
    "LuFactor",
    "LuSolve",
    "MatrixPower",
    "Qr",
    "Slogdet",
    "Solve",
    "SolverOps",
]


_NONE = Transpose.NONE
_NOT_DEFINITE = "is not positive definite: its leading minor of order {info} is not".format
_SINGULAR = "is singular: element {info} of the diagonal of U is 0, counted from 1".format


@op("solver")
class _Sides(FamilyOp[Any]):
    """What solves equations of a matrix, which is its first field, for the right-hand sides ``b``."""

    def sizes(self) -> tuple[Shape, int, int]:
        """Return the stack of the results, the number of equations, and that of right-hand sides."""
        a, b = self.operands()
        stack, k = right_sides("the matrix", a.shape[-1], b)
        return broadcast(a.shape[:-2], stack), a.shape[-1], k

    @abstractmethod
    def operands(self) -> tuple[AccelRef, AccelRef]:
        """Return the matrix and the right-hand sides."""

    def _result(self) -> Spec:
        a, b = self.operands()
        same_dtype(a=a, b=b)
        stack, n, k = self.sizes()
        return Spec((*stack, n) if b.ndim == 1 else (*stack, n, k), a.dtype)


@op(convert={"upper": to_flag})
class Cholesky(OfMatrices):
    """The triangular factor of Hermitian positive definite matrices: ``a = l @ l.conj().T``, or ``a = u.conj().T @ u``. The other triangle is 0.

    Parameters
    ----------
    a
        (..., n, n), of float32, float64, complex64 or complex128. Only the triangle that is asked for is read.
    upper
        Whether the result is u, and not l.
    check
        Whether a matrix that is not positive definite raises :class:`~accel.LinAlgError`. ``False`` returns the factors and ``info``, int32 (...): 0, or the
        order of the leading minor that is not positive definite; that factor then holds no defined values.
    """

    _: KW_ONLY
    upper: bool = False

    def plan(self) -> Plan:
        a = matrix(self, "a", self.a)
        return self.checked((a,), (Spec(a.shape, a.dtype),), a.shape[:-2], _NOT_DEFINITE)


@op(convert={"upper": to_flag})
class ChoSolve(_Sides):
    """The solution of ``a @ x = b``, given the Cholesky factor of ``a``.

    Parameters
    ----------
    c
        (..., n, n): what ``cholesky`` returned. Its other triangle is not read.
    b
        (n,), or (..., n, k), of the dtype of ``c``; dimensions before the last two are broadcast.
    upper
        Whether ``c`` is the upper factor.
    """

    c: AccelRef
    b: AccelRef
    _: KW_ONLY
    upper: bool = False

    def operands(self) -> tuple[AccelRef, AccelRef]:
        return matrix(self, "c", self.c), operand("b", self.b)

    def plan(self) -> Plan:
        return Plan(self.operands(), (), (self._result(),), dtype=self.c.dtype)


@op("solver", convert={"upper": to_flag})
class CholeskyInverse(FamilyOp):
    """The inverse of Hermitian positive definite matrices, given their Cholesky factors: torch's ``cholesky_inverse``.

    Parameters
    ----------
    c
        (..., n, n): what ``cholesky`` returned. Its other triangle is not read.
    upper
        Whether ``c`` is the upper factor.
    """

    c: AccelRef
    _: KW_ONLY
    upper: bool = False

    def plan(self) -> Plan:
        c = matrix(self, "c", self.c)
        return Plan((c,), (), (Spec(c.shape, c.dtype),), dtype=c.dtype)


@op()
class LuFactor(OfMatrices):
    """The factors of ``a = p @ l @ u`` with partial pivoting, in one array, and the interchanges of rows: ``lu, piv``.

    Parameters
    ----------
    a
        (..., m, n), of float32, float64, complex64 or complex128.
    check
        Whether a 0 on the diagonal of u raises :class:`~accel.LinAlgError`. ``False`` returns ``lu, piv, info``, with ``info`` int32 (...): 0, or the
        place of the first such 0, counted from 1. The factors are complete all the same.

    Notes
    -----
    As scipy has it: l is below the diagonal of ``lu``, with ones on it; row i was interchanged with row ``piv[i]``, int32 (..., min(m, n)), counted from 0.
    """

    def plan(self) -> Plan:
        a = matrix(self, "a", self.a, square=False)
        *stack, m, n = a.shape
        return self.checked((a,), (Spec(a.shape, a.dtype), Spec((*stack, min(m, n)), DType.INT32)), tuple(stack), _SINGULAR)


_PIVOTS = status_of_places("pivot {} is no row of the matrix", "Give what lu_factor returned: rows from 0.")


@op(convert={"transpose": to_transpose})
class LuSolve(_Sides):
    """The solution of ``op(a) @ x = b``, given the factors of ``a``; where ``a`` is singular, its elements are infinite or NaN.

    Parameters
    ----------
    lu, piv
        (..., n, n) and int32 (..., n): what ``lu_factor`` returned. The op raises if a pivot is no row.
    b
        (n,), or (..., n, k), of the dtype of ``lu``; dimensions before the last two are broadcast.
    transpose
        What ``op`` does: ``False`` or ``"n"``, ``True`` or ``"t"``, or ``"c"``.
    """

    lu: AccelRef
    piv: AccelRef
    b: AccelRef
    _: KW_ONLY
    transpose: TransposeField = _NONE

    def operands(self) -> tuple[AccelRef, AccelRef]:
        return matrix(self, "lu", self.lu), operand("b", self.b)

    def plan(self) -> Plan:
        (lu, b), piv = self.operands(), operand("piv", self.piv)
        if piv.dtype is not DType.INT32 or piv.shape != lu.shape[:-1]:
            raise InvalidArgumentError(
                f"piv is {piv.dtype.value}{list(piv.shape)}", remedy=f"Give what lu_factor returned: int32{list(lu.shape[:-1])}."
            )
        return Plan((lu, piv, b), (), (self._result(),), dtype=lu.dtype, status=_PIVOTS)


@op()
class Solve(_Sides, OfMatrices):
    """The solution of ``a @ x = b``.

    Parameters
    ----------
    a
        (..., n, n), of float32, float64, complex64 or complex128.
    b
        (n,), or (..., n, k), of the dtype of ``a``; dimensions before the last two are broadcast.
    check
        Whether a singular matrix raises :class:`~accel.LinAlgError`. ``False`` returns ``x, info``, with ``info`` int32 for each matrix of the result's stack:
        0, or the place of the first 0 on the diagonal of u, counted from 1; the values of that solution are not defined then.
    """

    b: AccelRef

    def operands(self) -> tuple[AccelRef, AccelRef]:
        return matrix(self, "a", self.a), operand("b", self.b)

    def plan(self) -> Plan:
        return self.checked(self.operands(), (self._result(),), self.sizes()[0], _SINGULAR)


@op()
class Inv(OfMatrices):
    """The inverse of each matrix.

    Parameters
    ----------
    a
        (..., n, n), of float32, float64, complex64 or complex128.
    check
        As for ``solve``: ``False`` returns the inverses and ``info``.
    """

    def plan(self) -> Plan:
        a = matrix(self, "a", self.a)
        return self.checked((a,), (Spec(a.shape, a.dtype),), a.shape[:-2], _SINGULAR)


@op("solver")
class Det(FamilyOp):
    """The determinant of each matrix; 0 of one that is singular, 1 of one without rows.

    Parameters
    ----------
    a
        (..., n, n), of float32, float64, complex64 or complex128. ``slogdet`` neither overflows nor underflows.
    """

    a: AccelRef

    def plan(self) -> Plan:
        a = matrix(self, "a", self.a)
        return Plan((a,), (), (Spec(a.shape[:-2], a.dtype),), dtype=a.dtype)


@op("solver")
class Slogdet(FamilyOp[tuple[AccelRef, AccelRef]]):
    """The determinant of each matrix as its sign, of absolute value 1, and the logarithm of its absolute value; 0 and -infinity of a singular one.

    Parameters
    ----------
    a
        (..., n, n), of float32, float64, complex64 or complex128. The logarithms are real.
    """

    a: AccelRef

    def plan(self) -> Plan:
        a = matrix(self, "a", self.a)
        return Plan((a,), (), (Spec(a.shape[:-2], a.dtype), Spec(a.shape[:-2], REALS[a.dtype])), dtype=a.dtype)


@op("solver")
class Qr(FamilyOp[tuple[AccelRef, AccelRef]]):
    """``a = q @ r`` with orthonormal columns of q and triangular r.

    Parameters
    ----------
    a
        (..., m, n), of float32, float64, complex64 or complex128.
    mode
        ``"reduced"``: q is (..., m, k) and r (..., k, n), with k the smaller of m and n. ``"complete"``: (..., m, m) and (..., m, n). The signs of rows of r
        are the library's choice.
    """

    a: AccelRef
    mode: Literal["reduced", "complete"] = "reduced"

    def plan(self) -> Plan:
        a = matrix(self, "a", self.a, square=False)
        check_choice("mode", self.mode, "reduced", "complete")
        *stack, m, n = a.shape
        k = m if self.mode == "complete" else min(m, n)
        return Plan((a,), (), (Spec((*stack, m, k), a.dtype), Spec((*stack, k, n), a.dtype)), dtype=a.dtype)


@op(convert={"n": to_int})
class MatrixPower(OfMatrices):
    """Each matrix to the power of ``n``.

    Parameters
    ----------
    a
        (..., m, m), of float32, float64, complex64 or complex128.
    n
        An int. The 0th power is the identity; negative powers are those of the inverse.
    check
        As for ``inv``: ``False`` returns the powers and ``info``.
    """

    n: int

    def plan(self) -> Plan:
        a = matrix(self, "a", self.a)
        return self.checked((a,), (Spec(a.shape, a.dtype),), a.shape[:-2], _SINGULAR)


class SolverOps(OpNamespace[M]):
    """Factorizations of dense matrices and stacks of them, and what is solved by them. Names and meanings are those of numpy.linalg and scipy.linalg."""

    __slots__ = ()

    library: ClassVar = "solver"
    aliases: ClassVar = {
        "lu": ".lu_factor(a)",
        "cho_factor": ".cholesky(a)",
        "potri": ".cholesky_inverse(c)",
        "cholesky_ex": ".cholesky(a, check=False)",
        "inv_ex": ".inv(a, check=False)",
        "solve_ex": ".solve(a, b, check=False)",
        "lu_factor_ex": ".lu_factor(a, check=False)",
    }

    cholesky = method(Cholesky)
    cho_solve = method(ChoSolve)
    cholesky_inverse = method(CholeskyInverse)
    lu_factor = method(LuFactor)
    lu_solve = method(LuSolve)
    solve = method(Solve)
    inv = method(Inv)
    det = method(Det)
    slogdet = method(Slogdet)
    qr = method(Qr)
    eigh = method(Eigh)
    eigvalsh = method(Eigvalsh)
    svd = method(Svd)
    svdvals = method(Svdvals)
    pinv = method(Pinv)
    lstsq = method(Lstsq)
    matrix_power = method(MatrixPower)
    eig = method(Eig)
    eigvals = method(Eigvals)


FAMILY = Family(SolverOps)
