"""What can be asked of a device: one frozen, picklable dataclass per operation."""

from __future__ import annotations

from accel.ops.arrays import Arange, ArraysOps, Concatenate, Eye, Linspace, Split, Stack, Tril, Triu
from accel.ops.attention import Attention, PagedAttention, RaggedAttention
from accel.ops.base import FamilyOp, KernelOp, Plan, SizedOp, Spec, Status
from accel.ops.blas import Axpy, BlasOps, Dot, Gemm, GemmBatched, Gemv, Nrm2, Scal
from accel.ops.compiler import CompiledKernel, KernelLayout, Launch
from accel.ops.convolution import Conv1d, Conv2d, Conv3d
from accel.ops.dnn import DnnOps
from accel.ops.elementwise import Binary, Cast, Clip, ElementwiseOps, Unary, Where
from accel.ops.family import Family
from accel.ops.fft import Fft, FftOps, Ifft, Irfft, Rfft
from accel.ops.found import Bincount, Compress, Histogram, Nonzero, Unique, UniqueAll
from accel.ops.fused import Fused
from accel.ops.indexed import PutAlongAxis, ScatterAdd, Take, TakeAlongAxis
from accel.ops.linalg import LinalgOps, Matmul
from accel.ops.managed import Advise, Prefetch
from accel.ops.memory import Checksum, Copy, Empty, Fill, Free, Get, Put
from accel.ops.namespace import Awaited, OpNamespace, Recorded, method, sized_method
from accel.ops.normalization import BatchNorm, GroupNorm, InstanceNorm, LayerNorm, LogSoftmax, RmsNorm, Softmax
from accel.ops.pooling import AvgPool, MaxPool
from accel.ops.rearranged import BroadcastTo, Flip, Pad, Part, Repeat, Roll, Tile, Transpose
from accel.ops.reduce import Reduce, ReduceOps
from accel.ops.rng import Integers, Lognormal, Normal, RngOps, Uniform
from accel.ops.scan import Cummax, Cummin, Cumprod, Cumsum, ScanOps, SegmentReduce
from accel.ops.solver import (
    Cholesky,
    ChoSolve,
    Det,
    Inv,
    LuFactor,
    LuSolve,
    MatrixPower,
    Qr,
    Slogdet,
    Solve,
    SolverOps,
)
from accel.ops.sort import Argsort, Partition, Searchsorted, SegmentSort, Sort, SortOps, Topk
from accel.ops.spectral import Eig, Eigh, Eigvals, Eigvalsh, Lstsq, Pinv, Svd, Svdvals

__all__ = [
    "Advise",
    "Arange",
    "Argsort",
    "ArraysOps",
    "Attention",
    "AvgPool",
    "Awaited",
    "Axpy",
    "BatchNorm",
    "Binary",
    "Bincount",
    "BlasOps",
    "BroadcastTo",
    "Cast",
    "Checksum",
    "ChoSolve",
    "Cholesky",
    "Clip",
    "CompiledKernel",
    "Compress",
    "Concatenate",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "Copy",
    "Cummax",
    "Cummin",
    "Cumprod",
    "Cumsum",
    "Det",
    "DnnOps",
    "Dot",
    "Eig",
    "Eigh",
    "Eigvals",
    "Eigvalsh",
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
    "Fused",
    "Gemm",
    "GemmBatched",
    "Gemv",
    "Get",
    "GroupNorm",
    "Histogram",
    "Ifft",
    "InstanceNorm",
    "Integers",
    "Inv",
    "Irfft",
    "KernelLayout",
    "KernelOp",
    "Launch",
    "LayerNorm",
    "LinalgOps",
    "Linspace",
    "LogSoftmax",
    "Lognormal",
    "Lstsq",
    "LuFactor",
    "LuSolve",
    "Matmul",
    "MatrixPower",
    "MaxPool",
    "Nonzero",
    "Normal",
    "Nrm2",
    "OpNamespace",
    "Pad",
    "PagedAttention",
    "Part",
    "Partition",
    "Pinv",
    "Plan",
    "Prefetch",
    "Put",
    "PutAlongAxis",
    "Qr",
    "RaggedAttention",
    "Recorded",
    "Reduce",
    "ReduceOps",
    "Repeat",
    "Rfft",
    "RmsNorm",
    "RngOps",
    "Roll",
    "Scal",
    "ScanOps",
    "ScatterAdd",
    "Searchsorted",
    "SegmentReduce",
    "SegmentSort",
    "SizedOp",
    "Slogdet",
    "Softmax",
    "Solve",
    "SolverOps",
    "Sort",
    "SortOps",
    "Spec",
    "Split",
    "Stack",
    "Status",
    "Svd",
    "Svdvals",
    "Take",
    "TakeAlongAxis",
    "Tile",
    "Topk",
    "Transpose",
    "Tril",
    "Triu",
    "Unary",
    "Uniform",
    "Unique",
    "UniqueAll",
    "Where",
    "method",
    "sized_method",
]
