"""Triangular, symmetric and Hermitian matrices of BLAS, and sums of matrices, in numpy."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu import costs
from accel.cpu.views import Array, array, operand
from accel.enums import Transpose

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from accel.backend import Kernel

__all__ = ["KERNELS", "applied"]

# Rows that are solved one after the other; what they need of the rows before them is one product.
_ROWS = 64


def applied(a: Array, transpose: Transpose) -> Array:
    """Return ``op(a)`` of the last two dimensions, as a view where nothing is conjugated. Called when the work runs."""
    if transpose is Transpose.NONE:
        return a
    turned = a.swapaxes(-1, -2)
    return np.conjugate(turned) if transpose is Transpose.CONJUGATE and a.dtype.kind == "c" else turned


def _shape(a: Array, transpose: Transpose) -> tuple[int, ...]:
    """Return the shape of ``op(a)`` of one matrix."""
    rows, columns = a.shape[-2:]
    return (rows, columns) if transpose is Transpose.NONE else (columns, rows)


def _triangle(a: Array, op: Any) -> Array:
    """Return ``op`` of one triangle of a: the other one is 0, and the diagonal 1 where it is not read."""
    kept = np.tril(a) if op.lower else np.triu(a)
    if op.unit_diagonal:
        places = np.arange(a.shape[-1])
        kept[..., places, places] = 1
    return applied(kept, op.trans)


def _solve_rows(a: Array, x: Array, *, lower: bool) -> None:
    """Solve ``a @ x == x`` in place, with matrices or stacks that are broadcast; a is triangular, and its other triangle is 0."""
    n = a.shape[-1]
    starts = range(0, n, _ROWS)
    for start in starts if lower else reversed(starts):
        end = min(n, start + _ROWS)
        known = slice(0, start) if lower else slice(end, n)
        x[..., start:end, :] -= a[..., start:end, known] @ x[..., known, :]
        for i in range(start, end) if lower else range(end - 1, start - 1, -1):
            near = slice(start, i) if lower else slice(i + 1, end)
            x[..., i, :] -= (a[..., i, None, near] @ x[..., near, :])[..., 0, :]
            x[..., i, :] /= a[..., i, i, None]


@np.errstate(all="ignore")
def _multiply(a: Array, b: Array, out: Array, alpha: complex, op: Any, is_left: bool) -> None:
    if not alpha:
        out[...] = 0
        return
    triangle = _triangle(a, op)
    product = triangle @ b if is_left else b @ triangle
    out[...] = product if alpha == 1 else product * out.dtype.type(alpha)


@np.errstate(all="ignore")
def _solve(a: Array, b: Array, out: Array, alpha: complex, op: Any, is_left: bool) -> None:
    if not alpha:
        out[...] = 0
        return
    np.multiply(b, out.dtype.type(alpha), out=out)
    triangle, lower = _triangle(a, op), op.lower is (op.trans is Transpose.NONE)
    if is_left:
        _solve_rows(triangle, out, lower=lower)
    else:
        _solve_rows(triangle.swapaxes(-1, -2), out.swapaxes(-1, -2), lower=not lower)


def _result(pointer: int, op: Any, shape: tuple[int, ...], *operands: Array) -> Array:
    """Return the result, matrices of ``shape``: one, or as many as the operands are."""
    batch = (op.batch_count,) if any(each.ndim == 3 for each in operands) else ()
    return array(pointer, (*batch, *shape), operands[0].dtype)


def _triangular(work: Any, lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    a, b = operand(inputs[0], op.a), operand(inputs[1], op.b)
    out = _result(outputs[0], op, b.shape[-2:], a, b)
    if out.size:
        n, others = a.shape[-1], out.size // a.shape[-1]
        cost = costs.matmul(n, n, others, b.dtype) + (2 * n * 3e-6 if work is _solve else 0)
        lane.stream.submit(partial(work, a, b, out, op.alpha, op, op.side == "left"), cost)


def _triangular_vector(work: Any, lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    a, x = operand(inputs[0], op.a), operand(inputs[1], op.x)
    if x.size:
        out = array(outputs[0], x.shape, x.dtype)
        cost = costs.matmul(x.size, x.size, 1, x.dtype) + (2 * x.size * 3e-6 if work is _solve else 0)
        lane.stream.submit(partial(work, a, x[:, None], out[:, None], 1.0, op, True), cost)


def _symmetric(is_hermitian: bool, lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    a, b = operand(inputs[0], op.a), operand(inputs[1], op.b)
    out, n = _result(outputs[0], op, b.shape[-2:], a, b), a.shape[-1]
    lane.stream.submit(partial(_symmetric_product, a, b, out, op, is_hermitian), costs.matmul(n, n, out.size // max(n, 1), b.dtype))


@np.errstate(all="ignore")
def _symmetric_product(a: Array, b: Array, out: Array, op: Any, is_hermitian: bool) -> None:
    half = np.tril(a, -1) if op.lower else np.triu(a, 1)
    whole = half + _mirrored(half, is_hermitian)
    places = np.arange(a.shape[-1])
    diagonal = a[..., places, places]
    whole[..., places, places] = diagonal.real if is_hermitian else diagonal
    _finish(whole @ b if op.side == "left" else b @ whole, out, op)


def _mirrored(a: Array, is_conjugate: bool) -> Array:
    turned = a.swapaxes(-1, -2)
    return turned.conj() if is_conjugate else turned


def _finish(product: Array, out: Array, op: Any) -> None:
    """Store ``alpha * product + beta * out``; out is not read with ``beta == 0``."""
    kind = out.dtype.type
    if op.alpha != 1:
        product = product * kind(op.alpha) if op.alpha else np.zeros_like(product)
    out[...] = product + kind(op.beta) * out if op.beta else product


def _update(is_hermitian: bool, lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    a = operand(inputs[0], op.a)
    n, k = _shape(a, op.trans)
    out = _result(outputs[0], op, (n, n), a)
    lane.stream.submit(partial(_update_triangle, a, out, op, is_hermitian), costs.matmul(n, n * op.batch_count, k, a.dtype))


@np.errstate(all="ignore")
def _update_triangle(a: Array, out: Array, op: Any, is_hermitian: bool) -> None:
    a = applied(a, op.trans)
    made = np.empty_like(out) if op.out is None else out.copy()
    _finish(a @ _mirrored(a, is_hermitian), made, op)
    n = out.shape[-1]
    if is_hermitian and made.dtype.kind == "c":
        places = np.arange(n)
        made[..., places, places] = made[..., places, places].real
    kept = np.tri(n, dtype=bool)
    np.copyto(out, made, where=kept if op.lower else kept.T)
    if op.out is None:
        np.copyto(out, 0, where=~kept if op.lower else ~kept.T)


def _geam(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    a, b = operand(inputs[0], op.a), operand(inputs[1], op.b)
    out = _result(outputs[0], op, _shape(a, op.transpose_a), a, b)
    terms = (op.alpha, a, op.transpose_a), (op.beta, b, op.transpose_b)
    lane.stream.submit(partial(_add, terms, out), costs.elements(5 * out.size, out.dtype))


@np.errstate(all="ignore")
def _add(terms: Sequence[tuple[complex, Array, Transpose]], out: Array) -> None:
    kind, total = out.dtype.type, np.zeros_like(out)
    for factor, matrix, transpose in terms:
        if factor:
            total += kind(factor) * applied(matrix, transpose)
    out[...] = total


KERNELS: Mapping[str, Kernel] = {
    "trmv": partial(_triangular_vector, _multiply),
    "trsv": partial(_triangular_vector, _solve),
    "trmm": partial(_triangular, _multiply),
    "trsm": partial(_triangular, _solve),
    "symm": partial(_symmetric, False),
    "hemm": partial(_symmetric, True),
    "syrk": partial(_update, False),
    "herk": partial(_update, True),
    "geam": _geam,
}
