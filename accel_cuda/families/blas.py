"""The ``blas`` family: cuBLAS, one handle per stream with a workspace of its own, and the native kernels of its ops.

The kernels do not check again what an op's plan has checked, and vectors do not go through a product.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple

from accel import ComputeBackend, DType, Transpose
from accel.ops.blas import apart, stored
from accel_cuda.core.compute_memory import lacks_workspace
from accel_cuda.core.family import CudaPart, Source
from accel_cuda.core.libraries import VendorLibrary, load_module
from accel_cuda.core.library_handle import LibraryHandle
from accel_cuda.families import blas_matrices, blas_vectors
from accel_cuda.families.kernels import CODES

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from accel_cuda.core.stream import CudaStream

__all__ = ["CUBLAS", "PART", "Blas"]

CUBLAS = VendorLibrary("cublas", "nvidia-cublas", "nvmath.bindings.cublas", "cuBLASError")
_FACTOR = 16
_ALIGNMENT = 16
_DOUBLES = frozenset({DType.FLOAT64, DType.COMPLEX128})


class _Types(NamedTuple):
    """How cuBLAS names elements of one dtype: the element type, the types that are computed in without and with TF32, and the operations."""

    element: int
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
        DType.FLOAT16: _Types(int(data.CUDA_R_16F), *single, real),
        DType.BFLOAT16: _Types(int(data.CUDA_R_16BF), *single, real),
        DType.FLOAT32: _Types(int(data.CUDA_R_32F), *single, real),
        DType.FLOAT64: _Types(int(data.CUDA_R_64F), *double, real),
        DType.COMPLEX64: _Types(int(data.CUDA_C_32F), *single, whole),
        DType.COMPLEX128: _Types(int(data.CUDA_C_64F), *double, whole),
    }


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
    """

    def __init__(self, stream: CudaStream, workspace: int, nbytes: int) -> None:
        self._handle = LibraryHandle(CUBLAS, stream, workspace, nbytes)
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
            self._handle.call("set_workspace", address, nbytes)

    def gemm(
        self, ta: Transpose, tb: Transpose, m: int, n: int, k: int, alpha: complex, a: int, lda: int, b: int, ldb: int, beta: complex, c: int,
        ldc: int, dtype: DType, allow_tf32: bool = False,
    ) -> None:  # fmt: skip
        """Enqueue one product; the arguments are checked."""
        element, compute, tf32, operation = self._types[dtype]
        if self._written != (dtype, alpha, beta):
            self._write(dtype, alpha, beta)
        try:
            with self._stream.context.section:
                self._cublas.gemm_ex_64(
                    self.handle, operation[ta], operation[tb], m, n, k, self._alpha, a, element, lda, b, element, ldb, self._beta, c, element, ldc,
                    tf32 if allow_tf32 else compute, self._algorithm,
                )  # fmt: skip
        except self._error as error:
            raise self._handle.failure(error, "gemm") from error

    def batched_gemm(
        self, ta: Transpose, tb: Transpose, m: int, n: int, k: int, alpha: complex, a: int, lda: int, stride_a: int, b: int, ldb: int,
        stride_b: int, beta: complex, c: int, ldc: int, stride_c: int, count: int, dtype: DType, allow_tf32: bool = False,
    ) -> None:  # fmt: skip
        """Enqueue ``count`` products in one call; the arguments are checked."""
        element, compute, tf32, operation = self._types[dtype]
        if self._written != (dtype, alpha, beta):
            self._write(dtype, alpha, beta)
        try:
            with self._stream.context.section:
                self._cublas.gemm_strided_batched_ex_64(
                    self.handle, operation[ta], operation[tb], m, n, k, self._alpha, a, element, lda, stride_a, b, element, ldb, stride_b,
                    self._beta, c, element, ldc, stride_c, count, tf32 if allow_tf32 else compute, self._algorithm,
                )  # fmt: skip
        except self._error as error:
            raise self._handle.failure(error, "batched_gemm") from error

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
        """Enqueue a call that writes a number into device memory, which the last argument is the address of."""
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


