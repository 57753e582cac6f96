"""BLAS on vectors: what the CUDA backend offers beyond :class:`accel.ComputeBackend`, for native kernels of the ``blas`` library.

These are kernels of the backend's own and not cuBLAS's: it is known when they are loaded, and so when enqueuing them may block.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from accel_cuda.core.compute_memory import CudaMemory
from accel_cuda.families.kernels import CODES

if TYPE_CHECKING:
    from accel import DType

__all__ = ["CudaVectors", "bits"]

_BLOCK = 256
_BLOCKS_PER_MULTIPROCESSOR = 8
# Bytes of one operand up to which one block makes a sum on its own.
_ALONE = 64 << 10
_DOUBLE = struct.Struct("d")


def bits(value: float) -> int:
    """Return the bits of a float64, as an argument of a kernel."""
    return int.from_bytes(_DOUBLE.pack(value), "little")


class CudaVectors(CudaMemory):
    """The vector calls of :class:`accel_cuda.families.compute.CudaCompute`, on raw pointers to elements that follow each other.

    They enqueue and return. The arguments are what an op's plan has checked. Float16 and bfloat16 are computed in float32.
    """

    def axpy(self, n: int, alpha: complex, x: int, y: int, dtype: DType) -> None:
        """Enqueue ``y = alpha * x + y`` for n elements; with ``alpha == 0`` nothing is read or written."""
        if alpha:
            self._scaled("axpy", n, alpha, x, y, dtype)

    def scal(self, n: int, alpha: complex, x: int, dtype: DType) -> None:
        """Enqueue ``x = alpha * x`` for n elements. NaN and infinity times 0 are NaN."""
        self._scaled("scal", n, alpha, x, x, dtype)

    def dot(self, n: int, x: int, y: int, result: int, dtype: DType) -> None:
        """Enqueue ``result = sum(x[i] * y[i])`` over n elements, 0 of none. Nothing is conjugated."""
        self._sum("dot", n, (x, y), result, dtype)

    def nrm2(self, n: int, x: int, result: int, dtype: DType) -> None:
        """Enqueue the Euclidean norm of n real elements, 0 of none. Squares neither overflow nor vanish."""
        self._sum("nrm2", n, (x,), result, dtype)

    def _scaled(self, kind: str, n: int, alpha: complex, x: int, y: int, dtype: DType) -> None:
        if n:
            self._stream.ready()
            blocks = -(-(n * dtype.itemsize + y % 16) // (_BLOCK * 16))
            function = self._stream.functions[f"{kind}_{CODES[dtype]}"]
            self._stream.launch(function, blocks, _BLOCK, x, y, n, bits(alpha.real), bits(alpha.imag))

    def _sum(self, kind: str, n: int, operands: tuple[int, ...], result: int, dtype: DType) -> None:
        stream, functions, code = self._stream, self._stream.functions, CODES[dtype]
        stream.ready()
        blocks = 1
        if n * dtype.itemsize > _ALONE:
            blocks = min(_BLOCKS_PER_MULTIPROCESSOR * self._context.multiprocessors, -(-n * dtype.itemsize // (16 * _BLOCK)))
        # Also where it is not used: once it is there, this never blocks.
        workspace = self.prepare_workspace()
        stream.launch(functions[f"{kind}_{code}"], blocks, _BLOCK, *operands, result, workspace, n)
        if blocks > 1:
            stream.launch(functions[f"{kind}_end_{code}"], 1, _BLOCK, workspace, result, blocks)
