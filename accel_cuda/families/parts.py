"""What CUDA has of each family of ops: one entry a family, which the device, the programs, the counts of commands and the preloading iterate over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from accel.backend import Kernel
from accel_cuda.core.context import CudaContext
from accel_cuda.families.blas import BLAS_KERNELS
from accel_cuda.families.conv2d import DNN_KERNELS, commands_of_convolution
from accel_cuda.families.fft import FftLibrary
from accel_cuda.families.rng import RNG_KERNELS

if TYPE_CHECKING:
    from accel_cuda.core.stream import CudaStream

__all__ = ["PARTS", "CudaPart", "FamilyState"]


class FamilyState(Protocol):
    """What a family keeps in one context: plans, and how much memory its kernels work in."""

    kernels: Mapping[str, Kernel]

    def may_block(self, lane: Any, op: Any) -> bool:
        """Return whether enqueuing ``op`` has to make something first."""

    def commands(self, op: Any) -> int:
        """Return how many commands an op enqueues at most."""

    def scratch_nbytes(self, op: Any) -> int | None:
        """Return how many bytes an op works in; ``None`` if that was not measured."""

    def measure(self, op: Any) -> None:
        """See that :meth:`scratch_nbytes` knows. May block."""

    def prepare(self, stream: CudaStream) -> None:
        """Load the family's library for a stream. May block."""

    def close(self) -> None:
        """Destroy what no stream has. May block."""


@dataclass(frozen=True, slots=True)
class CudaPart:
    """What CUDA has of one family.

    Parameters
    ----------
    kernels
        Op kind -> kernel, for kinds whose kernels keep nothing in a context.
    programs
        Families of the backend's own programs that the ops need.
    compiled
        Kinds of ops whose kernel may be in one of these programs.
    commands
        Op kind -> its commands at most, or how they are counted; one where it is left out.
    wheels
        Distributions that its handles are made with.
    open
        Makes what it keeps in a context, which has the kernels of the other kinds.
    """

    kernels: Mapping[str, Kernel] = field(default_factory=dict)
    programs: tuple[str, ...] = ()
    compiled: tuple[str, ...] = ()
    commands: Mapping[str, int | Callable[[Any], int]] = field(default_factory=dict)
    wheels: tuple[str, ...] = ()
    open: Callable[[CudaContext], FamilyState] | None = None


PARTS: Mapping[str, CudaPart] = {
    "blas": CudaPart(
        BLAS_KERNELS,
        programs=("vectors",),
        compiled=("axpy", "scal", "dot", "nrm2"),
        # A product whose sums are split over blocks takes two launches.
        commands=dict.fromkeys(("gemm", "gemm_batched", "gemv", "dot", "nrm2"), 2),
        wheels=("nvidia-cublas", "nvmath-python"),
    ),
    "elementwise": CudaPart(programs=("unary", "binary"), compiled=("unary", "binary")),
    "reduce": CudaPart(programs=("sum", "max", "min"), compiled=("reduce",), commands={"reduce": 2}),
    "dnn": CudaPart(
        DNN_KERNELS,
        programs=("conv2d", "attention"),
        compiled=("conv2d", "attention"),
        commands={"attention": 2, "conv2d": commands_of_convolution},
    ),
    "fft": CudaPart(
        programs=("fft",), compiled=("fft", "ifft", "rfft", "irfft"), wheels=("nvidia-cufft", "nvmath-python"), open=FftLibrary
    ),
    "rng": CudaPart(RNG_KERNELS, programs=("rng",), compiled=("uniform", "normal", "lognormal", "integers")),
}
"""Name of a family -> CUDA's part."""
