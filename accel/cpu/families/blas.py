"""Matrix products, on column-major matrices as BLAS has them.

A column-major matrix is the transpose of a row-major one, so ``C = op(A) @ op(B)`` is computed as ``C.T = op(B).T @ op(A).T`` on row-major views; no element
moves for a transpose. numpy hands such views, with their leading dimensions, to its BLAS.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu.families import blas_matrices, blas_samples, blas_vectors, sampling
from accel.cpu.families.precision import WORKSPACE, blocks, wider
from accel.cpu.views import Array, array
from accel.enums import Transpose
from accel.family import BackendPart, Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from accel.dtype import DType

__all__ = ["PART", "batched_gemm", "finish", "gemm", "scale"]

# Enum members are slow to look up on their class, and gemm is called for matrices that take less time than that.
_NONE = Transpose.NONE
_CONJUGATE = Transpose.CONJUGATE
_matmul: Callable[[Array, Array, Array], Any] = np.matmul


@np.errstate(all="ignore")
def gemm(
    transpose_a: Transpose,
    transpose_b: Transpose,
    m: int,
    n: int,
    k: int,
    alpha: complex,
    a: int,
    lda: int,
    b: int,
    ldb: int,
    beta: complex,
    c: int,
    ldc: int,
    dtype: np.dtype[Any],
) -> None:
    """Compute ``C = alpha * op(A) @ op(B) + beta * C``; ``k`` may be 0."""
    size = dtype.itemsize
    out = array(c, (n, m), dtype, (ldc * size, size))
    if k == 0 or alpha == 0:
        scale(out, beta)
        return
    left = array(b, (n, k), dtype, (ldb * size, size) if transpose_b is _NONE else (size, ldb * size))
    right = array(a, (k, m), dtype, (lda * size, size) if transpose_a is _NONE else (size, lda * size))
    if dtype.kind == "c":
        left, right = _conjugated(left, transpose_b), _conjugated(right, transpose_a)
    if alpha == 1 and beta == 0 and wider(dtype) is dtype:
        _matmul(left, right, out)
    else:
        _multiply(left, right, out, alpha, beta)


@np.errstate(all="ignore")
def batched_gemm(
    transpose_a: Transpose,
    transpose_b: Transpose,
    m: int,
    n: int,
    k: int,
    alpha: complex,
    a: int,
    lda: int,
    stride_a: int,
    b: int,
    ldb: int,
    stride_b: int,
    beta: complex,
    c: int,
    ldc: int,
    stride_c: int,
    batch_count: int,
    dtype: np.dtype[Any],
) -> None:
    """Compute ``batch_count`` products whose matrices lie ``stride_*`` elements apart; ``k`` may be 0."""
    size = dtype.itemsize
    out = array(c, (batch_count, n, m), dtype, (stride_c * size, ldc * size, size))
    if k == 0 or alpha == 0:
        scale(out, beta)
        return
    # A matrix that all products share is a stack of one, so that it is converted once.
    left = array(b, (batch_count if stride_b else 1, n, k), dtype, (stride_b * size, *_strides(transpose_b, ldb, size)))
    right = array(a, (batch_count if stride_a else 1, k, m), dtype, (stride_a * size, *_strides(transpose_a, lda, size)))
    if dtype.kind == "c":
        left, right = _conjugated(left, transpose_b), _conjugated(right, transpose_a)
    if alpha == 1 and beta == 0 and wider(dtype) is dtype:
        _matmul(left, right, out)
    else:
        _multiply_each(left, right, out, alpha, beta)


def scale(out: Array, beta: complex) -> None:
    """Compute ``out = beta * out``, without reading it if ``beta`` is 0."""
    if beta == 0:
        out[...] = 0
    elif beta != 1:
        wide = wider(out.dtype)
        np.multiply(out, wide.type(beta), out=out, dtype=wide, casting="unsafe")


def finish(out: Array, product: Array, alpha: complex, beta: complex) -> None:
    """Store ``alpha * product + beta * out``, rounding once; ``product`` is used up."""
    wide = product.dtype
    if alpha != 1:
        np.multiply(product, wide.type(alpha), out=product)
    if beta != 0:
        np.add(product, np.multiply(out, wide.type(beta), dtype=wide), out=product)
    out[...] = product


def _strides(transpose: Transpose, ld: int, size: int) -> tuple[int, int]:
    """Return the strides of the row-major view of ``op(M).T``."""
    return (ld * size, size) if transpose is _NONE else (size, ld * size)


def _conjugated(matrix: Array, transpose: Transpose) -> Array:
    return np.conjugate(matrix) if transpose is _CONJUGATE else matrix


def _multiply(left: Array, right: Array, out: Array, alpha: complex, beta: complex) -> None:
    wide = wider(out.dtype)
    right = right.astype(wide, copy=False)
    rows, columns = out.shape
    for part in blocks(rows, (left.shape[1] + 2 * columns) * wide.itemsize):
        finish(out[part], np.matmul(left[part].astype(wide, copy=False), right), alpha, beta)


def _multiply_each(left: Array, right: Array, out: Array, alpha: complex, beta: complex) -> None:
    wide = wider(out.dtype)
    nbytes = (left[0].size + right[0].size + out[0].size) * wide.itemsize
    for part in blocks(len(out), nbytes):
        x, y = (stack if len(stack) == 1 else stack[part] for stack in (left, right))
        if nbytes > WORKSPACE:
            _multiply(x[0], y[0], out[part][0], alpha, beta)
        else:
            finish(out[part], np.matmul(x.astype(wide, copy=False), y.astype(wide, copy=False)), alpha, beta)


def _axpy(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Add ``alpha * x`` to y."""
    lane.compute.axpy(op.x.size, op.alpha, inputs[0], 1, outputs[0], 1, dtype=op.x.dtype)


