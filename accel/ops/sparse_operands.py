"""What ops on sparse matrices check of their operands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel.compute import Transpose
from accel.dtype import DType
from accel.errors import InvalidArgumentError, UnsupportedError
from accel.ops.base import FamilyOp, Shape, Spec, factor

if TYPE_CHECKING:
    from accel.ops.blas import TransposeField
    from accel.ref import AccelRef

__all__ = ["COUNT", "INT32", "applied", "check_factors", "check_wide", "no_product", "not_of_blocks"]

COUNT = Spec((), DType.INT64)
"""The number of elements that a device finds."""

INT32 = 2**31 - 1
"""The largest index of 32 bits."""

_WIDE = (DType.FLOAT32, DType.FLOAT64, DType.COMPLEX64, DType.COMPLEX128)


def applied(shape: tuple[int, ...], transpose: TransposeField) -> tuple[int, int]:
    """Return the shape of ``op(a)``."""
    rows, columns = shape
    return (rows, columns) if transpose is Transpose.NONE else (columns, rows)


def check_wide(op: FamilyOp[Any], dtype: DType) -> None:
    """Raise :class:`UnsupportedError` for dtypes of 16 bits."""
    if dtype not in _WIDE:
        raise UnsupportedError(f"{op.kind} is not offered for {dtype.value}", remedy="Convert the elements: device.elementwise.cast.")


def check_factors(dtype: DType, out: AccelRef | None, alpha: complex, beta: complex) -> None:
    """See that the factors fit the elements, and that there is something for ``beta`` to scale."""
    factor("alpha", alpha, dtype)
    if factor("beta", beta, dtype) and out is None:
        raise InvalidArgumentError("beta scales out, which is not given", remedy="Pass out=, or leave beta at 0.")


def no_product(a: tuple[int, int], b: Shape) -> InvalidArgumentError:
    """Return the error of a matrix and what it cannot be multiplied by."""
    return InvalidArgumentError(
        f"op(a) is {a[0]} x {a[1]} and is to be multiplied by {b}", remedy="Give as many rows as op(a) has columns."
    )


def not_of_blocks() -> InvalidArgumentError:
    """Return the error of an op that takes no bsr."""
    return InvalidArgumentError("a is bsr", remedy="Convert it first: await device.sparse.tocsr(a).")
