"""Native kernels of the ``blas`` and ``dnn`` libraries: what an op's plan has checked is not checked again, and vectors do not go through a product."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel import Transpose

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from accel.backend import Kernel

__all__ = ["BLAS_KERNELS", "DNN_KERNELS"]

_NONE = Transpose.NONE


def gemm(lane: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Multiply C-order matrices by a column-major product: ``C^T = B^T A^T``."""
    a, b = inputs
    rows, columns = op.a.shape
    n_a, n_b = op.b.shape
    ta, tb = op.transpose_a, op.transpose_b
    m, k = (rows, columns) if ta is _NONE else (columns, rows)
    n = n_b if tb is _NONE else n_a
    lane.compute.product(tb, ta, n, m, k, op.alpha, b, n_b, a, columns, op.beta, outputs[0], n, op.a.dtype, op.allow_tf32)


def gemm_batched(lane: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Multiply a strided batch as :func:`gemm` does one; a single matrix has stride 0."""
    a, b = inputs
    (*batch_a, rows, columns), (*batch_b, n_a, n_b) = op.a.shape, op.b.shape
    ta, tb = op.transpose_a, op.transpose_b
    m, k = (rows, columns) if ta is _NONE else (columns, rows)
    n = n_b if tb is _NONE else n_a
    stride_a, stride_b = rows * columns if batch_a else 0, n_a * n_b if batch_b else 0
    lane.compute.products(
        tb, ta, n, m, k, op.alpha, b, n_b, stride_b, a, columns, stride_a, op.beta, outputs[0], n, m * n, op.batch_count, op.a.dtype,
        op.allow_tf32,
    )  # fmt: skip


def gemv(lane: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Multiply a matrix by a matrix of one column: cuBLAS takes the kernels of its own gemv for it, and has none of that name for the 16-bit floats."""
    a, x = inputs
    rows, columns = op.a.shape
    m, k = (rows, columns) if op.transpose_a is _NONE else (columns, rows)
    lane.compute.product(_NONE, op.transpose_a, 1, m, k, op.alpha, x, 1, a, columns, op.beta, outputs[0], 1, op.a.dtype)


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


def conv2d(lane: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Convolve."""
    shapes = inputs[0], op.input.shape, inputs[1], op.filter.shape, outputs[0], op.output_shape()
    lane.compute.conv2d_forward(*shapes, op.stride, op.padding, dtype=op.input.dtype)


BLAS_KERNELS: Mapping[str, Kernel] = {
    "gemm": gemm,
    "gemm_batched": gemm_batched,
    "gemv": gemv,
    "axpy": axpy,
    "dot": dot,
    "nrm2": nrm2,
    "scal": scal,
}
"""Op kind -> kernel."""

DNN_KERNELS: Mapping[str, Kernel] = {"conv2d": conv2d}
"""Op kind -> kernel, of those that are not as the compute interface has them."""
