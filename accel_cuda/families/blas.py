"""The ``blas`` family on a GPU: cuBLAS.

The kernels do not check again what an op's plan has checked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel import Transpose
from accel.ops.blas import apart, products_of, stored
from accel_cuda.core.family import CudaPart, Source
from accel_cuda.families import blas_matrices, blas_vectors
from accel_cuda.families.cublas import CUBLAS, blas_of, lacks_blas

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

__all__ = ["PART"]

_ALIGNMENT = 16
_QUICK = 64
"""How many calls of a group or batch the loop's thread enqueues."""
_MANY = 512
"""How many launches of a batch it enqueues: half of what a stream takes before a call blocks."""


def gemm(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Multiply C-order matrices by a column-major product: ``C^T = B^T A^T``."""
    a, b = inputs
    rows, columns = op.a.shape
    n_a, n_b = op.b.shape
    ta, tb = op.transpose_a, op.transpose_b
    m, k = (rows, columns) if ta is Transpose.NONE else (columns, rows)
    n = n_b if tb is Transpose.NONE else n_a
    ldc, out = n, op.out
    if op.a.is_strided or op.b.is_strided or (out is not None and out.is_strided):
        columns, ta = stored(op.a, ta)
        n_b, tb = stored(op.b, tb)
        ldc = n if out is None else stored(out, Transpose.NONE)[0]
    blas_of(lane.stream).gemm(tb, ta, n, m, k, op.alpha, b, n_b, a, columns, op.beta, outputs[0], ldc, op.a.dtype, op.allow_tf32)


def gemm_batched(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Multiply a strided batch as :func:`gemm` does one; a single matrix has stride 0."""
    a, b = inputs
    (rows, columns), (n_a, n_b) = op.a.shape[-2:], op.b.shape[-2:]
    ta, tb = op.transpose_a, op.transpose_b
    m, k = (rows, columns) if ta is Transpose.NONE else (columns, rows)
    n = n_b if tb is Transpose.NONE else n_a
    lda, ta = stored(op.a, ta)
    ldb, tb = stored(op.b, tb)
    stride_c, ldc = op.out.strides[:2] if op.out is not None and op.out.is_strided else (m * n, n)
    blas_of(lane.stream).batched_gemm(
        tb, ta, n, m, k, op.alpha, b, ldb, apart(op.b), a, lda, apart(op.a), op.beta, outputs[0], ldc, stride_c, op.batch_count,
        op.a.dtype, op.allow_tf32,
    )  # fmt: skip


def gemm_grouped(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Multiply matrices of different sizes, one product after the other: cuBLAS's call for groups was slow (``benchmarks/records/kernels.md``)."""
    blas, dtype = blas_of(lane.stream), op.a[0].dtype
    for each in products_of(op, inputs, outputs):
        (a, lda, turn_a), (b, ldb, turn_b), (c, ldc) = each.a, each.b, each.out
        blas.gemm(turn_b, turn_a, each.n, each.m, each.k, op.alpha, b, ldb, a, lda, op.beta, c, ldc, dtype, op.allow_tf32)


def gemv(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Multiply a matrix by a matrix of one column: cuBLAS takes the kernels of its own gemv for it, and has none of that name for the 16-bit floats."""
    a, x = inputs
    rows, columns = op.a.shape
    m, k = (rows, columns) if op.transpose_a is Transpose.NONE else (columns, rows)
    lda, ta = stored(op.a, op.transpose_a)
    ldx, ldy = op.x.strides[0], 1 if op.out is None else op.out.strides[0]
    blas_of(lane.stream).gemm(Transpose.NONE, ta, 1, m, k, op.alpha, x, ldx, a, lda, op.beta, outputs[0], ldy, op.a.dtype)


def _placed(ref: Any) -> Hashable:
    """Return what of an operand's place may decide which kernel a product takes; there are others for views that begin between two vectors."""
    return None if ref is None else (ref.shape, ref.strides if ref.is_strided else None, ref.offset % _ALIGNMENT)


def _product(lane: Any, op: Any) -> Hashable:
    a, b, out = op.a, op.b, op.out
    return op.kind, _placed(a), _placed(b), _placed(out), a.dtype, op.transpose_a, op.transpose_b, op.allow_tf32, not op.beta


def _group(lane: Any, op: Any) -> Hashable:
    places = [tuple([_placed(ref) for ref in refs]) for refs in (op.a, op.b, op.out or ())]
    return op.kind, *places, op.a[0].dtype, op.transpose_a, op.transpose_b, op.allow_tf32, not op.beta


def _matrix_by_vector(lane: Any, op: Any) -> Hashable:
    a, x, out = op.a, op.x, op.out
    return op.kind, _placed(a), _placed(x), _placed(out), a.dtype, op.transpose_a, not op.beta


_REFS = ("a", "b", "x", "y", "out")
_OPTIONS = ("side", "lower", "trans", "unit_diagonal", "transpose_a", "transpose_b", "conjugate")


def _typed(lane: Any, op: Any) -> Hashable:
    """Return what decides which kernels the calls of one dtype take."""
    refs = [_placed(getattr(op, name, None)) for name in _REFS]
    dtype = (op.a if hasattr(op, "a") else op.x).dtype
    return op.kind, dtype, *refs, *[getattr(op, name, None) for name in _OPTIONS], not getattr(op, "beta", 0.0)


_TYPED = {**blas_vectors.KERNELS, **blas_matrices.KERNELS}


def _lacks_for_batch(lane: Any, op: Any) -> bool:
    return lane.stream.blas is None or blas_matrices.count_calls(op) > _QUICK or blas_matrices.count_launches(op) > _MANY


def _lacks_for_group(lane: Any, op: Any) -> bool:
    return lane.stream.blas is None or len(op.a) > _QUICK


PART = CudaPart(
    libraries=(CUBLAS,),
    kernels={
        "gemm": gemm,
        "gemm_batched": gemm_batched,
        "gemm_grouped": gemm_grouped,
        "gemv": gemv,
        **_TYPED,
    },
    programs=(Source("blas", lambda code: ("blas.cu", ""), functions=("index", "addresses")),),
    program=dict.fromkeys(("iamax", "iamin", "trsm"), "blas"),
    lacks={
        **dict.fromkeys(("gemm", "gemm_batched", "gemv", *blas_vectors.KERNELS), lacks_blas),
        **dict.fromkeys(blas_matrices.KERNELS, _lacks_for_batch),
        "gemm_grouped": _lacks_for_group,
    },
    signatures={
        "gemm": _product,
        "gemm_batched": _product,
        "gemm_grouped": _group,
        "gemv": _matrix_by_vector,
        **dict.fromkeys(_TYPED, _typed),
    },
    # A product whose sums are split over blocks takes two launches.
    commands={
        **dict.fromkeys(("gemm", "gemm_batched", "gemv"), 2),
        **dict.fromkeys(blas_vectors.KERNELS, 3),
        **dict.fromkeys(blas_matrices.KERNELS, blas_matrices.commands),
        "gemm_grouped": lambda op: 2 * len(op.a),
    },
    workspaces=1,
    prepare=blas_of,
)
