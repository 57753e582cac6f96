"""Twins of NVIDIA's libraries in numpy, for tests of kernels without a GPU: a column-major BLAS, and a stream whose device memory is the host's."""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from accel import Transpose
from accel.cpu.views import array
from accel_cuda.errors import error_of
from accel_cuda.families.cublas import CUBLAS
from accel_cuda.families.kernels import CODES
from tests.cuda_support import FakeLibrary, Numbers

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.cpu.views import Array

__all__ = ["DTYPES", "HOST", "NAMES", "ColumnMajor", "Stream", "column_major", "product", "triangle"]

NAMES = Numbers()
DTYPES = {"s": np.dtype(np.float32), "d": np.dtype(np.float64), "c": np.dtype(np.complex64), "z": np.dtype(np.complex128)}
HOST = NAMES.HOST


TYPES: dict[int, tuple[np.dtype[Any], Any]] = {
    NAMES.CUDA_R_16F: (np.dtype(np.float16), np.float32),
    NAMES.CUDA_R_16BF: (np.dtype(ml_dtypes.bfloat16), np.float32),
    NAMES.CUDA_R_32F: (np.dtype(np.float32), np.float32),
    NAMES.CUDA_R_64F: (np.dtype(np.float64), np.float64),
    NAMES.CUDA_C_32F: (np.dtype(np.complex64), np.complex64),
    NAMES.CUDA_C_64F: (np.dtype(np.complex128), np.complex128),
}
ROOM = np.zeros(1 << 17, np.uint8)
"""A workspace."""


def addresses(place: int, count: int) -> list[int]:
    return [int(each) for each in array(place, (count,), np.dtype(np.uint64))]


