"""Systems of equations with sparse matrices."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import TYPE_CHECKING, Any

from accel.dtype import DType
from accel.enums import Transpose
from accel.errors import AccelError, InvalidArgumentError, LinAlgError
from accel.ops.base import FamilyOp, Plan, Spec, Status, not_aliased, op, operand, result_in, same_dtype
from accel.ops.blas import TransposeField, transpose_of
from accel.ops.fields import set_fields
from accel.ops.sparse_operands import STRUCTURE, check_wide, structure_error
from accel.ref import AccelRef
from accel.sparse_ref import SparseField, parts_of, sparse_of

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Spsolve", "SpsolveTriangular"]


def _failure(status: np.ndarray[Any, Any]) -> AccelError | None:
    """Return the error of a status: of the indices, or the number, from 1 on, of the first row whose diagonal element is 0 or is not stored."""
    info = int(status[2])
    singular = LinAlgError(f"the matrix is singular: row {info - 1} has 0 on the diagonal", info=info) if info else None
    return structure_error(status) or singular


_INFO = Spec((), DType.INT32)
# What is wrong with the indices, as in STRUCTURE, and then the info.
_BOTH = Spec((3,), DType.INT64)
_STATUS = Status(_BOTH, _failure)


@op("sparse")
class SpsolveTriangular(FamilyOp[Any]):
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

    a: SparseField
    b: AccelRef
    lower: bool = True
    _: KW_ONLY
    unit_diagonal: bool = False
    out: AccelRef | None = None
    transpose_a: TransposeField = Transpose.NONE
    check: bool = True

    def __post_init__(self) -> None:
        set_fields(self, a=parts_of("a", self.a), transpose_a=transpose_of(self.transpose_a))

    def plan(self) -> Plan:
        a, b = sparse_of("a", self.a), operand("b", self.b)
        dtype = same_dtype(a=a.data, b=b)
        check_wide(self, dtype)
        if a.format not in ("csr", "csc") or a.shape[0] != a.shape[1]:
            raise InvalidArgumentError(f"a is {a.format} of shape {a.shape}", remedy="Give a square matrix in the format csr or csc.")
        if b.ndim not in (1, 2) or b.shape[0] != a.shape[0]:
            raise InvalidArgumentError(f"b has shape {b.shape} and a {a.shape}", remedy="Give (n,) or (n, k) for an a of (n, n).")
        for name in ("lower", "unit_diagonal", "check"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgumentError(f"{name} is {getattr(self, name)!r}", remedy="Give True or False.")
        not_aliased(self.out, data=a.data, indices=a.indices, indptr=a.indptr, b=b)
        writes, creates = result_in(self.out, b.shape, dtype)
        if self.check:
            return Plan((*a.refs, b), writes, creates, status=_STATUS)
        return Plan((*a.refs, b), writes, (*creates, _INFO), status=STRUCTURE)


def _singular(status: np.ndarray[Any, Any]) -> AccelError | None:
    """Return the error of a status: of the indices, or how many pivots were 0."""
    info = int(status[2])
    singular = LinAlgError("the matrix is singular: the factorization has found a pivot of 0", info=info) if info else None
    return structure_error(status) or singular


_PIVOTS = Status(_BOTH, _singular)


@op("sparse", kind="solve")
class Spsolve(FamilyOp[Any]):
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

    a: SparseField
    b: AccelRef
    _: KW_ONLY
    out: AccelRef | None = None
    check: bool = True

    def __post_init__(self) -> None:
        """Convert ``a``; see :mod:`accel.ops.fields`."""
        set_fields(self, a=parts_of("a", self.a))

    def plan(self) -> Plan:
        a, b = sparse_of("a", self.a), operand("b", self.b)
        dtype = same_dtype(a=a.data, b=b)
        check_wide(self, dtype)
        if a.format != "csr" or a.shape[0] != a.shape[1]:
            raise InvalidArgumentError(f"a is {a.format} of shape {a.shape}", remedy="Give a square matrix in the format csr: tocsr(a).")
        if b.ndim not in (1, 2) or b.shape[0] != a.shape[0]:
            raise InvalidArgumentError(f"b has shape {b.shape} and a {a.shape}", remedy="Give (n,) or (n, k) for an a of (n, n).")
        if not isinstance(self.check, bool):
            raise InvalidArgumentError(f"check is {self.check!r}", remedy="Give True or False.")
        not_aliased(self.out, data=a.data, indices=a.indices, indptr=a.indptr, b=b)
        writes, creates = result_in(self.out, b.shape, dtype)
        if self.check:
            return Plan((*a.refs, b), writes, creates, status=_PIVOTS)
        return Plan((*a.refs, b), writes, (*creates, _INFO), status=STRUCTURE)
