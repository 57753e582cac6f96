"""Ops of BLAS on matrices besides products: outer products, symmetric and Hermitian matrices, and sums of matrices."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import ClassVar

from accel.enums import Transpose
from accel.errors import InvalidArgumentError
from accel.ops.base import OutOp, Plan, op, operand, planned, same_dtype
from accel.ops.blas_operands import (
    FACTORS,
    TRANSPOSES,
    TransposeField,
    applied,
    batch_of,
    check_factors,
    check_side,
    count_of,
    is_stored,
    to_transpose,
    transpose_of,
    wide_dtype,
)
from accel.ops.blas_triangular import Side
from accel.ops.fields import to_flag
from accel.ref import AccelRef

__all__ = ["Geam", "Ger", "Hemm", "Herk", "Symm", "Syrk"]

_NONE, _CONJUGATE = Transpose.NONE, Transpose.CONJUGATE


@op("blas", convert={**FACTORS, "conjugate": to_flag})
class Ger(OutOp):
    """``alpha * outer(x, y) + beta * out``; with ``conjugate=True``, of the conjugate of y. BLAS's ``ger`` has ``beta=1.0``.

    Parameters
    ----------
    x, y
        (m,) and (n,), of one dtype of those that :class:`Gemm` has.
    out
        (m, n); needed where ``beta`` is not 0. It is apart from ``x`` and ``y``.
    alpha, beta
        Scaling factors. With ``beta == 0`` the old contents of ``out`` are not read.
    conjugate
        Whether y is conjugated: ``gerc`` instead of ``geru``. The same for real elements.

    Raises
    ------
    InvalidArgumentError
        If shapes, dtypes or options do not fit together.
    """

    x: AccelRef
    y: AccelRef
    _: KW_ONLY
    alpha: complex = 1.0
    beta: complex = 0.0
    conjugate: bool = False

    def plan(self) -> Plan:
        x, y = operand("x", self.x, ndim=1), operand("y", self.y, ndim=1)
        dtype = same_dtype(x=x, y=y)
        check_factors(self, dtype)
        return planned(self.out, {"x": x, "y": y}, (x.shape[0], y.shape[0]), dtype, "gemm", updates=bool(self.beta))


@op("blas", convert={**FACTORS, "lower": to_flag})
class Symmetric(OutOp):
    """What :class:`Symm` and :class:`Hemm` have in common.

    Parameters
    ----------
    a
        (n, n) or (batch, n, n), of float32, float64, complex64 or complex128. One triangle of a matrix is read.
    b
        (n, columns) with ``side="left"``, (rows, n) with ``side="right"``; or (batch, ...). Of the same dtype.
        One of a and b may be a single matrix, used for the whole batch.
    out
        Of the result's shape, which is that of b or of a batch of such; needed where ``beta`` is not 0. It is apart from ``a`` and ``b``.
    alpha, beta
        Scaling factors. With ``beta == 0`` the old contents of ``out`` are not read.
    side
        On which side of the product ``a`` stands.
    lower
        Whether the lower triangle of ``a`` is read; else the upper one is.

    Raises
    ------
    InvalidArgumentError
        If shapes, dtypes or options do not fit together.
    UnsupportedError
        If the dtype is another one.
    """

    a: AccelRef
    b: AccelRef
    _: KW_ONLY
    alpha: complex = 1.0
    beta: complex = 0.0
    side: Side = "left"
    lower: bool = False

    @property
    def batch_count(self) -> int:
        """Number of products."""
        return count_of(self.a, self.b)

    def plan(self) -> Plan:
        a, b = operand("a", self.a), operand("b", self.b)
        dtype = wide_dtype(self, a=a, b=b)
        shape = check_side(self.side, a, b)
        check_factors(self, dtype)
        return planned(self.out, {"a": a, "b": b}, shape, dtype, updates=bool(self.beta))


@op()
class Symm(Symmetric):
    """``alpha * a @ b + beta * out`` with a symmetric ``a``, of which one triangle is read; with ``side="right"``, of ``b @ a``."""


@op()
class Hemm(Symmetric):
    """``alpha * a @ b + beta * out`` with a Hermitian ``a``, of which one triangle is read; with ``side="right"``, of ``b @ a``.

    Imaginary parts of the diagonal count as 0. Of real matrices it is ``symm``.
    """


@op("blas", convert={**FACTORS, "lower": to_flag, "trans": to_transpose})
class Update(OutOp):
    """What :class:`Syrk` and :class:`Herk` have in common.

    Parameters
    ----------
    a
        (n, k), or (k, n) where it is transposed; or (batch, ...). Of float32, float64, complex64 or complex128.
    out
        (n, n) or (batch, n, n), as ``a`` is; needed where ``beta`` is not 0. The other triangle stays as it is; that of a new buffer is 0.
        It is apart from ``a``.
    alpha, beta
        Scaling factors. With ``beta == 0`` the old contents of the triangle are not read.
    lower
        Whether the lower triangle of the result is computed; else the upper one is.
    trans
        What ``op`` does.

    Raises
    ------
    InvalidArgumentError
        If shapes, dtypes or options do not fit together.
    UnsupportedError
        If the dtype is another one.
    """

    refused: ClassVar[Transpose]
    """What ``op`` cannot be of complex matrices."""

    a: AccelRef
    _: KW_ONLY
    alpha: complex = 1.0
    beta: complex = 0.0
    lower: bool = False
    trans: TransposeField = _NONE

    @property
    def batch_count(self) -> int:
        """Number of matrices that are multiplied by themselves."""
        return count_of(self.a)

    def takes_strided(self, ref: AccelRef) -> bool:
        return ref is self.a and ref is not self.out and is_stored(ref, _CONJUGATE)

    def plan(self) -> Plan:
        a = operand("a", self.a)
        dtype = wide_dtype(self, a=a)
        if dtype.is_complex and transpose_of(self.trans) is self.refused:
            raise InvalidArgumentError(
                f"trans={self.refused.value!r} is not offered for {self.kind} of complex matrices",
                remedy="Use herk with trans='c', or syrk with trans='t'.",
            )
        self.check_factors()
        batch = batch_of(a=a)
        n = applied(a.shape, transpose_of(self.trans))[0]
        return planned(self.out, {"a": a}, (*batch, n, n), dtype, updates=True)

    def check_factors(self) -> None:
        """Raise if the factors do not fit the matrices."""
        check_factors(self, self.a.dtype)


@op()
class Syrk(Update):
    """One triangle of ``alpha * op(a) @ op(a).T + beta * out``."""

    refused: ClassVar[Transpose] = Transpose.CONJUGATE


@op()
class Herk(Update):
    """One triangle of ``alpha * op(a) @ op(a).conj().T + beta * out``, with real factors; the imaginary parts of the diagonal become 0.

    Of real matrices it is ``syrk``.
    """

    refused: ClassVar[Transpose] = Transpose.TRANSPOSE

    def check_factors(self) -> None:
        for name, value in (("alpha", self.alpha), ("beta", self.beta)):
            if isinstance(value, complex):
                raise InvalidArgumentError(f"{name} is {value}, and herk has real factors", remedy="Give a real number.")
        Update.check_factors(self)


@op("blas", convert=TRANSPOSES | FACTORS)
class Geam(OutOp):
    """``alpha * op(a) + beta * op(b)``.

    Parameters
    ----------
    a, b
        Matrices, or batches (batch, ...), of one dtype, float32, float64, complex64 or complex128, with ``op(a)`` and ``op(b)`` of one shape.
        One of a and b may be a single matrix, used for the whole batch.
    alpha, beta
        Scaling factors. A matrix whose factor is 0 is not read.
    transpose_a, transpose_b
        What ``op`` does to each matrix.
    out
        Buffer of the result's shape. It may be an operand of that shape that is not transposed.

    Raises
    ------
    InvalidArgumentError
        If shapes, dtypes or options do not fit together.
    UnsupportedError
        If the dtype is another one.
    """

    a: AccelRef
    b: AccelRef
    _: KW_ONLY
    alpha: complex = 1.0
    beta: complex = 1.0
    transpose_a: TransposeField = _NONE
    transpose_b: TransposeField = _NONE

    @property
    def batch_count(self) -> int:
        """Number of sums."""
        return count_of(self.a, self.b)

    def plan(self) -> Plan:
        a, b = operand("a", self.a), operand("b", self.b)
        dtype = wide_dtype(self, a=a, b=b)
        check_factors(self, dtype, scales_out=False)
        shape = (*batch_of(a=a, b=b), *applied(a.shape, transpose_of(self.transpose_a)))
        if applied(b.shape, transpose_of(self.transpose_b)) != shape[-2:]:
            raise InvalidArgumentError(
                f"op(a) and op(b) differ in shape (a has {a.shape}, b has {b.shape})",
                remedy="Give matrices of one shape, with transpose_a= or transpose_b= where they lie the other way round.",
            )
        as_they_are = [name for name, transpose in (("a", self.transpose_a), ("b", self.transpose_b)) if transpose is _NONE]
        return planned(self.out, {"a": a, "b": b}, shape, dtype, in_place=as_they_are)
