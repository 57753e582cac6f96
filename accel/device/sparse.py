"""``device.sparse``: the ops on sparse matrices, and how matrices come to the device and back."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.errors import BackendUnavailableError, InvalidArgumentError
from accel.ops.namespace import Awaited
from accel.ops.sparse import SparseOps
from accel.ref import AccelRef
from accel.sparse_ref import FORMATS, SparseFormat, SparseRef, sparse_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from accel.device.memory_face import MemoryFace
    from accel.ops.namespace import Submitter

__all__ = ["DeviceSparse"]

Array = np.ndarray[Any, Any]
_INT32 = np.iinfo(np.int32).max


class DeviceSparse(SparseOps[Awaited]):
    """The sparse matrices of a device.

    Parameters
    ----------
    submitter
        Takes the ops.
    device
        The device.
    run_blocking
        Calls a function on a worker thread.
    """

    __slots__ = ("_device", "_run_blocking")

    def __init__(self, submitter: Submitter[Awaited], device: MemoryFace, run_blocking: Callable[..., Awaitable[Any]]) -> None:
        super().__init__(submitter)
        self._device = device
        self._run_blocking = run_blocking

    async def csr(self, parts: tuple[Any, Any, Any], *, shape: tuple[int, int], durable: bool = False) -> SparseRef:
        """Make a matrix of ``(data, indices, indptr)``, as scipy's ``csr_array`` does.

        Parameters
        ----------
        parts
            Host arrays: they are checked, brought into order, elements of one place are added up, and indices become int32 where that holds them. Or refs,
            which are taken as they are; see :class:`~accel.SparseRef`.
        shape
            Rows and columns.
        durable
            Of host arrays, whether the matrix outlives a fault.

        Raises
        ------
        InvalidArgumentError
            If these are no parts of such a matrix.
        """
        return await self._made("csr", parts, shape, durable)

    async def csc(self, parts: tuple[Any, Any, Any], *, shape: tuple[int, int], durable: bool = False) -> SparseRef:
        """Make a matrix of ``(data, indices, indptr)``, as scipy's ``csc_array`` does; see :meth:`csr`."""
        return await self._made("csc", parts, shape, durable)

    async def coo(self, parts: tuple[Any, tuple[Any, Any]], *, shape: tuple[int, int], durable: bool = False) -> SparseRef:
        """Make a matrix of ``(data, (rows, columns))``, as scipy's ``coo_array`` does; see :meth:`csr`."""
        if not (isinstance(parts, (tuple, list)) and len(parts) == 2 and isinstance(parts[1], (tuple, list)) and len(parts[1]) == 2):
            raise InvalidArgumentError("the parts of coo are (data, (rows, columns))", remedy="Give them so.", op="coo")
        return await self._made("coo", (parts[0], parts[1][1], parts[1][0]), shape, durable)

    async def put(self, matrix: Any, *, durable: bool = False) -> SparseRef:
        """Copy a sparse matrix of scipy's to the device, in its format if that is csr, csc or coo, else as csr.

        Parameters
        ----------
        matrix
            Any of scipy's sparse arrays and matrices, of two dimensions. It is read until the copy has ended: do not change it before.
        durable
            Whether the copy outlives a fault.

        Raises
        ------
        InvalidArgumentError
            If it is no sparse matrix.
        """
        if not hasattr(matrix, "tocsr") or isinstance(matrix, SparseRef) or len(matrix.shape) != 2:
            raise InvalidArgumentError(
                f"{type(matrix).__name__} is no sparse matrix of scipy's",
                remedy="Dense arrays: device.put, then device.sparse.fromdense.",
                op="put",
            )
        if matrix.format not in FORMATS:
            matrix = await self._run_blocking(matrix.tocsr)
        shape = (int(matrix.shape[0]), int(matrix.shape[1]))
        if matrix.format == "coo":
            return await self._made("coo", (matrix.data, matrix.col, matrix.row), shape, durable)
        return await self._made(matrix.format, (matrix.data, matrix.indices, matrix.indptr), shape, durable)

    async def get(self, matrix: SparseRef) -> Any:
        """Copy a matrix to the host, and return scipy's ``csr_array``, ``csc_array`` or ``coo_array``.

        Raises
        ------
        BackendUnavailableError
            If scipy is not installed.
        """
        matrix = sparse_of("matrix", matrix)
        try:
            scipy = await self._run_blocking(importlib.import_module, "scipy.sparse")
        except ImportError as error:
            raise BackendUnavailableError("scipy is not installed", remedy="In a checkout: pip install '.[cpu]'.") from error
        data, indices, indptr = [await self._device.get(ref) for ref in matrix.refs]
        parts = (data, (indptr, indices)) if matrix.format == "coo" else (data, indices, indptr)
        return getattr(scipy, f"{matrix.format}_array")(parts, shape=matrix.shape)

    async def _made(self, form: SparseFormat, parts: Any, shape: tuple[int, int], durable: bool) -> SparseRef:
        if not (isinstance(parts, (tuple, list)) and len(parts) == 3):
            raise InvalidArgumentError(f"the parts of {form} are (data, indices, indptr)", remedy="Give them so.", op=form)
        if all(isinstance(part, AccelRef) for part in parts):
            data, indices, indptr = parts
            return SparseRef(form, data, indices, indptr, shape)
        if any(isinstance(part, AccelRef) for part in parts):
            raise InvalidArgumentError("some parts are refs, and others are not", remedy="Give refs only, or host arrays only.", op=form)
        arrays = await self._run_blocking(_canonical, form, *[np.asarray(part) for part in parts], shape)
        data, indices, indptr = [await self._device.put(part, durable=durable) for part in arrays]
        return SparseRef(form, data, indices, indptr, shape)


