"""Systems of equations with sparse matrices."""

from __future__ import annotations

from dataclasses import KW_ONLY
from functools import partial
from typing import TYPE_CHECKING, Any

from accel.dtype import DType
from accel.enums import Transpose
from accel.errors import AccelError, InvalidArgumentError, LinAlgError
from accel.ops.base import OutOp, Plan, Spec, Status, op, operand, planned
from accel.ops.blas_operands import TransposeField, to_transpose, wide_dtype
from accel.ops.fields import to_flag
from accel.ops.sparse_operands import STRUCTURE, parts, structure_error
from accel.ref import AccelRef
from accel.sparse_ref import SparseField, SparseFormat, parts_of, sparse_of

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Spsolve", "SpsolveTriangular"]


_INFO = Spec((), DType.INT32)


def _failure(why: str, status: np.ndarray[Any, Any]) -> AccelError | None:
    """Return the error of a status: of the indices, as in ``STRUCTURE``, or of the info behind it.

    ``why`` says why there is no solution, with ``{}`` for the number of a row.
    """
    info = int(status[2])
    return structure_error(status) or (LinAlgError(f"the matrix is singular: {why.format(info - 1)}", info=info) if info else None)


@op("sparse", convert={"a": parts_of, "check": to_flag})
class _System(OutOp[Any]):
    """A system of equations."""

    a: SparseField
    b: AccelRef
    _: KW_ONLY
    check: bool = True

    def _solved(self, formats: tuple[SparseFormat, ...], remedy: str, why: str) -> Plan:
        """Return the plan for a matrix of one of these formats; ``why`` is that of :func:`_failure`."""
        a, b = sparse_of("a", self.a), operand("b", self.b)
        dtype = wide_dtype(self, a=a.data, b=b)
        if a.format not in formats or a.shape[0] != a.shape[1]:
            raise InvalidArgumentError(f"a is {a.format} of shape {a.shape}", remedy=remedy)
        if b.ndim not in (1, 2) or b.shape[0] != a.shape[0]:
            raise InvalidArgumentError(f"b has shape {b.shape} and a {a.shape}", remedy="Give (n,) or (n, k) for an a of (n, n).")
        plan = planned(self.out, {**parts(a), "b": b}, b.shape, dtype, status=STRUCTURE)
        if self.check:
            return plan._replace(status=Status(Spec((3,), DType.INT64), partial(_failure, why)))
        return plan._replace(creates=(*plan.creates, _INFO))


@op(convert={"lower": to_flag, "unit_diagonal": to_flag, "transpose_a": to_transpose})
class SpsolveTriangular(_System):
    """Solve ``op(a) @ x = b`` for a triangular sparse matrix.

    Raises :class:`~accel.LinAlgError` if an element on the diagonal is 0 or is not stored; its ``info`` is the number of the first such row, from 1 on.

    Parameters
    ----------
    a
        csr or csc, square: float32, float64, complex64 or complex128. Elements outside the triangle are not read.
    b
        (n,) or (n, k), of the dtype of ``a``.
    lower
        Whether ``a``, before ``op``, is lower triangular; else upper.
    unit_diagonal
        Whether the diagonal is taken as 1, and what is stored there is not read.
    out
        Buffer to write; none of the operands.
    transpose_a
        What ``op`` does.
    check
        ``False``: the result is ``(x, info)``, where ``info`` is a 0-d int32, and nothing is raised; ``x`` must not be used if ``info`` is not 0.
    """

    lower: bool = True
    _: KW_ONLY
    unit_diagonal: bool = False
    transpose_a: TransposeField = Transpose.NONE

    def plan(self) -> Plan:
        return self._solved(("csr", "csc"), "Give a square matrix in the format csr or csc.", "row {} has 0 on the diagonal")


@op(kind="solve")
class Spsolve(_System):
    """Solve ``a @ x = b`` directly: a sparse matrix is ordered, factored and solved, each time anew.

    Raises :class:`~accel.LinAlgError` if a pivot is 0; a matrix that is singular but for rounding is not found. On CUDA this is cuDSS, which takes memory
    beside the device's limit, and graphs refuse it; :class:`~accel.BackendUnavailableError` if it is not installed.

    Parameters
    ----------
    a
        csr, square: float32, float64, complex64 or complex128.
    b
        (n,) or (n, k), of the dtype of ``a``.
    out
        Buffer to write; none of the operands.
    check
        ``False``: the result is ``(x, info)``, where ``info`` is a 0-d int32, and nothing is raised; ``x`` must not be used if ``info`` is not 0.
    """

    def plan(self) -> Plan:
        return self._solved(("csr",), "Give a square matrix in the format csr: tocsr(a).", "the factorization has found a pivot of 0")
