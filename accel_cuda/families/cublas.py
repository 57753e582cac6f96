"""cuBLAS: one handle a stream, with a workspace of its own, and the calls of all dtypes; and the scaling of matrices, which it has none for."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple

from accel import DType, Transpose, UnsupportedError
from accel_cuda.core.libraries import VendorLibrary, load_module
from accel_cuda.core.library_handle import LibraryHandle
from accel_cuda.core.stream import WORKSPACE
from accel_cuda.families.kernels import CODES, bits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accel_cuda.core.stream import CudaStream

__all__ = ["ADDRESSES", "CUBLAS", "LETTERS", "Blas", "blas_of", "lacks_blas", "scale"]

CUBLAS = VendorLibrary("cublas", "nvidia-cublas", "nvmath.bindings.cublas", "cuBLASError")
LETTERS = {DType.FLOAT32: "s", DType.FLOAT64: "d", DType.COMPLEX64: "c", DType.COMPLEX128: "z"}
"""What the names of typed calls begin with, as those of LAPACK do."""

ADDRESSES = 64 << 10
"""Bytes of a workspace that hold addresses of matrices."""

_BLOCK = 256
_FACTOR = 16
_DOUBLES = frozenset({DType.FLOAT64, DType.COMPLEX128})


_NORMS = {DType.FLOAT32: "snrm2_64", DType.FLOAT64: "dnrm2_64"}
_LIMIT = 2**31 - 1


class _Types(NamedTuple):
    """How cuBLAS names elements of one dtype: the element type, that of sums of vectors, the types of products without and with TF32, and the operations."""

    element: int
    execution: int
    compute: int
    tf32: int
    operation: Mapping[Transpose, int]


def _types(cublas: Any) -> dict[DType, _Types]:
    """Return the dtypes that products are offered for. Sums of 16-bit floats are in 32 bits."""
    data, compute, operation = load_module("nvmath", "nvmath-python").CudaDataType, cublas.ComputeType, cublas.Operation
    real = {Transpose.NONE: int(operation.N), Transpose.TRANSPOSE: int(operation.T), Transpose.CONJUGATE: int(operation.T)}
    whole = real | {Transpose.CONJUGATE: int(operation.C)}
    single = int(compute.COMPUTE_32F), int(compute.COMPUTE_32F_FAST_TF32)
    double = int(compute.COMPUTE_64F), int(compute.COMPUTE_64F)
    return {
        DType.FLOAT16: _Types(int(data.CUDA_R_16F), int(data.CUDA_R_32F), *single, real),
        DType.BFLOAT16: _Types(int(data.CUDA_R_16BF), int(data.CUDA_R_32F), *single, real),
        DType.FLOAT32: _Types(int(data.CUDA_R_32F), int(data.CUDA_R_32F), *single, real),
        DType.FLOAT64: _Types(int(data.CUDA_R_64F), int(data.CUDA_R_64F), *double, real),
        DType.COMPLEX64: _Types(int(data.CUDA_C_32F), int(data.CUDA_C_32F), *single, whole),
        DType.COMPLEX128: _Types(int(data.CUDA_C_64F), int(data.CUDA_C_64F), *double, whole),
    }


def blas_of(stream: CudaStream) -> Blas:
    """Return what cuBLAS has for a stream; make it, and a workspace, if they are not there. May block then."""
    blas: Blas | None = stream.blas
    if blas is None:
        context = stream.ready()
        workspace = stream.prepare_workspace()
        with context.section:
            blas = stream.blas = Blas(stream, workspace, WORKSPACE)
    return blas


def lacks_blas(lane: Any, op: Any) -> bool:
    """Return whether the lane's stream has nothing of cuBLAS yet: a kernel that calls it may block."""
    return lane.stream.blas is None


