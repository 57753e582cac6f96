"""Triangular, symmetric and Hermitian matrices of BLAS, and sums of matrices, in numpy."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu import costs
from accel.cpu.kernels import kernel, touches
from accel.enums import Transpose

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from accel.backend import Kernel
    from accel.cpu.views import Array

__all__ = ["KERNELS", "applied"]

# Rows that are solved one after the other; what they need of the rows before them is one product.
_ROWS = 64


def applied(a: Array, transpose: Transpose) -> Array:
    """Return ``op(a)`` of the last two dimensions, as a view where nothing is conjugated. Called when the work runs."""
    if transpose is Transpose.NONE:
        return a
    turned = a.swapaxes(-1, -2)
    return np.conjugate(turned) if transpose is Transpose.CONJUGATE and a.dtype.kind == "c" else turned


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


def _multiply(a: Array, b: Array, out: Array, alpha: complex, op: Any, is_left: bool) -> None:
    if not alpha:
        out[...] = 0
        return
    triangle = _triangle(a, op)
    product = triangle @ b if is_left else b @ triangle
    out[...] = product if alpha == 1 else product * out.dtype.type(alpha)


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


def _triangular(work: Callable[..., None], op: Any, operands: list[Array], results: list[Array]) -> None:
    a, b, out = *operands, *results
    work(a, b, out, op.alpha, op, op.side == "left")


def _triangular_vector(work: Callable[..., None], op: Any, operands: list[Array], results: list[Array]) -> None:
    a, x, out = *operands, *results
    work(a, x[:, None], out[:, None], 1.0, op, True)


def _product_cost(op: Any, operands: list[Array], results: list[Array]) -> float:
    n: int = operands[0].shape[-1]
    return costs.matmul(n, n, results[0].size // max(n, 1), results[0].dtype)


def _solution_cost(op: Any, operands: list[Array], results: list[Array]) -> float:
    n: int = operands[0].shape[-1]
    return _product_cost(op, operands, results) + 2 * n * 3e-6


def _symmetric(is_hermitian: bool, op: Any, operands: list[Array], results: list[Array]) -> None:
    a, b = operands
    half = np.tril(a, -1) if op.lower else np.triu(a, 1)
    whole = half + _mirrored(half, is_hermitian)
    places = np.arange(a.shape[-1])
    diagonal = a[..., places, places]
    whole[..., places, places] = diagonal.real if is_hermitian else diagonal
    _finish(whole @ b if op.side == "left" else b @ whole, results[0], op)


def _mirrored(a: Array, is_conjugate: bool) -> Array:
    turned = a.swapaxes(-1, -2)
    return turned.conj() if is_conjugate else turned


def _finish(product: Array, out: Array, op: Any) -> None:
    """Store ``alpha * product + beta * out``; out is not read with ``beta == 0``."""
    kind = out.dtype.type
    if op.alpha != 1:
        product = product * kind(op.alpha) if op.alpha else np.zeros_like(product)
    out[...] = product + kind(op.beta) * out if op.beta else product


def _update_cost(op: Any, operands: list[Array], results: list[Array]) -> float:
    n = results[0].shape[-1]
    return costs.matmul(n, n, operands[0].size // max(n, 1), results[0].dtype)


def _update(is_hermitian: bool, op: Any, operands: list[Array], results: list[Array]) -> None:
    a, out = applied(operands[0], op.trans), results[0]
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


def _geam(op: Any, operands: list[Array], results: list[Array]) -> None:
    out = results[0]
    kind, total = out.dtype.type, np.zeros_like(out)
    for factor, matrix, transpose in ((op.alpha, operands[0], op.transpose_a), (op.beta, operands[1], op.transpose_b)):
        if factor:
            total += kind(factor) * applied(matrix, transpose)
    out[...] = total


KERNELS: Mapping[str, Kernel] = {
    "trmv": kernel(partial(_triangular_vector, _multiply), _product_cost),
    "trsv": kernel(partial(_triangular_vector, _solve), _solution_cost),
    "trmm": kernel(partial(_triangular, _multiply), _product_cost),
    "trsm": kernel(partial(_triangular, _solve), _solution_cost),
    "symm": kernel(partial(_symmetric, False), _product_cost),
    "hemm": kernel(partial(_symmetric, True), _product_cost),
    "syrk": kernel(partial(_update, False), _update_cost),
    "herk": kernel(partial(_update, True), _update_cost),
    "geam": kernel(_geam, touches(5)),
}
