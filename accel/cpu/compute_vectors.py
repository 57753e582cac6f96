"""BLAS on vectors: what the CPU offers beyond :class:`accel.ComputeBackend`, for native kernels of the ``blas`` library."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar

from accel import arguments
from accel.compute import ComputeBackend
from accel.cpu import costs
from accel.cpu.compute_memory import CpuMemory
from accel.cpu.families import vectors
from accel.dtype import DType

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CpuVectors"]

_PRODUCTS = ComputeBackend.CAPABILITIES["gemm"]


class CpuVectors(CpuMemory):
    """The vector calls of :class:`accel.cpu.compute.CpuCompute`, on raw pointers, with increments as BLAS has them.

    Element i of ``x`` lies at ``x + i * incx`` elements; with a negative increment at ``x + (i - n + 1) * incx``, so that ``x`` is the lowest address
    in both cases. Like all computing calls they enqueue and return, raise before anything is enqueued, and compute float16 and bfloat16 in float32.
    """

    CAPABILITIES: ClassVar[Mapping[str, frozenset[DType]]] = {
        **ComputeBackend.CAPABILITIES,
        **dict.fromkeys(("axpy", "dot", "nrm2", "scal"), _PRODUCTS),
    }

    def axpy(self, n: int, alpha: complex, x: int, incx: int, y: int, incy: int, *, dtype: DType = DType.FLOAT32) -> None:
        """Enqueue ``y = alpha * x + y`` for n elements; with ``alpha == 0`` nothing is read or written."""
        self._require("axpy", dtype)
        arguments.not_negative("axpy", n=n)
        arguments.increments("axpy", incx=incx, incy=incy)
        alpha, _ = arguments.real_scalars("axpy", alpha, 0.0, dtype)
        if n:
            arguments.pointers("axpy", x=x, y=y)
            self._submit(partial(vectors.axpy, n, alpha, x, incx, y, incy, dtype.numpy), costs.elements(3 * n, dtype.numpy))

    def scal(self, n: int, alpha: complex, x: int, incx: int, *, dtype: DType = DType.FLOAT32) -> None:
        """Enqueue ``x = alpha * x`` for n elements. NaN and infinity times 0 are NaN."""
        self._require("scal", dtype)
        arguments.not_negative("scal", n=n)
        arguments.increments("scal", incx=incx)
        alpha, _ = arguments.real_scalars("scal", alpha, 0.0, dtype)
        if n:
            arguments.pointers("scal", x=x)
            self._submit(partial(vectors.scal, n, alpha, x, incx, dtype.numpy), costs.elements(2 * n, dtype.numpy))

    def dot(self, n: int, x: int, incx: int, y: int, incy: int, result: int, *, dtype: DType = DType.FLOAT32) -> None:
        """Enqueue ``result = sum(x[i] * y[i])`` over n elements, 0 of none. Nothing is conjugated (BLAS calls it ``dotu``)."""
        self._require("dot", dtype)
        arguments.not_negative("dot", n=n)
        arguments.increments("dot", incx=incx, incy=incy)
        arguments.pointers("dot", result=result)
        if n:
            arguments.pointers("dot", x=x, y=y)
        self._submit(partial(vectors.dot, n, x, incx, y, incy, result, dtype.numpy), costs.elements(2 * n, dtype.numpy))

    def nrm2(self, n: int, x: int, incx: int, result: int, *, dtype: DType = DType.FLOAT32) -> None:
        """Enqueue ``result = sqrt(sum(|x[i]|**2))`` over n elements, 0 of none; squares neither overflow nor vanish.

        The result is real: for complex64 it is one float32, for complex128 one float64.
        """
        self._require("nrm2", dtype)
        arguments.not_negative("nrm2", n=n)
        arguments.increments("nrm2", incx=incx)
        arguments.pointers("nrm2", result=result)
        if n:
            arguments.pointers("nrm2", x=x)
        self._submit(partial(vectors.nrm2, n, x, incx, result, dtype.numpy), costs.elements(2 * n, dtype.numpy))
