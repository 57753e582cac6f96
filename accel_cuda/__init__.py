"""The CUDA backend of accel: NVIDIA GPUs behind the protocols of :mod:`accel.backend`.

Importing this package imports nothing of CUDA; ``accel`` finds it by itself, so there is no need to import it.
"""

from __future__ import annotations

from accel_cuda.backend import CudaBackend

__all__ = ["CudaBackend"]
