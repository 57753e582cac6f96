"""Factorizations on a GPU, and what is solved by them.

A C-order matrix is the transpose of cuSOLVER's column-major one. Hermitian matrices become their conjugates by that: their triangle is the other one, and the
factor comes out transposed, so nothing moves. Other matrices are transposed first: pivots of the transpose would be others.

cuSOLVER's ``getrf`` skips NaN in its search for pivots and returns finite, wrong factors; its ``geqrf`` may not end for infinities. A matrix with such an
element is replaced by zeros before the call, and its results by NaN behind it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from accel import DType, Transpose
from accel_cuda.families.kernels import CODES
from accel_cuda.families.solver_calls import Call

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from accel_cuda.families.solver_work import Work

__all__ = ["STEPS", "Lu", "sources"]

_NONE, _TURNED, _CONJUGATE = Transpose.NONE, Transpose.TRANSPOSE, Transpose.CONJUGATE
_INFO = 4


def sources(ref: Any, stack: tuple[int, ...]) -> list[int]:
    """Return which matrix of ``ref`` each one of a result's stack is made of."""
    lengths = ref.shape[:-2]
    return list(map(int, np.broadcast_to(np.arange(math.prod(lengths)).reshape(lengths), stack).ravel()))


def _cholesky(work: Work, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    n, dtype, (out, info) = op.a.shape[-1], op.a.dtype, outputs
    count = math.prod(op.a.shape[:-2])
    work.clear(info, count * _INFO)
    work.copy(out, inputs[0], op.a.nbytes)
    for i in range(count if n else 0):
        work.call(Call("potrf", dtype, n, n, lower=op.upper), (out + i * n * n * dtype.itemsize,), info + i * _INFO)
    work.triangle(out, count, n, n, dtype, upper=op.upper, info=info)


def _cho_solve(work: Work, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Solve twice with one triangle. With a of ``l @ l^H``, and m the transpose of l: ``x^T = b^T @ m^-1 @ m^-H``."""
    stack, n, k = op.sizes()
    (c, b), out, dtype = inputs, outputs[0], op.c.dtype
    size, itemsize = n * k, dtype.itemsize
    if not size:
        return
    for i, (j, side) in enumerate(zip(sources(op.c, stack), _sides(op.b, stack), strict=True)):
        x = out + i * size * itemsize
        work.copy(x, b + side * size * itemsize, size * itemsize)
        _substitute(work, op, k, n, c + j * n * n * itemsize, x)


def _cholesky_inverse(work: Work, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Solve for the unit matrix, which is its own transpose."""
    n, count, dtype = op.c.shape[-1], math.prod(op.c.shape[:-2]), op.c.dtype
    work.eye(outputs[0], count, n, n, dtype)
    for place in range(0, count * n * n * dtype.itemsize, n * n * dtype.itemsize or 1):
        _substitute(work, op, n, n, inputs[0] + place, outputs[0] + place)


def _substitute(work: Work, op: Any, k: int, n: int, c: int, x: int) -> None:
    """Solve for k right-hand sides in place, with one triangle and with its conjugate transpose."""
    second = _CONJUGATE if op.c.dtype.is_complex else _TURNED
    for turn in (second, _NONE) if op.upper else (_NONE, second):
        work.triangular(op.upper, turn, k, n, c, x, op.c.dtype)


def _sides(ref: Any, stack: tuple[int, ...]) -> list[int]:
    """Return which right-hand sides each one of a result's stack belongs to; a vector is all of theirs."""
    return [0] * math.prod(stack) if ref.ndim == 1 else sources(ref, stack)


class Lu:
    """The factors of one matrix at a time, column-major, in memory of the op's.

    Parameters
    ----------
    work, dtype
        The op's.
    m, n
        Rows and columns.

    Attributes
    ----------
    factors, piv : int
        Where they lie. The factors of a matrix with an element that is not finite are NaN, its pivots leave the rows as they are.
    unused : int
        An int32 of calls whose info says nothing of the matrix.
    """

    def __init__(self, work: Work, dtype: DType, m: int, n: int) -> None:
        self._work, self._dtype, self._m, self._n = work, dtype, m, n
        self.factors = work.room(m * n * dtype.itemsize)
        self.piv = work.room(8 * min(m, n))
        self.unused, self._flag = work.room(_INFO), work.room(_INFO)
        self._last: tuple[int, int] | None = None

    def factor(self, a: int, info: int = 0) -> None:
        """Factor a C-order matrix, unless it is the one that was factored last: then its info is copied."""
        work, m, n = self._work, self._m, self._n
        told = info or self.unused
        if self._last is not None and self._last[0] == a:
            work.copy(told, self._last[1], _INFO)
            return
        work.clear(self._flag, _INFO)
        work.finite(self._flag, a, m, n, self._dtype)
        work.turn(self.factors, a, m, n, self._dtype)
        work.blank(self._flag, self.factors, m * n, self._dtype, 0)
        work.call(Call("getrf", self._dtype, m, n), (self.factors, self.piv), told)
        work.blank(self._flag, self.factors, m * n, self._dtype)
        work.blank(self._flag, told, 1, DType.INT32, 0)  # NaN is no singular matrix
        self._last = a, told

    def take(self, lu: int, piv: int, status: int) -> None:
        """Have factors that ``lu_factor`` has made, unless these are there. The status tells of a pivot that is no row; another row is taken for it."""
        if self._last is None or self._last[0] != lu:
            self._work.turn(self.factors, lu, self._n, self._n, self._dtype)
            self._work.launch("piv_in", self._n, piv, self.piv, status, self._n)
            self._last = lu, 0

    def solve(self, trans: Transpose, k: int, b: int, x: int, room: int) -> None:
        """Solve for k right-hand sides in C order; ``room`` has space for them where there are several."""
        work, n, dtype = self._work, self._n, self._dtype
        if k == 1:
            work.copy(x, b, n * dtype.itemsize)
            work.solve(trans, dtype, n, 1, self.factors, self.piv, x, self.unused)
        else:
            work.turn(room, b, n, k, dtype)
            work.solve(trans, dtype, n, k, self.factors, self.piv, room, self.unused)
            work.turn(x, room, k, n, dtype)


def _lu_factor(work: Work, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    *stack, m, n = op.a.shape
    count, dtype, (lu, piv, info) = math.prod(stack), op.a.dtype, outputs
    work.clear(info, count * _INFO)
    if not m * n:
        return
    made, nbytes, k = Lu(work, dtype, m, n), m * n * dtype.itemsize, min(m, n)
    for i in range(count):
        made.factor(inputs[0] + i * nbytes, info + i * _INFO)
        work.turn(lu + i * nbytes, made.factors, n, m, dtype)
        work.launch("piv_out", k, made.piv, piv + i * k * 4, k)


def _lu_solve(work: Work, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    stack, n, k = op.sizes()
    (lu, piv, b), (out, status), dtype = inputs, outputs, op.lu.dtype
    size = n * k * dtype.itemsize
    if not size:
        return
    made, room = Lu(work, dtype, n, n), work.room(size)
    for i, (j, side) in enumerate(zip(sources(op.lu, stack), _sides(op.b, stack), strict=True)):
        made.take(lu + j * n * n * dtype.itemsize, piv + j * n * 4, status)
        made.solve(op.transpose, k, b + side * size, out + i * size, room)


def _solve(work: Work, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    stack, n, k = op.sizes()
    (a, b), (out, info), dtype = inputs, outputs, op.a.dtype
    size = n * k * dtype.itemsize
    work.clear(info, math.prod(stack) * _INFO)
    if not size:
        return
    made, room = Lu(work, dtype, n, n), work.room(size)
    for i, (j, side) in enumerate(zip(sources(op.a, stack), _sides(op.b, stack), strict=True)):
        made.factor(a + j * n * n * dtype.itemsize, info + i * _INFO)
        made.solve(_NONE, k, b + side * size, out + i * size, room)


def _inv(work: Work, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Solve for the unit matrix with the transpose: what comes out by columns is the inverse by rows."""
    n, count, dtype, (out, info) = op.a.shape[-1], math.prod(op.a.shape[:-2]), op.a.dtype, outputs
    nbytes = n * n * dtype.itemsize
    work.clear(info, count * _INFO)
    if not n:
        return
    made = Lu(work, dtype, n, n)
    work.eye(out, count, n, n, dtype)
    for i in range(count):
        made.factor(inputs[0] + i * nbytes, info + i * _INFO)
        work.solve(_TURNED, dtype, n, n, made.factors, made.piv, out + i * nbytes, made.unused)


def _det(work: Work, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    n, count, dtype = op.a.shape[-1], math.prod(op.a.shape[:-2]), op.a.dtype
    is_log, real = op.kind == "slogdet", dtype.itemsize // (2 if dtype.is_complex else 1)
    made, nbytes = Lu(work, dtype, n, n), n * n * dtype.itemsize
    if not n:
        work.eye(outputs[0], count, 1, 1, dtype)
        work.clear(outputs[1] if is_log else 0, count * real * is_log)
        return
    for i in range(count):
        made.factor(inputs[0] + i * nbytes)
        log = outputs[1] + i * real if is_log else 0
        work.launch(f"det_{CODES[dtype]}", 1, made.factors, made.piv, outputs[0] + i * dtype.itemsize, log, n)


def _qr(work: Work, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    *stack, m, n = op.a.shape
    count, dtype, (q, r) = math.prod(stack), op.a.dtype, outputs
    k, itemsize = min(m, n), dtype.itemsize
    columns = m if op.mode == "complete" else k
    if not k:
        work.eye(q, count, m, columns, dtype)
        return
    room, tau = work.room(m * max(n, columns) * itemsize), work.room(k * itemsize)
    info, flag = work.room(_INFO), work.room(_INFO)
    for i in range(count):
        a, at_q, at_r = inputs[0] + i * m * n * itemsize, q + i * m * columns * itemsize, r + i * columns * n * itemsize
        work.clear(flag, _INFO)
        work.finite(flag, a, m, n, dtype)
        work.turn(room, a, m, n, dtype)
        work.blank(flag, room, m * n, dtype, 0)
        work.call(Call("geqrf", dtype, m, n), (room, tau), info)
        work.turn(at_r, room, n, columns, dtype, width=m)
        work.call(Call("orgqr", dtype, m, columns, k), (room, tau), info)
        work.turn(at_q, room, columns, m, dtype)
        work.blank(flag, at_r, columns * n, dtype)
        work.blank(flag, at_q, m * columns, dtype)
    work.triangle(r, count, columns, n, dtype, upper=True)


def _matrix_power(work: Work, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Square, and multiply what the bits of the exponent name."""
    n, count, dtype, (out, info) = op.a.shape[-1], math.prod(op.a.shape[:-2]), op.a.dtype, outputs
    exponent, nbytes = abs(op.n), op.a.nbytes
    work.clear(info, count * _INFO)
    if not nbytes:
        return
    if not exponent:
        work.eye(out, count, n, n, dtype)
        return
    square, found = inputs[0], 0
    if op.n < 0:
        square = work.room(nbytes)
        _inv(work, op, plan, inputs, (square, info))
    squares = [work.room(nbytes) for _ in range(min(exponent.bit_length() - 1, 2))]
    # The last product is written to the result.
    rooms = [out, work.room(nbytes)] if exponent.bit_count() > 1 else [out]
    if exponent.bit_count() % 2 == 0:
        rooms.reverse()
    while exponent:
        exponent, bit = divmod(exponent, 2)
        if bit and not found:
            found = rooms[0]
            work.copy(found, square, nbytes)
        elif bit:
            other = rooms[0] if found == rooms[1] else rooms[1]
            work.powers(n, found, square, other, count, dtype)
            found = other
        if exponent:
            work.powers(n, square, square, squares[0], count, dtype)
            square = squares[0]
            squares.reverse()


STEPS: Mapping[str, Callable[[Work, Any, Any, Sequence[int], Sequence[int]], None]] = {
    "cholesky": _cholesky,
    "cho_solve": _cho_solve,
    "cholesky_inverse": _cholesky_inverse,
    "lu_factor": _lu_factor,
    "lu_solve": _lu_solve,
    "solve": _solve,
    "inv": _inv,
    "det": _det,
    "slogdet": _det,
    "qr": _qr,
    "matrix_power": _matrix_power,
}
"""Op kind -> its steps, given the addresses of operands and of results, with the info behind them."""