def _dot(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Sum ``x * y``."""
    lane.compute.dot(op.x.size, inputs[0], 1, inputs[1], 1, outputs[0], dtype=op.x.dtype)


def _nrm2(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Compute the norm without overflow of the squares."""
    lane.compute.nrm2(op.x.size, inputs[0], 1, outputs[0], dtype=op.x.dtype)


def _scal(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Multiply x by ``alpha``; NaN stays NaN whatever alpha is."""
    lane.compute.scal(op.x.size, op.alpha, outputs[0], 1, dtype=op.x.dtype)


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    for dtype in (*sampling.ALL_FLOATS, *sampling.COMPLEX):
        for m, n, k in ((1, 1, 1), (7, 5, 3), (33, 17, 64)):
            a, b = sampling.random(rng, (m, k), dtype), sampling.random(rng, (k, n), dtype)
            product, error = sampling.wide(a) @ sampling.wide(b), sampling.sums(dtype, k)
            what = f"{dtype.value} {m}x{k} @ {k}x{n}"
            yield Sample(f"gemm {what}", lambda blas, a, b: blas.gemm(a, b), (a, b), product, error)
            yield Sample(
                f"gemm of transposes {what}",
                lambda blas, a, b: blas.gemm(a, b, transpose_a=True, transpose_b="t", alpha=0.5),
                (np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)),
                product / 2,
                error,
            )
            yield Sample(f"gemv {what}", lambda blas, a, x: blas.gemv(a, x), (a, b[:, 0].copy()), product[:, 0], error)
            stored = np.zeros((k + 2, m + 3), a.dtype)
            stored[1:-1, 2:-1] = a.T
            yield Sample(f"gemm of views {what}", lambda blas, a, b: blas.gemm(a[1:-1, 2:-1].T, b), (stored, b), product, error)
            yield Sample(f"gemm of reversed views {what}", lambda blas, a, b: blas.gemm(a[::-1], b), (a, b), product[::-1], error)
            three = sampling.random(rng, (3, m, k), dtype)
            batched = sampling.wide(three) @ sampling.wide(b)
            yield Sample(f"gemm_batched {what}", lambda blas, a, b: blas.gemm_batched(a, b), (three, b), batched, error)
        yield from _vector_samples(rng, dtype)
    yield from blas_samples.samples(rng)


def _vector_samples(rng: np.random.Generator, dtype: DType) -> Iterator[Sample]:
    for n in (0, 1, 1001):
        x, y = sampling.random(rng, n, dtype), sampling.random(rng, n, dtype)
        wide_x, wide_y, error = sampling.wide(x), sampling.wide(y), sampling.sums(dtype, n)
        what = f"{dtype.value} n={n}"
        yield Sample(f"axpy {what}", lambda blas, x, y: blas.axpy(x, y, alpha=-0.5), (x, y), wide_y - wide_x / 2, error)
        yield Sample(f"scal {what}", lambda blas, x: blas.scal(x, 3.0), (x,), 3 * wide_x, error)
        products = wide_x * wide_y
        terms = float(np.abs(products).max(initial=0.0))
        yield Sample(f"dot {what}", lambda blas, x, y: blas.dot(x, y), (x, y), np.asarray(products.sum()), error, terms)
        if not dtype.is_complex:
            yield Sample(f"nrm2 {what}", lambda blas, x: blas.nrm2(x), (x,), np.asarray(np.sqrt((wide_x**2).sum())), error)


PART = BackendPart(
    {"axpy": _axpy, "dot": _dot, "nrm2": _nrm2, "scal": _scal, **blas_vectors.KERNELS, **blas_matrices.KERNELS}, samples=_samples
)
