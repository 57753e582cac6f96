"""What ops on sparse matrices check of their operands: their shapes when they are made, and on the device what indices and indptr say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel.dtype import DType
from accel.errors import AccelError, InvalidArgumentError
from accel.ops.base import Shape, Spec, Status
from accel.sparse_ref import OUT_OF_RANGE, UNSORTED

if TYPE_CHECKING:
    import numpy as np

    from accel.ref import AccelRef
    from accel.sparse_ref import SparseRef

__all__ = [
    "COUNT",
    "INT32",
    "STRUCTURE",
    "index_out_of_range",
    "no_product",
    "not_of_blocks",
    "parts",
    "structure_error",
]

COUNT = Spec((), DType.INT64)
"""The number of elements that a device finds."""

INT32 = 2**31 - 1
"""The largest index of 32 bits."""


def index_out_of_range(index: int) -> InvalidArgumentError:
    """Return the error of an index that is no row or column."""
    return InvalidArgumentError(f"index {index} of a sparse matrix is out of range", remedy="Count rows and columns from 0.")


def structure_error(status: np.ndarray[Any, Any]) -> AccelError | None:
    """Return the error of what :func:`~accel.sparse_ref.structure_fault`, or a device, has found."""
    code, number = int(status[0]), int(status[1])
    if not code:
        return None
    if code == OUT_OF_RANGE:
        return index_out_of_range(number)
    if code == UNSORTED:
        return InvalidArgumentError(
            f"element {number} of the indices of a sparse matrix is out of order in its row",
            remedy="Let the indices of each row (of csc, column) rise, none twice: device.sparse.csr(host arrays) brings them into order.",
        )
    return InvalidArgumentError(
        f"element {number} of the indptr of a sparse matrix is out of order",
        remedy="Let it rise from 0 to the number of elements (of coo, rows rise); trim what a batch has made: matrix.trimmed(number).",
    )


STRUCTURE = Status(Spec((2,), DType.INT64), structure_error)
"""The status of an op that reads sparse matrices: what is wrong with the indices of one of them."""


def parts(a: SparseRef) -> dict[str, AccelRef]:
    """Return what a matrix is made of, by the names that errors have for it."""
    return {"data": a.data, "indices": a.indices, "indptr": a.indptr}


def no_product(a: tuple[int, int], b: Shape) -> InvalidArgumentError:
    """Return the error of a matrix and what it cannot be multiplied by."""
    return InvalidArgumentError(
        f"op(a) is {a[0]} x {a[1]} and is to be multiplied by {b}", remedy="Give as many rows as op(a) has columns."
    )


def not_of_blocks() -> InvalidArgumentError:
    """Return the error of an op that takes no bsr."""
    return InvalidArgumentError("a is bsr", remedy="Convert it first: await device.sparse.tocsr(a).")