def real(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.zeros(0, dtype).real.dtype


def column_major(address: int, rows: int, columns: int, ld: int, dtype: np.dtype[Any]) -> Array:
    assert ld >= max(1, rows), "the leading dimension is too small"
    return array(address, (rows, columns), dtype, (dtype.itemsize, ld * dtype.itemsize))


def turned(a: Array, operation: int) -> Array:
    return {NAMES.N: a, NAMES.T: a.T, NAMES.C: a.conj().T}[operation]


def triangle(a: Array, fill: int, diagonal: int) -> Array:
    kept = {NAMES.LOWER: np.tril, NAMES.UPPER: np.triu}[fill](a)
    if {NAMES.UNIT: True, NAMES.NON_UNIT: False}[diagonal]:
        np.fill_diagonal(kept, 1)
    return kept


class ColumnMajor(FakeLibrary):
    """cuBLAS's typed calls. Their first letter is the dtype; that of what they are is asked for by the rest."""

    def __init__(self) -> None:
        super().__init__(CUBLAS.module, CUBLAS.error)
        self.mode = HOST

    def __getattr__(self, name: str) -> Any:
        if not name.endswith("_64"):
            return super().__getattr__(name)
        asked = name.removesuffix("_64")
        letter, kind = ("c" if asked[0] == "s" else "z", "asum") if asked in ("scasum", "dzasum") else (asked[0], asked[1:])
        if asked.startswith("i"):
            letter, kind = asked[1], "i" + asked[2:]
        found: Callable[..., None] = getattr(self, f"do_{kind}")

        def call(handle: int, *arguments: int) -> None:
            self.called.append((name, handle, *arguments))
            if name in self.fails:
                super(ColumnMajor, self).__getattr__(name)(handle, *arguments)
            assert (self.mode == HOST) is (kind not in ("asum", "dotc", "iamax", "iamin", "nrm2")), "the pointer mode is wrong"
            found(DTYPES[letter], *arguments)

        return call

    def set_pointer_mode(self, handle: int, mode: int) -> None:
        self.mode = mode

    def typed(self, name: str, on_host: bool, *types: int) -> tuple[np.dtype[Any], Any]:
        """Note a call that is given types, and return the element's, and the one that is computed in."""
        self.called.append((name,))
        assert (self.mode == HOST) is on_host, "the pointer mode is wrong"
        *elements, execution = types
        (element,) = set(elements)
        dtype, wide = TYPES[element]
        assert TYPES[execution][1] == wide
        return dtype, np.dtype(wide)

    @np.errstate(all="ignore")
    def axpy_ex_64(
        self, handle: int, n: int, alpha: int, kind: int, x: int, type_x: int, incx: int, y: int, type_y: int, incy: int, ex: int
    ) -> None:
        dtype, wide = self.typed("axpy_ex_64", True, type_x, type_y, ex)
        assert kind == ex
        out = array(y, (n,), dtype)
        out[...] = array(alpha, (), wide) * array(x, (n,), dtype).astype(wide) + out.astype(wide)

    @np.errstate(all="ignore")
    def scal_ex_64(self, handle: int, n: int, alpha: int, kind: int, x: int, type_x: int, incx: int, ex: int) -> None:
        dtype, wide = self.typed("scal_ex_64", True, type_x, ex)
        assert kind == ex
        out = array(x, (n,), dtype)
        out[...] = array(alpha, (), wide) * out.astype(wide)

    def dot_ex_64(
        self, handle: int, n: int, x: int, type_x: int, incx: int, y: int, type_y: int, incy: int, result: int, type_result: int, ex: int
    ) -> None:  # fmt: skip
        dtype, wide = self.typed("dot_ex_64", False, type_x, type_y, type_result, ex)
        array(result, (), dtype)[...] = (array(x, (n,), dtype).astype(wide) * array(y, (n,), dtype).astype(wide)).sum()

    def nrm2_ex(self, handle: int, n: int, x: int, type_x: int, incx: int, result: int, type_result: int, ex: int) -> None:
        dtype, wide = self.typed("nrm2_ex", False, type_x, type_result, ex)
        array(result, (), dtype)[...] = np.linalg.norm(array(x, (n,), dtype).astype(wide))

    def do_nrm2(self, dtype: np.dtype[Any], n: int, x: int, incx: int, result: int) -> None:
        array(result, (), dtype)[...] = np.linalg.norm(array(x, (n,), dtype))

    def do_asum(self, dtype: np.dtype[Any], n: int, x: int, incx: int, result: int) -> None:
        values = array(x, (n,), dtype)
        array(result, (), real(dtype))[...] = (np.abs(values.real) + np.abs(values.imag)).sum()

    def extreme(self, find: Any, dtype: np.dtype[Any], n: int, x: int, incx: int, result: int) -> None:
        values = array(x, (n,), dtype)
        sizes = np.abs(values.real) + np.abs(values.imag)
        numbers = np.flatnonzero(~np.isnan(sizes))  # cuBLAS skips NaN
        array(result, (), np.dtype(np.int64))[...] = numbers[find(sizes[numbers])] + 1 if numbers.size else 1

    def do_iamax(self, *arguments: Any) -> None:
        self.extreme(np.argmax, *arguments)

    def do_iamin(self, *arguments: Any) -> None:
        self.extreme(np.argmin, *arguments)

    def do_dotc(self, dtype: np.dtype[Any], n: int, x: int, incx: int, y: int, incy: int, result: int) -> None:
        array(result, (), dtype)[...] = np.vdot(array(x, (n,), dtype), array(y, (n,), dtype))

    def do_rot(self, dtype: np.dtype[Any], n: int, x: int, incx: int, y: int, incy: int, c: int, s: int) -> None:
        first, second = array(x, (n,), dtype), array(y, (n,), dtype)
        cosine, sine = array(c, (), real(dtype)), array(s, (), dtype)
        made = cosine * first + sine * second, cosine * second - sine.conj() * first
        first[...], second[...] = made

    def do_swap(self, dtype: np.dtype[Any], n: int, x: int, incx: int, y: int, incy: int) -> None:
        first, second = array(x, (n,), dtype), array(y, (n,), dtype)
        first[...], second[...] = second.copy(), first.copy()

    def do_trmv(self, dtype: np.dtype[Any], fill: int, trans: int, diagonal: int, n: int, a: int, lda: int, x: int, incx: int) -> None:
        values = array(x, (n,), dtype)
        values[...] = turned(triangle(column_major(a, n, n, lda, dtype), fill, diagonal), trans) @ values

    def do_trsv(self, dtype: np.dtype[Any], fill: int, trans: int, diagonal: int, n: int, a: int, lda: int, x: int, incx: int) -> None:
        values = array(x, (n,), dtype)
        values[...] = np.linalg.solve(turned(triangle(column_major(a, n, n, lda, dtype), fill, diagonal), trans), values)

    def do_trmm(
        self, dtype: np.dtype[Any], side: int, fill: int, trans: int, diagonal: int, m: int, n: int, alpha: int, a: int, lda: int, b: int, ldb: int,
        c: int, ldc: int,
    ) -> None:  # fmt: skip
        order = {NAMES.LEFT: m, NAMES.RIGHT: n}[side]
        left, right = turned(triangle(column_major(a, order, order, lda, dtype), fill, diagonal), trans), column_major(b, m, n, ldb, dtype)
        product = left @ right if side == NAMES.LEFT else right @ left
        column_major(c, m, n, ldc, dtype)[...] = array(alpha, (), dtype) * product

    def do_trsm(
        self, dtype: np.dtype[Any], side: int, fill: int, trans: int, diagonal: int, m: int, n: int, alpha: int, a: int, lda: int, b: int, ldb: int
    ) -> None:  # fmt: skip
        order = {NAMES.LEFT: m, NAMES.RIGHT: n}[side]
        known, x = turned(triangle(column_major(a, order, order, lda, dtype), fill, diagonal), trans), column_major(b, m, n, ldb, dtype)
        solved = np.linalg.solve(known, x) if side == NAMES.LEFT else np.linalg.solve(known.T, x.T).T
        x[...] = array(alpha, (), dtype) * solved

    def do_trsm_batched(
        self, dtype: np.dtype[Any], side: int, fill: int, trans: int, diagonal: int, m: int, n: int, alpha: int, a: int, lda: int, b: int, ldb: int,
        count: int,
    ) -> None:  # fmt: skip
        for each_a, each_b in zip(addresses(a, count), addresses(b, count), strict=True):
            self.do_trsm(dtype, side, fill, trans, diagonal, m, n, alpha, each_a, lda, each_b, ldb)

    def symmetric(
        self, is_hermitian: bool, dtype: np.dtype[Any], side: int, fill: int, m: int, n: int, alpha: int, a: int, lda: int, b: int, ldb: int, beta: int,
        c: int, ldc: int,
    ) -> None:  # fmt: skip
        order = {NAMES.LEFT: m, NAMES.RIGHT: n}[side]
        half = triangle(column_major(a, order, order, lda, dtype), fill, NAMES.NON_UNIT)
        diagonal = np.diag(np.diagonal(half))
        other = (half - diagonal).conj().T if is_hermitian else (half - diagonal).T
        whole = half - diagonal + other + (diagonal.real if is_hermitian else diagonal)
        right = column_major(b, m, n, ldb, dtype)
        product = whole @ right if side == NAMES.LEFT else right @ whole
        self.store(column_major(c, m, n, ldc, dtype), product, array(alpha, (), dtype), array(beta, (), dtype))

    def do_symm(self, *arguments: Any) -> None:
        self.symmetric(False, *arguments)

    def do_hemm(self, *arguments: Any) -> None:
        self.symmetric(True, *arguments)

    @staticmethod
    def store(c: Array, product: Array, alpha: Array, beta: Array) -> None:
        c[...] = alpha * product + (beta * c if beta else 0)

    def update(
        self, turn: int, dtype: np.dtype[Any], fill: int, trans: int, n: int, k: int, alpha: int, a: int, lda: int, beta: int, c: int, ldc: int
    ) -> None:  # fmt: skip
        assert trans in (NAMES.N, turn)
        x = column_major(a, n, k, lda, dtype) if trans == NAMES.N else turned(column_major(a, k, n, lda, dtype), trans)
        out, kept = column_major(c, n, n, ldc, dtype), np.tri(n, dtype=bool)
        kind = real(dtype) if turn == NAMES.C else dtype
        made = out.copy()
        self.store(made, x @ turned(x, turn), array(alpha, (), kind), array(beta, (), kind))
        np.copyto(out, made, where=kept if fill == NAMES.LOWER else kept.T)

    def do_syrk(self, *arguments: Any) -> None:
        self.update(NAMES.T, *arguments)

    def do_herk(self, *arguments: Any) -> None:
        self.update(NAMES.C, *arguments)

    @np.errstate(invalid="ignore")
    def do_geam(
        self, dtype: np.dtype[Any], turn_a: int, turn_b: int, m: int, n: int, alpha: int, a: int, lda: int, beta: int, b: int, ldb: int, c: int, ldc: int
    ) -> None:  # fmt: skip
        total = np.zeros((m, n), dtype)
        for turn, factor, address, ld in ((turn_a, alpha, a, lda), (turn_b, beta, b, ldb)):
            if not array(factor, (), dtype):
                continue  # that matrix is not read
            shape = (m, n) if turn == NAMES.N else (n, m)
            total += array(factor, (), dtype) * turned(column_major(address, *shape, ld, dtype), turn)
        column_major(c, m, n, ldc, dtype)[...] = total


_FUNCTIONS = ("index_from_zero", "index_of_nan_f32", "index_of_nan_f64", "addresses_apart")


class Stream:
    """A stream whose device memory is the host's."""

    context = SimpleNamespace(section=contextlib.nullcontext())
    handle = 5
    is_capturing = False
    functions = {name: name for name in (*_FUNCTIONS, *(f"scale_{code}" for code in CODES.values()))}  # noqa: RUF012  # nothing writes to it

    def at_close(self, close: Any) -> None: ...

    def ready(self) -> None: ...

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        ctypes.memmove(destination, source, nbytes)

    def fill(self, destination: int, pattern: bytes, count: int) -> None:
        ctypes.memmove(destination, pattern * count, len(pattern) * count)

    def launch(self, function: str, blocks: int, threads: int, out: int, *arguments: int) -> None:
        if function == "addresses_apart":
            first, step, count = arguments
            assert blocks * threads >= count
            array(out, (count,), np.dtype(np.uint64))[...] = first + step * np.arange(count)
            return
        if function.startswith("scale_"):
            columns, rows, ld, step, count, *factor = arguments
            kind = {code: dtype for dtype, code in CODES.items()}[function.removeprefix("scale_")].numpy
            real, imaginary = np.array(factor, np.uint64).view(np.float64)
            size, beta = kind.itemsize, complex(real, imaginary) if kind.kind == "c" else real
            matrices = array(out, (count, rows, columns), kind, (step * size, ld * size, size))
            matrices[...] = matrices * np.dtype(np.float32 if size == 2 else kind).type(beta) if beta else 0
            return
        index = array(out, (), np.dtype(np.int64))
        if function.startswith("index_of_nan"):
            x, count, parts = arguments
            places = np.flatnonzero(np.isnan(array(x, (count * parts,), np.dtype(f"f{int(function[-2:]) // 8}"))))
            index[...] = min([int(index), *(places // parts - count)])
            return
        assert (function, blocks, threads) == ("index_from_zero", 1, 1)
        index += arguments[0] if index < 0 else -1

    def failure(self, status: int, call: str, library: str) -> Exception:
        return error_of(status, call, library=library)


def product(*arguments: Any) -> None:
    ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc, dtype = arguments[:14]  # TF32 is for a GPU
    kind = dtype.numpy

    def stored(address: int, rows: int, columns: int, ld: int) -> Array:
        return array(address, (rows, columns), kind, (kind.itemsize, ld * kind.itemsize))

    def applied(transpose: Transpose, address: int, rows: int, columns: int, ld: int) -> Array:
        if transpose is Transpose.NONE:
            return stored(address, rows, columns, ld)
        turned = stored(address, columns, rows, ld).T
        return turned.conj() if transpose is Transpose.CONJUGATE else turned

    out = stored(c, m, n, ldc)
    wide = np.dtype(np.float32) if kind.itemsize == 2 else kind
    with np.errstate(all="ignore"):
        total = wide.type(beta) * out.astype(wide) if beta else np.zeros(out.shape, wide)
        if k and alpha:
            total = total + wide.type(alpha) * (applied(ta, a, m, k, lda).astype(wide) @ applied(tb, b, k, n, ldb).astype(wide))
        out[...] = total
