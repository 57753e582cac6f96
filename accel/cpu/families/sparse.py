"""Sparse matrices: products and triangular systems through scipy, conversions through numpy."""

from __future__ import annotations

import importlib
import importlib.util
import math
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu.families.precision import blocks, wider
from accel.cpu.families.sparse_samples import samples
from accel.cpu.views import Array, array
from accel.enums import Transpose
from accel.errors import BackendUnavailableError
from accel.family import BackendPart
from accel.sparse_ref import SparseRef, sparse_of, structure_fault

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["PART"]

# Seconds: of a call, for one element, and what sends the first call to the stream's thread: an import takes tenths of a second.
_CALL, _ELEMENT, _IMPORT = 50e-6, 4e-9, 1.0
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)


@cache
def _scipy() -> Any:
    return importlib.import_module("scipy.sparse")


def _enqueue(lane: Any, elements: int, work: Callable[[], None], *, by_scipy: bool = False) -> None:
    """Enqueue work on so many elements.

    Raises
    ------
    BackendUnavailableError
        If it needs scipy, which is not installed.
    """
    cost = _CALL + _ELEMENT * elements
    if by_scipy and not _scipy.cache_info().currsize:
        if importlib.util.find_spec("scipy") is None:
            raise BackendUnavailableError("sparse products on the CPU need scipy", remedy="In a checkout: pip install '.[cpu]'.")
        cost += _IMPORT
    lane.stream.submit(work, cost)


def _arrays(a: SparseRef, addresses: Sequence[int]) -> tuple[Array, Array, Array]:
    """Return the parts of a matrix: elements, indices and indptr."""
    data, indices, indptr = (array(address, ref.shape, ref.dtype.numpy) for address, ref in zip(addresses, a.refs, strict=False))
    return data, indices, indptr


def _checked(
    status: int, work: Callable[[], None], *matrices: tuple[SparseRef, tuple[Array, Array, Array]], is_sorted: bool = False
) -> Callable[[], None]:
    """Return work that is done if the indices of its matrices lie within them, and are sorted where asked; else the status says what is wrong."""
    told = array(status, (2,), _INT64)

    def checked() -> None:
        for a, (_, indices, indptr) in matrices:
            fault = structure_fault(a, indices, indptr, is_sorted=is_sorted)
            if fault[0]:
                told[...] = fault
                return
        work()

    return checked


def _coordinates(a: SparseRef, indices: Array, indptr: Array) -> tuple[Array, Array]:
    """Return the row and the column of each element; of bsr, in the order of the blocks."""
    if a.format == "bsr":
        rows, columns = a.blocksize
        first_row = np.repeat(np.arange(a.major, dtype=indices.dtype), np.diff(indptr))[:, None, None] * rows
        within = np.arange(rows, dtype=indices.dtype)[:, None], np.arange(columns, dtype=indices.dtype)
        places = np.broadcast_arrays(first_row + within[0], indices[:, None, None] * columns + within[1])
        return places[0].reshape(-1), places[1].reshape(-1)
    major = indptr if a.format == "coo" else np.repeat(np.arange(a.major, dtype=indices.dtype), np.diff(indptr))
    return (indices, major) if a.format == "csc" else (major, indices)


def _applied(matrix: Any, transpose: Transpose) -> Any:
    """Return ``op`` of a dense or sparse matrix."""
    if transpose is Transpose.NONE:
        return matrix
    return matrix.T if transpose is Transpose.TRANSPOSE else matrix.T.conj()


def _matrix(a: SparseRef, data: Array, indices: Array, indptr: Array) -> Any:
    """Return scipy's matrix of the same elements, in the type that is computed in."""
    scipy, data = _scipy(), data.astype(wider(data.dtype), copy=False)
    if a.format == "coo":
        return scipy.coo_array((data, (indptr, indices)), shape=a.shape)
    return getattr(scipy, f"{a.format}_array")((data, indices, indptr), shape=a.shape)


