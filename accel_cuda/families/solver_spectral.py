"""Eigenvalues and singular values on a GPU, and what is made of them.

cuSOLVER's iterations are not said to end for elements that are not finite. Such a matrix is found first and replaced by zeros; its results become NaN
afterwards, and its info -1.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from accel import DType, Transpose
from accel.dtype import COMPLEX_OF, REAL_OF
from accel_cuda.families.kernels import CODES
from accel_cuda.families.solver_calls import Call
from accel_cuda.families.solver_factors import sources

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from accel_cuda.families.solver_work import Work

__all__ = ["STEPS"]

_NONE, _CONJUGATE = Transpose.NONE, Transpose.CONJUGATE
_INFO = 4
_NOT_FINITE = 0xFFFFFFFF  # -1
_LOWER, _UPPER = 1, 2


def _eigh(work: Work, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Decompose the conjugates of the matrices, which need no move: their eigenvectors are the conjugates, and come by columns."""
    n, count, dtype = op.a.shape[-1], math.prod(op.a.shape[:-2]), op.a.dtype
    (w, *v, info), real, size = outputs, REAL_OF.get(dtype, dtype), n * n
    work.clear(info, count * _INFO)
    if not n * count:
        return
    flag, rooms = work.room(_INFO), [work.room(size * dtype.itemsize) for _ in inputs]
    name = "sygvd" if len(inputs) == 2 else "syevd"
    call = Call(name, dtype, n, n, lower=op.upper, vectors="all" if v else "none")
    for i in range(count):
        work.clear(flag, _INFO)
        for source, room in zip(inputs, rooms, strict=True):
            at = source + i * size * dtype.itemsize
            work.finite(flag, at, n, n, dtype, part=_UPPER if op.upper else _LOWER)
            work.copy(room, at, size * dtype.itemsize)
        for room in rooms:
            work.blank(flag, room, size, dtype, 0)
        values, told = w + i * n * real.itemsize, info + i * _INFO
        work.call(call, (*rooms, values), told)
        work.blank(flag, values, n, real)
        if v:
            vectors = v[0] + i * size * dtype.itemsize
            work.turn(vectors, rooms[0], n, n, dtype, conjugate=True)
            work.blank(flag, vectors, size, dtype)
        work.blank(flag, told, 1, DType.INT32, _NOT_FINITE)


class _Svd:
    """One decomposition at a time, of a matrix that has as many columns as rows, or fewer: cuSOLVER decomposes no others. What is wider is transposed.

    Parameters
    ----------
    work, dtype
        The op's.
    m, n
        Rows and columns.
    vectors
        ``"all"``, ``"some"`` or ``"none"``.

    Attributes
    ----------
    is_wide : bool
        Whether it is the transpose that is decomposed: the matrix in C order is that already.
    rows, columns : int
        Of what is decomposed.
    width : int
        How many columns u has.
    flag : int
        Where an int32 lies that tells of elements that are not finite.
    """

    def __init__(self, work: Work, dtype: DType, m: int, n: int, vectors: str) -> None:
        self._work, self._dtype, self._m, self._n = work, dtype, m, n
        self.is_wide = m <= n
        self.rows, self.columns = max(m, n), min(m, n)
        self.width = self.rows if vectors == "all" else self.columns
        self._call = Call("gesvd", dtype, self.rows, self.columns, vectors=vectors)
        self._matrix = work.room(m * n * dtype.itemsize)
        self.flag = work.room(_INFO)

    def run(self, a: int, s: int, u: int, vt: int, info: int, *, conjugate: bool = False) -> None:
        """Decompose a C-order matrix; u and vt come by columns. ``conjugate`` takes the conjugate of a matrix that is not wide."""
        work, dtype, m, n = self._work, self._dtype, self._m, self._n
        work.clear(self.flag, _INFO)
        work.finite(self.flag, a, m, n, dtype)
        if self.is_wide:
            work.copy(self._matrix, a, m * n * dtype.itemsize)
        else:
            work.turn(self._matrix, a, m, n, dtype, conjugate=conjugate)
        work.blank(self.flag, self._matrix, m * n, dtype, 0)
        work.call(self._call, (self._matrix, s, u, vt), info)
        work.blank(self.flag, info, 1, DType.INT32, _NOT_FINITE)