def scale(stream: CudaStream, c: int, m: int, n: int, ldc: int, stride: int, count: int, beta: complex, dtype: DType) -> None:
    """Enqueue ``C = beta * C`` for ``count`` matrices that lie ``stride`` elements apart."""
    if beta != 1:
        function = stream.functions[f"scale_{CODES[dtype]}"]
        factor = complex(beta)
        blocks = -(-m * n * count // _BLOCK)
        stream.launch(function, blocks, _BLOCK, c, m, n, ldc, stride, count, bits(factor.real), bits(factor.imag))


class Blas:
    """A cuBLAS handle bound to a stream.

    Parameters
    ----------
    stream
        Where the work goes; its context is current.
    workspace, nbytes
        Device memory that products may use. It is the stream's own, so that products of several streams do not share any.

    Attributes
    ----------
    fill, side, diagonal : dict
        cuBLAS's numbers: of a triangle by whether it is the lower one, of a side, and of a diagonal by whether it is of ones.
    addresses : int
        Device memory of :data:`ADDRESSES` bytes, for one call at a time.
    """

    def __init__(self, stream: CudaStream, workspace: int, nbytes: int) -> None:
        # What is left of the workspace holds addresses of matrices, which cuBLAS reads from the device.
        self._handle = LibraryHandle(CUBLAS, stream, workspace, nbytes - ADDRESSES)
        self.addresses = workspace + nbytes - ADDRESSES
        self._cublas, self._error, self.handle = self._handle.module, self._handle.error, self._handle.value
        self._handle.call("set_math_mode", int(self._cublas.Math.DISALLOW_REDUCED_PRECISION_REDUCTION))
        self._handle.call("set_pointer_mode", int(self._cublas.PointerMode.HOST))
        self._types = _types(self._cublas)
        fill, side, diagonal = self._cublas.FillMode, self._cublas.SideMode, self._cublas.DiagType
        self.fill = {False: int(fill.UPPER), True: int(fill.LOWER)}
        self.side = {"left": int(side.LEFT), "right": int(side.RIGHT)}
        self.diagonal = {False: int(diagonal.NON_UNIT), True: int(diagonal.UNIT)}
        self._modes = int(self._cublas.PointerMode.HOST), int(self._cublas.PointerMode.DEVICE)
        self._algorithm = int(self._cublas.GemmAlgo.DFALT)
        self._stream = stream
        # As ctypes has them, numbers beyond a float's range become infinite.
        self._doubles = (ctypes.c_double * 4)()
        self._floats = (ctypes.c_float * 8).from_buffer(self._doubles)
        self._alpha = ctypes.addressof(self._doubles)
        self._beta = self._alpha + _FACTOR
        self._written: tuple[DType, complex, complex] | None = None

    def use_workspace(self, address: int, nbytes: int) -> None:
        """Let products use this memory from now on."""
        with self._stream.context.section:
            self._handle.call("set_workspace", address, nbytes - ADDRESSES)
        self.addresses = address + nbytes - ADDRESSES

    def gemm(
        self, ta: Transpose, tb: Transpose, m: int, n: int, k: int, alpha: complex, a: int, lda: int, b: int, ldb: int, beta: complex, c: int,
        ldc: int, dtype: DType, allow_tf32: bool = False,
    ) -> None:  # fmt: skip
        """Enqueue ``C = alpha * op(A) @ op(B) + beta * C`` of column-major matrices; float32 is rounded to TF32 if allowed. The arguments are checked."""
        if not (m and n):
            return
        stream = self._stream
        context = stream.ready()
        if not (k and alpha):
            scale(stream, c, m, n, ldc, 0, 1, beta, dtype)
            return
        element, _, compute, tf32, operation = self._types[dtype]
        if self._written != (dtype, alpha, beta):
            self._write(dtype, alpha, beta)
        try:
            with context.section:
                self._cublas.gemm_ex_64(
                    self.handle, operation[ta], operation[tb], m, n, k, self._alpha, a, element, lda or 1, b, element, ldb or 1, self._beta, c, element, ldc,
                    tf32 if allow_tf32 else compute, self._algorithm,
                )  # fmt: skip
        except self._error as error:
            raise self._handle.failure(error, "gemm") from error

    def batched_gemm(
        self, ta: Transpose, tb: Transpose, m: int, n: int, k: int, alpha: complex, a: int, lda: int, stride_a: int, b: int, ldb: int,
        stride_b: int, beta: complex, c: int, ldc: int, stride_c: int, count: int, dtype: DType, allow_tf32: bool = False,
    ) -> None:  # fmt: skip
        """Enqueue ``count`` products, as :meth:`gemm` does one, in one call; matrices lie ``stride_*`` elements apart."""
        if not (m and n and count):
            return
        stream = self._stream
        context = stream.ready()
        if not (k and alpha):
            scale(stream, c, m, n, ldc, stride_c, count, beta, dtype)
            return
        element, _, compute, tf32, operation = self._types[dtype]
        if self._written != (dtype, alpha, beta):
            self._write(dtype, alpha, beta)
        try:
            with context.section:
                self._cublas.gemm_strided_batched_ex_64(
                    self.handle, operation[ta], operation[tb], m, n, k, self._alpha, a, element, lda or 1, stride_a, b, element, ldb or 1, stride_b,
                    self._beta, c, element, ldc, stride_c, count, tf32 if allow_tf32 else compute, self._algorithm,
                )  # fmt: skip
        except self._error as error:
            raise self._handle.failure(error, "batched_gemm") from error

    def axpy(self, n: int, alpha: complex, x: int, y: int, dtype: DType) -> None:
        """Enqueue ``y = alpha * x + y`` for n elements that follow each other, at least one; with ``alpha == 0`` nothing is read or written."""
        element, execution = self._types[dtype][:2]
        factor, _ = self.factors(dtype, alpha, 0.0)
        self.call("axpy_ex_64", n, factor, execution, x, element, 1, y, element, 1, execution)

    def scal(self, n: int, alpha: complex, x: int, dtype: DType) -> None:
        """Enqueue ``x = alpha * x`` for n elements, at least one."""
        element, execution = self._types[dtype][:2]
        factor, _ = self.factors(dtype, alpha, 0.0)
        self.call("scal_ex_64", n, factor, execution, x, element, 1, execution)

    def dot(self, n: int, x: int, y: int, result: int, dtype: DType) -> None:
        """Enqueue ``result = sum(x[i] * y[i])`` over n elements, at least one. Nothing is conjugated."""
        element, execution = self._types[dtype][:2]
        self.call_on_device("dot_ex_64", n, x, element, 1, y, element, 1, result, element, execution)

    def nrm2(self, n: int, x: int, result: int, dtype: DType) -> None:
        """Enqueue the Euclidean norm of n real elements, at least one.

        Raises
        ------
        UnsupportedError
            If there are more than 2,147,483,647 elements of 16 bits: cuBLAS's call for these takes no more.
        """
        element, execution = self._types[dtype][:2]
        if dtype in _NORMS:
            self.call_on_device(_NORMS[dtype], n, x, 1, result)
            return
        if n > _LIMIT:
            raise UnsupportedError(f"nrm2 of {n} elements of {dtype.value}", op="nrm2", remedy=f"Give up to {_LIMIT}, or float32.")
        self.call_on_device("nrm2_ex", n, x, element, 1, result, element, execution)

    def operation(self, dtype: DType) -> Mapping[Transpose, int]:
        """Return cuBLAS's numbers of what is done to matrices of ``dtype``."""
        return self._types[dtype].operation

    def factors(self, dtype: DType, alpha: complex, beta: complex) -> tuple[int, int]:
        """Return the addresses of two scaling factors in host memory, for the next call."""
        if self._written != (dtype, alpha, beta):
            self._write(dtype, alpha, beta)
        return self._alpha, self._beta

    def call(self, name: str, *arguments: Any) -> None:
        """Enqueue a call of one dtype, such as ``strsm_64``; the arguments are checked."""
        try:
            with self._stream.context.section:
                getattr(self._cublas, name)(self.handle, *arguments)
        except self._error as error:
            raise self._handle.failure(error, name) from error

    def call_on_device(self, name: str, *arguments: Any) -> None:
        """Enqueue a call that writes a number into device memory."""
        host, device = self._modes
        with self._stream.context.section:
            self._handle.call("set_pointer_mode", device)
            try:
                self.call(name, *arguments)
            finally:
                self._handle.call("set_pointer_mode", host)

    def _write(self, dtype: DType, alpha: complex, beta: complex) -> None:
        """Write the scaling factors where the library reads them, during the call."""
        values = self._doubles if dtype in _DOUBLES else self._floats
        half = len(values) // 2
        values[0], values[1], values[half], values[half + 1] = alpha.real, alpha.imag, beta.real, beta.imag
        self._written = dtype, alpha, beta
