"""Sums and products of two sparse matrices, which find out how many elements they have."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Any

from accel.dtype import DType
from accel.errors import InvalidArgumentError
from accel.ops.base import FamilyOp, Plan, Shape, Spec, factor, op, to_scalar
from accel.ops.blas_operands import FACTORS, check_factors, wide_dtype
from accel.ops.sparse_conversions import SizedMatrix
from accel.ops.sparse_operands import COUNT, STRUCTURE, no_product
from accel.sparse_ref import SparseField, SparseFormat, SparseRef, parts_of, sparse_of
from accel.values import check_count

__all__ = ["Add", "Spgemm", "SpgemmSize"]


@op(convert={"a": parts_of, "b": parts_of, **FACTORS})
class Add(SizedMatrix):
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

    def plan(self) -> Plan:
        a, b = sparse_of("a", self.a), sparse_of("b", self.b)
        dtype = wide_dtype(self, a=a.data, b=b.data)
        if a.format != b.format or a.format not in ("csr", "csc") or a.shape != b.shape or a.indices.dtype is not b.indices.dtype:
            raise InvalidArgumentError(
                f"a is {a.format} of shape {a.shape}, b is {b.format} of shape {b.shape}, indices are {a.indices.dtype.value} and "
                f"{b.indices.dtype.value}",
                remedy="Give two of csr, or two of csc, of one shape.",
            )
        check_factors(self, dtype, scales_out=False)
        room, index = self.room(a.nnz + b.nnz), a.indices.dtype
        creates = Spec((room,), dtype), Spec((room,), index), Spec(a.indptr.shape, index), COUNT
        return Plan((*a.refs, *b.refs), (), creates, status=STRUCTURE)

    def form(self) -> tuple[SparseFormat, Shape]:
        a = sparse_of("a", self.a)
        return a.format, a.shape


def _factors_of_product(op: Any) -> tuple[SparseRef, SparseRef]:
    """Return both matrices of a sparse product, if they have one."""
    a, b = sparse_of("a", op.a), sparse_of("b", op.b)
    wide_dtype(op, a=a.data, b=b.data)
    if a.format != b.format or a.format not in ("csr", "csc") or a.indices.dtype is not b.indices.dtype:
        raise InvalidArgumentError(
            f"a is {a.format}, b is {b.format}, indices are {a.indices.dtype.value} and {b.indices.dtype.value}",
            remedy="Give two of csr, or two of csc.",
        )
    if a.shape[1] != b.shape[0]:
        raise no_product(a.shape, b.shape)
    check_count("workspace", op.workspace, 0, remedy="Give bytes, as an int of 0 or more.")
    return a, b


@op("sparse", convert={"a": parts_of, "b": parts_of})
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

    def plan(self) -> Plan:
        a, b = _factors_of_product(self)
        return Plan((*a.refs, *b.refs), (), (Spec((2,), DType.INT64),), status=STRUCTURE)


@op(convert={"a": parts_of, "b": parts_of, "alpha": to_scalar})
class Spgemm(SizedMatrix):
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

    def plan(self) -> Plan:
        a, b = _factors_of_product(self)
        factor("alpha", self.alpha, a.dtype)
        room, index, marks = self.room(a.shape[0] * b.shape[1]), a.indices.dtype, 1 + (b.shape[1] if a.format == "csc" else a.shape[0])
        creates = Spec((room,), a.dtype), Spec((room,), index), Spec((marks,), index), COUNT
        return Plan((*a.refs, *b.refs), (), creates, status=STRUCTURE)

    def form(self) -> tuple[SparseFormat, Shape]:
        a, b = sparse_of("a", self.a), sparse_of("b", self.b)
        return a.format, (a.shape[0], b.shape[1])
