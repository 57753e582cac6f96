"""Products of column-major matrices by cuBLAS, and their scaling where nothing is multiplied."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_cuda.families.cublas import blas_of
from accel_cuda.families.kernels import CODES, bits

if TYPE_CHECKING:
    from accel import DType, Transpose
    from accel_cuda.core.stream import CudaStream

__all__ = ["product", "products", "scale"]

_BLOCK = 256


def product(
    stream: CudaStream, transpose_a: Transpose, transpose_b: Transpose, m: int, n: int, k: int, alpha: complex, a: int, lda: int, b: int, ldb: int,
    beta: complex, c: int, ldc: int, dtype: DType, allow_tf32: bool = False,
) -> None:  # fmt: skip
    """Enqueue ``C = alpha * op(A) @ op(B) + beta * C``; float32 is rounded to TF32 if allowed."""
    if not (m and n):
        return
    stream.ready()
    if k and alpha:
        blas_of(stream).gemm(transpose_a, transpose_b, m, n, k, alpha, a, lda or 1, b, ldb or 1, beta, c, ldc, dtype, allow_tf32)
    else:
        scale(stream, c, m, n, ldc, 0, 1, beta, dtype)


def products(
    stream: CudaStream, transpose_a: Transpose, transpose_b: Transpose, m: int, n: int, k: int, alpha: complex, a: int, lda: int, stride_a: int,
    b: int, ldb: int, stride_b: int, beta: complex, c: int, ldc: int, stride_c: int, count: int, dtype: DType, allow_tf32: bool = False,
) -> None:  # fmt: skip
    """Enqueue ``count`` products whose matrices lie ``stride_*`` elements apart."""
    if not (m and n and count):
        return
    stream.ready()
    if k and alpha:
        blas_of(stream).batched_gemm(
            transpose_a, transpose_b, m, n, k, alpha, a, lda or 1, stride_a, b, ldb or 1, stride_b, beta, c, ldc, stride_c, count, dtype,
            allow_tf32,
        )  # fmt: skip
    else:
        scale(stream, c, m, n, ldc, stride_c, count, beta, dtype)


def scale(stream: CudaStream, c: int, m: int, n: int, ldc: int, stride: int, count: int, beta: complex, dtype: DType) -> None:
    """Enqueue ``C = beta * C`` for ``count`` matrices that lie ``stride`` elements apart."""
    if beta != 1:
        function = stream.functions[f"scale_{CODES[dtype]}"]
        factor = complex(beta)
        blocks = -(-m * n * count // _BLOCK)
        stream.launch(function, blocks, _BLOCK, c, m, n, ldc, stride, count, bits(factor.real), bits(factor.imag))
