"""Sparse matrices: products and triangular systems through scipy, conversions through numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu.families.precision import blocks, wider
from accel.cpu.families.sparse_samples import samples
from accel.cpu.kernels import LateModule, fill, kernel
from accel.enums import Transpose
from accel.family import BackendPart
from accel.sparse_ref import SparseRef, sparse_of, structure_fault

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.backend import Kernel
    from accel.cpu.views import Array

__all__ = ["PART"]

# Seconds: of a call, and for one element.
_CALL, _ELEMENT = 50e-6, 4e-9

_scipy, _solvers = LateModule("scipy.sparse"), LateModule("scipy.sparse.linalg")


def _kernel(
    compute: Callable[[Any, list[Array], list[Array]], None],
    elements: Callable[[Any, list[Array], list[Array]], int],
    *,
    by_scipy: bool = False,
    is_sorted: bool = False,
) -> Kernel:
    """Return the kernel of an op.

    Parameters
    ----------
    compute
        Called if the indices of all matrices lie within them; else the status, which is the last result, says what is wrong.
    elements
        Returns how many elements are touched.
    by_scipy
        Whether scipy is needed.
    is_sorted
        Whether indices have to be sorted.
    """

    def checked(op: Any, operands: list[Array], results: list[Array]) -> None:
        for place, a in _matrices(op):
            fault = structure_fault(a, *operands[place + 1 : place + 3], is_sorted=is_sorted)
            if fault[0]:
                results[-1][:2] = fault
                return
        compute(op, operands, results)

    def cost(op: Any, operands: list[Array], results: list[Array]) -> float:
        return _CALL + _ELEMENT * elements(op, operands, results) + (_scipy.seconds(op.kind) if by_scipy else 0.0)

    return kernel(checked, cost)


def _matrices(op: Any) -> list[tuple[int, SparseRef]]:
    """Return the sparse operands, each with the place of its elements among the operands; indices and indptr follow."""
    if op.kind == "fromdense":
        return []
    if op.kind == "sddmm":
        return [(2, sparse_of("pattern", op.pattern))]
    second = [(3, sparse_of("b", op.b))] if op.kind in ("add", "spgemm", "spgemm_size") else []
    return [(0, sparse_of("a", op.a)), *second]


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


def _multiply(op: Any, operands: list[Array], results: list[Array]) -> None:
    (*parts, b), out = operands, results[0]
    turned, wide = getattr(op, "transpose_b", Transpose.NONE), wider(b.dtype)
    product = _applied(_matrix(sparse_of("a", op.a), *parts), op.transpose_a) @ _applied(b, turned).astype(wide, copy=False)
    product = product * wide.type(op.alpha)
    out[...] = product + wide.type(op.beta) * out.astype(wide, copy=False) if op.beta else product


def _convert(op: Any, operands: list[Array], results: list[Array]) -> None:
    (data, indices, indptr), (made, made_indices, made_indptr, _) = operands, results
    rows, columns = _coordinates(sparse_of("a", op.a), indices, indptr)
    major, minor = (columns, rows) if op.target == "csc" else (rows, columns)
    order = np.lexsort((minor, major))
    made[...], made_indices[...] = data.reshape(-1)[order], minor[order]
    made_indptr[...] = major[order] if op.target == "coo" else np.searchsorted(major[order], np.arange(made_indptr.size))


def _todense(op: Any, operands: list[Array], results: list[Array]) -> None:
    (data, indices, indptr), (out, _) = operands, results
    out[...] = 0
    out[_coordinates(sparse_of("a", op.a), indices, indptr)] = data.reshape(-1)


def _diagonal(op: Any, operands: list[Array], results: list[Array]) -> None:
    (data, indices, indptr), (out, _) = operands, results
    out[...] = 0
    rows, columns = _coordinates(sparse_of("a", op.a), indices, indptr)
    is_on = rows == columns
    out[rows[is_on]] = data[is_on]


def _fromdense(op: Any, operands: list[Array], results: list[Array]) -> None:
    (x,), (data, indices, indptr, count) = operands, results
    rows, columns = np.nonzero(x.astype(wider(x.dtype), copy=False))
    fill(data, x[rows, columns])
    fill(indices, columns)
    indptr[...] = np.searchsorted(rows, np.arange(indptr.size))
    count[...] = rows.size


def _add(op: Any, operands: list[Array], results: list[Array]) -> None:
    (a, indices_a, indptr_a, b, indices_b, indptr_b), (data, indices, indptr, count, _) = operands, results
    kind = data.dtype.type
    values = np.concatenate([kind(op.alpha) * a, kind(op.beta) * b])
    minor = np.concatenate([indices_a, indices_b])
    major = np.concatenate([np.repeat(np.arange(each.size - 1), np.diff(each)) for each in (indptr_a, indptr_b)])
    order = np.lexsort((minor, major))
    values, minor, major = values[order], minor[order], major[order]
    starts = np.flatnonzero(np.diff(major, prepend=-1) | np.diff(minor, prepend=-1))
    fill(data, np.add.reduceat(values, starts) if starts.size else values)
    fill(indices, minor[starts])
    indptr[...] = np.searchsorted(major[starts], np.arange(indptr.size))
    count[...] = starts.size


def _spgemm_size(op: Any, operands: list[Array], results: list[Array]) -> None:
    # Each element of the first factor (of csc, of the second) meets a whole row (column) of the other.
    indices, indptr = (operands[4], operands[2]) if sparse_of("a", op.a).format == "csc" else (operands[1], operands[5])
    results[0][...] = 0, np.diff(indptr)[indices].sum(dtype=np.int64)


def _spgemm(op: Any, operands: list[Array], results: list[Array]) -> None:
    a, b = sparse_of("a", op.a), sparse_of("b", op.b)
    parts_a, parts_b, (data, indices, indptr, count, _) = operands[:3], operands[3:], results
    product = (_matrix(a, *parts_a) @ _matrix(b, *parts_b)).asformat(a.format)
    # scipy leaves out sums that are 0; ones add up to none.
    stored = (_matrix(a, np.ones(a.nnz), *parts_a[1:]) @ _matrix(b, np.ones(b.nnz), *parts_b[1:])).asformat(a.format)
    product.sort_indices()
    stored.sort_indices()
    values = product.data
    if product.nnz != stored.nnz:
        values = np.zeros(stored.nnz, product.dtype)
        values[np.searchsorted(_places(stored), _places(product))] = product.data
    fill(data, values.dtype.type(op.alpha) * values)
    fill(indices, stored.indices)
    indptr[...] = stored.indptr
    count[...] = stored.nnz


def _places(matrix: Any) -> Array:
    """Return numbers of the places of the elements of a csr or csc matrix, which rise."""
    major = np.repeat(np.arange(matrix.indptr.size - 1, dtype=np.int64), np.diff(matrix.indptr))
    places: Array = major * max(matrix.shape) + matrix.indices
    return places


def _sddmm(op: Any, operands: list[Array], results: list[Array]) -> None:
    (a, b, data, indices, indptr), out = operands, results[0]
    left, right = _applied(a, op.transpose_a), _applied(b, op.transpose_b).T
    rows, columns = _coordinates(sparse_of("pattern", op.pattern), indices, indptr)
    for part in blocks(data.size, 2 * left.shape[1] * data.itemsize):
        out[part] = data.dtype.type(op.alpha) * np.einsum("ik,ik->i", left[rows[part]], right[columns[part]])
    if op.beta:
        out[...] += data.dtype.type(op.beta) * data


def _info(op: Any, results: list[Array]) -> Array:
    """Return where the info of a system is: the last number of the status, or a result."""
    return results[1][2:] if op.check else results[1]


def _solve(op: Any, operands: list[Array], results: list[Array]) -> None:
    (*parts, b), x, info = operands, results[0], _info(op, results)
    matrix, scipy, info[...] = _matrix(sparse_of("a", op.a), *parts), _scipy(), 0
    if not op.unit_diagonal and not (diagonal := matrix.diagonal()).all():
        info[...] = 1 + np.flatnonzero(diagonal == 0)[0]
    elif b.size:
        triangle = (scipy.tril if op.lower else scipy.triu)(matrix, format="csr")
        if op.unit_diagonal:
            triangle.setdiag(1)
        is_lower, turned = op.lower is (op.transpose_a is Transpose.NONE), _applied(triangle, op.transpose_a).tocsr()
        x[...] = _solvers().spsolve_triangular(turned, b, lower=is_lower, unit_diagonal=op.unit_diagonal)


def _direct(op: Any, operands: list[Array], results: list[Array]) -> None:
    (*parts, b), x, info = operands, results[0], _info(op, results)
    info[...] = 0
    if not b.size:
        return
    try:
        x[...] = _solvers().splu(_matrix(sparse_of("a", op.a), *parts).tocsc()).solve(b)
    except RuntimeError:  # scipy has no class for it; SuperLU says the same in other words where elements leave no place for pivots
        info[...] = 1


def _of_columns(op: Any, operands: list[Array], results: list[Array]) -> int:
    """Return the elements of a product with, or a system for, each column of a dense matrix."""
    result = results[0]
    return (operands[0].size + 10 * len(result)) * (result.size // max(1, len(result)))


def _of_operands(times: int) -> Callable[[Any, list[Array], list[Array]], int]:
    return lambda op, operands, results: times * sum(operand.size for operand in operands)


def _of_all(op: Any, operands: list[Array], results: list[Array]) -> int:
    return operands[0].size + results[0].size


def _of_pairs(op: Any, operands: list[Array], results: list[Array]) -> int:
    rows = operands[4].size - 1  # the pattern is csr
    return operands[2].size * (1 + operands[0].size // max(1, rows))


PART = BackendPart(
    {
        **dict.fromkeys(("spmv", "spmm"), _kernel(_multiply, _of_columns, by_scipy=True)),
        **dict.fromkeys(("tocsr", "tocsc", "tocoo"), _kernel(_convert, _of_operands(4))),
        "todense": _kernel(_todense, _of_all),
        "diagonal": _kernel(_diagonal, _of_all),
        "fromdense": _kernel(_fromdense, _of_operands(3)),
        "add": _kernel(_add, _of_operands(5), is_sorted=True),
        "spgemm": _kernel(_spgemm, _of_operands(15), by_scipy=True),
        "spgemm_size": _kernel(_spgemm_size, _of_operands(1)),
        "sddmm": _kernel(_sddmm, _of_pairs),
        "spsolve_triangular": _kernel(_solve, _of_columns, by_scipy=True),
        "solve": _kernel(_direct, lambda *given: 100 * _of_columns(*given), by_scipy=True, is_sorted=True),
    },
    wheels=("scipy",),
    samples=samples,
)
