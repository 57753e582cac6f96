"""What an op of the ``solver`` family enqueues, step by step. The same steps are taken for nothing to learn how much memory they work in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel import DType, LibraryError, Transpose, UnsupportedError
from accel_cuda.families.cublas import LETTERS, blas_of
from accel_cuda.families.kernels import CODES, bits
from accel_cuda.families.solver_calls import CUSOLVER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel_cuda.families.solver_calls import Call, SolverCalls

__all__ = ["Work"]

_BLOCK, _MOST_BLOCKS, _ALIGNMENT = 256, 4096, 256
_LAUNCHES, _ROWS_PER_LAUNCH = 8, 8
"""Of a call of cuSOLVER's, which does not say how much it launches: as many at least, and one for so many rows."""

_NONE, _TURNED, _CONJUGATE = Transpose.NONE, Transpose.TRANSPOSE, Transpose.CONJUGATE
_NAN = {4: 0x7FC00000, 8: 0x7FF8000000000000}


class Work:
    """One op's.

    Parameters
    ----------
    calls
        cuSOLVER's.
    lane
        Where the work goes; ``None`` if nothing is to be enqueued.
    address, nbytes
        The memory to work in; without ``nbytes`` there is no end.

    Attributes
    ----------
    most : int
        Bytes that were in use together, at most.
    commands : int
        How many commands were enqueued, at most.
    """

    __slots__ = ("_address", "_blas", "_calls", "_lane", "_nbytes", "_used", "commands", "most")

    def __init__(self, calls: SolverCalls, lane: Any = None, address: int = _ALIGNMENT, nbytes: int | None = None) -> None:
        self._calls = calls
        self._lane = lane
        self._blas: Any = None if lane is None else blas_of(lane.stream)
        self._address = address
        self._nbytes = nbytes
        self._used = self.most = self.commands = 0

    def room(self, nbytes: int) -> int:
        """Return the address of memory to work in, which is the op's to its end.

        Raises
        ------
        LibraryError
            If there is too little: then it was measured wrongly.
        """
        address = self._address + self._used
        self._used += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self.most = max(self.most, self._used)
        if self._nbytes is not None and self._used > self._nbytes:
            raise LibraryError(f"an op works in {self._used} bytes, {self._nbytes} were expected", library=CUSOLVER.name)
        return address

    def call(self, call: Call, addresses: Sequence[int], info: int) -> None:
        """Enqueue a call of cuSOLVER's; the memory that it works in is free again behind it."""
        used = self._used
        scratch = self.room(self._calls.measure(call)[0])
        self.commands += _LAUNCHES + max(call.m, call.n) // _ROWS_PER_LAUNCH
        if self._lane is not None:
            self._calls.run(self._lane.stream, call, addresses, scratch, info)
        self._used = used

    def solve(self, trans: Transpose, dtype: DType, n: int, k: int, lu: int, piv: int, b: int, info: int) -> None:
        """Enqueue the solution in place of column-major right-hand sides; lu is column-major too."""
        self.commands += _LAUNCHES + n // _ROWS_PER_LAUNCH
        if self._lane is not None:
            self._calls.solve(self._lane.stream, self._blas.operation(dtype)[trans], dtype, n, k, lu, piv, b, info)

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        """Enqueue a copy, unless it is of memory to itself."""
        if nbytes and source != destination:
            self.commands += 1
            if self._lane is not None:
                self._lane.stream.copy(destination, source, nbytes)

    def clear(self, address: int, nbytes: int) -> None:
        """Enqueue zeros."""
        if nbytes:
            self.commands += 1
            if self._lane is not None:
                self._lane.stream.fill(address, b"\0", nbytes)

    def turn(
        self, destination: int, source: int, rows: int, columns: int, dtype: DType, *, conjugate: bool = False, width: int = 0
    ) -> None:  # fmt: skip
        """Enqueue the transpose of a C-order matrix, whose rows are ``width`` apart: this also is how a matrix comes to lie by columns, and back."""
        if not (rows and columns):
            return
        self.commands += 1
        if self._lane is None:
            return
        blas = self._blas
        trans, width = blas.operation(dtype)[_CONJUGATE if conjugate else _TURNED], width or columns
        one, zero = blas.factors(dtype, 1.0, 0.0)
        # The second matrix, which is multiplied by 0, is not read.
        blas.call(
            f"{LETTERS[dtype]}geam_64", trans, trans, rows, columns, one, source, width, zero, source, width, destination, rows
        )  # fmt: skip

    def product(
        self, ta: Transpose, tb: Transpose, m: int, n: int, k: int, a: int, b: int, c: int, dtype: DType, *, alpha: float = 1.0, beta: float = 0.0
    ) -> None:  # fmt: skip
        """Enqueue a product of column-major matrices without gaps."""
        self.commands += 2
        if self._lane is not None:
            lda, ldb = (m if ta is _NONE else k), (k if tb is _NONE else n)
            self._blas.gemm(ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, m, dtype)

    def powers(self, n: int, a: int, b: int, c: int, count: int, dtype: DType) -> None:
        """Enqueue the products of so many square matrices in C order."""
        self.commands += 2
        if self._lane is not None:
            self._blas.batched_gemm(_NONE, _NONE, n, n, n, 1.0, b, n, n * n, a, n, n * n, 0.0, c, n, n * n, count, dtype)

    def triangular(self, lower: bool, trans: Transpose, m: int, n: int, a: int, x: int, dtype: DType) -> None:
        """Enqueue ``x = x @ op(a)^-1`` for column-major matrices without gaps, x of m rows and n columns."""
        self.commands += _LAUNCHES + n // _ROWS_PER_LAUNCH
        if self._lane is not None:
            blas = self._blas
            form = blas.side["right"], blas.fill[lower], blas.operation(dtype)[trans], blas.diagonal[False]
            one, _ = blas.factors(dtype, 1.0, 0.0)
            blas.call(f"{LETTERS[dtype]}trsm_64", *form, m, n, one, a, n, x, m)

    # -- the backend's own kernels

    def launch(self, name: str, threads: int, *arguments: int) -> None:
        """Enqueue one of the family's own kernels."""
        if not threads:
            return
        self.commands += 1
        if self._lane is not None:
            stream = self._lane.stream
            blocks = min(-(-threads // _BLOCK), _MOST_BLOCKS)
            stream.launch(stream.functions[f"solver_{name}"], blocks, _BLOCK, *arguments)

    def eye(self, address: int, count: int, rows: int, columns: int, dtype: DType) -> None:
        """Enqueue so many unit matrices."""
        size = count * rows * columns
        self.launch(f"eye_{CODES[dtype]}", size, address, size, rows, columns)

    def triangle(self, address: int, count: int, rows: int, columns: int, dtype: DType, *, upper: bool, info: int = 0) -> None:
        """Enqueue zeros for the other triangle of so many C-order matrices. A diagonal element that is NaN becomes their info, if they have one."""
        size = count * rows * columns
        self.launch(f"triangle_{CODES[dtype]}", size, address, info, size, rows, columns, int(upper))

    def finite(self, flag: int, address: int, rows: int, columns: int, dtype: DType, *, part: int = 0) -> None:
        """Enqueue the search for elements that are not finite: the flag, which was 0, becomes 1. Only one triangle is searched if part is 1 or 2."""
        self.launch(f"finite_{CODES[dtype]}", rows * columns, address, flag, rows * columns, columns, part)

    def blank(self, flag: int, address: int, count: int, dtype: DType, value: int | None = None) -> None:
        """Enqueue NaN for so many elements where the flag is 1, or the bits of ``value``: of int32, or those of 0."""
        words = count * (2 if dtype.is_complex else 1)
        width = dtype.itemsize * count // max(words, 1)
        self.launch(f"blank_{width}", words, flag, address, words, _NAN[width] if value is None else value)

    def scale(self, u: int, s: int, rank: int, rows: int, columns: int, rtol: float, dtype: DType) -> None:
        """Enqueue the division of columns by the singular values that count."""
        self.launch(f"scaled_{CODES[dtype]}", rows * columns, u, s, rank, rows, columns, bits(rtol))

    def lengths(self, address: int, out: int, rows: int, columns: int, dtype: DType) -> None:
        """Enqueue the squared lengths of the columns of a C-order matrix."""
        self.commands += 1
        if self._lane is not None and columns:
            stream = self._lane.stream
            stream.launch(stream.functions[f"solver_lengths_{CODES[dtype]}"], columns, _BLOCK, address, out, rows, columns)

    def refuse_capture(self, what: str) -> None:
        """See that the op does not become a part of a graph."""
        if self._lane is not None and self._lane.stream.is_capturing:
            raise UnsupportedError(
                f"{what} cannot become a part of a graph: the host waits for steps of cuSOLVER's iteration",
                library=CUSOLVER.name,
                remedy="Await the op outside the graph.",
            )
