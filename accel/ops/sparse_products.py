"""Sums and products of two sparse matrices, which find out how many elements they have."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Any

from accel.dtype import DType
from accel.errors import InvalidArgumentError
from accel.ops.base import FamilyOp, Plan, SizedOp, Spec, factor, op, same_dtype, scalar
from accel.ops.fields import set_fields
from accel.ops.sparse_operands import COUNT, STRUCTURE, check_wide, no_product
from accel.ref import AccelRef
from accel.sparse_ref import SparseField, SparseRef, parts_of, sparse_of

__all__ = ["Add", "Spgemm", "SpgemmSize"]


@op("sparse")
class Add(SizedOp[SparseRef, tuple[SparseRef, AccelRef]]):
    """``alpha * a + beta * b`` of two sparse matrices; with ``size``, and how many elements that stores.

    The result stores what one of the two does, also where the sum is 0.

    Parameters
    ----------
    a, b
        Both csr or both csc, of one shape and dtype: float32, float64, complex64 or complex128.
    alpha, beta
        Factors.
    size
        As for ``fromdense``; at most the elements of ``a`` and ``b`` together are needed.
    """

    a: SparseField
    b: SparseField
    _: KW_ONLY
    alpha: complex = 1.0
    beta: complex = 1.0

    def __post_init__(self) -> None:
        set_fields(self, a=parts_of("a", self.a), b=parts_of("b", self.b))
        set_fields(self, alpha=scalar("alpha", self.alpha), beta=scalar("beta", self.beta))

    def plan(self) -> Plan:
        a, b = sparse_of("a", self.a), sparse_of("b", self.b)
        dtype = same_dtype(a=a.data, b=b.data)
        check_wide(self, dtype)
        if a.format != b.format or a.format not in ("csr", "csc") or a.shape != b.shape or a.indices.dtype is not b.indices.dtype:
            raise InvalidArgumentError(
                f"a is {a.format} of shape {a.shape}, b is {b.format} of shape {b.shape}, indices are {a.indices.dtype.value} and "
                f"{b.indices.dtype.value}",
                remedy="Give two of csr, or two of csc, of one shape.",
            )
        for name, value in (("alpha", self.alpha), ("beta", self.beta)):
            factor(name, value, dtype)
        room, index = self.room(a.nnz + b.nnz), a.indices.dtype
        creates = Spec((room,), dtype), Spec((room,), index), Spec(a.indptr.shape, index), COUNT
        return Plan((*a.refs, *b.refs), (), creates, status=STRUCTURE)

    def result(self, refs: tuple[AccelRef, ...]) -> tuple[SparseRef, AccelRef]:
        data, indices, indptr, count = refs
        a = sparse_of("a", self.a)
        return SparseRef(a.format, data, indices, indptr, a.shape), count

    @classmethod
    def trimmed(cls, made: tuple[SparseRef, AccelRef], count: int) -> SparseRef:
        return made[0].trimmed(count)


def _factors_of_product(op: Any) -> tuple[SparseRef, SparseRef]:
    """Return both matrices of a sparse product, if they have one."""
    a, b = sparse_of("a", op.a), sparse_of("b", op.b)
    check_wide(op, same_dtype(a=a.data, b=b.data))
    if a.format != b.format or a.format not in ("csr", "csc") or a.indices.dtype is not b.indices.dtype:
        raise InvalidArgumentError(
            f"a is {a.format}, b is {b.format}, indices are {a.indices.dtype.value} and {b.indices.dtype.value}",
            remedy="Give two of csr, or two of csc.",
        )
    if a.shape[1] != b.shape[0]:
        raise no_product(a.shape, b.shape)
    if isinstance(op.workspace, bool) or not isinstance(op.workspace, int) or op.workspace < 0:
        raise InvalidArgumentError(f"workspace is {op.workspace!r}", remedy="Give bytes, as an int of 0 or more.")
    return a, b


@op("sparse")
class SpgemmSize(FamilyOp):
    """What ``spgemm(a, b)`` needs, as two int64: bytes of ``workspace``, and how many products of elements there are, which ``size`` need not exceed.

    On CUDA the number of products is -1 if ``workspace`` is too small to count them. The first number is then how many bytes are enough for that.

    Parameters
    ----------
    a, b
        As for ``spgemm``.
    workspace
        How many bytes the library may count in.
    """

    a: SparseField
    b: SparseField
    _: KW_ONLY
    workspace: int = 0

    def __post_init__(self) -> None:
        set_fields(self, a=parts_of("a", self.a), b=parts_of("b", self.b))

    def plan(self) -> Plan:
        a, b = _factors_of_product(self)
        return Plan((*a.refs, *b.refs), (), (Spec((2,), DType.INT64),), status=STRUCTURE)


@op("sparse")
class Spgemm(SizedOp[SparseRef, tuple[SparseRef, AccelRef]]):
    """``alpha * a @ b`` of two sparse matrices; with ``size``, and how many elements that stores.

    The result stores an element wherever both matrices store factors of one, also where the sum is 0.

    Parameters
    ----------
    a, b
        (m, k) and (k, n), both csr or both csc, of one dtype: float32, float64, complex64 or complex128.
    alpha
        Factor.
    size
        As for ``fromdense``. A device finds out what is needed; a batch needs it, and on CUDA stores no element if it is too small. CUDA graphs refuse the op.
    workspace
        How many bytes the library may work in. A device finds out; a batch on CUDA needs what ``spgemm_size`` says.
    """

    a: SparseField
    b: SparseField
    _: KW_ONLY
    alpha: complex = 1.0
    workspace: int = 0

    def __post_init__(self) -> None:
        set_fields(self, a=parts_of("a", self.a), b=parts_of("b", self.b), alpha=scalar("alpha", self.alpha))

    def plan(self) -> Plan:
        a, b = _factors_of_product(self)
        factor("alpha", self.alpha, a.dtype)
        room, index, marks = self.room(a.shape[0] * b.shape[1]), a.indices.dtype, 1 + (b.shape[1] if a.format == "csc" else a.shape[0])
        creates = Spec((room,), a.dtype), Spec((room,), index), Spec((marks,), index), COUNT
        return Plan((*a.refs, *b.refs), (), creates, status=STRUCTURE)

    def result(self, refs: tuple[AccelRef, ...]) -> tuple[SparseRef, AccelRef]:
        data, indices, indptr, count = refs
        a, b = sparse_of("a", self.a), sparse_of("b", self.b)
        return SparseRef(a.format, data, indices, indptr, (a.shape[0], b.shape[1])), count

    @classmethod
    def trimmed(cls, made: tuple[SparseRef, AccelRef], count: int) -> SparseRef:
        return made[0].trimmed(count)
