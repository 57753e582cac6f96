"""Samples of the ``sparse`` family: calls with their results from numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu.families import sampling
from accel.dtype import DType
from accel.enums import Transpose
from accel.family import Sample
from accel.sparse_ref import SparseRef

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accel.cpu.views import Array
    from accel.sparse_ref import SparseFormat

__all__ = ["samples"]

_WORKSPACE = 1 << 26  # a device's method asks the library how much it needs; this is more
_FORMATS: tuple[SparseFormat, ...] = ("csr", "csc", "coo")  # those of single elements
_SHAPES = ((1, 1), (0, 4), (4, 0), (5, 3), (61, 40), (3, 130), (4, 4))
_TRANSPOSES = (Transpose.NONE, Transpose.TRANSPOSE, Transpose.CONJUGATE)
_ALL = (*sampling.ALL_FLOATS, *sampling.COMPLEX)
_WIDE = (*sampling.FLOATS, *sampling.COMPLEX)


def _turned(matrix: Array, transpose: Transpose) -> Array:
    """Return ``op`` of a dense matrix."""
    return matrix if transpose is Transpose.NONE else matrix.T if transpose is Transpose.TRANSPOSE else matrix.T.conj()


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


_Matrix = tuple["SparseFormat", tuple[int, int]]
"""Format and shape of an operand, whose parts are three refs."""


def _sample(
    kind: str,
    what: str,
    matrices: tuple[_Matrix, ...],
    operands: tuple[Array, ...],
    expected: Array | tuple[Array, ...],
    error: float = 0.0,
    *,
    before: int = 0,
    seen: Any = None,
    **options: Any,
) -> Sample:
    """Return the sample of an op of sparse matrices, which are the operands behind ``before`` dense ones; others follow, and what is written, with ``beta``."""

    def call(sparse: Any, *refs: Any) -> Any:
        given, rest = list(refs[:before]), list(refs[before:])
        for form, shape in matrices:
            data, indices, indptr, *rest = rest
            given.append(SparseRef(form, data, indices, indptr, shape))
        more = {"out": rest.pop()} if "beta" in options and rest else {}
        return getattr(sparse, kind)(*given, *rest, **options, **more)

    return Sample(f"{kind} {what}", call, operands, expected, error, seen=seen)


def samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Return calls of every op, in all formats and dtypes."""
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
        yield from _direct_solutions(rng, dtype)
        yield from _sampled(rng, dtype)
        yield from _sums(rng, dtype)
        yield from _sparse_products(rng, dtype)


def _products(rng: np.random.Generator, dtype: DType, form: SparseFormat, shape: tuple[int, int], index: Any) -> Iterator[Sample]:
    dense = _random(rng, shape, dtype)
    # cuSPARSE adds parts of a row in the type of the result where that has 16 bits.
    error = sampling.sums(dtype, 16) if dtype in _WIDE else 4 * sampling.rounding(dtype)
    parts, name = _parts(dense, form, index), f"{dtype.value}{list(shape)} {form} {np.dtype(index).name}"
    for transpose in _TRANSPOSES if dtype.is_complex else _TRANSPOSES[:2]:
        yield from _multiplied(rng, dtype, (form, shape), parts, sampling.wide(dense), transpose, name, error)


def _multiplied(
    rng: np.random.Generator,
    dtype: DType,
    form: _Matrix,
    parts: tuple[Array, Array, Array],
    whole: Array,
    transpose: Transpose,
    name: str,
    error: float,
) -> Iterator[Sample]:
    """Yield products of ``op`` of one matrix, whole and in parts, with a vector and a matrix."""
    matrix, what = _turned(whole, transpose), f"{name} {transpose.value}"
    m, k = matrix.shape
    x, b, y, c = (sampling.random(rng, size, dtype) for size in (k, (k, 7), m, (m, 7)))
    of_x, of_b = matrix @ sampling.wide(x), matrix @ sampling.wide(b)
    options: dict[str, Any] = {"transpose_a": transpose}
    yield _sample("spmv", what, (form,), (*parts, x), of_x, error, **options)
    yield _sample("spmm", what, (form,), (*parts, b), of_b, error, **options)
    options |= {"alpha": 0.5, "beta": -2.0}
    expected = 0.5 * of_x - 2 * sampling.wide(y)
    yield _sample("spmv", f"{what} scaled", (form,), (*parts, x, y), expected, 2 * error, **options)
    operands, expected = (*parts, np.ascontiguousarray(b.T), c), 0.5 * of_b - 2 * sampling.wide(c)
    yield _sample("spmm", f"{what} scaled", (form,), operands, expected, 2 * error, transpose_b=True, **options)


