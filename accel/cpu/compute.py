"""The CPU's compute interface: checks the arguments of a call, estimates its cost, and submits its kernel to the stream."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from accel import arguments
from accel.arguments import BASE
from accel.cpu import costs
from accel.cpu.compute_vectors import CpuVectors
from accel.cpu.families import attention, blas, convolution, elementwise
from accel.cpu.families import reduce as reductions
from accel.cpu.views import array
from accel.dtype import DType
from accel.enums import EXTREMES, BinaryOp, Causal, ReduceOp, Transpose, UnaryOp
from accel.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CpuCompute"]

_NONE = Transpose.NONE
# Building "unary.relu" for each call would cost more than looking it up.
_UNARY_CALLS = {op: f"unary.{op.value}" for op in UnaryOp}
_BINARY_CALLS = {op: f"binary.{op.value}" for op in BinaryOp}
_REDUCE_CALLS = {op: f"reduce.{op.value}" for op in ReduceOp}
_CAUSAL: tuple[Causal, ...] = (False, True, "bottom_right")


class CpuCompute(CpuVectors):
    """:class:`accel.ComputeBackend` on the CPU, one instance a stream; it adds ``axpy dot nrm2 scal``.

    Parameters
    ----------
    stream
        Where the work goes: :class:`accel.cpu.stream.CpuStream`, or anything with its ``submit`` and ``synchronize``.
    device
        Name of the device, for error messages.
    """

    def gemm(
        self,
        transpose_a: Transpose,
        transpose_b: Transpose,
        m: int,
        n: int,
        k: int,
        alpha: complex,
        a: int,
        lda: int,
        b: int,
        ldb: int,
        beta: complex,
        c: int,
        ldc: int,
        *,
        dtype: DType = DType.FLOAT64,
    ) -> None:
        """Enqueue ``C = alpha * op(A) @ op(B) + beta * C`` on column-major matrices."""
        self._require("gemm", dtype)
        if m <= 0 or n <= 0 or k <= 0 or c < BASE or a < BASE or b < BASE:
            self._check_sizes("gemm", m, n, k, alpha, a, b, c)
        rows_a, rows_b = m if transpose_a is _NONE else k, k if transpose_b is _NONE else n
        if lda < rows_a or ldb < rows_b or ldc < m or lda < 1 or ldb < 1 or ldc < 1:
            arguments.leading_dimensions("gemm", lda=(lda, rows_a), ldb=(ldb, rows_b), ldc=(ldc, m))
        if dtype.kind != "complex":
            if alpha.imag or beta.imag:
                arguments.real_scalars("gemm", alpha, beta, dtype)
            alpha, beta = alpha.real, beta.real
        if m and n:
            element = dtype.numpy
            work = partial(blas.gemm, transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc, element)
            self._submit(work, costs.matmul(m, n, k, element))

    def batched_gemm(
        self,
        transpose_a: Transpose,
        transpose_b: Transpose,
        m: int,
        n: int,
        k: int,
        alpha: complex,
        a: int,
        lda: int,
        stride_a: int,
        b: int,
        ldb: int,
        stride_b: int,
        beta: complex,
        c: int,
        ldc: int,
        stride_c: int,
        batch_count: int,
        *,
        dtype: DType = DType.FLOAT32,
    ) -> None:
        """Enqueue ``batch_count`` products whose matrices lie ``stride_*`` elements apart."""
        op = "batched_gemm"
        self._require(op, dtype)
        arguments.not_negative(op, stride_a=stride_a, stride_b=stride_b, stride_c=stride_c, batch_count=batch_count)
        rows_a, rows_b = m if transpose_a is _NONE else k, k if transpose_b is _NONE else n
        arguments.leading_dimensions(op, lda=(lda, rows_a), ldb=(ldb, rows_b), ldc=(ldc, m))
        self._check_sizes(op, m, n, k if batch_count else 0, alpha, a, b, c if batch_count else BASE)
        alpha, beta = arguments.real_scalars(op, alpha, beta, dtype)
        if m and n and batch_count:
            arguments.separate(op, stride_c, ldc, batch_count)
            first = (transpose_a, transpose_b, m, n, k, alpha, a, lda, stride_a)
            work = partial(blas.batched_gemm, *first, b, ldb, stride_b, beta, c, ldc, stride_c, batch_count, dtype.numpy)
            self._submit(work, costs.matmul(m, n, k, dtype.numpy, batch_count))

    def conv2d_forward(
        self,
        input: int,
        input_shape: Sequence[int],
        filter: int,
        filter_shape: Sequence[int],
        output: int,
        output_shape: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        *,
        dtype: DType = DType.FLOAT32,
    ) -> None:
        """Enqueue a 2-d cross-correlation of NCHW arrays."""
        op = "conv2d_forward"
        self._require(op, dtype)
        arguments.convolution(op, input_shape, filter_shape, output_shape, stride, padding)
        if 0 in output_shape:
            return
        arguments.pointers(op, output=output)
        if 0 not in input_shape:
            arguments.pointers(op, input=input, filter=filter)
        images, filters, rows, columns = output_shape
        shapes = (input, input_shape), (filter, filter_shape), (output, output_shape)
        x, w, out = (np.empty(shape, dtype.numpy) if 0 in shape else array(address, tuple(shape), dtype.numpy) for address, shape in shapes)
        borders = tuple([(border, border) for border in padding])
        work = partial(convolution.convolution, x, w, out, tuple(stride), borders, (1, 1))
        self._submit(work, costs.convolution(images * rows * columns, filters, math.prod(filter_shape[1:]), dtype.numpy))

    def attention(
        self,
        q: int,
        k: int,
        v: int,
        o: int,
        batch: int,
        heads: int,
        seq_q: int,
        seq_kv: int,
        head_dim: int,
        scale: float,
        causal: Causal,
        *,
        dtype: DType = DType.FLOAT32,
    ) -> None:
        """Enqueue ``O = softmax(scale * Q K^T) V``."""
        self._require("attention", dtype)
        arguments.not_negative("attention", batch=batch, heads=heads, seq_q=seq_q, seq_kv=seq_kv, head_dim=head_dim)
        if causal not in _CAUSAL:
            raise InvalidArgumentError(f"causal is {causal!r}", op="attention", remedy="Use False, True or 'bottom_right'.")
        if not (batch and heads and seq_q and head_dim):
            return
        arguments.pointers("attention", o=o)
        if seq_kv:
            arguments.pointers("attention", q=q, k=k, v=v)
        # How many keys query 0 sees, before those that do not exist are taken off; each further query sees one more.
        first = seq_kv if causal is False else 1 if causal is True else 1 + seq_kv - seq_q
        groups, kind = batch * heads, dtype.numpy
        result = array(o, (groups, 1, seq_q, head_dim), kind)
        queries = array(q, result.shape, kind) if seq_kv else result
        keys, values = (
            array(each, (groups, seq_kv, head_dim), kind) if seq_kv else np.empty((groups, 0, head_dim), kind) for each in (k, v)
        )
        work = partial(attention.attention, queries, keys, values, result, float(scale), first)
        self._submit(work, costs.attention(batch * heads * seq_q * seq_kv, head_dim, dtype.numpy))

    def reduce(self, op: ReduceOp, input: int, output: int, shape: Sequence[int], axis: int, *, dtype: DType = DType.FLOAT32) -> None:
        """Enqueue a reduction along one axis of a C-contiguous array."""
        call = _REDUCE_CALLS[op]
        self._require(call, dtype)
        outer, length, inner = arguments.reduced_shape(call, shape, axis, empty=op not in EXTREMES)
        if outer and inner:
            arguments.pointers(call, output=output)
            if length:
                arguments.pointers(call, input=input)
            work = partial(reductions.reduce, op, input, output, outer, length, inner, dtype.numpy)
            self._submit(work, costs.elements(outer * length * inner, dtype.numpy))

    def unary(self, op: UnaryOp, input: int, output: int, n: int, *, dtype: DType = DType.FLOAT32) -> None:
        """Enqueue a function of each of n elements."""
        call = _UNARY_CALLS[op]
        self._require(call, dtype)
        if n <= 0 or input < BASE or output < BASE:
            arguments.not_negative(call, n=n)
            if n == 0:
                return
            arguments.pointers(call, input=input, output=output)
        self._submit(partial(elementwise.unary, op, input, output, n, dtype.numpy), costs.unary(op, n, dtype.numpy))

    def binary(self, op: BinaryOp, a: int, b: int, output: int, n: int, *, dtype: DType = DType.FLOAT32) -> None:
        """Enqueue a function of each of n pairs of elements."""
        call = _BINARY_CALLS[op]
        self._require(call, dtype)
        if n <= 0 or a < BASE or b < BASE or output < BASE:
            arguments.not_negative(call, n=n)
            if n == 0:
                return
            arguments.pointers(call, a=a, b=b, output=output)
        self._submit(partial(elementwise.binary, op, a, b, output, n, dtype.numpy), costs.elements(3 * n, dtype.numpy))

    @staticmethod
    def _check_sizes(op: str, m: int, n: int, k: int, alpha: complex, a: int, b: int, c: int) -> None:
        arguments.not_negative(op, m=m, n=n, k=k)
        if m and n:
            arguments.pointers(op, c=c)
            if k and alpha:
                arguments.pointers(op, a=a, b=b)
