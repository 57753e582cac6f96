"""cuBLAS: one handle per stream, with a workspace of its own."""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING, Any

from accel import DType, Transpose
from accel_cuda.core.libraries import load_library, load_module

if TYPE_CHECKING:
    from accel_cuda.core.stream import CudaStream

__all__ = ["Blas"]

_DISALLOW_REDUCED_PRECISION_REDUCTION = 16
_DEFAULT_ALGORITHM = -1
_OPERATION = {Transpose.NONE: 0, Transpose.TRANSPOSE: 1, Transpose.CONJUGATE: 2}
_REAL_OPERATION = {Transpose.NONE: 0, Transpose.TRANSPOSE: 1, Transpose.CONJUGATE: 1}
_F32, _F64, _TF32 = 68, 70, 77
# Element type of the arrays, type that is computed in, operations. Plain 32-bit computing: without TF32.
_TYPES: dict[DType, tuple[int, int, dict[Transpose, int]]] = {
    DType.FLOAT16: (2, _F32, _REAL_OPERATION),
    DType.BFLOAT16: (14, _F32, _REAL_OPERATION),
    DType.FLOAT32: (0, _F32, _REAL_OPERATION),
    DType.FLOAT64: (1, _F64, _REAL_OPERATION),
    DType.COMPLEX64: (4, _F32, _OPERATION),
    DType.COMPLEX128: (5, _F64, _OPERATION),
}
_FACTOR = 16


class Blas:
    """A cuBLAS handle bound to a stream.

    Parameters
    ----------
    stream
        Where the work goes; its context is current.
    workspace, nbytes
        Device memory that products may use. It is the stream's own, so that products of several streams do not share any.
    """

    def __init__(self, stream: CudaStream, workspace: int, nbytes: int) -> None:
        load_library("cublas", "nvidia-cublas")
        self._cublas = load_module("nvmath.bindings.cublas", "nvmath-python")
        self._stream = stream
        self._error: Any = self._cublas.cuBLASError
        # As ctypes has them, numbers beyond a float's range become infinite.
        self._doubles = (ctypes.c_double * 4)()
        self._floats = (ctypes.c_float * 8).from_buffer(self._doubles)
        self._alpha = ctypes.addressof(self._doubles)
        self._beta = self._alpha + _FACTOR
        self._written: tuple[DType, complex, complex] | None = None
        try:
            self.handle = int(self._cublas.create())
        except self._error as error:
            raise self._failure(error, "create") from error
        stream.at_close(self.close)
        try:
            # Setting the stream resets the workspace, so ours comes after it.
            self._cublas.set_stream(self.handle, stream.handle)
            self._cublas.set_workspace(self.handle, workspace, nbytes)
            self._cublas.set_math_mode(self.handle, _DISALLOW_REDUCED_PRECISION_REDUCTION)
            self._cublas.set_pointer_mode(self.handle, 0)
        except self._error as error:
            raise self._failure(error, "set_stream") from error

    def gemm(
        self, ta: Transpose, tb: Transpose, m: int, n: int, k: int, alpha: complex, a: int, lda: int, b: int, ldb: int, beta: complex, c: int,
        ldc: int, dtype: DType, allow_tf32: bool = False,
    ) -> None:  # fmt: skip
        """Enqueue one product; the arguments are checked."""
        element, compute, operation = _TYPES[dtype]
        if self._written != (dtype, alpha, beta):
            self._write(dtype, alpha, beta)
        try:
            with self._stream.context.section:
                self._cublas.gemm_ex_64(
                    self.handle, operation[ta], operation[tb], m, n, k, self._alpha, a, element, lda, b, element, ldb, self._beta, c, element, ldc,
                    _TF32 if allow_tf32 else compute, _DEFAULT_ALGORITHM,
                )  # fmt: skip
        except self._error as error:
            raise self._failure(error, "gemm") from error

    def batched_gemm(
        self, ta: Transpose, tb: Transpose, m: int, n: int, k: int, alpha: complex, a: int, lda: int, stride_a: int, b: int, ldb: int,
        stride_b: int, beta: complex, c: int, ldc: int, stride_c: int, count: int, dtype: DType, allow_tf32: bool = False,
    ) -> None:  # fmt: skip
        """Enqueue ``count`` products in one call; the arguments are checked."""
        element, compute, operation = _TYPES[dtype]
        if self._written != (dtype, alpha, beta):
            self._write(dtype, alpha, beta)
        try:
            with self._stream.context.section:
                self._cublas.gemm_strided_batched_ex_64(
                    self.handle, operation[ta], operation[tb], m, n, k, self._alpha, a, element, lda, stride_a, b, element, ldb, stride_b,
                    self._beta, c, element, ldc, stride_c, count, _TF32 if allow_tf32 else compute, _DEFAULT_ALGORITHM,
                )  # fmt: skip
        except self._error as error:
            raise self._failure(error, "batched_gemm") from error

    def close(self) -> None:
        """Give the handle back. May block; the context is current and healthy."""
        with contextlib.suppress(self._error):  # what else the stream has is given back all the same
            self._cublas.destroy(self.handle)

    def _failure(self, error: Any, call: str) -> Exception:
        return self._stream.failure(int(error.status), call, "cublas")

    def _write(self, dtype: DType, alpha: complex, beta: complex) -> None:
        """Write the scaling factors where the library reads them, during the call."""
        values = self._floats if _TYPES[dtype][1] == _F32 else self._doubles
        half = len(values) // 2
        values[0], values[1], values[half], values[half + 1] = alpha.real, alpha.imag, beta.real, beta.imag
        self._written = dtype, alpha, beta
