"""The CUDA backend's part of each family of ops."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_cuda.families import arrays, blas, collective, dnn, elementwise, fft, linalg, reduce, rng, scan, solver, sort, sparse, tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accel_cuda.core.family import CudaPart

__all__ = ["PARTS"]

PARTS: Mapping[str, CudaPart] = {
    "blas": blas.PART,
    "linalg": linalg.PART,
    "tensor": tensor.PART,
    "solver": solver.PART,
    "elementwise": elementwise.PART,
    "reduce": reduce.PART,
    "arrays": arrays.PART,
    "scan": scan.PART,
    "sort": sort.PART,
    "dnn": dnn.PART,
    "fft": fft.PART,
    "rng": rng.PART,
    "sparse": sparse.PART,
    "collective": collective.PART,
}
"""Name of a family -> the CUDA backend's part; and of collectives, which only a world sends."""
