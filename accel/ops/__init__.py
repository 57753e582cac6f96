"""What can be asked of a device: one frozen, picklable dataclass per operation."""

from __future__ import annotations

from accel.ops.arrays import Arange, ArraysOps, Concatenate, Eye, Linspace, Split, Stack, Tril, Triu
from accel.ops.base import FamilyOp, KernelOp, Plan, Spec, Status
from accel.ops.blas import Axpy, BlasOps, Dot, Gemm, GemmBatched, Gemv, Nrm2, Scal
from accel.ops.compiler import CompiledKernel, KernelLayout, Launch
from accel.ops.dnn import Attention, Conv2d, DnnOps
from accel.ops.elementwise import Binary, Cast, Clip, ElementwiseOps, Unary, Where
from accel.ops.family import Family
from accel.ops.fft import Fft, FftOps, Ifft, Irfft, Rfft
from accel.ops.indexed import PutAlongAxis, ScatterAdd, Take, TakeAlongAxis
from accel.ops.managed import Advise, Prefetch
from accel.ops.memory import Checksum, Copy, Empty, Fill, Free, Get, Put
from accel.ops.namespace import Awaited, OpNamespace, Recorded, method
from accel.ops.rearranged import BroadcastTo, Flip, Pad, Part, Repeat, Roll, Tile, Transpose
from accel.ops.reduce import Reduce, ReduceOps
from accel.ops.rng import Integers, Lognormal, Normal, RngOps, Uniform

__all__ = [
    "Advise",
    "Arange",
    "ArraysOps",
    "Attention",
    "Awaited",
    "Axpy",
    "Binary",
    "BlasOps",
    "BroadcastTo",
    "Cast",
    "Checksum",
    "Clip",
    "CompiledKernel",
    "Concatenate",
    "Conv2d",
    "Copy",
    "DnnOps",
    "Dot",
    "ElementwiseOps",
    "Empty",
    "Eye",
    "Family",
    "FamilyOp",
    "Fft",
    "FftOps",
    "Fill",
    "Flip",
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
    "Linspace",
    "Lognormal",
    "Normal",
    "Nrm2",
    "OpNamespace",
    "Pad",
    "Part",
    "Plan",
    "Prefetch",
    "Put",
    "PutAlongAxis",
    "Recorded",
    "Reduce",
    "ReduceOps",
    "Repeat",
    "Rfft",
    "RngOps",
    "Roll",
    "Scal",
    "ScatterAdd",
    "Spec",
    "Split",
    "Stack",
    "Status",
    "Take",
    "TakeAlongAxis",
    "Tile",
    "Transpose",
    "Tril",
    "Triu",
    "Unary",
    "Uniform",
    "Where",
    "method",
]
