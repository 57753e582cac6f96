"""Ops of BLAS on vectors that only the four dtypes of every BLAS have, and the conjugated dot product."""

from __future__ import annotations

from typing import Any

from accel.dtype import REAL_OF, DType
from accel.errors import InvalidArgumentError
from accel.ops.base import FamilyOp, OutOp, Plan, factor, op, operand, planned, scalar
from accel.ops.blas_operands import same_shape, wide_dtype
from accel.ops.fields import set_fields
from accel.ref import AccelRef, overlap
from accel.values import number

__all__ = ["Asum", "Iamax", "Iamin", "Rot", "Swap"]


@op("blas")
class Asum(OutOp):
    """The sum of ``abs(x.real) + abs(x.imag)`` as a 0-d buffer of real numbers; any shape.

    Parameters
    ----------
    x
        float32, float64, complex64 or complex128, of any shape. The sum of no elements is 0.
    out
        0-d, of float32 for float32 and complex64, else of float64. It is not part of ``x``.

    Raises
    ------
    InvalidArgumentError
        If ``out`` does not fit.
    UnsupportedError
        If ``x`` is of another dtype.
    """

    x: AccelRef

    def plan(self) -> Plan:
        x = operand("x", self.x)
        wide_dtype(self, x=x)
        return planned(self.out, {"x": x}, (), REAL_OF.get(x.dtype, x.dtype), of=x.dtype)


@op("blas")
class Extreme(OutOp):
    """What :class:`Iamax` and :class:`Iamin` have in common.

    Parameters
    ----------
    x
        float32, float64, complex64 or complex128, of any shape but an empty one. Where it holds NaN, the result is any index.
    out
        0-d int64, which is not part of ``x``.

    Raises
    ------
    InvalidArgumentError
        If ``x`` is empty, or ``out`` does not fit.
    UnsupportedError
        If ``x`` is of another dtype.
    """

    x: AccelRef

    def plan(self) -> Plan:
        x = operand("x", self.x)
        wide_dtype(self, x=x)
        if not x.size:
            raise InvalidArgumentError(f"{self.kind} of no elements", remedy="Leave empty buffers out.")
        return planned(self.out, {"x": x}, (), DType.INT64, of=x.dtype)


@op()
class Iamax(Extreme):
    """The first index, from 0, of the largest ``abs(x.real) + abs(x.imag)``, as a 0-d int64; of any shape, in C order. NaN is the largest."""


@op()
class Iamin(Extreme):
    """The first index, from 0, of the smallest ``abs(x.real) + abs(x.imag)``, as a 0-d int64; of any shape, in C order. NaN is the smallest."""


def _check_pair(op: FamilyOp[Any], x: AccelRef, y: AccelRef) -> DType:
    """Check two vectors that are both written, and return their dtype."""
    dtype = wide_dtype(op, x=operand("x", x), y=operand("y", y))
    same_shape(x, y)
    if overlap(x, y):
        raise InvalidArgumentError("x and y overlap, and both are written", remedy="Give buffers, or parts of one, that do not overlap.")
    return dtype


@op("blas")
class Rot(FamilyOp[tuple[AccelRef, AccelRef]]):
    """Rotate points of a plane, in place: ``x, y = c * x + s * y, c * y - conj(s) * x``; any one shape. The result is ``(x, y)``.

    Parameters
    ----------
    x, y
        float32, float64, complex64 or complex128. They do not overlap.
    c
        The cosine, a real number.
    s
        The sine; complex for complex elements only.

    Raises
    ------
    InvalidArgumentError
        If the operands do not fit each other, or ``c`` or ``s`` does not fit them.
    UnsupportedError
        If they are of another dtype.
    """

    x: AccelRef
    y: AccelRef
    c: float
    s: complex

    def __post_init__(self) -> None:
        if isinstance(number("c", self.c), complex):
            raise InvalidArgumentError(f"c is {self.c!r}, and a cosine is real", remedy="Give a real number; s may be complex.")
        set_fields(self, c=scalar("c", self.c), s=scalar("s", self.s))

    def plan(self) -> Plan:
        dtype = _check_pair(self, self.x, self.y)
        factor("s", self.s, dtype)
        return Plan((), (self.x, self.y), (), dtype=dtype, updates=True)


@op("blas")
class Swap(FamilyOp[tuple[AccelRef, AccelRef]]):
    """Exchange the elements of ``x`` and ``y``, in place; any one shape. The result is ``(x, y)``.

    Raises
    ------
    InvalidArgumentError
        If the operands differ in shape or dtype, or overlap.
    UnsupportedError
        If they are not float32, float64, complex64 or complex128.
    """

    x: AccelRef
    y: AccelRef

    def plan(self) -> Plan:
        dtype = _check_pair(self, self.x, self.y)
        return Plan((), (self.x, self.y), (), dtype=dtype, updates=True)
