"""Sparse matrices: products and triangular systems through scipy, conversions through numpy."""

from __future__ import annotations

import importlib
import importlib.util
import math
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.compute import Transpose
from accel.cpu.families import sampling
from accel.cpu.families.precision import blocks, wider
from accel.cpu.views import Array, array
from accel.dtype import DType
from accel.errors import BackendUnavailableError
from accel.family import BackendPart, Sample
from accel.sparse_ref import SparseRef, sparse_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from accel.sparse_ref import SparseFormat

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


def _multiply(lane: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
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

    _enqueue(lane, (a.nnz + rows) * math.prod(shape[1:]), work, by_scipy=True)


def _convert(lane: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
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

    _enqueue(lane, 8 * a.nnz, work)


def _todense(lane: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    a = sparse_of("a", op.a)
    data, indices, indptr = _arrays(a, inputs)
    out = array(outputs[0], a.shape, data.dtype)

    def work() -> None:
        out[...] = 0
        out[_coordinates(a, indices, indptr)] = data.reshape(-1)

    _enqueue(lane, a.nnz + math.prod(a.shape), work)


def _diagonal(lane: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    a = sparse_of("a", op.a)
    data, indices, indptr = _arrays(a, inputs)
    out = array(outputs[0], (min(a.shape),), data.dtype)

    def work() -> None:
        out[...] = 0
        rows, columns = _coordinates(a, indices, indptr)
        is_on = rows == columns
        out[rows[is_on]] = data[is_on]

    _enqueue(lane, a.nnz + a.major, work)


def _write(found: Array, room: Array) -> None:
    """Write as much as there is room for, and zeros behind it."""
    room[: len(found)] = found[: len(room)]
    room[len(found) :] = 0


def _fromdense(lane: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
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


def _add(lane: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
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

    _enqueue(lane, 10 * (a.nnz + b.nnz), work)


def _spgemm_size(lane: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    a, b = sparse_of("a", op.a), sparse_of("b", op.b)
    parts_a, parts_b, out = _arrays(a, inputs), _arrays(b, inputs[3:]), array(outputs[0], (2,), _INT64)

    def work() -> None:
        # Each element of the first factor (of csc, of the second) meets a whole row (column) of the other.
        (_, indices, _), (_, _, indptr) = (parts_b, parts_a) if a.format == "csc" else (parts_a, parts_b)
        out[...] = 0, np.diff(indptr)[indices].sum(dtype=np.int64)

    _enqueue(lane, a.nnz + b.nnz, work)


def _spgemm(lane: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
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

    _enqueue(lane, 30 * (a.nnz + b.nnz), work, by_scipy=True)


def _places(matrix: Any) -> Array:
    """Return numbers of the places of the elements of a csr or csc matrix, which rise."""
    major = np.repeat(np.arange(matrix.indptr.size - 1, dtype=np.int64), np.diff(matrix.indptr))
    places: Array = major * max(matrix.shape) + matrix.indices
    return places


def _sddmm(lane: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
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

    _enqueue(lane, pattern.nnz * (1 + a.size // max(1, pattern.shape[0])), work)


def _solve(lane: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    a = sparse_of("a", op.a)
    parts, b = _arrays(a, inputs), array(inputs[3], op.b.shape, op.b.dtype.numpy)
    x, info = array(outputs[0], b.shape, b.dtype), array(outputs[1], (), _INT32)

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

    _enqueue(lane, (a.nnz + 10 * a.shape[0]) * math.prod(b.shape[1:]), work, by_scipy=True)


_WORKSPACE = 1 << 26  # a device's method asks the library how much it needs; this is more
_FORMATS: tuple[SparseFormat, ...] = ("csr", "csc", "coo")  # those of single elements
_SHAPES = ((1, 1), (0, 4), (4, 0), (5, 3), (61, 40), (3, 130), (4, 4))
_TRANSPOSES = (Transpose.NONE, Transpose.TRANSPOSE, Transpose.CONJUGATE)
_ALL = (*sampling.ALL_FLOATS, *sampling.COMPLEX)
_WIDE = (*sampling.FLOATS, *sampling.COMPLEX)


def _random(rng: np.random.Generator, shape: tuple[int, int], dtype: DType, density: float = 0.2) -> Array:
    """Return a dense matrix of which few elements are not 0; if it is large enough, a row and a column have none."""
    dense = sampling.random(rng, shape, dtype)
    dense[rng.random(shape) >= density] = 0
    dense[shape[0] // 2 : shape[0] // 2 + shape[0] // 5] = 0
    dense[:, shape[1] // 2 : shape[1] // 2 + shape[1] // 5] = 0
    return dense


def _parts(dense: Array, form: SparseFormat, index: Any = np.int32) -> tuple[Array, Array, Array]:
    """Return the elements of a dense matrix that are not 0, their indices and indptr."""
    wide = sampling.wide(dense)
    minor, major = np.nonzero(wide.T)[::-1] if form == "csc" else np.nonzero(wide)[::-1]
    data = (dense.T if form == "csc" else dense)[major, minor]
    marks = major if form == "coo" else np.searchsorted(major, np.arange(1 + dense.shape[form == "csc"]))
    return data, minor.astype(index), marks.astype(index)


def _called(kind: str, form: SparseFormat, shape: tuple[int, int], options: dict[str, Any], sparse: Any, *refs: Any) -> Any:
    """Call an op of a sparse matrix, which is the first three refs, and perhaps a dense operand and a buffer to write."""
    data, indices, indptr, *others = refs
    more = {"out": others.pop()} if "beta" in options else {}
    return getattr(sparse, kind)(SparseRef(form, data, indices, indptr, shape), *others, **options, **more)


def _called_dense(options: dict[str, Any], sparse: Any, x: Any) -> Any:
    return sparse.fromdense(x, **options)


def _called_two(
    kind: str, form: SparseFormat, shapes: tuple[tuple[int, int], tuple[int, int]], options: dict[str, Any], sparse: Any, *refs: Any
) -> Any:
    a, b = (
        SparseRef(form, data, indices, indptr, shape) for (data, indices, indptr), shape in zip((refs[:3], refs[3:]), shapes, strict=True)
    )
    return getattr(sparse, kind)(a, b, **options)


def _called_sddmm(shape: tuple[int, int], options: dict[str, Any], sparse: Any, a: Any, b: Any, *refs: Any) -> Any:
    data, indices, indptr = refs
    return sparse.sddmm(a, b, SparseRef("csr", data, indices, indptr, shape), **options)


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    for dtype in _ALL:
        for form in _FORMATS:
            yield from _products(rng, dtype, form, (37, 50), np.int32)
            yield from _conversions(rng, dtype, form, (37, 50), np.int32)
        for block in ((2, 2), (16, 16), (3, 5)):
            yield from _of_blocks(rng, dtype, block, np.int64 if block == (2, 2) and dtype is DType.FLOAT64 else np.int32)
    for number, shape in enumerate(_SHAPES):
        for index in (np.int32, np.int64):
            form = _FORMATS[number % 3]
            yield from _products(rng, DType.FLOAT32, form, shape, index)
            yield from _conversions(rng, DType.FLOAT64, form, shape, index)
    for dtype in _WIDE:
        yield from _solutions(rng, dtype)
        yield from _sampled(rng, dtype)
        yield from _sums(rng, dtype)
        yield from _sparse_products(rng, dtype)


def _products(rng: np.random.Generator, dtype: DType, form: SparseFormat, shape: tuple[int, int], index: Any) -> Iterator[Sample]:
    dense = _random(rng, shape, dtype)
    # cuSPARSE adds parts of a row in the type of the result where that has 16 bits.
    parts, error = _parts(dense, form, index), sampling.sums(dtype, 16) if dtype in _WIDE else 4 * sampling.rounding(dtype)
    for transpose in _TRANSPOSES if dtype.is_complex else _TRANSPOSES[:2]:
        matrix = _applied(sampling.wide(dense), transpose)
        (m, k), name = matrix.shape, f"{dtype.value}{list(shape)} {form} {transpose.value} {np.dtype(index).name}"
        x, b = sampling.random(rng, k, dtype), sampling.random(rng, (k, 7), dtype)
        options: dict[str, Any] = {"transpose_a": transpose}
        yield Sample(f"spmv {name}", partial(_called, "spmv", form, shape, options), (*parts, x), matrix @ sampling.wide(x), error)
        yield Sample(f"spmm {name}", partial(_called, "spmm", form, shape, options), (*parts, b), matrix @ sampling.wide(b), error)
        scaled = {**options, "alpha": 0.5, "beta": -2.0}
        y, c = sampling.random(rng, m, dtype), sampling.random(rng, (m, 7), dtype)
        expected = 0.5 * (matrix @ sampling.wide(x)) - 2 * sampling.wide(y)
        yield Sample(f"spmv {name} scaled", partial(_called, "spmv", form, shape, scaled), (*parts, x, y), expected, 2 * error)
        turned = np.ascontiguousarray(b.T)
        expected = 0.5 * (matrix @ sampling.wide(b)) - 2 * sampling.wide(c)
        call = partial(_called, "spmm", form, shape, {**scaled, "transpose_b": True})
        yield Sample(f"spmm {name} scaled", call, (*parts, turned, c), expected, 2 * error)


def _conversions(rng: np.random.Generator, dtype: DType, form: SparseFormat, shape: tuple[int, int], index: Any) -> Iterator[Sample]:
    dense = _random(rng, shape, dtype)
    parts, name = _parts(dense, form, index), f"{dtype.value}{list(shape)} {form} {np.dtype(index).name}"
    yield Sample(f"todense {name}", partial(_called, "todense", form, shape, {}), parts, sampling.wide(dense))
    yield Sample(f"diagonal {name}", partial(_called, "diagonal", form, shape, {}), parts, sampling.wide(dense).diagonal())
    if index is np.int32:
        data, indices, indptr = _parts(dense, "csr")
        call = partial(_called_dense, {"size": data.size + 3})
        yield Sample(f"fromdense {name}", call, (dense,), (sampling.wide(data), indices, indptr))
    for target in _FORMATS:
        data, indices, indptr = _parts(dense, target, index)
        yield Sample(f"to{target} {name}", partial(_called, f"to{target}", form, shape, {}), parts, (sampling.wide(data), indices, indptr))


def _of_blocks(rng: np.random.Generator, dtype: DType, block: tuple[int, int], index: Any) -> Iterator[Sample]:
    m, k, (rows, columns) = 7, 9, block
    shape, is_stored = (m * rows, k * columns), rng.random((m, k)) < 0.3
    is_stored[2], is_stored[:, 4], is_stored[6, 8] = False, False, True
    dense = sampling.random(rng, shape, dtype).reshape(m, rows, k, columns).transpose(0, 2, 1, 3) * is_stored[..., None, None].astype(
        dtype.numpy
    )
    data, whole = np.ascontiguousarray(dense[is_stored]), sampling.wide(dense).transpose(0, 2, 1, 3).reshape(shape)
    _, indices, indptr = _parts(is_stored.astype(np.float32), "csr", index)
    parts, error = (data, indices, indptr), sampling.sums(dtype, 64) if dtype in _WIDE else 4 * sampling.rounding(dtype)
    name = f"{dtype.value}{list(shape)} bsr {rows}x{columns} {np.dtype(index).name}"
    for transpose in (Transpose.NONE, Transpose.TRANSPOSE):
        matrix, options = _applied(whole, transpose), {"transpose_a": transpose}
        x, b = (sampling.random(rng, (matrix.shape[1], *more), dtype) for more in ((), (7,)))
        call = partial(_called, "spmv", "bsr", shape, options)
        yield Sample(f"spmv {name} {transpose.value}", call, (*parts, x), matrix @ sampling.wide(x), error)
        call = partial(_called, "spmm", "bsr", shape, options)
        yield Sample(f"spmm {name} {transpose.value}", call, (*parts, b), matrix @ sampling.wide(b), error)
        scaled = {**options, "alpha": 0.5, "beta": -2.0}
        y = sampling.random(rng, matrix.shape[0], dtype)
        call = partial(_called, "spmv", "bsr", shape, scaled)
        expected = 0.5 * (matrix @ sampling.wide(x)) - 2 * sampling.wide(y)
        yield Sample(f"spmv {name} {transpose.value} scaled", call, (*parts, x, y), expected, 2 * error)
        call = partial(_called, "spmm", "bsr", shape, {**scaled, "transpose_b": True})
        c = sampling.random(rng, (matrix.shape[0], 7), dtype)
        expected = 0.5 * (matrix @ sampling.wide(b)) - 2 * sampling.wide(c)
        yield Sample(f"spmm {name} {transpose.value} scaled", call, (*parts, np.ascontiguousarray(b.T), c), expected, 2 * error)
    yield Sample(f"todense {name}", partial(_called, "todense", "bsr", shape, {}), parts, whole)
    marks = np.repeat(np.repeat(is_stored, rows, 0), columns, 1)
    _, indices, indptr = _parts(marks.astype(np.float32), "csr", index)
    yield Sample(f"tocsr {name}", partial(_called, "tocsr", "bsr", shape, {}), parts, (whole[marks], indices, indptr))


def _sums(rng: np.random.Generator, dtype: DType) -> Iterator[Sample]:
    for number, shape in enumerate(_SHAPES):
        a, b, form = _random(rng, shape, dtype), _random(rng, shape, dtype), _FORMATS[number % 2]
        index = np.int64 if number == 3 else np.int32
        is_stored = (sampling.wide(a) != 0) | (sampling.wide(b) != 0)
        _, indices, indptr = _parts(is_stored.astype(np.float32), form, index)
        total = 2 * sampling.wide(a) - 0.5 * sampling.wide(b)
        values = total.T[is_stored.T] if form == "csc" else total[is_stored]
        call = partial(_called_two, "add", form, (shape, shape), {"alpha": 2.0, "beta": -0.5, "size": values.size})
        operands = (*_parts(a, form, index), *_parts(b, form, index))
        yield Sample(f"add {dtype.value}{list(shape)} {form}", call, operands, (values, indices, indptr), sampling.sums(dtype))


def _sparse_products(rng: np.random.Generator, dtype: DType) -> Iterator[Sample]:
    for number, (m, k, n) in enumerate(((1, 1, 1), (0, 4, 3), (4, 0, 5), (5, 3, 0), (37, 50, 41), (61, 40, 77), (3, 130, 9), (130, 3, 64))):
        a, b, form = _random(rng, (m, k), dtype), _random(rng, (k, n), dtype), _FORMATS[number % 2]
        if number > 4:  # sums of 0, which are stored all the same
            a[:, :2], b[:2] = 1, np.array([[1], [-1]])
        counts = (sampling.wide(a) != 0).astype(np.int64) @ (sampling.wide(b) != 0).astype(np.int64)
        _, indices, indptr = _parts((counts != 0).astype(np.float32), form)
        product = 2 * (sampling.wide(a) @ sampling.wide(b))
        values = product.T[counts.T != 0] if form == "csc" else product[counts != 0]
        operands, name = (*_parts(a, form), *_parts(b, form)), f"{dtype.value}[{m}, {k}] [{k}, {n}] {form}"
        shapes = (m, k), (k, n)
        call = partial(_called_two, "spgemm", form, shapes, {"alpha": 2.0, "size": values.size, "workspace": _WORKSPACE})
        yield Sample(f"spgemm {name}", call, operands, (values, indices, indptr), sampling.sums(dtype, 64))
        call = partial(_called_two, "spgemm_size", form, shapes, {"workspace": _WORKSPACE})
        yield Sample(f"spgemm_size {name}", call, operands, counts.sum()[None], seen=lambda found: (found[1:],))


def _solutions(rng: np.random.Generator, dtype: DType) -> Iterator[Sample]:
    for n, lower, is_unit in ((1, True, False), (40, True, False), (40, False, True), (0, True, False), (133, False, False)):
        dense = _random(rng, (n, n), dtype, 0.1) * dtype.numpy.type(0.2)
        np.fill_diagonal(dense, 1 + rng.random(n))
        form: SparseFormat = "csr" if n == 40 else "csc"
        for transpose in _TRANSPOSES:
            triangle = np.tril(sampling.wide(dense)) if lower else np.triu(sampling.wide(dense))
            if is_unit:
                np.fill_diagonal(triangle, 1)
            for columns in ((), (3,)) if n > 1 else ((3,),):
                b = sampling.random(rng, (n, *columns), dtype)
                options = {"lower": lower, "unit_diagonal": is_unit, "transpose_a": transpose}
                double = np.complex128 if dtype.is_complex else np.float64
                expected = np.linalg.solve(_applied(triangle, transpose).astype(double), sampling.wide(b).astype(double))
                name = f"spsolve_triangular {dtype.value}[{n}, {n}] {form} {transpose.value} {list(columns)}"
                call = partial(_called, "spsolve_triangular", form, (n, n), options)
                yield Sample(name, call, (*_parts(dense, form), b), expected, sampling.sums(dtype, 64))


def _sampled(rng: np.random.Generator, dtype: DType) -> Iterator[Sample]:
    for m, k, n in ((1, 1, 1), (30, 17, 41), (6, 0, 5), (33, 64, 7)):
        a, b, dense = sampling.random(rng, (m, k), dtype), sampling.random(rng, (k, n), dtype), _random(rng, (m, n), dtype, 0.3)
        parts, error = _parts(dense, "csr"), sampling.sums(dtype, 64)
        rows, columns = np.nonzero(sampling.wide(dense))
        product = (sampling.wide(a) @ sampling.wide(b))[rows, columns]
        name = f"sddmm {dtype.value}[{m}, {k}] [{k}, {n}]"
        yield Sample(name, partial(_called_sddmm, (m, n), {}), (a, b, *parts), (product, *parts[1:]), error)
        turned = np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)
        call = partial(_called_sddmm, (m, n), {"alpha": 0.5, "beta": 2.0, "transpose_a": True, "transpose_b": True})
        yield Sample(f"{name} turned", call, (*turned, *parts), (product / 2 + 2 * sampling.wide(parts[0]), *parts[1:]), error)


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
    },
    wheels=("scipy",),
    samples=_samples,
)
