"""What the ops of BLAS have in common: transposes, factors, and which matrices its calls take as they are in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from accel.dtype import WIDE, DType
from accel.enums import Transpose, TransposeName
from accel.errors import InvalidArgumentError, UnsupportedError
from accel.ops.base import FamilyOp, Shape, factor, same_dtype, to_scalar
from accel.ops.fields import Conversion, Convert
from accel.values import check_choice

if TYPE_CHECKING:
    from accel.ref import AccelRef

__all__ = [
    "FACTORS", "TRANSPOSES", "TransposeField", "applied", "are_rows", "batch_of", "check_factors", "check_side", "check_square",
    "count_of", "is_stored", "no_out", "no_product", "same_shape", "stored", "to_transpose", "transpose_of", "wide_dtype",
]  # fmt: skip

TransposeField: TypeAlias = bool | TransposeName | Transpose

_NONE = Transpose.NONE
_TRANSPOSE = {False: Transpose.NONE, True: Transpose.TRANSPOSE} | {member: member for member in Transpose} | {m.value: m for m in Transpose}


def transpose_of(value: TransposeField) -> Transpose:
    """Return the member that a caller's value means; raise :class:`InvalidArgumentError` if there is none."""
    try:
        return _TRANSPOSE[value]
    except (KeyError, TypeError):
        raise InvalidArgumentError(f"{value!r} is not a transpose", remedy="Use False, True, or accel.Transpose.CONJUGATE.") from None


to_transpose = Conversion(lambda name, value: transpose_of(value), frozenset({Transpose}))

FACTORS: dict[str, Convert] = {"alpha": to_scalar, "beta": to_scalar}
"""Factors become floats or complexes, which every kernel takes."""

TRANSPOSES: dict[str, Convert] = {"transpose_a": to_transpose, "transpose_b": to_transpose}


def applied(shape: Shape, transpose: Transpose) -> Shape:
    """Return the shape of ``op(A)``."""
    rows, columns = shape[-2:]
    return (rows, columns) if transpose is _NONE else (columns, rows)


def batch_of(**refs: AccelRef) -> Shape:
    """Return the dimensions that a result has before those of a matrix: of single matrices none, else how many matrices there are.

    Raises
    ------
    InvalidArgumentError
        If an operand is neither a matrix nor a batch of them, or batches differ in length.
    """
    if not {len(ref.shape) for ref in refs.values()} <= {2, 3}:
        listing = " and ".join(f"{name} has shape {ref.shape}" for name, ref in refs.items())
        raise InvalidArgumentError(listing, remedy="Give (rows, columns) or (batch, rows, columns).")
    counts = {name: ref.shape[0] for name, ref in refs.items() if len(ref.shape) == 3}
    if len(set(counts.values())) > 1:
        listing = " and ".join(f"{name} has {count} matrices" for name, count in counts.items())
        raise InvalidArgumentError(listing, remedy="Give both as many.")
    return tuple(set(counts.values()))


def count_of(*refs: AccelRef) -> int:
    """Return how many matrices operands are, whose batches have one length."""
    return next((ref.shape[0] for ref in refs if len(ref.shape) == 3), 1)


def check_factors(op: Any, dtype: DType, *, scales_out: bool = True) -> None:
    """Raise if a complex factor is for real elements, or a ``beta`` that scales ``out`` has none."""
    for name in ("alpha", "beta"):
        factor(name, getattr(op, name), dtype)
    if scales_out and op.beta and op.out is None:
        raise no_out()


def stored(ref: AccelRef, transpose: Transpose) -> tuple[int, Transpose]:
    """Return the leading dimension of matrices as they are in memory, and how these are transposed in a product whose operand is transposed so.

    Parameters
    ----------
    ref
        One matrix, or several, that :func:`is_stored` or contiguous.
    transpose
        What the product does with the operand.
    """
    if not ref.is_strided:
        return ref.shape[-1] or 1, transpose
    (rows, columns), (down, right) = ref.shape[-2:], ref.strides[-2:]
    if are_rows(rows, columns, down, right):
        return down, transpose
    return right, Transpose.TRANSPOSE if transpose is _NONE else _NONE


def are_rows(rows: int, columns: int, down: int, right: int) -> bool:
    """Return whether each row of a matrix with these strides is one run, and no row overlaps the next."""
    return (right == 1 or columns == 1) and down >= columns


def is_stored(ref: AccelRef, transpose: Transpose) -> bool:
    """Return whether products take a strided operand as it is: its rows, or columns, are each one run, and so are the matrices of several."""
    (rows, columns), (*apart, down, right) = ref.shape[-2:], ref.strides
    if any(step < 0 for step in apart):
        return False
    if are_rows(rows, columns, down, right):
        return True
    # The conjugate of what is stored transposed is no operation of a product's.
    return transpose is not Transpose.CONJUGATE and are_rows(columns, rows, right, down)


def no_out() -> InvalidArgumentError:
    """Return the error of a ``beta`` that has nothing to scale."""
    return InvalidArgumentError("beta scales out, which is not given", remedy="Pass out=, or leave beta at 0.")


def no_product(a: Shape, b: Shape, k: int, k_b: int) -> InvalidArgumentError:
    """Return the error of matrices that cannot be multiplied."""
    return InvalidArgumentError(
        f"op(a) has {k} columns and op(b) has {k_b} rows (shapes {a} and {b})",
        remedy="Give matrices that can be multiplied, with transpose_a= or transpose_b= where they lie the other way round.",
    )


def same_shape(x: AccelRef, y: AccelRef) -> None:
    """Raise if two vectors do not have one shape."""
    if x.shape != y.shape:
        raise InvalidArgumentError(f"x has shape {x.shape} and y has {y.shape}", remedy="Give both the same shape.")


def wide_dtype(op: FamilyOp[Any], **refs: AccelRef) -> DType:
    """Return the one dtype of operands; raise unless it is one of the four that every BLAS has."""
    dtype = same_dtype(**refs)
    if dtype not in WIDE:
        raise UnsupportedError(
            f"{op.kind} is not offered for {dtype.value}",
            remedy="Give float32, float64, complex64 or complex128; device.elementwise.cast converts.",
        )
    return dtype


def check_square(a: AccelRef) -> None:
    """Raise unless the last two dimensions of ``a`` are equal."""
    if len(a.shape) < 2 or a.shape[-1] != a.shape[-2]:
        raise InvalidArgumentError(f"a has shape {a.shape}, which is not square", remedy="Give as many rows as columns.")


def check_side(side: object, a: AccelRef, b: AccelRef) -> Shape:
    """Return the shape of a product with the square matrix ``a`` on a side; raise unless they fit."""
    check_choice("side", side, "left", "right")
    batch = batch_of(a=a, b=b)
    check_square(a)
    if a.shape[-1] != b.shape[-2 if side == "left" else -1]:
        raise InvalidArgumentError(
            f"a has shape {a.shape} and b {b.shape}, with a on the {side}", remedy="Give matrices that fit, or the other side=."
        )
    return (*batch, *b.shape[-2:])
