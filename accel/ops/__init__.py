"""What can be asked of a device: one frozen, picklable dataclass per operation."""

from __future__ import annotations

from accel.ops.base import KernelOp, Plan, Spec
from accel.ops.blas import Axpy, Dot, Gemm, GemmBatched, Gemv, Nrm2, Scal
from accel.ops.compiler import CompiledKernel, KernelLayout, Launch
from accel.ops.dnn import Attention, Conv2d
from accel.ops.elementwise import Binary, Unary
from accel.ops.fft import Fft, Ifft, Irfft, Rfft
from accel.ops.managed import Advise, Prefetch
from accel.ops.memory import Checksum, Copy, Empty, Fill, Free, Get, Put
from accel.ops.reduce import Reduce
from accel.ops.rng import Integers, Lognormal, Normal, Uniform

__all__ = [
    "Advise",
    "Attention",
    "Axpy",
    "Binary",
    "Checksum",
    "CompiledKernel",
    "Conv2d",
    "Copy",
    "Dot",
    "Empty",
    "Fft",
    "Fill",
    "Free",
    "Gemm",
    "GemmBatched",
    "Gemv",
    "Get",
    "Ifft",
    "Integers",
    "Irfft",
    "KernelLayout",
    "KernelOp",
    "Launch",
    "Lognormal",
    "Normal",
    "Nrm2",
    "Plan",
    "Prefetch",
    "Put",
    "Reduce",
    "Rfft",
    "Scal",
    "Spec",
    "Unary",
    "Uniform",
]
