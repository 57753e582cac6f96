"""Products of sparse matrices, conversions between their formats, and triangular systems. Names and meaning are those of ``scipy.sparse``."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from accel.compute import Transpose
from accel.dtype import DType
from accel.errors import AccelError, InvalidArgumentError, LinAlgError, UnsupportedError
from accel.ops.base import FamilyOp, Plan, Shape, SizedOp, Spec, Status, factor, not_aliased, operand, result_in, same_dtype, scalar
from accel.ops.blas import TransposeField, transpose_of
from accel.ops.family import Family
from accel.ops.fields import set_fields
from accel.ops.namespace import OpNamespace, method, sized_method
from accel.ref import AccelRef
from accel.sparse_ref import ELEMENTS, SparseField, SparseFormat, SparseRef, parts_of, sparse_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

__all__ = [
    "FAMILY",
    "Add",
    "Diagonal",
    "Fromdense",
    "Sddmm",
    "SparseOps",
    "Spmm",
    "Spmv",
    "SpsolveTriangular",
    "Tocoo",
    "Tocsc",
    "Tocsr",
    "Todense",
]

M = TypeVar("M")

_NONE = Transpose.NONE
_COUNT = Spec((), DType.INT64)
_INT32 = 2**31 - 1
_WIDE = (DType.FLOAT32, DType.FLOAT64, DType.COMPLEX64, DType.COMPLEX128)


def _applied(shape: tuple[int, ...], transpose: TransposeField) -> tuple[int, int]:
    """Return the shape of ``op(a)``."""
    rows, columns = shape
    return (rows, columns) if transpose is _NONE else (columns, rows)


def _wide_only(op: FamilyOp[Any], dtype: DType) -> None:
    if dtype not in _WIDE:
        raise UnsupportedError(f"{op.kind} is not offered for {dtype.value}", remedy="Convert the elements: device.elementwise.cast.")


def _factors(dtype: DType, out: AccelRef | None, alpha: complex, beta: complex) -> None:
    """See that the factors fit the elements, and that there is something for ``beta`` to scale."""
    factor("alpha", alpha, dtype)
    if factor("beta", beta, dtype) and out is None:
        raise InvalidArgumentError("beta scales out, which is not given", remedy="Pass out=, or leave beta at 0.")


def _no_product(a: tuple[int, int], b: Shape) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"op(a) is {a[0]} x {a[1]} and is to be multiplied by {b}", remedy="Give as many rows as op(a) has columns."
    )


@dataclass(frozen=True, eq=False, slots=True)
class Spmv(FamilyOp):
    """``alpha * op(a) @ x + beta * out`` of a sparse matrix and a vector.

    Parameters
    ----------
    a
        (m, n) after ``op``, of any format. float16 and bfloat16 are summed in float32.
    x
        (n,), of the dtype of ``a``.
    out
        Buffer to write, (m,); none of the operands.
    alpha, beta
        Factors. With a ``beta`` that is not 0, ``out`` has to be given.
    transpose_a
        What ``op`` does.
    """

    library: ClassVar[str] = "sparse"
    kind: ClassVar[str] = "spmv"

    a: SparseField
    x: AccelRef
    _: KW_ONLY
    out: AccelRef | None = None
    alpha: complex = 1.0
    beta: complex = 0.0
    transpose_a: TransposeField = _NONE

    def __post_init__(self) -> None:
        """Convert fields; see :mod:`accel.ops.fields`."""
        set_fields(self, a=parts_of("a", self.a), alpha=scalar("alpha", self.alpha), beta=scalar("beta", self.beta))
        set_fields(self, transpose_a=transpose_of(self.transpose_a))

    def plan(self) -> Plan:
        """See :meth:`KernelOp.plan`."""
        a, x = sparse_of("a", self.a), operand("x", self.x, ndim=1)
        dtype = same_dtype(a=a.data, x=x)
        m, n = _applied(a.shape, self.transpose_a)
        if x.shape != (n,):
            raise _no_product((m, n), x.shape)
        _factors(dtype, self.out, self.alpha, self.beta)
        not_aliased(self.out, data=a.data, indices=a.indices, indptr=a.indptr, x=x)
        writes, creates = result_in(self.out, (m,), dtype)
        return Plan((*a.refs, x), writes, creates, updates=bool(self.beta))


@dataclass(frozen=True, eq=False, slots=True)
class Spmm(FamilyOp):
    """``alpha * op(a) @ op(b) + beta * out`` of a sparse and a dense matrix.

    Parameters
    ----------
    a
        (m, k) after ``op``, of any format. float16 and bfloat16 are summed in float32.
    b
        (k, n) after ``op``, of the dtype of ``a``.
    out
        Buffer to write, (m, n); none of the operands.
    alpha, beta
        As for ``spmv``.
    transpose_a, transpose_b
        What ``op`` does.
    """

    library: ClassVar[str] = "sparse"
    kind: ClassVar[str] = "spmm"

    a: SparseField
    b: AccelRef
    _: KW_ONLY
    out: AccelRef | None = None
    alpha: complex = 1.0
    beta: complex = 0.0
    transpose_a: TransposeField = _NONE
    transpose_b: TransposeField = _NONE

    def __post_init__(self) -> None:
        """Convert fields; see :mod:`accel.ops.fields`."""
        set_fields(self, a=parts_of("a", self.a), alpha=scalar("alpha", self.alpha), beta=scalar("beta", self.beta))
        set_fields(self, transpose_a=transpose_of(self.transpose_a), transpose_b=transpose_of(self.transpose_b))

    def plan(self) -> Plan:
        """See :meth:`KernelOp.plan`."""
        a, b = sparse_of("a", self.a), operand("b", self.b, ndim=2)
        dtype = same_dtype(a=a.data, b=b)
        (m, k), (k_b, n) = _applied(a.shape, self.transpose_a), _applied(b.shape, self.transpose_b)
        if k != k_b:
            raise _no_product((m, k), (k_b, n))
        _factors(dtype, self.out, self.alpha, self.beta)
        not_aliased(self.out, data=a.data, indices=a.indices, indptr=a.indptr, b=b)
        writes, creates = result_in(self.out, (m, n), dtype)
        return Plan((*a.refs, b), writes, creates, updates=bool(self.beta))


@dataclass(frozen=True, eq=False, slots=True)
class Sddmm(FamilyOp[SparseRef]):
    """``alpha * (op(a) @ op(b))`` where ``pattern`` has elements, plus ``beta`` times these: a product of dense matrices of which few elements are wanted.

    The result shares ``indices`` and ``indptr`` with the pattern.

    Parameters
    ----------
    a, b
        (m, k) and (k, n), dense, after ``op``: float32, float64, complex64 or complex128.
    pattern
        csr, (m, n), of the same dtype.
    alpha, beta
        Factors.
    transpose_a, transpose_b
        What ``op`` does.
    """

    library: ClassVar[str] = "sparse"
    kind: ClassVar[str] = "sddmm"

    a: AccelRef
    b: AccelRef
    pattern: SparseField
    _: KW_ONLY
    alpha: complex = 1.0
    beta: complex = 0.0
    transpose_a: TransposeField = _NONE
    transpose_b: TransposeField = _NONE

    def __post_init__(self) -> None:
        """Convert fields; see :mod:`accel.ops.fields`."""
        set_fields(self, pattern=parts_of("pattern", self.pattern), alpha=scalar("alpha", self.alpha), beta=scalar("beta", self.beta))
        set_fields(self, transpose_a=transpose_of(self.transpose_a), transpose_b=transpose_of(self.transpose_b))

    def plan(self) -> Plan:
        """See :meth:`KernelOp.plan`."""
        a, b, pattern = operand("a", self.a, ndim=2), operand("b", self.b, ndim=2), sparse_of("pattern", self.pattern)
        dtype = same_dtype(a=a, b=b, pattern=pattern.data)
        _wide_only(self, dtype)
        if pattern.format != "csr":
            raise InvalidArgumentError(f"pattern is {pattern.format}", remedy="Convert it first: await device.sparse.tocsr(pattern).")
        (m, k), (k_b, n) = _applied(a.shape, self.transpose_a), _applied(b.shape, self.transpose_b)
        if k != k_b or pattern.shape != (m, n):
            raise InvalidArgumentError(
                f"op(a) is {m} x {k}, op(b) is {k_b} x {n} and pattern {pattern.shape}", remedy="Give the pattern of their product."
            )
        for name, value in (("alpha", self.alpha), ("beta", self.beta)):
            factor(name, value, dtype)
        return Plan((a, b, *pattern.refs), (), (Spec((pattern.nnz,), dtype),))

    def result(self, refs: tuple[AccelRef, ...]) -> SparseRef:
        """See :meth:`KernelOp.result`."""
        pattern = sparse_of("pattern", self.pattern)
        return SparseRef("csr", refs[0], pattern.indices, pattern.indptr, pattern.shape)


@dataclass(frozen=True, eq=False, slots=True)
class _Conversion(FamilyOp[SparseRef]):
    """A copy of ``a`` in another format, or in the same one."""

    library: ClassVar[str] = "sparse"
    target: ClassVar[SparseFormat]

    a: SparseField

    def __post_init__(self) -> None:
        """Convert ``a``; see :mod:`accel.ops.fields`."""
        set_fields(self, a=parts_of("a", self.a))

    def plan(self) -> Plan:
        """See :meth:`KernelOp.plan`."""
        a = sparse_of("a", self.a)
        index = a.indices.dtype
        marks = a.nnz if self.target == "coo" else 1 + (a.shape[1] if self.target == "csc" else a.shape[0])
        return Plan(a.refs, (), (Spec((a.nnz,), a.dtype), Spec((a.nnz,), index), Spec((marks,), index)))

    def result(self, refs: tuple[AccelRef, ...]) -> SparseRef:
        """See :meth:`KernelOp.result`."""
        data, indices, indptr = refs
        return SparseRef(self.target, data, indices, indptr, sparse_of("a", self.a).shape)


@dataclass(frozen=True, eq=False, slots=True)
class Tocsr(_Conversion):
    """``a`` in the format csr: a copy. The transpose of a matrix is ``tocsr(a.T)``.

    Parameters
    ----------
    a
        Of any format and dtype.
    """

    kind: ClassVar[str] = "tocsr"
    target: ClassVar[SparseFormat] = "csr"


@dataclass(frozen=True, eq=False, slots=True)
class Tocsc(_Conversion):
    """``a`` in the format csc: a copy.

    Parameters
    ----------
    a
        Of any format and dtype.
    """

    kind: ClassVar[str] = "tocsc"
    target: ClassVar[SparseFormat] = "csc"


@dataclass(frozen=True, eq=False, slots=True)
class Tocoo(_Conversion):
    """``a`` in the format coo, its elements in the order of rows: a copy.

    Parameters
    ----------
    a
        Of any format and dtype.
    """

    kind: ClassVar[str] = "tocoo"
    target: ClassVar[SparseFormat] = "coo"


@dataclass(frozen=True, eq=False, slots=True)
class Todense(FamilyOp):
    """``a`` as a dense matrix.

    Parameters
    ----------
    a
        Of any format and dtype.
    out
        Buffer to write; none of the operands.
    """

    library: ClassVar[str] = "sparse"
    kind: ClassVar[str] = "todense"

    a: SparseField
    _: KW_ONLY
    out: AccelRef | None = None

    def __post_init__(self) -> None:
        """Convert ``a``; see :mod:`accel.ops.fields`."""
        set_fields(self, a=parts_of("a", self.a))

    def plan(self) -> Plan:
        """See :meth:`KernelOp.plan`."""
        a = sparse_of("a", self.a)
        not_aliased(self.out, data=a.data, indices=a.indices, indptr=a.indptr)
        writes, creates = result_in(self.out, a.shape, a.dtype)
        return Plan(a.refs, writes, creates)


@dataclass(frozen=True, eq=False, slots=True)
class Diagonal(FamilyOp):
    """The diagonal of ``a``, with 0 where it stores nothing: (min(m, n),).

    Parameters
    ----------
    a
        Of any format and dtype.
    out
        Buffer to write; none of the operands.
    """

    library: ClassVar[str] = "sparse"
    kind: ClassVar[str] = "diagonal"

    a: SparseField
    _: KW_ONLY
    out: AccelRef | None = None

    def __post_init__(self) -> None:
        """Convert ``a``; see :mod:`accel.ops.fields`."""
        set_fields(self, a=parts_of("a", self.a))

    def plan(self) -> Plan:
        """See :meth:`KernelOp.plan`."""
        a = sparse_of("a", self.a)
        not_aliased(self.out, data=a.data, indices=a.indices, indptr=a.indptr)
        writes, creates = result_in(self.out, (min(a.shape),), a.dtype)
        return Plan(a.refs, writes, creates)


@dataclass(frozen=True, eq=False, slots=True)
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

    library: ClassVar[str] = "sparse"
    kind: ClassVar[str] = "fromdense"

    x: AccelRef

    def plan(self) -> Plan:
        """See :meth:`KernelOp.plan`."""
        x = operand("x", self.x, ndim=2)
        if x.dtype not in ELEMENTS:
            raise UnsupportedError(f"fromdense is not offered for {x.dtype.value}", remedy="Convert the elements: device.elementwise.cast.")
        room, index = self.room(x.size), self.index_type
        return Plan((x,), (), (Spec((room,), x.dtype), Spec((room,), index), Spec((x.shape[0] + 1,), index), _COUNT))

    @property
    def index_type(self) -> DType:
        """Dtype of the indices."""
        return DType.INT32 if max(self.x.size, *self.x.shape) <= _INT32 else DType.INT64

    def result(self, refs: tuple[AccelRef, ...]) -> tuple[SparseRef, AccelRef]:
        """See :meth:`KernelOp.result`."""
        data, indices, indptr, count = refs
        rows, columns = self.x.shape
        return SparseRef("csr", data, indices, indptr, (rows, columns)), count

    @classmethod
    def trimmed(cls, made: tuple[SparseRef, AccelRef], count: int) -> SparseRef:
        """See :meth:`SizedOp.trimmed`."""
        return made[0].trimmed(count)


@dataclass(frozen=True, eq=False, slots=True)
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

    library: ClassVar[str] = "sparse"
    kind: ClassVar[str] = "add"

    a: SparseField
    b: SparseField
    _: KW_ONLY
    alpha: complex = 1.0
    beta: complex = 1.0

    def __post_init__(self) -> None:
        """Convert fields; see :mod:`accel.ops.fields`."""
        set_fields(self, a=parts_of("a", self.a), b=parts_of("b", self.b))
        set_fields(self, alpha=scalar("alpha", self.alpha), beta=scalar("beta", self.beta))

    def plan(self) -> Plan:
        """See :meth:`KernelOp.plan`."""
        a, b = sparse_of("a", self.a), sparse_of("b", self.b)
        dtype = same_dtype(a=a.data, b=b.data)
        _wide_only(self, dtype)
        if a.format != b.format or a.format == "coo" or a.shape != b.shape or a.indices.dtype is not b.indices.dtype:
            raise InvalidArgumentError(
                f"a is {a.format} of shape {a.shape}, b is {b.format} of shape {b.shape}, indices are {a.indices.dtype.value} and "
                f"{b.indices.dtype.value}",
                remedy="Give two of csr, or two of csc, of one shape.",
            )
        for name, value in (("alpha", self.alpha), ("beta", self.beta)):
            factor(name, value, dtype)
        room, index = self.room(a.nnz + b.nnz), a.indices.dtype
        return Plan((*a.refs, *b.refs), (), (Spec((room,), dtype), Spec((room,), index), Spec(a.indptr.shape, index), _COUNT))

    def result(self, refs: tuple[AccelRef, ...]) -> tuple[SparseRef, AccelRef]:
        """See :meth:`KernelOp.result`."""
        data, indices, indptr, count = refs
        a = sparse_of("a", self.a)
        return SparseRef(a.format, data, indices, indptr, a.shape), count

    @classmethod
    def trimmed(cls, made: tuple[SparseRef, AccelRef], count: int) -> SparseRef:
        """See :meth:`SizedOp.trimmed`."""
        return made[0].trimmed(count)


def _failure(status: np.ndarray[Any, Any]) -> AccelError | None:
    """Return the error of a status: the number, from 1 on, of the first row whose diagonal element is 0 or is not stored."""
    info = int(status)
    return LinAlgError(f"the matrix is singular: row {info - 1} has 0 on the diagonal", info=info) if info else None


_INFO = Spec((), DType.INT32)
_STATUS = Status(_INFO, _failure)


@dataclass(frozen=True, eq=False, slots=True)
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

    library: ClassVar[str] = "sparse"
    kind: ClassVar[str] = "spsolve_triangular"

    a: SparseField
    b: AccelRef
    lower: bool = True
    _: KW_ONLY
    unit_diagonal: bool = False
    out: AccelRef | None = None
    transpose_a: TransposeField = _NONE
    check: bool = True

    def __post_init__(self) -> None:
        """Convert fields; see :mod:`accel.ops.fields`."""
        set_fields(self, a=parts_of("a", self.a), transpose_a=transpose_of(self.transpose_a))

    def plan(self) -> Plan:
        """See :meth:`KernelOp.plan`."""
        a, b = sparse_of("a", self.a), operand("b", self.b)
        dtype = same_dtype(a=a.data, b=b)
        _wide_only(self, dtype)
        if a.format == "coo" or a.shape[0] != a.shape[1]:
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
        return Plan((*a.refs, b), writes, (*creates, _INFO))


class SparseOps(OpNamespace[M]):
    """Sparse matrices, each a :class:`~accel.SparseRef`. Nothing is converted silently: operands have one dtype."""

    __slots__ = ()

    library: ClassVar[str] = "sparse"
    aliases: ClassVar[Mapping[str, str]] = {
        "csrmv": ".spmv(a, x)",
        "csrmm": ".spmm(a, b)",
        "to_dense": ".todense(a)",
        "toarray": ".todense(a)",
        "from_dense": ".fromdense(x)",
        "csrgeam": ".add(a, b)",
        "csr2csc": ".tocsc(a)",
        "spsv": ".spsolve_triangular(a, b)",
        "spsm": ".spsolve_triangular(a, b)",
    }

    spmv = method(Spmv)
    spmm = method(Spmm)
    tocsr = method(Tocsr)
    tocsc = method(Tocsc)
    tocoo = method(Tocoo)
    todense = method(Todense)
    diagonal = method(Diagonal)
    fromdense = sized_method(Fromdense)
    add = sized_method(Add)
    sddmm = method(Sddmm)
    spsolve_triangular = method(SpsolveTriangular)


FAMILY = Family(SparseOps)
