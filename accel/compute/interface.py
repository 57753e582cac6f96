"""The compute interface: fifteen calls on raw pointers, asynchronous in one stream.

The calls are those of oxicuda's ``ComputeBackend`` trait. What that trait leaves open is fixed here, and
checked by the conformance suite in :mod:`accel.testing`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from accel.compute import arguments
from accel.dtype import DType
from accel.enums import CAPABILITIES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from accel.enums import BinaryOp, Causal, ReduceOp, Transpose, UnaryOp

__all__ = ["ComputeBackend"]


class ComputeBackend(ABC):
    """Compute calls that go into one stream.

    Every computing method **enqueues and returns**; only :meth:`synchronize` blocks. Pointers are addresses of device memory; ranges that are
    written do not overlap ranges that are read, except where a method says so. A method raises before it has enqueued anything, or not at all;
    what fails later surfaces in the stream's events.

    ``dtype`` is the type of all elements of a call. Sums of float16 and bfloat16 are accumulated in float32 at least, and rounded once.
    NaN and infinity behave as in numpy: they propagate, also through ``max``, ``min`` and ``relu``.

    Raises
    ------
    UnsupportedError
        From any computing method whose (call, dtype) pair is not in :meth:`capabilities`.
    InvalidArgumentError
        If a size or stride is negative, a leading dimension too small, a pointer null where something is read or written, a scaling factor complex
        for real elements, or host memory not C-contiguous (for ``copy_dtoh``: or read-only).
    NotInitializedError
        If :meth:`init` was not called.
    """

    CAPABILITIES: ClassVar[Mapping[str, frozenset[DType]]] = CAPABILITIES
    """What a backend offers by default: call -> dtypes."""

    def capabilities(self) -> Mapping[str, frozenset[DType]]:
        """Return the dtypes of every call; ops outside it are rejected before any work. A backend may narrow or widen the default."""
        return self.CAPABILITIES

    @property
    @abstractmethod
    def name(self) -> str:
        """The backend's name, such as ``"cpu"``."""

    @abstractmethod
    def init(self) -> None:
        """Make the instance ready. Called again it does nothing. May block."""

    @property
    @abstractmethod
    def is_initialized(self) -> bool:
        """Whether :meth:`init` has been called and :meth:`synchronize` can be."""

    @abstractmethod
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
        """Enqueue ``C = alpha * op(A) @ op(B) + beta * C`` on **column-major** matrices, as BLAS defines it.

        Parameters
        ----------
        transpose_a, transpose_b
            ``op`` of A and of B.
        m, n, k
            ``op(A)`` is m x k, ``op(B)`` is k x n, C is m x n. Any may be 0; with ``k == 0`` C is scaled by ``beta``.
        alpha, beta
            Scaling factors. With ``beta == 0`` C is not read (NaN in it does not spread); with ``alpha == 0`` A and B are not read.
        a, b, c
            Addresses of the first elements.
        lda, ldb, ldc
            Elements between the starts of two columns; at least the number of rows of the matrix as it is stored (and at least 1).
        dtype
            Element type.
        """

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
        """Enqueue ``batch_count`` independent :meth:`gemm` calls whose matrices lie ``stride_*`` **elements** apart.

        A stride of 0 for A or B uses the same matrix for the whole batch; for C, results would overwrite
        each other. This makes one call after the other; a subclass may have one call for all.
        """
        strides = {"stride_a": stride_a, "stride_b": stride_b, "stride_c": stride_c}
        arguments.not_negative("batched_gemm", m=m, n=n, k=k, batch_count=batch_count, **strides)
        if m and n:
            arguments.separate("batched_gemm", stride_c, ldc, batch_count)
        step = dtype.itemsize
        for i in range(batch_count):
            at_a, at_b, at_c = a + i * stride_a * step, b + i * stride_b * step, c + i * stride_c * step
            self.gemm(transpose_a, transpose_b, m, n, k, alpha, at_a, lda, at_b, ldb, beta, at_c, ldc, dtype=dtype)

    @abstractmethod
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
        """Enqueue a 2-d cross-correlation (what neural networks call convolution), all arrays C-contiguous.

        Parameters
        ----------
        input, input_shape
            ``[N, C, H, W]``.
        filter, filter_shape
            ``[K, C, R, S]``; not flipped.
        output, output_shape
            ``[N, K, P, Q]`` with ``P = (H + 2 * padding[0] - R) // stride[0] + 1``, Q likewise.
        stride, padding
            ``[vertical, horizontal]``; padding is with zeros, on both sides.
        dtype
            Element type.
        """

    @abstractmethod
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
        """Enqueue ``O = softmax(scale * Q K^T) V``, the softmax over keys computed stably.

        Parameters
        ----------
        q, o
            C-contiguous ``[batch, heads, seq_q, head_dim]``.
        k, v
            C-contiguous ``[batch, heads, seq_kv, head_dim]``.
        scale
            Multiplies the scores; usually ``head_dim ** -0.5``.
        causal
            Which keys a query sees; see :data:`accel.enums.Causal`. A query that sees none gives zeros.
        dtype
            Element type.
        """

    @abstractmethod
    def reduce(self, op: ReduceOp, input: int, output: int, shape: Sequence[int], axis: int, *, dtype: DType = DType.FLOAT32) -> None:
        """Enqueue a reduction of a C-contiguous array along ``axis`` (0 <= axis < ndim); the output has the input's shape without it.

        :func:`accel.enums.result_dtype` has the type of its elements. Integer sums and products wrap
        around. VAR and STD divide by the number of elements. Over an empty axis SUM is 0, PROD 1,
        ANY false, ALL true, LOGSUMEXP -infinity, MEAN, VAR and STD NaN; others raise
        :class:`~accel.InvalidArgumentError`.
        """

    @abstractmethod
    def unary(self, op: UnaryOp, input: int, output: int, n: int, *, dtype: DType = DType.FLOAT32) -> None:
        """Enqueue ``output[i] = op(input[i])`` for n elements; ``output`` may be ``input`` if its elements are of the same type.

        :func:`accel.enums.result_dtype` has the type of its elements.
        """

    @abstractmethod
    def binary(self, op: BinaryOp, a: int, b: int, output: int, n: int, *, dtype: DType = DType.FLOAT32) -> None:
        """Enqueue ``output[i] = op(a[i], b[i])`` for n elements; ``output`` may be ``a`` or ``b`` if its elements are of the same type.

        :func:`accel.enums.result_dtype` has the type of its elements.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Block this thread until everything enqueued has ended, releasing the GIL; raises the context's fault."""

    @abstractmethod
    def alloc(self, nbytes: int) -> int:
        """Allocate device memory, aligned to at least 256 bytes, and return its address. May block.

        For callers that use this interface alone; devices cut their buffers from slabs instead.
        """

    @abstractmethod
    def free(self, pointer: int) -> None:
        """Give memory from :meth:`alloc` back once the work enqueued so far has ended. 0 is allowed and ignored.

        Raises
        ------
        InvalidArgumentError
            If the pointer is not from :meth:`alloc`, or was freed before.
        """

    @abstractmethod
    def copy_htod(self, destination: int, source: memoryview) -> None:
        """Enqueue a copy of host memory (C-contiguous bytes) to the device. The source is kept alive, and may be read until the copy has ended."""

    @abstractmethod
    def copy_dtoh(self, destination: memoryview, source: int) -> None:
        """Enqueue a copy of device memory into writable host memory (C-contiguous bytes), which is kept alive until the copy has ended."""
