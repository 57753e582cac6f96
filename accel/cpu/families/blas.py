"""Matrix products."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu import costs
from accel.cpu.families import blas_matrices, blas_samples, blas_vectors, sampling
from accel.cpu.families.blas_matrices import applied
from accel.cpu.families.precision import NARROW, pieces, wider
from accel.cpu.views import Array, operand, result
from accel.enums import Transpose
from accel.family import BackendPart, Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from accel.dtype import DType

__all__ = ["PART"]

# Enum members are slow to look up on their class, and gemm is called for matrices that take less time than that.
_NONE = Transpose.NONE
_matmul: Callable[[Array, Array, Array], Any] = np.matmul


@np.errstate(all="ignore")
def _multiply(
    a: Array, b: Array, out: Array, alpha: complex, beta: complex, transpose_a: Transpose, transpose_b: Transpose = _NONE
) -> None:
    """Compute ``alpha * op(a) @ op(b) + beta * out`` of matrices, or of stacks of them."""
    if not (alpha and a.size and b.size):
        _scale(out, beta)
        return
    if transpose_a is not _NONE:
        a = applied(a, transpose_a)
    if transpose_b is not _NONE:
        b = applied(b, transpose_b)
    if alpha == 1 and not beta and out.dtype not in NARROW:
        _matmul(a, b, out)
        return
    wide = wider(out.dtype)
    for index, rows in pieces(out.shape[:-2], out.shape[-2], out.shape[-1], a.shape[-1], wide):
        left, right = (stack if stack.ndim == 2 else stack[index] for stack in (a, b))
        product = np.matmul(left[..., rows, :].astype(wide, copy=False), right.astype(wide, copy=False))
        if alpha != 1:
            np.multiply(product, wide.type(alpha), out=product)
        part = out[index][..., rows, :]
        if beta:
            np.add(product, np.multiply(part, wide.type(beta), dtype=wide), out=product)
        part[...] = product  # rounded once


def _scale(out: Array, beta: complex) -> None:
    """Compute ``out = beta * out``, without reading it if ``beta`` is 0."""
    if not beta:
        out[...] = 0
    elif beta != 1:
        wide = wider(out.dtype)
        np.multiply(out, wide.type(beta), out=out, dtype=wide, casting="unsafe")


def _gemm(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    a, b, out = operand(inputs[0], op.a), operand(inputs[1], op.b), result(outputs[0], plan)
    m, n = out.shape[-2:]
    work = partial(_multiply, a, b, out, op.alpha, op.beta, op.transpose_a, op.transpose_b)
    k, count = a.shape[-1 if op.transpose_a is _NONE else -2], 1 if out.ndim == 2 else len(out)
    lane.stream.submit(work, costs.matmul(m, n, k, out.dtype, count))


def _gemm_grouped(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    for number, (m, n, k) in enumerate(op.sizes()):
        a, b = operand(inputs[number], op.a[number]), operand(inputs[len(op.a) + number], op.b[number])
        out = result(outputs[number], plan, number)
        work = partial(_multiply, a, b, out, op.alpha, op.beta, op.transpose_a, op.transpose_b)
        lane.stream.submit(work, costs.matmul(m, n, k, out.dtype))


def _gemv(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    a, x, out = operand(inputs[0], op.a), operand(inputs[1], op.x), result(outputs[0], plan)
    work = partial(_multiply, a, x[:, None], out[:, None], op.alpha, op.beta, op.transpose_a)
    lane.stream.submit(work, costs.matmul(out.size, 1, x.size, out.dtype))


def _ger(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    x, y, out = operand(inputs[0], op.x), operand(inputs[1], op.y), result(outputs[0], plan)
    turn = Transpose.CONJUGATE if op.conjugate else Transpose.TRANSPOSE
    work = partial(_multiply, x[:, None], y[:, None], out, op.alpha, op.beta, _NONE, turn)
    lane.stream.submit(work, costs.matmul(x.size, y.size, 1, out.dtype))


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
    {
        **dict.fromkeys(("gemm", "gemm_batched"), _gemm),
        "gemm_grouped": _gemm_grouped,
        "gemv": _gemv,
        "ger": _ger,
        **blas_vectors.KERNELS,
        **blas_matrices.KERNELS,
    },
    samples=_samples,
)