def _svd(work: Work, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Decompose. Of the transpose, ``u`` by columns is ``vh`` by rows, and the other way round."""
    *stack, m, n = op.a.shape
    count, dtype, k, (u, s, vh, info) = math.prod(stack), op.a.dtype, min(m, n), outputs
    real, rows, columns = REAL_OF.get(dtype, dtype), *((m, n) if op.full_matrices else (k, k))
    work.clear(info, count * _INFO)
    if not k:
        work.eye(u, count, m, rows, dtype)
        work.eye(vh, count, columns, n, dtype)
        return
    made = _Svd(work, dtype, m, n, "all" if op.full_matrices else "some")
    step_u, step_v = m * rows * dtype.itemsize, columns * n * dtype.itemsize
    rooms = (0, 0) if made.is_wide else (work.room(step_u), work.room(step_v))
    for i in range(count):
        a, at_u, at_s, at_v = inputs[0] + i * m * n * dtype.itemsize, u + i * step_u, s + i * k * real.itemsize, vh + i * step_v
        if made.is_wide:
            made.run(a, at_s, at_v, at_u, info + i * _INFO)
        else:
            made.run(a, at_s, *rooms, info + i * _INFO)
            work.turn(at_u, rooms[0], rows, m, dtype)
            work.turn(at_v, rooms[1], n, columns, dtype)
        work.blank(made.flag, at_u, m * rows, dtype)
        work.blank(made.flag, at_v, columns * n, dtype)
        work.blank(made.flag, at_s, k, real)


def _svdvals(work: Work, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    *stack, m, n = op.a.shape
    count, dtype, k, (s, info) = math.prod(stack), op.a.dtype, min(m, n), outputs
    real = REAL_OF.get(dtype, dtype)
    work.clear(info, count * _INFO)
    if not k:
        return
    made = _Svd(work, dtype, m, n, "none")
    for i in range(count):
        at = s + i * k * real.itemsize
        made.run(inputs[0] + i * m * n * dtype.itemsize, at, 0, 0, info + i * _INFO)
        work.blank(made.flag, at, k, real)


class _Inverse:
    """The pseudo-inverse of one matrix at a time, as two factors by columns: ``(u / s) @ vt`` is the transpose of the pseudo-inverse, by columns.

    That holds for the conjugate of a matrix that is not wide. Of a wide one, whose transpose is decomposed, it is ``vt^H @ (u / s)^H``.
    """

    def __init__(self, work: Work, dtype: DType, m: int, n: int, tolerance: float | None) -> None:
        self._svd = _Svd(work, dtype, m, n, "some")
        rows, k = self._svd.rows, self._svd.columns
        self._work, self._dtype, self._m, self._n, self._k = work, dtype, m, n, k
        self._u, self._vt = work.room(rows * k * dtype.itemsize), work.room(k * k * dtype.itemsize)
        self._rtol = max(m, n) * float(np.finfo(dtype.numpy).eps) if tolerance is None else float(tolerance)
        self.flag = self._svd.flag

    def find(self, a: int, s: int, rank: int, info: int) -> None:
        """Decompose a C-order matrix."""
        svd = self._svd
        svd.run(a, s, self._u, self._vt, info, conjugate=True)
        self._work.scale(self._u, s, rank, svd.rows, self._k, self._rtol, self._dtype)

    def write(self, out: int) -> None:
        """Write the pseudo-inverse in C order."""
        if self._svd.is_wide:
            self._product(_CONJUGATE, self._k, self._n, self._vt, self._u, out)
        else:
            self._product(_NONE, self._m, self._n, self._u, self._vt, out)

    def apply(self, b: int, count: int, room: int, x: int) -> None:
        """Write its product with so many right-hand sides, in C order; ``room`` has space for the inner product."""
        if self._svd.is_wide:
            self._product(_NONE, count, self._k, b, self._vt, room, turned=True)
            self._product(_NONE, count, self._n, room, self._u, x, turned=True)
        else:
            self._work.product(_NONE, _NONE, count, self._k, self._m, b, self._u, room, self._dtype)
            self._product(_NONE, count, self._n, room, self._vt, x)

    def _product(self, turn: Transpose, m: int, n: int, a: int, b: int, c: int, *, turned: bool = False) -> None:
        self._work.product(turn, _CONJUGATE if turned else turn, m, n, self._k, a, b, c, self._dtype)


def _pinv(work: Work, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    *stack, m, n = op.a.shape
    count, dtype, (out, info) = math.prod(stack), op.a.dtype, outputs
    work.clear(info, count * _INFO)
    if not m * n:
        return
    made, s = _Inverse(work, dtype, m, n, op.rtol), work.room(min(m, n) * dtype.itemsize)
    for i in range(count):
        at = out + i * m * n * dtype.itemsize
        made.find(inputs[0] + i * m * n * dtype.itemsize, s, 0, info + i * _INFO)
        made.write(at)
        work.blank(made.flag, at, m * n, dtype)


def _lstsq(work: Work, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    stack, (m, n), dtype = plan.creates[2].shape, op.a.shape[-2:], op.a.dtype
    (a, b), (x, residuals, rank, s, info) = inputs, outputs
    k, real, count, itemsize = 1 if op.b.ndim == 1 else op.b.shape[-1], REAL_OF.get(dtype, dtype), math.prod(stack), dtype.itemsize
    sides = [0] * count if op.b.ndim == 1 else sources(op.b, stack)
    work.clear(info, count * _INFO)
    work.clear(rank, count * 8)
    if not m * n:
        work.clear(x, count * n * k * itemsize)
        for i, side in enumerate(sides):
            work.lengths(b + side * m * k * itemsize, residuals + i * k * real.itemsize, m, k, dtype)
        return
    made, values = _Inverse(work, dtype, m, n, op.rcond), min(m, n) * real.itemsize
    inner, rest = work.room(min(m, n) * k * itemsize), work.room(m * k * itemsize)
    last = -1
    for i, (j, side) in enumerate(zip(sources(op.a, stack), sides, strict=True)):
        at, sides_at, at_x, at_s = a + j * m * n * itemsize, b + side * m * k * itemsize, x + i * n * k * itemsize, s + i * values
        if i and j == last:  # another right-hand side of the same matrix
            work.copy(at_s, at_s - values, values)
            work.copy(rank + 8 * i, rank + 8 * (i - 1), 8)
            work.copy(info + _INFO * i, info + _INFO * (i - 1), _INFO)
        else:
            made.find(at, at_s, rank + 8 * i, info + _INFO * i)
            last = j
        if k:
            made.apply(sides_at, k, inner, at_x)
            work.copy(rest, sides_at, m * k * itemsize)
            work.product(_NONE, _NONE, k, m, n, at_x, at, rest, dtype, alpha=-1.0, beta=1.0)
            work.lengths(rest, residuals + i * k * real.itemsize, m, k, dtype)
        work.blank(made.flag, at_x, n * k, dtype)
        work.blank(made.flag, residuals + i * k * real.itemsize, k, real)
        work.blank(made.flag, at_s, min(m, n), real)


def _eig(work: Work, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Decompose; of a real matrix, the library gives eigenvectors as real and imaginary parts of pairs."""
    n, count, dtype, (w, *v, info) = op.a.shape[-1], math.prod(op.a.shape[:-2]), op.a.dtype, outputs
    made, size = COMPLEX_OF.get(dtype, dtype), n * n
    work.clear(info, count * _INFO)
    if not n * count:
        return
    nbytes = size * dtype.itemsize
    flag, matrix, vectors = work.room(_INFO), work.room(nbytes), work.room(nbytes) if v else 0
    call = Call("geev", dtype, n, n, vectors="all" if v else "none")
    for i in range(count):
        at, values, told = inputs[0] + i * nbytes, w + i * n * made.itemsize, info + i * _INFO
        work.clear(flag, _INFO)
        work.finite(flag, at, n, n, dtype)
        work.turn(matrix, at, n, n, dtype)
        work.blank(flag, matrix, size, dtype, 0)
        work.call(call, (matrix, values, vectors), told)
        if v:
            out = v[0] + i * size * made.itemsize
            if dtype.is_complex:
                work.turn(out, vectors, n, n, dtype)
            else:
                work.launch(f"pairs_{CODES[dtype]}", size, vectors, values, out, n)
            work.blank(flag, out, size, made)
        work.blank(flag, values, n, made)
        work.blank(flag, told, 1, DType.INT32, _NOT_FINITE)


STEPS: Mapping[str, Callable[[Work, Any, Any, Sequence[int], Sequence[int]], None]] = {
    "eigh": _eigh,
    "eigvalsh": _eigh,
    "svd": _svd,
    "svdvals": _svdvals,
    "pinv": _pinv,
    "lstsq": _lstsq,
    "eig": _eig,
    "eigvals": _eig,
}
"""Op kind -> its steps, given the addresses of operands and of results, with the info behind them. The host waits for each of them within the library."""