def gemm(lane: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Multiply C-order matrices by a column-major product: ``C^T = B^T A^T``."""
    a, b = inputs
    rows, columns = op.a.shape
    n_a, n_b = op.b.shape
    ta, tb = op.transpose_a, op.transpose_b
    m, k = (rows, columns) if ta is Transpose.NONE else (columns, rows)
    n = n_b if tb is Transpose.NONE else n_a
    ldc, out = n, op.out
    if op.a.is_strided or op.b.is_strided or (out is not None and out.is_strided):
        columns, ta = stored(op.a, ta)
        n_b, tb = stored(op.b, tb)
        ldc = n if out is None else stored(out, Transpose.NONE)[0]
    lane.compute.product(tb, ta, n, m, k, op.alpha, b, n_b, a, columns, op.beta, outputs[0], ldc, op.a.dtype, op.allow_tf32)


def gemm_batched(lane: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Multiply a strided batch as :func:`gemm` does one; a single matrix has stride 0."""
    a, b = inputs
    (rows, columns), (n_a, n_b) = op.a.shape[-2:], op.b.shape[-2:]
    ta, tb = op.transpose_a, op.transpose_b
    m, k = (rows, columns) if ta is Transpose.NONE else (columns, rows)
    n = n_b if tb is Transpose.NONE else n_a
    lda, ta = stored(op.a, ta)
    ldb, tb = stored(op.b, tb)
    stride_c, ldc = op.out.strides[:2] if op.out is not None and op.out.is_strided else (m * n, n)
    lane.compute.products(
        tb, ta, n, m, k, op.alpha, b, ldb, apart(op.b), a, lda, apart(op.a), op.beta, outputs[0], ldc, stride_c, op.batch_count, op.a.dtype,
        op.allow_tf32,
    )  # fmt: skip


def gemv(lane: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Multiply a matrix by a matrix of one column: cuBLAS takes the kernels of its own gemv for it, and has none of that name for the 16-bit floats."""
    a, x = inputs
    rows, columns = op.a.shape
    m, k = (rows, columns) if op.transpose_a is Transpose.NONE else (columns, rows)
    lda, ta = stored(op.a, op.transpose_a)
    ldx, ldy = op.x.strides[0], 1 if op.out is None else op.out.strides[0]
    lane.compute.product(Transpose.NONE, ta, 1, m, k, op.alpha, x, ldx, a, lda, op.beta, outputs[0], ldy, op.a.dtype)


def axpy(lane: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Add ``alpha * x`` to y."""
    lane.compute.axpy(op.x.size, op.alpha, inputs[0], outputs[0], op.x.dtype)


def dot(lane: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Sum ``x * y``."""
    lane.compute.dot(op.x.size, inputs[0], inputs[1], outputs[0], op.x.dtype)


def nrm2(lane: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Compute the norm without overflow of the squares."""
    lane.compute.nrm2(op.x.size, inputs[0], outputs[0], op.x.dtype)


def scal(lane: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Multiply x by ``alpha``; NaN stays NaN whatever alpha is."""
    lane.compute.scal(op.x.size, op.alpha, outputs[0], op.x.dtype)


def _placed(ref: Any) -> Hashable:
    """Return what of an operand's place may decide which kernel a product takes; there are others for views that begin between two vectors."""
    return None if ref is None else (ref.shape, ref.strides if ref.is_strided else None, ref.offset % _ALIGNMENT)


def _product(lane: Any, op: Any) -> Hashable:
    a, b, out = op.a, op.b, op.out
    return op.kind, _placed(a), _placed(b), _placed(out), a.dtype, op.transpose_a, op.transpose_b, op.allow_tf32, not op.beta


def _matrix_by_vector(lane: Any, op: Any) -> Hashable:
    a, x, out = op.a, op.x, op.out
    return op.kind, _placed(a), _placed(x), _placed(out), a.dtype, op.transpose_a, not op.beta


_REFS = ("a", "b", "x", "y", "out")
_OPTIONS = ("side", "lower", "trans", "unit_diagonal", "transpose_a", "transpose_b", "conjugate")


def _typed(lane: Any, op: Any) -> Hashable:
    """Return what decides which kernels the calls of one dtype take."""
    refs = [_placed(getattr(op, name, None)) for name in _REFS]
    dtype = (op.a if hasattr(op, "a") else op.x).dtype
    return op.kind, dtype, *refs, *[getattr(op, name, None) for name in _OPTIONS], not getattr(op, "beta", 0.0)


def _lacks_handle(lane: Any, op: Any) -> bool:
    return not lane.compute.has_blas


def _vectors(op: Any) -> str:
    return "vectors"


def _vectors_source(code: str) -> tuple[str, str]:
    dtypes = sorted(ComputeBackend.CAPABILITIES["gemm"], key=lambda dtype: dtype.value)
    lines = (f"VECTORS({CODES[dtype]})" + ("" if dtype.is_complex else f" NORM({CODES[dtype]})") for dtype in dtypes)
    return "vectors.cu", "\n".join(lines)


def _prepare(compute: Any) -> None:
    compute.prepare_blas()


_TYPED = {**blas_vectors.KERNELS, **blas_matrices.KERNELS}
_TRIANGULAR = ("trmv", "trsv", "trmm", "trsm")

PART = CudaPart(
    libraries=(CUBLAS,),
    kernels={
        "gemm": gemm,
        "gemm_batched": gemm_batched,
        "gemv": gemv,
        "axpy": axpy,
        "dot": dot,
        "nrm2": nrm2,
        "scal": scal,
        **_TYPED,
    },
    programs=(Source("vectors", _vectors_source, functions=("axpy", "scal", "dot", "nrm2", "index")),),
    program=dict.fromkeys(("axpy", "scal", "dot", "nrm2", "dotc", "iamax", "iamin"), _vectors),
    lacks={
        **dict.fromkeys(("gemm", "gemm_batched", "gemv", *_TYPED), _lacks_handle),
        **dict.fromkeys(("dot", "nrm2"), lacks_workspace),
        "dotc": blas_vectors.dotc_lacks,
    },
    signatures={"gemm": _product, "gemm_batched": _product, "gemv": _matrix_by_vector, **dict.fromkeys(_TYPED, _typed)},
    # A product whose sums are split over blocks takes two launches.
    commands={
        **dict.fromkeys(("gemm", "gemm_batched", "gemv", "dot", "nrm2"), 2),
        **dict.fromkeys(_TYPED, 3),
        **dict.fromkeys(_TRIANGULAR, blas_matrices.commands),
    },
    workspaces=1,
    prepare=_prepare,
)
