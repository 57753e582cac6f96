"""Native kernels of the CPU: ops that its compute interface has no call for, or for which there is something better than a gemm in disguise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel.cpu.kernels.digest import checksum
from accel.cpu.kernels.fft import FFT
from accel.cpu.kernels.rng import RNG

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from accel.backend import Kernel

__all__ = ["NATIVE"]


def axpy(lane: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Add ``alpha * x`` to y."""
    lane.compute.axpy(op.x.size, op.alpha, inputs[0], 1, outputs[0], 1, dtype=op.x.dtype)


def dot(lane: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Sum ``x * y``."""
    lane.compute.dot(op.x.size, inputs[0], 1, inputs[1], 1, outputs[0], dtype=op.x.dtype)


def nrm2(lane: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Compute the norm without overflow of the squares."""
    lane.compute.nrm2(op.x.size, inputs[0], 1, outputs[0], dtype=op.x.dtype)


def scal(lane: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Multiply x by ``alpha``; NaN stays NaN whatever alpha is."""
    lane.compute.scal(op.x.size, op.alpha, outputs[0], 1, dtype=op.x.dtype)


NATIVE: Mapping[str, Mapping[str, Kernel]] = {
    "blas": {"axpy": axpy, "dot": dot, "nrm2": nrm2, "scal": scal},
    "fft": FFT,
    "memory": {"checksum": checksum},
    "rng": RNG,
}
"""Library -> op kind -> kernel."""
