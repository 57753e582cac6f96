"""Sparse matrices in other formats, as dense ones and made of them."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import ClassVar

from accel.dtype import DType
from accel.errors import InvalidArgumentError, UnsupportedError
from accel.ops.base import FamilyOp, Plan, SizedOp, Spec, not_aliased, op, operand, result_in
from accel.ops.fields import set_fields
from accel.ops.sparse_operands import COUNT, INT32, STRUCTURE, not_of_blocks
from accel.ref import AccelRef
from accel.sparse_ref import ELEMENTS, SparseField, SparseFormat, SparseRef, parts_of, sparse_of

__all__ = ["Diagonal", "Fromdense", "Tocoo", "Tocsc", "Tocsr", "Todense"]


@op("sparse")
class _Conversion(FamilyOp[SparseRef]):
    """A copy of ``a`` in another format, or in the same one."""

    target: ClassVar[SparseFormat]

    a: SparseField

    def __post_init__(self) -> None:
        """Convert ``a``; see :mod:`accel.ops.fields`."""
        set_fields(self, a=parts_of("a", self.a))

    def plan(self) -> Plan:
        a = sparse_of("a", self.a)
        index = a.indices.dtype
        if a.format == "bsr":
            if self.target != "csr":
                raise not_of_blocks()
            if a.nnz > INT32 and index is DType.INT32:
                raise InvalidArgumentError(f"{a.nnz} elements cannot be counted in int32", remedy="Give indices of int64.")
        marks = a.nnz if self.target == "coo" else 1 + (a.shape[1] if self.target == "csc" else a.shape[0])
        return Plan(a.refs, (), (Spec((a.nnz,), a.dtype), Spec((a.nnz,), index), Spec((marks,), index)), status=STRUCTURE)

    def result(self, refs: tuple[AccelRef, ...]) -> SparseRef:
        data, indices, indptr = refs
        return SparseRef(self.target, data, indices, indptr, sparse_of("a", self.a).shape)


@op()
class Tocsr(_Conversion):
    """``a`` in the format csr: a copy; of bsr, with all elements of the blocks. The transpose of a matrix is ``tocsr(a.T)``.

    Parameters
    ----------
    a
        Of any format and dtype.
    """

    target: ClassVar[SparseFormat] = "csr"


@op()
class Tocsc(_Conversion):
    """``a`` in the format csc: a copy.

    Parameters
    ----------
    a
        csr, csc or coo, of any dtype.
    """

    target: ClassVar[SparseFormat] = "csc"


@op()
class Tocoo(_Conversion):
    """``a`` in the format coo, its elements in the order of rows: a copy.

    Parameters
    ----------
    a
        csr, csc or coo, of any dtype.
    """

    target: ClassVar[SparseFormat] = "coo"


@op("sparse")
class Todense(FamilyOp):
    """``a`` as a dense matrix.

    Parameters
    ----------
    a
        Of any format and dtype.
    out
        Buffer to write; none of the operands.
    """

    a: SparseField
    _: KW_ONLY
    out: AccelRef | None = None

    def __post_init__(self) -> None:
        """Convert ``a``; see :mod:`accel.ops.fields`."""
        set_fields(self, a=parts_of("a", self.a))

    def plan(self) -> Plan:
        a = sparse_of("a", self.a)
        not_aliased(self.out, data=a.data, indices=a.indices, indptr=a.indptr)
        return Plan(a.refs, *result_in(self.out, a.shape, a.dtype), status=STRUCTURE)


@op("sparse")
class Diagonal(FamilyOp):
    """The diagonal of ``a``, with 0 where it stores nothing: (min(m, n),).

    Parameters
    ----------
    a
        csr, csc or coo, of any dtype.
    out
        Buffer to write; none of the operands.
    """

    a: SparseField
    _: KW_ONLY
    out: AccelRef | None = None

    def __post_init__(self) -> None:
        """Convert ``a``; see :mod:`accel.ops.fields`."""
        set_fields(self, a=parts_of("a", self.a))

    def plan(self) -> Plan:
        a = sparse_of("a", self.a)
        if a.format == "bsr":
            raise not_of_blocks()
        not_aliased(self.out, data=a.data, indices=a.indices, indptr=a.indptr)
        return Plan(a.refs, *result_in(self.out, (min(a.shape),), a.dtype), status=STRUCTURE)


@op("sparse")
class Fromdense(SizedOp[SparseRef, tuple[SparseRef, AccelRef]]):
    """The elements of a dense matrix that are not 0, as csr; with ``size``, and their number.

    Parameters
    ----------
    x
        (m, n): float16, bfloat16, float32, float64, complex64 or complex128. NaN is not 0.
    size
        How many elements there is room for. A batch or graph needs it, and gets a matrix with that much room and then the number, a 0-d int64: after the
        block ``matrix.trimmed(number)`` has as many. A device returns that, and raises if ``size`` is too small; without ``size`` there is room for all of x.
    """

    x: AccelRef

    def plan(self) -> Plan:
        x = operand("x", self.x, ndim=2)
        if x.dtype not in ELEMENTS:
            raise UnsupportedError(f"fromdense is not offered for {x.dtype.value}", remedy="Convert the elements: device.elementwise.cast.")
        room, index = self.room(x.size), self.index_type
        return Plan((x,), (), (Spec((room,), x.dtype), Spec((room,), index), Spec((x.shape[0] + 1,), index), COUNT))

    @property
    def index_type(self) -> DType:
        """Dtype of the indices."""
        return DType.INT32 if max(self.x.size, *self.x.shape) <= INT32 else DType.INT64

    def result(self, refs: tuple[AccelRef, ...]) -> tuple[SparseRef, AccelRef]:
        data, indices, indptr, count = refs
        rows, columns = self.x.shape
        return SparseRef("csr", data, indices, indptr, (rows, columns)), count

    @classmethod
    def trimmed(cls, made: tuple[SparseRef, AccelRef], count: int) -> SparseRef:
        return made[0].trimmed(count)
