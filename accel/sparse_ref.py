"""Handles to sparse matrices on a device: three refs, a format and a shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from accel.dtype import DType
from accel.errors import InvalidArgumentError
from accel.ref import AccelRef, AccelToken

__all__ = [
    "ELEMENTS",
    "FORMATS",
    "OUT_OF_ORDER",
    "OUT_OF_RANGE",
    "UNSORTED",
    "SparseField",
    "SparseFormat",
    "SparseRef",
    "parts_of",
    "sparse_of",
    "structure_fault",
]

Array = np.ndarray[Any, np.dtype[Any]]

SparseFormat: TypeAlias = Literal["csr", "csc", "coo", "bsr"]

FORMATS: tuple[SparseFormat, ...] = ("csr", "csc", "coo", "bsr")
"""The formats that there are."""

ELEMENTS = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64, DType.COMPLEX64, DType.COMPLEX128)
"""Dtypes of elements."""

_INDICES = (DType.INT32, DType.INT64)

OUT_OF_RANGE, OUT_OF_ORDER, UNSORTED = 1, 2, 3
"""What can be wrong: an index is no row or column, indptr does not rise from 0 to the number of elements, or the indices of a row do not rise."""


@dataclass(frozen=True, eq=False, slots=True)
class SparseRef:
    """A sparse matrix on a device. Like a tuple of its refs it owns nothing else: they are freed, outlive a fault and become stale as any ref does.

    Rows (of csc columns) are in order, and so are the elements of each; no element is there twice. ``device.sparse.csr`` and its like bring host arrays into
    that form. Of refs the contents are on the device: an op that reads them raises :class:`InvalidArgumentError` if an index is out of range, or ``indptr``
    does not rise from 0 to the number of elements. The order within a row is checked by ``add`` and ``solve``, whose libraries rely on it.

    Parameters
    ----------
    format
        ``"csr"``, ``"csc"``, ``"coo"``, whose elements are in the order of csr, or ``"bsr"``: csr of dense blocks, all of one size.
    data
        The elements: float16, bfloat16, float32, float64, complex64 or complex128; of bsr (blocks, rows of a block, columns of a block).
    indices
        int32 or int64: the column of each element; of csc, the row; of bsr, the column of each block, counted in blocks.
    indptr
        Of the dtype of ``indices``: where each row (of csc, column; of bsr, row of blocks) begins, and the number of elements (of bsr, blocks); of coo, the
        row of each element.
    shape
        Rows and columns; of bsr, multiples of those of a block.

    Raises
    ------
    InvalidArgumentError
        If these do not fit together.
    """

    format: SparseFormat
    data: AccelRef
    indices: AccelRef
    indptr: AccelRef
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        """See that the parts fit."""
        if self.format not in FORMATS:
            raise InvalidArgumentError(f"format is {self.format!r}", remedy="Use 'csr', 'csc', 'coo' or 'bsr'.")
        shape = self.shape
        if not (isinstance(shape, tuple) and len(shape) == 2 and all(isinstance(n, int) and n >= 0 for n in shape)):
            raise InvalidArgumentError(f"shape is {shape!r}", remedy="Give (rows, columns).")
        for name in ("data", "indices", "indptr"):
            ref = getattr(self, name)
            if isinstance(ref, AccelToken):
                raise InvalidArgumentError(f"{name} is a token", remedy="Turn it back into a ref first: matrix.resolved(device).")
            ndim = 3 if name == "data" and self.format == "bsr" else 1
            if not isinstance(ref, AccelRef) or len(ref.shape) != ndim:
                raise InvalidArgumentError(f"{name} is {ref!r:.200}", remedy=f"Give a ref of {ndim} dimension{'s' * (ndim > 1)}.")
        if self.data.dtype not in ELEMENTS:
            raise InvalidArgumentError(f"data is {self.data.dtype.value}", remedy="Give a float or complex dtype.")
        if self.indices.dtype not in _INDICES or self.indptr.dtype is not self.indices.dtype:
            raise InvalidArgumentError(
                f"indices are {self.indices.dtype.value} and indptr is {self.indptr.dtype.value}", remedy="Give both int32, or both int64."
            )
        rows, columns = self.blocksize
        if not rows or not columns or shape[0] % rows or shape[1] % columns:
            raise InvalidArgumentError(f"blocks are {rows} x {columns} and the matrix {shape}", remedy="Give a multiple of the blocks.")
        if self.indices.shape != self.data.shape[:1] or self.indptr.shape != (self._marks(),):
            raise InvalidArgumentError(
                f"{self.format} of shape {shape} has {self.data.shape[0]} elements, {self.indices.size} indices and indptr of {self.indptr.size}",
                remedy=f"Give an index for each element, and indptr of {self._marks()}.",
            )

    def _marks(self) -> int:
        """Return how many elements ``indptr`` has."""
        return self.data.size if self.format == "coo" else self.major + 1

    @property
    def dtype(self) -> DType:
        """Of the elements."""
        return self.data.dtype

    @property
    def nnz(self) -> int:
        """How many elements are stored; of bsr, all of each block."""
        return self.data.size

    @property
    def blocksize(self) -> tuple[int, int]:
        """Rows and columns of a block of bsr; 1 and 1 of other formats."""
        return (self.data.shape[1], self.data.shape[2]) if self.format == "bsr" else (1, 1)

    @property
    def ndim(self) -> int:
        """2."""
        return 2

    @property
    def refs(self) -> tuple[AccelRef, AccelRef, AccelRef]:
        """``(data, indices, indptr)``, in the order in which kernels take their addresses."""
        return self.data, self.indices, self.indptr

    @property
    def major(self) -> int:
        """How many rows there are; of csc, columns; of bsr, rows of blocks."""
        return self.shape[1] if self.format == "csc" else self.shape[0] // self.blocksize[0]

    @property
    def is_stale(self) -> bool:
        """Whether one of the refs is; see :attr:`AccelRef.is_stale`."""
        return any(ref.is_stale for ref in self.refs)

    @property
    def T(self) -> SparseRef:  # noqa: N802 - as in scipy
        """The transpose: csc of the same refs for csr, and csr for csc. Nothing is copied.

        Raises
        ------
        InvalidArgumentError
            For coo, whose elements would be in the order of columns, and for bsr, whose blocks would have to be turned.
        """
        if self.format in ("coo", "bsr"):
            raise InvalidArgumentError(
                f"{self.format} has no transpose of the same refs", remedy="Convert it first: await device.sparse.tocsr(a)."
            )
        return SparseRef("csc" if self.format == "csr" else "csr", *self.refs, (self.shape[1], self.shape[0]))

    def trimmed(self, count: int) -> SparseRef:
        """Return the matrix of the first ``count`` elements, with views of the same refs: for results of batches, which have room for more than there are."""
        return SparseRef(self.format, self.data[:count], self.indices[:count], self.indptr, self.shape)

    def check(self) -> None:
        """Raise what :meth:`AccelRef.check` raises, unless all refs are valid."""
        for ref in self.refs:
            ref.check()

    def resolved(self, device: Any) -> SparseRef:
        """Return an unpickled matrix, whose refs have travelled as tokens, with the refs of ``device``."""

        def resolved(each: Any) -> AccelRef:
            ref: AccelRef = device.resolve(each) if isinstance(each, AccelToken) else each
            return ref

        return SparseRef(self.format, resolved(self.data), resolved(self.indices), resolved(self.indptr), self.shape)


SparseField: TypeAlias = "SparseRef | tuple[Any, ...]"
"""A field of an op that is a sparse matrix: a caller gives a :class:`SparseRef`, and the op has its parts as a tuple, among which refs and tokens are found."""


def sparse_of(name: str, value: SparseField) -> SparseRef:
    """Return the matrix that a field holds; raise :class:`InvalidArgumentError` if it is none."""
    if isinstance(value, SparseRef):
        return value
    if not isinstance(value, tuple) or len(value) != 5:
        raise InvalidArgumentError(
            f"{name} is a {type(value).__name__}, not a SparseRef", remedy="Put it on the device first: await device.sparse.put(matrix)."
        )
    return SparseRef(*value)


def parts_of(name: str, value: SparseField) -> tuple[Any, ...]:
    """Return the parts of a matrix, as an op has them."""
    if type(value) is tuple and len(value) == 5:
        return value
    matrix = sparse_of(name, value)
    return (matrix.format, *matrix.refs, matrix.shape)


def structure_fault(a: SparseRef, indices: Array, indptr: Array, *, is_sorted: bool = False) -> tuple[int, int]:
    """Look whether the indices of a matrix, on the host, lie within it; and, of csr and csc, ``is_sorted``: whether they rise in each row or column.

    Returns
    -------
    code, number
        0 and 0 if they do. :data:`OUT_OF_RANGE` and the first index that does not. :data:`OUT_OF_ORDER` and the first place of ``indptr`` that is less than the
        one before; or the first or last place, where it does not begin with 0 or does not end with the number of elements. :data:`UNSORTED` and the first
        place of ``indices`` that is not more than the one before in its row.
    """
    columns = a.blocksize[1]
    minor = a.shape[0] if a.format == "csc" else a.shape[1] // columns
    limits = ((indices, minor), (indptr, a.shape[0])) if a.format == "coo" else ((indices, minor),)
    for numbers, most in limits:
        if not numbers.size:
            continue
        # A negative number is larger than any other one without its sign.
        unsigned = numbers.view(f"u{numbers.itemsize}")
        limit = min(most, int(np.iinfo(numbers.dtype).max) + 1)
        if int(unsigned.max()) >= limit:
            return OUT_OF_RANGE, int(numbers[np.argmax(unsigned >= limit)])
    falls = indptr[1:] < indptr[:-1]
    if falls.any():
        return OUT_OF_ORDER, 1 + int(np.argmax(falls))
    if a.format != "coo":
        for place, is_wrong in ((0, indptr[0] != 0), (a.major, indptr[-1] != indices.size)):
            if is_wrong:
                return OUT_OF_ORDER, place
    if is_sorted:
        places = 1 + np.flatnonzero(indices[1:] <= indices[:-1])
        within = places[indptr[np.searchsorted(indptr, places)] != places]  # no row begins there
        if within.size:
            return UNSORTED, int(within[0])
    return 0, 0
