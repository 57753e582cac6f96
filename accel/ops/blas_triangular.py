"""Ops of BLAS on triangular matrices: products and solutions, of vectors and of matrices."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Literal, TypeAlias

from accel.enums import Transpose
from accel.errors import InvalidArgumentError
from accel.ops.base import OutOp, Plan, factor, op, operand, planned, to_scalar
from accel.ops.blas_operands import (
    TransposeField,
    check_side,
    check_square,
    count_of,
    is_stored,
    to_transpose,
    transpose_of,
    wide_dtype,
)
from accel.ops.fields import Convert, to_flag
from accel.ref import AccelRef

__all__ = ["Trmm", "Trmv", "Trsm", "Trsv"]

Side: TypeAlias = Literal["left", "right"]

_NONE = Transpose.NONE


def _takes_triangle(op: TriangularVector | TriangularMatrix, other: AccelRef, ref: AccelRef) -> bool:
    """Return whether a strided ``ref`` is the triangle alone, and lies as the kernels take it."""
    return ref is op.a and ref is not other and ref is not op.out and is_stored(ref, transpose_of(op.trans))


_TRIANGLE: dict[str, Convert] = {"lower": to_flag, "trans": to_transpose, "unit_diagonal": to_flag}


@op("blas", convert=_TRIANGLE)
class TriangularVector(OutOp):
    """What :class:`Trmv` and :class:`Trsv` have in common.

    Parameters
    ----------
    a
        (n, n), of float32, float64, complex64 or complex128. Elements of its other triangle are not read.
    x
        (n,), of the same dtype.
    lower
        Whether the lower triangle of ``a`` is the matrix; else the upper one is.
    trans
        What ``op`` does.
    unit_diagonal
        Whether the diagonal is of ones; it is not read then.
    out
        (n,); it may be ``x`` itself.

    Raises
    ------
    InvalidArgumentError
        If shapes, dtypes or options do not fit together.
    UnsupportedError
        If the dtype is another one.
    """

    a: AccelRef
    x: AccelRef
    _: KW_ONLY
    lower: bool = False
    trans: TransposeField = _NONE
    unit_diagonal: bool = False

    def takes_strided(self, ref: AccelRef) -> bool:
        return _takes_triangle(self, self.x, ref)

    def plan(self) -> Plan:
        a, x = operand("a", self.a, ndim=2), operand("x", self.x, ndim=1)
        dtype = wide_dtype(self, a=a, x=x)
        check_square(a)
        if a.shape[0] != x.shape[0]:
            raise InvalidArgumentError(f"a has shape {a.shape} and x has {x.shape[0]} elements", remedy="Give as many elements as rows.")
        return planned(self.out, {"a": a, "x": x}, x.shape, dtype, in_place=("x",))


@op()
class Trmv(TriangularVector):
    """``op(a) @ x`` of a triangular matrix and a vector. ``out`` may be ``x``."""


@op()
class Trsv(TriangularVector):
    """The ``y`` with ``op(a) @ y == x`` of a triangular matrix. ``out`` may be ``x``. A 0 on the diagonal is not looked for: it gives infinities or NaN."""


@op("blas", convert={"alpha": to_scalar, **_TRIANGLE})
class TriangularMatrix(OutOp):
    """What :class:`Trmm` and :class:`Trsm` have in common.

    Parameters
    ----------
    a
        (n, n) or (batch, n, n), of float32, float64, complex64 or complex128. Elements of its other triangle are not read.
    b
        (n, columns) with ``side="left"``, (rows, n) with ``side="right"``; or (batch, ...). One of a and b may be a single matrix, used for the whole batch.
    alpha
        Scaling factor of ``b``.
    side
        On which side of the matrix ``op(a)`` stands.
    lower
        Whether the lower triangle of ``a`` is the matrix; else the upper one is.
    trans
        What ``op`` does.
    unit_diagonal
        Whether the diagonal is of ones; it is not read then.
    out
        Buffer of the result's shape; it may be ``b`` itself.

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
    side: Side = "left"
    lower: bool = False
    trans: TransposeField = _NONE
    unit_diagonal: bool = False

    @property
    def batch_count(self) -> int:
        """Number of matrices that are multiplied or solved for."""
        return count_of(self.a, self.b)

    def takes_strided(self, ref: AccelRef) -> bool:
        return _takes_triangle(self, self.b, ref)

    def plan(self) -> Plan:
        a, b = operand("a", self.a), operand("b", self.b)
        dtype = wide_dtype(self, a=a, b=b)
        shape = check_side(self.side, a, b)
        factor("alpha", self.alpha, dtype)
        return planned(self.out, {"a": a, "b": b}, shape, dtype, in_place=("b",))


@op()
class Trmm(TriangularMatrix):
    """``alpha * op(a) @ b`` of triangular matrices; with ``side="right"``, ``alpha * b @ op(a)``. ``out`` may be ``b``."""


@op()
class Trsm(TriangularMatrix):
    """The ``x`` with ``op(a) @ x == alpha * b`` of triangular matrices; with ``side="right"``, with ``x @ op(a) == alpha * b``. ``out`` may be ``b``.

    A 0 on the diagonal is not looked for: it gives infinities or NaN.
    """
