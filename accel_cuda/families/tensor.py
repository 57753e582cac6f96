"""The ``tensor`` family on a GPU: ops of other families compute it, by cuBLAS, cuBLASLt and kernels that move, multiply and sum elements."""

from __future__ import annotations

from accel_cuda.core.family import CudaPart

__all__ = ["PART"]

PART = CudaPart()