def _conversions(rng: np.random.Generator, dtype: DType, form: SparseFormat, shape: tuple[int, int], index: Any) -> Iterator[Sample]:
    dense = _random(rng, shape, dtype)
    parts, name = _parts(dense, form, index), f"{dtype.value}{list(shape)} {form} {np.dtype(index).name}"
    matrices = ((form, shape),)
    yield _sample("todense", name, matrices, parts, sampling.wide(dense))
    yield _sample("diagonal", name, matrices, parts, sampling.wide(dense).diagonal())
    if index is np.int32:
        data, indices, indptr = _parts(dense, "csr")
        yield sampling.sample("fromdense", name, (dense,), (sampling.wide(data), indices, indptr), size=data.size + 3)
    for target in _FORMATS:
        data, indices, indptr = _parts(dense, target, index)
        yield _sample(f"to{target}", name, matrices, parts, (sampling.wide(data), indices, indptr))


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
        yield from _multiplied(rng, dtype, ("bsr", shape), parts, whole, transpose, name, error)
    yield _sample("todense", name, (("bsr", shape),), parts, whole)
    marks = np.repeat(np.repeat(is_stored, rows, 0), columns, 1)
    _, indices, indptr = _parts(marks.astype(np.float32), "csr", index)
    yield _sample("tocsr", name, (("bsr", shape),), parts, (whole[marks], indices, indptr))


def _sums(rng: np.random.Generator, dtype: DType) -> Iterator[Sample]:
    for number, shape in enumerate(_SHAPES):
        a, b, form = _random(rng, shape, dtype), _random(rng, shape, dtype), _FORMATS[number % 2]
        index = np.int64 if number == 3 else np.int32
        is_stored = (sampling.wide(a) != 0) | (sampling.wide(b) != 0)
        _, indices, indptr = _parts(is_stored.astype(np.float32), form, index)
        total = 2 * sampling.wide(a) - 0.5 * sampling.wide(b)
        values = total.T[is_stored.T] if form == "csc" else total[is_stored]
        operands, what = (*_parts(a, form, index), *_parts(b, form, index)), f"{dtype.value}{list(shape)} {form}"
        options = {"alpha": 2.0, "beta": -0.5, "size": values.size}
        yield _sample("add", what, ((form, shape),) * 2, operands, (values, indices, indptr), sampling.sums(dtype), **options)


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
        matrices, expected = ((form, (m, k)), (form, (k, n))), (values, indices, indptr)
        options = {"alpha": 2.0, "size": values.size, "workspace": _WORKSPACE}
        yield _sample("spgemm", name, matrices, operands, expected, sampling.sums(dtype, 64), **options)
        yield _sample("spgemm_size", name, matrices, operands, counts.sum()[None], seen=lambda found: (found[1:],), workspace=_WORKSPACE)


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
                options: dict[str, Any] = {"lower": lower, "unit_diagonal": is_unit, "transpose_a": transpose}
                double = np.complex128 if dtype.is_complex else np.float64
                expected = np.linalg.solve(_turned(triangle, transpose).astype(double), sampling.wide(b).astype(double))
                name, operands = f"{dtype.value}[{n}, {n}] {form} {transpose.value} {list(columns)}", (*_parts(dense, form), b)
                error = sampling.sums(dtype, 64)
                yield _sample("spsolve_triangular", name, ((form, (n, n)),), operands, expected, error, **options)


def _direct_solutions(rng: np.random.Generator, dtype: DType) -> Iterator[Sample]:
    for n, columns in ((1, ()), (0, ()), (40, ()), (133, ()), (40, (1,)), (133, (5,)), (7, (0,))):
        dense = _random(rng, (n, n), dtype, 0.1)
        dense[np.arange(n), rng.permutation(n)] += 3  # far from the diagonal
        np.fill_diagonal(dense, dense.diagonal() + dtype.numpy.type(1.5))
        b, double = sampling.random(rng, (n, *columns), dtype), np.complex128 if dtype.is_complex else np.float64
        expected = np.linalg.solve(sampling.wide(dense).astype(double), sampling.wide(b).astype(double))
        error = sampling.sums(dtype, 64) * max(1.0, float(np.linalg.cond(dense.astype(double))) if n else 1.0)
        name, operands = f"{dtype.value}[{n}, {n}] {list(columns)}", (*_parts(dense, "csr"), b)
        yield _sample("solve", name, (("csr", (n, n)),), operands, expected, error)


def _sampled(rng: np.random.Generator, dtype: DType) -> Iterator[Sample]:
    for m, k, n in ((1, 1, 1), (30, 17, 41), (6, 0, 5), (33, 64, 7)):
        a, b, dense = sampling.random(rng, (m, k), dtype), sampling.random(rng, (k, n), dtype), _random(rng, (m, n), dtype, 0.3)
        parts, error = _parts(dense, "csr"), sampling.sums(dtype, 64)
        rows, columns = np.nonzero(sampling.wide(dense))
        product = (sampling.wide(a) @ sampling.wide(b))[rows, columns]
        name = f"{dtype.value}[{m}, {k}] [{k}, {n}]"
        matrices: tuple[_Matrix] = (("csr", (m, n)),)
        yield _sample("sddmm", name, matrices, (a, b, *parts), (product, *parts[1:]), error, before=2)
        turned = np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)
        expected = product / 2 + 2 * sampling.wide(parts[0]), *parts[1:]
        options: dict[str, Any] = {"alpha": 0.5, "beta": 2.0, "transpose_a": True, "transpose_b": True}
        yield _sample("sddmm", f"{name} turned", matrices, (*turned, *parts), expected, error, before=2, **options)
