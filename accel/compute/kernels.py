"""Kernels of a backend that has a compute interface, and no kernels of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from accel.enums import Transpose, UnaryOp
from accel.errors import UnsupportedError
from accel.ops.blas import apart, products_of, stored

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from accel.backend import Kernel
    from accel.compute.interface import ComputeBackend
    from accel.dtype import DType
    from accel.ops.base import Plan

__all__ = ["kernels_of"]

_NONE = Transpose.NONE


def kernels_of(compute: Callable[[Any], ComputeBackend]) -> Mapping[str, Mapping[str, Kernel]]:
    """Return library -> kind of an op -> kernel, for the ops that a compute interface can make.

    These are ``gemm gemm_batched gemm_grouped gemv ger axpy dot nrm2 scal`` of ``blas``, ``unary``
    and ``binary`` of ``elementwise``, ``reduce``, and ``conv2d`` and ``attention`` of ``dnn``, on
    contiguous operands but for products. Other ops need a kernel of their own.

    Parameters
    ----------
    compute
        ``compute(stream)`` returns the interface whose calls go into a stream of the backend's,
        initialized: the same one each time.
    """
    kernels = _Kernels(compute)
    return {
        "blas": {name: getattr(kernels, name) for name in _BLAS},
        "elementwise": {"unary": kernels.unary, "binary": kernels.binary},
        "reduce": {"reduce": kernels.reduce},
        "dnn": {"conv2d": kernels.conv2d, "attention": kernels.attention},
    }


_BLAS = ("gemm", "gemm_batched", "gemm_grouped", "gemv", "ger", "axpy", "dot", "nrm2", "scal")


class _Kernels:
    """Each method is a kernel: see :data:`accel.backend.Kernel`.

    A C-order matrix is the transpose of a column-major one, and ``C^T = B^T A^T``.
    """

    def __init__(self, compute: Callable[[Any], ComputeBackend]) -> None:
        self._compute = compute
        self._ones: WeakKeyDictionary[ComputeBackend, dict[DType, int]] = WeakKeyDictionary()

    def gemm(self, lane: Any, op: Any, plan: Plan, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Multiply two matrices."""
        m, n = (plan.writes or plan.creates)[0].shape
        k = op.a.shape[1 if op.transpose_a is _NONE else 0]
        (lda, turn_a), (ldb, turn_b) = stored(op.a, op.transpose_a), stored(op.b, op.transpose_b)
        ldc = n or 1 if op.out is None else stored(op.out, _NONE)[0]
        compute = self._compute(lane.stream)
        compute.gemm(turn_b, turn_a, n, m, k, op.alpha, inputs[1], ldb, inputs[0], lda, op.beta, outputs[0], ldc, dtype=plan.dtype)

    def gemm_batched(self, lane: Any, op: Any, plan: Plan, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Multiply a strided batch; a single matrix has stride 0."""
        count, m, n = (plan.writes or plan.creates)[0].shape
        k = op.a.shape[-1 if op.transpose_a is _NONE else -2]
        (lda, turn_a), (ldb, turn_b) = stored(op.a, op.transpose_a), stored(op.b, op.transpose_b)
        stride_c, ldc = (m * n, n or 1) if op.out is None else (op.out.strides[0], stored(op.out, _NONE)[0])
        self._compute(lane.stream).batched_gemm(
            turn_b, turn_a, n, m, k, op.alpha, inputs[1], ldb, apart(op.b), inputs[0], lda, apart(op.a), op.beta, outputs[0], ldc, stride_c,
            count, dtype=plan.dtype,
        )  # fmt: skip

    def gemm_grouped(self, lane: Any, op: Any, plan: Plan, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Make one product after the other."""
        compute = self._compute(lane.stream)
        for m, n, k, (a, lda, turn_a), (b, ldb, turn_b), (c, ldc) in products_of(op, inputs, outputs):
            compute.gemm(turn_b, turn_a, n, m, k, op.alpha, b, ldb, a, lda, op.beta, c, ldc, dtype=plan.dtype)

    def gemv(self, lane: Any, op: Any, plan: Plan, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Multiply a matrix by a matrix of one column."""
        m, k = op.a.shape if op.transpose_a is _NONE else op.a.shape[::-1]
        lda, turn = stored(op.a, op.transpose_a)
        ldx, ldy = op.x.strides[0], 1 if op.out is None else op.out.strides[0]
        compute = self._compute(lane.stream)
        compute.gemm(_NONE, turn, 1, m, k, op.alpha, inputs[1], ldx, inputs[0], lda, op.beta, outputs[0], ldy, dtype=plan.dtype)

    def ger(self, lane: Any, op: Any, plan: Plan, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Multiply a column by a row, which is a matrix of leading dimension 1, transposed."""
        m, n = op.x.shape[0], op.y.shape[0]
        turn = Transpose.CONJUGATE if op.conjugate else Transpose.TRANSPOSE
        compute = self._compute(lane.stream)
        compute.gemm(turn, _NONE, n, m, 1, op.alpha, inputs[1], 1, inputs[0], 1, op.beta, outputs[0], n or 1, dtype=plan.dtype)

    def axpy(self, lane: Any, op: Any, plan: Plan, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Add the product of a column with the 1x1 matrix 1."""
        n, dtype, compute = op.x.size, plan.dtype, self._compute(lane.stream)
        ones = self._ones.setdefault(compute, {})
        if dtype not in ones:
            ones[dtype] = compute.alloc(dtype.itemsize)
            compute.copy_htod(ones[dtype], np.ones(1, dtype.numpy).view(np.uint8).data)
        compute.gemm(_NONE, _NONE, n, 1, 1, op.alpha, inputs[0], n or 1, ones[dtype], 1, 1.0, outputs[0], n or 1, dtype=dtype)

    def dot(self, lane: Any, op: Any, plan: Plan, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Multiply a row by a column."""
        n, compute = op.x.size, self._compute(lane.stream)
        compute.gemm(_NONE, _NONE, 1, 1, n, 1.0, inputs[0], 1, inputs[1], n or 1, 0.0, outputs[0], 1, dtype=plan.dtype)

    def nrm2(self, lane: Any, op: Any, plan: Plan, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Take the root of the product of x with itself; large squares overflow."""
        n, compute = op.x.size, self._compute(lane.stream)
        compute.gemm(_NONE, _NONE, 1, 1, n, 1.0, inputs[0], 1, inputs[0], n or 1, 0.0, outputs[0], 1, dtype=plan.dtype)
        compute.unary(UnaryOp.SQRT, outputs[0], outputs[0], 1, dtype=plan.dtype)

    def scal(self, lane: Any, op: Any, plan: Plan, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Multiply nothing and keep ``alpha`` times the output."""
        n, x, compute = op.x.size, outputs[0], self._compute(lane.stream)
        compute.gemm(_NONE, _NONE, n, 1, 0, 0.0, x, n or 1, x, 1, op.alpha, x, n or 1, dtype=plan.dtype)

    def unary(self, lane: Any, op: Any, plan: Plan, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Apply a function of one element."""
        if not op.is_plain():
            raise _unsupported(op, "on strided views", "Give contiguous refs.")
        self._compute(lane.stream).unary(op.op, inputs[0], outputs[0], op.x.size, dtype=plan.dtype)

    def binary(self, lane: Any, op: Any, plan: Plan, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Apply a function of two elements of arrays of one shape."""
        if not op.is_plain():
            raise _unsupported(op, "that broadcast, or take numbers or strided views", "Give two contiguous refs of one shape.")
        self._compute(lane.stream).binary(op.op, inputs[0], inputs[1], outputs[0], op.x.size, dtype=plan.dtype)

    def reduce(self, lane: Any, op: Any, plan: Plan, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Reduce neighbouring axes."""
        shape = op.middle()
        if shape is None:
            raise _unsupported(op, "but along neighbouring axes of contiguous refs, without ddof", "Reduce one axis after the other.")
        self._compute(lane.stream).reduce(op.op, inputs[0], outputs[0], shape, 1, dtype=plan.dtype)

    def conv2d(self, lane: Any, op: Any, plan: Plan, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Convolve, as far as compute interfaces can."""
        is_plain = op.bias is None and op.activation is None and not op.channels_last and (op.groups, *op.dilation) == (1, 1, 1)
        if not is_plain or any(before != after for before, after in op.padding):
            raise _unsupported(op, "but without bias, activation, groups, dilation, channels_last, and with equal padding at both ends")
        x, w, y = op.sizes()
        padding = [before for before, _ in op.padding]
        compute = self._compute(lane.stream)
        compute.conv2d_forward(inputs[0], x, inputs[1], w, outputs[0], y, op.stride, padding, dtype=plan.dtype)

    def attention(self, lane: Any, op: Any, plan: Plan, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Attend, as far as compute interfaces can."""
        batch, heads, seq_q, dim = op.q.shape
        if len(inputs) > 3 or op.window is not None or op.k.shape[1] != heads or op.v.shape[3] != dim:
            raise _unsupported(op, "but without bias, lengths and window, and with as many heads, of one size, in k and v as in q")
        (q, k, v), seq_kv = inputs, op.k.shape[2]
        compute = self._compute(lane.stream)
        compute.attention(q, k, v, outputs[0], batch, heads, seq_q, seq_kv, dim, op.multiplier(), op.causal, dtype=plan.dtype)


def _unsupported(op: Any, what: str, remedy: str = "Use another backend.") -> UnsupportedError:
    return UnsupportedError(f"this backend has no {op.kind} {what}", library=op.library, op=op.kind, remedy=remedy)
