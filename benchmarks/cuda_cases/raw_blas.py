"""The raw twin of products: cuBLAS called directly, with this project's settings."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from accel import DType
from accel_cuda.core.libraries import load_library, load_module

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.cuda_cases.raw import Raw

__all__ = ["RawBlas"]

_WORKSPACE = 32 << 20
_DISALLOW_REDUCED_PRECISION_REDUCTION = 16
_COMPUTE_F32, _DEFAULT_ALGORITHM = 68, -1
_TYPES = {DType.FLOAT16: 2, DType.BFLOAT16: 14, DType.FLOAT32: 0}


class RawBlas:
    """A cuBLAS handle on the raw stream: no TF32, sums in 32 bits, a workspace of 32 MiB.

    Parameters
    ----------
    raw
        The stream; its context is current.
    """

    def __init__(self, raw: Raw) -> None:
        load_library("cublas", "nvidia-cublas")
        self._cublas: Any = load_module("nvmath.bindings.cublas", "nvmath-python")
        self._workspace = raw.context.create_slab(_WORKSPACE)
        self._factors = (ctypes.c_float * 2)(1.0, 0.0)
        self._handle = int(self._cublas.create())
        self._cublas.set_stream(self._handle, raw.stream)
        self._cublas.set_workspace(self._handle, self._workspace.address, _WORKSPACE)
        self._cublas.set_math_mode(self._handle, _DISALLOW_REDUCED_PRECISION_REDUCTION)
        self._wait = raw.waiter()

    def gemm(self, n: int, dtype: DType, a: int, b: int, c: int) -> Callable[[], object]:
        """Return a call that enqueues the product of two square C-order matrices."""
        gemm, handle, element = self._cublas.gemm_ex, self._handle, _TYPES[dtype]
        alpha = ctypes.addressof(self._factors)
        beta = alpha + ctypes.sizeof(ctypes.c_float)
        arguments = (handle, 0, 0, n, n, n, alpha, b, element, n, a, element, n, beta, c, element, n, _COMPUTE_F32, _DEFAULT_ALGORITHM)
        return lambda: gemm(*arguments)

    def blocking(self, enqueue: Callable[[], object], count: int = 1) -> Callable[[], object]:
        """Return a call that enqueues ``count`` times and blocks until all is through."""
        wait = self._wait

        def run() -> None:
            for _ in range(count):
                enqueue()
            wait()

        return run

    def close(self) -> None:
        """Give the handle and the workspace back."""
        self._wait()
        self._cublas.destroy(self._handle)
        self._workspace.close()