def _multiply(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    a, dense = sparse_of("a", op.a), op.x if op.kind == "spmv" else op.b
    parts, b = _arrays(a, inputs), array(inputs[3], dense.shape, dense.dtype.numpy)
    turned = getattr(op, "transpose_b", Transpose.NONE)
    rows = a.shape[0] if op.transpose_a is Transpose.NONE else a.shape[1]
    shape = (rows,) if op.kind == "spmv" else (rows, _applied(b, turned).shape[1])
    out = array(outputs[0], shape, dense.dtype.numpy)

    @np.errstate(all="ignore")
    def work() -> None:
        wide = wider(b.dtype)
        product = _applied(_matrix(a, *parts), op.transpose_a) @ _applied(b, turned).astype(wide, copy=False)
        product = product * wide.type(op.alpha)
        out[...] = product + wide.type(op.beta) * out.astype(wide, copy=False) if op.beta else product

    _enqueue(lane, (a.nnz + rows) * math.prod(shape[1:]), _checked(outputs[1], work, (a, parts)), by_scipy=True)


def _convert(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    a, target = sparse_of("a", op.a), op.target
    data, indices, indptr = _arrays(a, inputs)
    made, made_indices = array(outputs[0], (a.nnz,), data.dtype), array(outputs[1], (a.nnz,), indices.dtype)
    marks = a.nnz if target == "coo" else 1 + (a.shape[1] if target == "csc" else a.shape[0])
    made_indptr = array(outputs[2], (marks,), indices.dtype)

    def work() -> None:
        rows, columns = _coordinates(a, indices, indptr)
        major, minor = (columns, rows) if target == "csc" else (rows, columns)
        order = np.lexsort((minor, major))
        made[...], made_indices[...] = data.reshape(-1)[order], minor[order]
        made_indptr[...] = major[order] if target == "coo" else np.searchsorted(major[order], np.arange(marks))

    _enqueue(lane, 8 * a.nnz, _checked(outputs[3], work, (a, (data, indices, indptr))))


def _todense(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    a = sparse_of("a", op.a)
    data, indices, indptr = _arrays(a, inputs)
    out = array(outputs[0], a.shape, data.dtype)

    def work() -> None:
        out[...] = 0
        out[_coordinates(a, indices, indptr)] = data.reshape(-1)

    _enqueue(lane, a.nnz + math.prod(a.shape), _checked(outputs[1], work, (a, (data, indices, indptr))))


def _diagonal(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    a = sparse_of("a", op.a)
    data, indices, indptr = _arrays(a, inputs)
    out = array(outputs[0], (min(a.shape),), data.dtype)

    def work() -> None:
        out[...] = 0
        rows, columns = _coordinates(a, indices, indptr)
        is_on = rows == columns
        out[rows[is_on]] = data[is_on]

    _enqueue(lane, a.nnz + a.major, _checked(outputs[1], work, (a, (data, indices, indptr))))


def _write(found: Array, room: Array) -> None:
    """Write as much as there is room for, and zeros behind it."""
    room[: len(found)] = found[: len(room)]
    room[len(found) :] = 0


def _fromdense(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    x, room, index = array(inputs[0], op.x.shape, op.x.dtype.numpy), op.room(op.x.size), op.index_type.numpy
    data, indices = array(outputs[0], (room,), x.dtype), array(outputs[1], (room,), index)
    indptr, count = array(outputs[2], (x.shape[0] + 1,), index), array(outputs[3], (), _INT64)

    def work() -> None:
        rows, columns = np.nonzero(x.astype(wider(x.dtype), copy=False))
        _write(x[rows, columns], data)
        _write(columns, indices)
        indptr[...] = np.searchsorted(rows, np.arange(indptr.size))
        count[...] = rows.size

    _enqueue(lane, 3 * x.size, work)


def _add(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    a, b = sparse_of("a", op.a), sparse_of("b", op.b)
    room = op.room(a.nnz + b.nnz)
    parts_a, parts_b = _arrays(a, inputs), _arrays(b, inputs[3:])
    data, indices = array(outputs[0], (room,), parts_a[0].dtype), array(outputs[1], (room,), parts_a[1].dtype)
    indptr, count = array(outputs[2], parts_a[2].shape, parts_a[2].dtype), array(outputs[3], (), _INT64)

    @np.errstate(all="ignore")
    def work() -> None:
        kind = data.dtype.type
        values = np.concatenate([kind(op.alpha) * parts_a[0], kind(op.beta) * parts_b[0]])
        minor = np.concatenate([parts_a[1], parts_b[1]])
        major = np.concatenate([np.repeat(np.arange(a.major), np.diff(part[2])) for part in (parts_a, parts_b)])
        order = np.lexsort((minor, major))
        values, minor, major = values[order], minor[order], major[order]
        starts = np.flatnonzero(np.diff(major, prepend=-1) | np.diff(minor, prepend=-1))
        _write(np.add.reduceat(values, starts) if starts.size else values, data)
        _write(minor[starts], indices)
        indptr[...] = np.searchsorted(major[starts], np.arange(indptr.size))
        count[...] = starts.size

    _enqueue(lane, 10 * (a.nnz + b.nnz), _checked(outputs[4], work, (a, parts_a), (b, parts_b), is_sorted=True))


def _spgemm_size(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    a, b = sparse_of("a", op.a), sparse_of("b", op.b)
    parts_a, parts_b, out = _arrays(a, inputs), _arrays(b, inputs[3:]), array(outputs[0], (2,), _INT64)

    def work() -> None:
        # Each element of the first factor (of csc, of the second) meets a whole row (column) of the other.
        (_, indices, _), (_, _, indptr) = (parts_b, parts_a) if a.format == "csc" else (parts_a, parts_b)
        out[...] = 0, np.diff(indptr)[indices].sum(dtype=np.int64)

    _enqueue(lane, a.nnz + b.nnz, _checked(outputs[1], work, (a, parts_a), (b, parts_b)))


def _spgemm(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    a, b = sparse_of("a", op.a), sparse_of("b", op.b)
    room, marks = op.room(a.shape[0] * b.shape[1]), 1 + (b.shape[1] if a.format == "csc" else a.shape[0])
    parts_a, parts_b = _arrays(a, inputs), _arrays(b, inputs[3:])
    data, indices = array(outputs[0], (room,), parts_a[0].dtype), array(outputs[1], (room,), parts_a[1].dtype)
    indptr, count = array(outputs[2], (marks,), parts_a[1].dtype), array(outputs[3], (), _INT64)

    @np.errstate(all="ignore")
    def work() -> None:
        product = (_matrix(a, *parts_a) @ _matrix(b, *parts_b)).asformat(a.format)
        # scipy leaves out sums that are 0; ones add up to none.
        stored = (_matrix(a, np.ones(a.nnz), *parts_a[1:]) @ _matrix(b, np.ones(b.nnz), *parts_b[1:])).asformat(a.format)
        product.sort_indices()
        stored.sort_indices()
        values = product.data
        if product.nnz != stored.nnz:
            values = np.zeros(stored.nnz, product.dtype)
            values[np.searchsorted(_places(stored), _places(product))] = product.data
        _write(values.dtype.type(op.alpha) * values, data)
        _write(stored.indices, indices)
        indptr[...] = stored.indptr
        count[...] = stored.nnz

    _enqueue(lane, 30 * (a.nnz + b.nnz), _checked(outputs[4], work, (a, parts_a), (b, parts_b)), by_scipy=True)


def _places(matrix: Any) -> Array:
    """Return numbers of the places of the elements of a csr or csc matrix, which rise."""
    major = np.repeat(np.arange(matrix.indptr.size - 1, dtype=np.int64), np.diff(matrix.indptr))
    places: Array = major * max(matrix.shape) + matrix.indices
    return places


def _sddmm(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    pattern = sparse_of("pattern", op.pattern)
    a, b = (array(address, ref.shape, ref.dtype.numpy) for address, ref in zip(inputs, (op.a, op.b), strict=False))
    data, indices, indptr = _arrays(pattern, inputs[2:])
    out = array(outputs[0], data.shape, data.dtype)

    @np.errstate(all="ignore")
    def work() -> None:
        left, right = _applied(a, op.transpose_a), _applied(b, op.transpose_b).T
        rows, columns = _coordinates(pattern, indices, indptr)
        for part in blocks(data.size, 2 * left.shape[1] * data.itemsize):
            out[part] = data.dtype.type(op.alpha) * np.einsum("ik,ik->i", left[rows[part]], right[columns[part]])
        if op.beta:
            out[...] += data.dtype.type(op.beta) * data

    checked = _checked(outputs[1], work, (pattern, (data, indices, indptr)))
    _enqueue(lane, pattern.nnz * (1 + a.size // max(1, pattern.shape[0])), checked)


def _told(op: Any, outputs: Sequence[int]) -> tuple[int, Array]:
    """Return where a system's status is, and its info: the last number of the status, or a result."""
    return outputs[1 if op.check else 2], array(outputs[1] + (16 if op.check else 0), (), _INT32)


def _solve(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    a = sparse_of("a", op.a)
    parts, b = _arrays(a, inputs), array(inputs[3], op.b.shape, op.b.dtype.numpy)
    x, (status, info) = array(outputs[0], b.shape, b.dtype), _told(op, outputs)

    @np.errstate(all="ignore")
    def work() -> None:
        matrix, scipy, info[...] = _matrix(a, *parts), _scipy(), 0
        if not op.unit_diagonal and not (diagonal := matrix.diagonal()).all():
            info[...] = 1 + np.flatnonzero(diagonal == 0)[0]
        elif b.size:
            triangle = (scipy.tril if op.lower else scipy.triu)(matrix, format="csr")
            if op.unit_diagonal:
                triangle.setdiag(1)
            solve = importlib.import_module("scipy.sparse.linalg").spsolve_triangular
            is_lower = op.lower is (op.transpose_a is Transpose.NONE)
            x[...] = solve(_applied(triangle, op.transpose_a).tocsr(), b, lower=is_lower, unit_diagonal=op.unit_diagonal)

    _enqueue(lane, (a.nnz + 10 * a.shape[0]) * math.prod(b.shape[1:]), _checked(status, work, (a, parts)), by_scipy=True)


def _direct(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    a = sparse_of("a", op.a)
    parts, b = _arrays(a, inputs), array(inputs[3], op.b.shape, op.b.dtype.numpy)
    x, (status, info) = array(outputs[0], b.shape, b.dtype), _told(op, outputs)

    @np.errstate(all="ignore")
    def work() -> None:
        info[...] = 0
        if not b.size:
            return
        try:
            x[...] = importlib.import_module("scipy.sparse.linalg").splu(_matrix(a, *parts).tocsc()).solve(b)
        except (
            RuntimeError
        ):  # scipy has no class for it; SuperLU says the same of a matrix whose elements leave no place for pivots in other words
            info[...] = 1

    cost = 100 * (a.nnz + a.shape[0]) * max(1, math.prod(b.shape[1:]))
    _enqueue(lane, cost, _checked(status, work, (a, parts), is_sorted=True), by_scipy=True)


PART = BackendPart(
    {
        "spmv": _multiply,
        "spmm": _multiply,
        "tocsr": _convert,
        "tocsc": _convert,
        "tocoo": _convert,
        "todense": _todense,
        "diagonal": _diagonal,
        "fromdense": _fromdense,
        "add": _add,
        "spgemm": _spgemm,
        "spgemm_size": _spgemm_size,
        "sddmm": _sddmm,
        "spsolve_triangular": _solve,
        "solve": _direct,
    },
    wheels=("scipy",),
    samples=samples,
)
