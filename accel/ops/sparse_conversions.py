"""Sparse matrices in other formats, as dense ones and made of them."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from accel.dtype import DType
from accel.errors import InvalidArgumentError, UnsupportedError
from accel.ops.base import FamilyOp, OutOp, Plan, Shape, SizedOp, Spec, op, operand, planned
from accel.ops.sparse_operands import COUNT, INT32, STRUCTURE, not_of_blocks, parts
from accel.ref import AccelRef
from accel.sparse_ref import ELEMENTS, SparseField, SparseFormat, SparseRef, parts_of, sparse_of

__all__ = ["Diagonal", "Fromdense", "Tocoo", "Tocsc", "Tocsr", "Todense"]


@op("sparse", convert={"a": parts_of})
class _Conversion(FamilyOp[SparseRef]):
    """A copy of ``a`` in another format, or in the same one."""

    target: ClassVar[SparseFormat]

    a: SparseField

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


@op("sparse", convert={"a": parts_of})
class Todense(OutOp):
    """``a`` as a dense matrix.

    Parameters
    ----------
    a
        Of any format and dtype.
    out
        Buffer to write; none of the operands.
    """

    a: SparseField

    def plan(self) -> Plan:
        a = sparse_of("a", self.a)
        return planned(self.out, parts(a), a.shape, a.dtype, status=STRUCTURE)


@op("sparse", convert={"a": parts_of})
class Diagonal(OutOp):
    """The diagonal of ``a``, with 0 where it stores nothing: (min(m, n),).

    Parameters
    ----------
    a
        csr, csc or coo, of any dtype.
    out
        Buffer to write; none of the operands.
    """

    a: SparseField

    def plan(self) -> Plan:
        a = sparse_of("a", self.a)
        if a.format == "bsr":
            raise not_of_blocks()
        return planned(self.out, parts(a), (min(a.shape),), a.dtype, status=STRUCTURE)


@op("sparse")
class SizedMatrix(SizedOp[SparseRef, tuple[SparseRef, AccelRef]]):
    """An op that makes a sparse matrix of as many elements as only the device finds out."""

    @abstractmethod
    def form(self) -> tuple[SparseFormat, Shape]:
        """Return the format and the shape of the matrix."""

    def result(self, refs: tuple[AccelRef, ...]) -> tuple[SparseRef, AccelRef]:
        data, indices, indptr, count = refs
        kind, (rows, columns) = self.form()
        return SparseRef(kind, data, indices, indptr, (rows, columns)), count

    @classmethod
    def trimmed(cls, made: tuple[SparseRef, AccelRef], count: int) -> SparseRef:
        return made[0].trimmed(count)


@op()
class Fromdense(SizedMatrix):
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

    def form(self) -> tuple[SparseFormat, Shape]:
        return "csr", self.x.shape