def _canonical(form: SparseFormat, data: Array, indices: Array, indptr: Array, shape: tuple[int, int]) -> tuple[Array, Array, Array]:
    """Return the parts of a matrix with its elements in order, and none twice.

    Raises
    ------
    InvalidArgumentError
        If they do not fit together.
    """
    rows, columns = shape if form != "csc" else shape[::-1]
    if data.ndim != 1 or indices.shape != data.shape or indptr.ndim != 1 or not all(part.dtype.kind in "iu" for part in (indices, indptr)):
        raise _wrong(form, f"data is {data.shape}, indices {indices.dtype}{indices.shape}, indptr {indptr.dtype}{indptr.shape}")
    major = indptr
    if form != "coo":
        if indptr.shape != (rows + 1,) or indptr[0] != 0 or indptr[-1] != data.size or (np.diff(indptr) < 0).any():
            raise _wrong(form, f"indptr does not rise from 0 to {data.size} in {rows + 1} elements")
        major = np.repeat(np.arange(rows), np.diff(indptr))
    limits = (major, rows), (indices, columns)
    if major.shape != data.shape or any(part.size and not 0 <= part.min() <= part.max() < most for part, most in limits):
        raise _wrong(form, f"an index is outside of {shape}")
    places = major.astype(np.int64) * max(columns, 1) + indices if rows * columns <= np.iinfo(np.int64).max else None
    if places is None or (np.diff(places) <= 0).any():
        order = np.lexsort((indices, major))
        data, indices, major = data[order], indices[order], major[order]
        is_first = np.ones(data.size, bool)
        is_first[1:] = (np.diff(major) != 0) | (np.diff(indices) != 0)
        if not is_first.all():
            starts = np.flatnonzero(is_first)
            data, indices, major = np.add.reduceat(data, starts, dtype=data.dtype), indices[starts], major[starts]
    index = np.int32 if max(rows, columns, data.size) <= _INT32 else np.int64
    marks = major if form == "coo" else np.searchsorted(major, np.arange(rows + 1))
    return data, indices.astype(index), marks.astype(index)


def _wrong(form: str, what: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"these are no parts of a {form} matrix: {what}", remedy=f"Give what scipy's {form}_array takes.", op=form)
