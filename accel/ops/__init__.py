"""What can be asked of a device: one frozen, picklable dataclass per operation."""

from __future__ import annotations

from accel.ops.base import FamilyOp, KernelOp, Plan, Spec, Status
from accel.ops.blas import Axpy, BlasOps, Dot, Gemm, GemmBatched, Gemv, Nrm2, Scal
from accel.ops.compiler import CompiledKernel, KernelLayout, Launch
from accel.ops.dnn import Attention, Conv2d, DnnOps
from accel.ops.elementwise import Binary, Cast, Clip, ElementwiseOps, Unary, Where
from accel.ops.family import Family
from accel.ops.fft import Fft, FftOps, Ifft, Irfft, Rfft
from accel.ops.managed import Advise, Prefetch
from accel.ops.memory import Checksum, Copy, Empty, Fill, Free, Get, Put
from accel.ops.namespace import Awaited, OpNamespace, Recorded, method
from accel.ops.reduce import Reduce, ReduceOps
from accel.ops.rng import Integers, Lognormal, Normal, RngOps, Uniform

__all__ = [
    "Advise",
    "Attention",
    "Awaited",
    "Axpy",
    "Binary",
    "BlasOps",
    "Cast",
    "Checksum",
    "Clip",
    "CompiledKernel",
    "Conv2d",
    "Copy",
    "DnnOps",
    "Dot",
    "ElementwiseOps",
    "Empty",
    "Family",
    "FamilyOp",
    "Fft",
    "FftOps",
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
    "OpNamespace",
    "Plan",
    "Prefetch",
    "Put",
    "Recorded",
    "Reduce",
    "ReduceOps",
    "Rfft",
    "RngOps",
    "Scal",
    "Spec",
    "Status",
    "Unary",
    "Uniform",
    "Where",
    "method",
]
