"""What can be asked of a device: one frozen, picklable dataclass per operation."""

from __future__ import annotations

from accel.ops.arrays import *
from accel.ops.attention import *
from accel.ops.base import (
    FamilyOp as FamilyOp,
    KernelOp as KernelOp,
    Plan as Plan,
    SizedOp as SizedOp,
    Spec as Spec,
    Status as Status,
    op as op,
)
from accel.ops.blas import (
    Axpy as Axpy,
    BlasOps as BlasOps,
    Dot as Dot,
    Dotc as Dotc,
    Gemm as Gemm,
    GemmBatched as GemmBatched,
    Gemv as Gemv,
    Nrm2 as Nrm2,
    Scal as Scal,
)
from accel.ops.blas_grouped import *
from accel.ops.blas_matrices import *
from accel.ops.blas_triangular import *
from accel.ops.blas_vectors import *
from accel.ops.choices import *
from accel.ops.compiler import (
    CompiledKernel as CompiledKernel,
    CompilesKernels as CompilesKernels,
    KernelLayout as KernelLayout,
    Launch as Launch,
)
from accel.ops.composed import ComposedOp as ComposedOp
from accel.ops.convolution import *
from accel.ops.cosine import *
from accel.ops.distributions import *
from accel.ops.dnn import *
from accel.ops.elementwise import *
from accel.ops.family import Family as Family
from accel.ops.fft import *
from accel.ops.filters import *
from accel.ops.found import *
from accel.ops.fused import Fused as Fused
from accel.ops.indexed import PutAlongAxis as PutAlongAxis, ScatterAdd as ScatterAdd, Take as Take, TakeAlongAxis as TakeAlongAxis
from accel.ops.linalg import LinalgOps as LinalgOps, Matmul as Matmul
from accel.ops.loss import *
from accel.ops.memory import *
from accel.ops.namespace import (
    Awaited as Awaited,
    OpNamespace as OpNamespace,
    Recorded as Recorded,
    method as method,
    sized_method as sized_method,
)
from accel.ops.normalization import (
    BatchNorm as BatchNorm,
    GroupNorm as GroupNorm,
    InstanceNorm as InstanceNorm,
    LayerNorm as LayerNorm,
    LogSoftmax as LogSoftmax,
    RmsNorm as RmsNorm,
    Softmax as Softmax,
)
from accel.ops.pooling import *
from accel.ops.quasi import *
from accel.ops.rearranged import *
from accel.ops.reduce import *
from accel.ops.rng import *
from accel.ops.scan import *
from accel.ops.solver import *
from accel.ops.sort import *
from accel.ops.sparse import *
from accel.ops.sparse_conversions import *
from accel.ops.sparse_products import *
from accel.ops.sparse_systems import *
from accel.ops.spectral import *
from accel.ops.tensor import *
from accel.ops.training import *

__all__ = sorted(name for name, found in globals().items() if getattr(found, "__module__", "").startswith("accel.ops."))
