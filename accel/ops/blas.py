"""Linear algebra ops. Matrices are C-order, as numpy users mean them; kernels translate to the column-major convention of BLAS."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from accel.enums import Transpose
from accel.errors import InvalidArgumentError, UnsupportedError
from accel.ops.base import (
    FamilyOp,
    OutOp,
    Plan,
    Shape,
    Spec,
    check_tf32,
    factor,
    not_aliased,
    op,
    operand,
    plan_of,
    planned,
    result_in,
    same_dtype,
    to_scalar,
)
from accel.ops.blas_grouped import GemmGrouped
from accel.ops.blas_matrices import Geam, Ger, Hemm, Herk, Symm, Syrk
from accel.ops.blas_operands import (
    FACTORS,
    TRANSPOSES,
    TransposeField,
    applied,
    are_rows,
    check_factors,
    is_stored,
    no_product,
    same_shape,
    stored,
    to_transpose,
    transpose_of,
)
from accel.ops.blas_triangular import Trmm, Trmv, Trsm, Trsv
from accel.ops.blas_vectors import Asum, Iamax, Iamin, Rot, Swap
from accel.ops.family import Family
from accel.ops.fields import convert_fields
from accel.ops.namespace import M, OpNamespace, method
from accel.ref import AccelRef, overlap

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


__all__ = [
    "FAMILY", "Axpy", "BlasOps", "Dot", "Dotc", "Gemm", "GemmBatched", "GemmGrouped", "Gemv", "Nrm2", "Product", "Scal", "TransposeField", "apart",
    "products_of", "stored", "transpose_of",
]  # fmt: skip


_NONE = Transpose.NONE


def _product(a: Shape, b: Shape, transpose_a: Transpose, transpose_b: Transpose) -> Shape:
    m, k = applied(a, transpose_a)
    k_b, n = applied(b, transpose_b)
    if k != k_b:
        raise no_product(a, b, k, k_b)
    return m, n


@op("blas", convert=TRANSPOSES | FACTORS)
class ProductForm(OutOp):
    """What a product of matrices and a batch of them share."""

    a: AccelRef
    b: AccelRef
    _: KW_ONLY
    alpha: complex = 1.0
    beta: complex = 0.0
    transpose_a: TransposeField = _NONE
    transpose_b: TransposeField = _NONE
    allow_tf32: bool = False

    def takes_strided(self, ref: AccelRef) -> bool:
        if ref is self.out:
            (rows, columns), (*apart, down, right) = ref.shape[-2:], ref.strides
            return are_rows(rows, columns, down, right) and all(step >= rows * down for step in apart)
        flags = [flag for each, flag in ((self.a, self.transpose_a), (self.b, self.transpose_b)) if each is ref]
        return all(is_stored(ref, transpose_of(flag)) for flag in flags)


@op()
class Gemm(ProductForm):
    """``alpha * op(a) @ op(b) + beta * out``.

    Parameters
    ----------
    a, b
        Matrices of one dtype, ``op(a)`` of shape (m, k) and ``op(b)`` of shape (k, n).
    out
        (m, n); needed where ``beta`` is not 0. It is neither ``a`` nor ``b``.
    alpha, beta
        Scaling factors. With ``beta == 0`` the old contents of ``out`` are not read.
    transpose_a, transpose_b
        What ``op`` does.
    allow_tf32
        Permits a device to round the factors of float32 matrices to TF32 (10 bits of mantissa), where that is faster; sums stay float32. A device
        without TF32 computes in full float32, which honours it. Rejected with any other dtype.
    """

    def __post_init__(self) -> None:
        if not (self.transpose_a is _NONE is self.transpose_b and type(self.alpha) is float is type(self.beta)):  # mostly all are
            convert_fields(self)

    def plan(self) -> Plan:
        a, b, out = self.a, self.b, self.out
        if type(a) is not AccelRef or type(b) is not AccelRef or len(a.shape) != 2 or len(b.shape) != 2:  # nearly always they are
            operand("a", a, ndim=2)
            operand("b", b, ndim=2)
        dtype = a.dtype
        if b.dtype is not dtype:
            same_dtype(a=a, b=b)
        m, k = a.shape if self.transpose_a is _NONE else a.shape[::-1]
        k_b, n = b.shape if self.transpose_b is _NONE else b.shape[::-1]
        if k != k_b:
            raise no_product(a.shape, b.shape, k, k_b)
        if type(self.alpha) is not float or type(self.beta) is not float or self.beta:
            check_factors(self, dtype)
        if self.allow_tf32 is not False:
            check_tf32(self.allow_tf32, dtype)
        if out is None:
            return plan_of(((a, b), (), (Spec((m, n), dtype),), "gemm", dtype, False, None))
        if type(out) is not AccelRef or out.shape != (m, n) or out.dtype is not dtype:
            result_in(out, (m, n), dtype)
        if out.buffer == a.buffer or out.buffer == b.buffer:
            not_aliased(out, a=a, b=b)
        return plan_of(((a, b), (out,), (), "gemm", dtype, self.beta != 0, None))


@op()
class GemmBatched(ProductForm):
    """``alpha * op(a[i]) @ op(b[i]) + beta * out[i]`` for every i, as one call.

    Parameters
    ----------
    a, b
        Of shape (batch, rows, columns); one of them may be a single matrix of two dimensions, used for the whole batch.
    out, alpha, beta, transpose_a, transpose_b, allow_tf32
        As in :class:`Gemm`; ``out`` is (batch, m, n).
    """

    @property
    def batch_count(self) -> int:
        """Number of products."""
        return self.a.shape[0] if len(self.a.shape) == 3 else self.b.shape[0]

    def plan(self) -> Plan:
        a, b = operand("a", self.a), operand("b", self.b)
        dtype = same_dtype(a=a, b=b)
        dimensions = (len(a.shape), len(b.shape))
        if dimensions not in {(3, 3), (2, 3), (3, 2)}:
            raise InvalidArgumentError(
                f"a has shape {a.shape} and b {b.shape}", remedy="Give (batch, rows, columns); one of them may be (rows, columns)."
            )
        if dimensions == (3, 3) and a.shape[0] != b.shape[0]:
            raise InvalidArgumentError(f"a has {a.shape[0]} matrices and b has {b.shape[0]}", remedy="Give both as many.")
        check_factors(self, dtype)
        check_tf32(self.allow_tf32, dtype)
        shape = (self.batch_count, *_product(a.shape, b.shape, transpose_of(self.transpose_a), transpose_of(self.transpose_b)))
        return planned(self.out, {"a": a, "b": b}, shape, dtype, "batched_gemm", updates=bool(self.beta))


@op("blas", convert={"transpose_a": to_transpose, **FACTORS})
class Gemv(OutOp):
    """``alpha * op(a) @ x + beta * out``, with ``op(a)`` of shape (m, n), x of shape (n,) and out of shape (m,)."""

    a: AccelRef
    x: AccelRef
    _: KW_ONLY
    alpha: complex = 1.0
    beta: complex = 0.0
    transpose_a: TransposeField = _NONE

    def takes_strided(self, ref: AccelRef) -> bool:
        return is_stored(ref, transpose_of(self.transpose_a)) if ref is self.a else ref.strides[0] > 0  # as a matrix of one row

    def plan(self) -> Plan:
        a, x = operand("a", self.a, ndim=2), operand("x", self.x, ndim=1)
        dtype = same_dtype(a=a, x=x)
        m, n = applied(a.shape, transpose_of(self.transpose_a))
        if n != x.shape[0]:
            raise InvalidArgumentError(f"op(a) has {n} columns and x has {x.shape[0]} elements", remedy="Give as many elements as columns.")
        check_factors(self, dtype)
        return planned(self.out, {"a": a, "x": x}, (m,), dtype, "gemm", updates=bool(self.beta))


@op("blas", convert={"alpha": to_scalar})
class Axpy(FamilyOp):
    """``y += alpha * x``, in place; any one shape. The result is ``y``."""

    x: AccelRef
    y: AccelRef
    _: KW_ONLY
    alpha: complex = 1.0

    def plan(self) -> Plan:
        x, y = operand("x", self.x), operand("y", self.y)
        dtype = same_dtype(x=x, y=y)
        same_shape(x, y)
        factor("alpha", self.alpha, dtype)
        if overlap(x, y):
            what = "are the same buffer" if x is y else "overlap: they are views of one buffer"
            raise InvalidArgumentError(f"x and y {what}", remedy="Use blas.scal(x, 1 + alpha), or parts that do not overlap.")
        return Plan((x,), (y,), (), "gemm", dtype, updates=True)


@op("blas")
class Dot(OutOp):
    """The sum of ``x * y`` (nothing is conjugated) as a 0-d buffer; any one shape."""

    x: AccelRef
    y: AccelRef

    def plan(self) -> Plan:
        x, y = operand("x", self.x), operand("y", self.y)
        dtype = same_dtype(x=x, y=y)
        same_shape(x, y)
        return planned(self.out, {"x": x, "y": y}, (), dtype, "gemm")


@op()
class Dotc(Dot):
    """The sum of ``conj(x) * y`` as a 0-d buffer; any one shape. Of real buffers it is ``dot``."""


@op("blas")
class Nrm2(OutOp):
    """The Euclidean norm of real ``x`` as a 0-d buffer; any shape."""

    x: AccelRef

    def plan(self) -> Plan:
        x = operand("x", self.x)
        if x.dtype.is_complex:
            raise UnsupportedError(
                f"nrm2 is for real buffers, and x is {x.dtype.value}",
                remedy="Put the array as real numbers: array.view('float32') of complex64, or 'float64' of complex128, has the same norm.",
            )
        return planned(self.out, {"x": x}, (), x.dtype, "unary.sqrt")


@op("blas", convert={"alpha": to_scalar})
class Scal(FamilyOp):
    """``x *= alpha``, in place; any shape. The result is ``x``."""

    x: AccelRef
    alpha: complex

    def plan(self) -> Plan:
        x = operand("x", self.x)
        factor("alpha", self.alpha, x.dtype)
        return Plan((), (x,), (), "gemm", x.dtype, updates=True)


class BlasOps(OpNamespace[M]):
    """Linear algebra. Matrices are C-order: ``gemm(a, b)`` is numpy's ``a @ b``.

    All operands of a call have one dtype: float32, float64, complex64 or complex128; products, ``ger`` and ``axpy dot dotc nrm2 scal`` also take float16 and
    bfloat16. ``out=`` names a buffer to write instead of making
    one; ``timeout=`` (seconds) is when waiting ends with :class:`~accel.DeadlineExceededError`.
    """

    __slots__ = ()

    library: ClassVar = "blas"
    aliases: ClassVar = {
        "mm": ".gemm(x, y)",
        "bmm": ".gemm_batched(x, y)",
        "norm": ".nrm2(x)",
    }

    gemm = method(Gemm)
    gemm_batched = method(GemmBatched)
    gemm_grouped = method(GemmGrouped)
    gemv = method(Gemv)
    axpy = method(Axpy)
    dot = method(Dot)
    nrm2 = method(Nrm2)
    scal = method(Scal)
    asum = method(Asum)
    dotc = method(Dotc)
    iamax = method(Iamax)
    iamin = method(Iamin)
    rot = method(Rot)
    swap = method(Swap)
    ger = method(Ger)
    trmv = method(Trmv)
    trsv = method(Trsv)
    symm = method(Symm)
    hemm = method(Hemm)
    syrk = method(Syrk)
    herk = method(Herk)
    trmm = method(Trmm)
    trsm = method(Trsm)
    geam = method(Geam)


def products_of(op: GemmGrouped, inputs: Sequence[int], outputs: Sequence[int]) -> Iterator[Product]:
    """Yield the products of a group."""
    count = len(op.a)
    turns = transpose_of(op.transpose_a), transpose_of(op.transpose_b)
    for i, (m, n, k) in enumerate(op.sizes()):
        (lda, turn_a), (ldb, turn_b) = stored(op.a[i], turns[0]), stored(op.b[i], turns[1])
        ldc = op.out[i].strides[0] if op.out is not None and op.out[i].is_strided else n or 1
        yield Product(m, n, k, (inputs[i], lda, turn_a), (inputs[count + i], ldb, turn_b), (outputs[i], ldc))


class Product(NamedTuple):
    """One product of C-order matrices: its sizes, where each operand is, how far its rows are apart and how it is transposed, and where the result goes."""

    m: int
    n: int
    k: int
    a: tuple[int, int, Transpose]
    b: tuple[int, int, Transpose]
    out: tuple[int, int]


def apart(ref: AccelRef) -> int:
    """Return how many elements the matrices of several lie apart; 0 of one."""
    return ref.strides[0] if len(ref.shape) == 3 else 0


FAMILY = Family(BlasOps)
