"""The CUDA compute interface: checks the arguments of a call, and enqueues cuBLAS or one of the backend's own kernels."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

from accel import BinaryOp, DType, InvalidArgumentError, ReduceOp, Transpose, UnaryOp, UnsupportedError, arguments
from accel.arguments import BASE
from accel.enums import EXTREMES, result_dtype
from accel_cuda.core.compute_memory import WORKSPACE, CudaMemory
from accel_cuda.families.attention import AttentionWork
from accel_cuda.families.convolution import ConvolutionWork
from accel_cuda.families.cublas import Blas
from accel_cuda.families.kernels import CODES, bits
from accel_cuda.families.parts import parts_of
from accel_cuda.families.reduce import BASIC, enqueue_fold, launches

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from accel.enums import Causal
    from accel_cuda.core.driver import Handle
    from accel_cuda.core.stream import CudaStream
    from accel_cuda.families.dnn import DnnLibrary

__all__ = ["CudaCompute"]

_NONE, _TURNED = Transpose.NONE, Transpose.TRANSPOSE
# The lanes of these libraries stage copies; in other lanes, the pinned memory for it is made at its first use.
_STAGES = frozenset({"memory", "batch", "capture"})
_BLOCK = 256
_LIMIT = 2**31 - 1
# Elements that one thread of the elementwise kernels takes.
_PER_THREAD = {dtype: max(1, 16 // dtype.itemsize) for dtype in CODES}


def _blocks(op: UnaryOp | BinaryOp, dtype: DType, output: int, n: int) -> int:
    """Return how many blocks compute n elements: threads are counted from the aligned address before the first result."""
    size, each = result_dtype(op, dtype).itemsize, _PER_THREAD[dtype]
    return -(-(n + output % (each * size) // size) // (each * _BLOCK))


class CudaCompute(CudaMemory):
    """:class:`accel.ComputeBackend` on a GPU, one instance a stream. Made by ``CudaDevice.create_compute``.

    Parameters
    ----------
    stream, library
        See :class:`~accel_cuda.core.compute_memory.CudaMemory`.
    dnn
        Convolutions and attention in the stream's context.

    Attributes
    ----------
    has_blas : bool
        Whether cuBLAS's handle is made: making it may block.
    """

    def __init__(self, stream: CudaStream, library: str, dnn: DnnLibrary) -> None:
        super().__init__(stream, library)
        self._dnn = dnn
        self._blas: Blas | None = None
        self.has_blas = False

    def init(self) -> None:
        """Make the instance ready, with the pinned memory that its library needs. Called again it does nothing. May block."""
        if self._supported is not None:
            return
        if self._library in _STAGES:
            self.prepare_transfers()
        # Filled as they are used: to look one up may load its program.
        self._unary: dict[tuple[UnaryOp, DType], Handle] = {}
        self._binary: dict[tuple[BinaryOp, DType], Handle] = {}
        self._supported = self.capabilities()

    def prepare(self, library: str) -> None:
        """Make what a library needs in this stream, as far as it is not there. May block."""
        if library in _STAGES:
            self.prepare_transfers()
        for part in parts_of(library):
            if part.prepare is not None:
                part.prepare(self)

    def workspace_wanted(self, library: str) -> int:
        """Return the bytes of the next workspace that a library needs here; see :class:`accel.backend.TakesWorkspace`."""
        wanted = max((part.workspaces for part in parts_of(library)), default=0)
        return WORKSPACE if len(self._workspaces) < wanted else 0

    def prepare_blas(self) -> Blas:
        """Make the cuBLAS handle and its workspace, if they are not there. May block."""
        if self._blas is None:
            workspace = self.prepare_workspace()
            with self._context.section:
                self._blas = Blas(self._stream, workspace, WORKSPACE)
            self.has_blas = True
        return self._blas

    def use_workspace(self, address: int, nbytes: int) -> None:
        """Take a workspace; a cuBLAS handle that is there, and has given its workspace back, gets the first one."""
        super().use_workspace(address, nbytes)
        if self._blas is not None and len(self._workspaces) == 1:
            self._blas.use_workspace(address, nbytes)

    def unary(self, op: UnaryOp, input: int, output: int, n: int, *, dtype: DType = DType.FLOAT32) -> None:
        """Enqueue a function of each of n elements."""
        if self._supported is None:
            self._ready()
        function = self._unary.get((op, dtype))
        if function is None:
            self._require(f"unary.{op.value}", dtype)
            function = self._unary[op, dtype] = self._stream.functions[f"unary_{op.value}_{CODES[dtype]}"]
        if n <= 0 or input < BASE or output < BASE:
            arguments.not_negative(f"unary.{op.value}", n=n)
            if n == 0:
                return
            arguments.pointers(f"unary.{op.value}", input=input, output=output)
        self._stream.ready()
        self._stream.launch(function, _blocks(op, dtype, output, n), _BLOCK, input, output, n)

    def binary(self, op: BinaryOp, a: int, b: int, output: int, n: int, *, dtype: DType = DType.FLOAT32) -> None:
        """Enqueue a function of each of n pairs of elements."""
        if self._supported is None:
            self._ready()
        function = self._binary.get((op, dtype))
        if function is None:
            self._require(f"binary.{op.value}", dtype)
            function = self._binary[op, dtype] = self._stream.functions[f"binary_{op.value}_{CODES[dtype]}"]
        if n <= 0 or a < BASE or b < BASE or output < BASE:
            arguments.not_negative(f"binary.{op.value}", n=n)
            if n == 0:
                return
            arguments.pointers(f"binary.{op.value}", a=a, b=b, output=output)
        self._stream.ready()
        self._stream.launch(function, _blocks(op, dtype, output, n), _BLOCK, a, b, output, n)

    def reduce(self, op: ReduceOp, input: int, output: int, shape: Sequence[int], axis: int, *, dtype: DType = DType.FLOAT32) -> None:
        """Enqueue a reduction along one axis of a C-contiguous array."""
        call = f"reduce.{op.value}"
        self._require(call, dtype)
        outer, length, inner = arguments.reduced_shape(call, shape, axis, empty=op not in EXTREMES)
        if not (outer and inner):
            return
        arguments.pointers(call, output=output)
        if op not in BASIC:
            if length:
                arguments.pointers(call, input=input)
            runs = (outer, False, length * inner), (length, True, inner), (inner, False, 1)
            enqueue_fold(self._stream, self.prepare_workspace(), op, input, output, runs, dtype)
            return
        if not length:
            self._stream.fill(output, dtype.numpy.type(math.nan if op is ReduceOp.MEAN else 0).tobytes(), outer * inner)
            return
        arguments.pointers(call, input=input)
        self._stream.ready()
        name = f"{'sum' if op is ReduceOp.MEAN else op.value}_{CODES[dtype]}"
        divisor = length if op is ReduceOp.MEAN else 0
        plan = launches(outer, length, inner, dtype.itemsize, self._context.multiprocessors)
        # Also where it is not used: once it is there, this never blocks.
        workspace = self.prepare_workspace()
        for each in plan:
            source = workspace if each.kind == "finish" else input
            target = workspace if each.is_partial else output
            if each.grid[0] > _LIMIT:
                raise UnsupportedError(f"an array of shape {tuple(shape)} has too many rows", op=call, device=self._device)
            function = self._stream.functions[f"reduce_{each.kind}_{name}"]
            self._stream.launch_wide(function, each.grid, each.block, 0, source, target, *each.sizes, divisor)

    def gemm(
        self, transpose_a: Transpose, transpose_b: Transpose, m: int, n: int, k: int, alpha: complex, a: int, lda: int, b: int, ldb: int,
        beta: complex, c: int, ldc: int, *, dtype: DType = DType.FLOAT64,
    ) -> None:  # fmt: skip
        """Enqueue ``C = alpha * op(A) @ op(B) + beta * C`` on column-major matrices."""
        self._require("gemm", dtype)
        rows_a, rows_b = m if transpose_a is _NONE else k, k if transpose_b is _NONE else n
        if lda < rows_a or ldb < rows_b or ldc < m or lda < 1 or ldb < 1 or ldc < 1:
            arguments.leading_dimensions("gemm", lda=(lda, rows_a), ldb=(ldb, rows_b), ldc=(ldc, m))
        self._check_sizes("gemm", m, n, k, alpha, a, b, c)
        alpha, beta = arguments.real_scalars("gemm", alpha, beta, dtype)
        self.product(transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc, dtype)

    def product(
        self, transpose_a: Transpose, transpose_b: Transpose, m: int, n: int, k: int, alpha: complex, a: int, lda: int, b: int, ldb: int,
        beta: complex, c: int, ldc: int, dtype: DType, allow_tf32: bool = False,
    ) -> None:  # fmt: skip
        """Do what :meth:`gemm` does, with arguments that are known to be right. Float32 is rounded to TF32 only if that is allowed."""
        if not (m and n):
            return
        self._stream.ready()
        if k and alpha:
            blas = self._blas or self.prepare_blas()
            blas.gemm(transpose_a, transpose_b, m, n, k, alpha, a, lda or 1, b, ldb or 1, beta, c, ldc, dtype, allow_tf32)
        else:
            self._scale(c, m, n, ldc, 0, 1, beta, dtype)

    def batched_gemm(
        self, transpose_a: Transpose, transpose_b: Transpose, m: int, n: int, k: int, alpha: complex, a: int, lda: int, stride_a: int,
        b: int, ldb: int, stride_b: int, beta: complex, c: int, ldc: int, stride_c: int, batch_count: int, *, dtype: DType = DType.FLOAT32,
    ) -> None:  # fmt: skip
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
        self.products(
            transpose_a, transpose_b, m, n, k, alpha, a, lda, stride_a, b, ldb, stride_b, beta, c, ldc, stride_c, batch_count, dtype
        )  # fmt: skip

    def products(
        self, transpose_a: Transpose, transpose_b: Transpose, m: int, n: int, k: int, alpha: complex, a: int, lda: int, stride_a: int,
        b: int, ldb: int, stride_b: int, beta: complex, c: int, ldc: int, stride_c: int, count: int, dtype: DType, allow_tf32: bool = False,
    ) -> None:  # fmt: skip
        """Do what :meth:`batched_gemm` does, with arguments that are known to be right."""
        if not (m and n and count):
            return
        self._stream.ready()
        if k and alpha:
            blas = self._blas or self.prepare_blas()
            blas.batched_gemm(
                transpose_a, transpose_b, m, n, k, alpha, a, lda or 1, stride_a, b, ldb or 1, stride_b, beta, c, ldc, stride_c, count, dtype,
                allow_tf32,
            )  # fmt: skip
        else:
            self._scale(c, m, n, ldc, stride_c, count, beta, dtype)

    def _scale(self, c: int, m: int, n: int, ldc: int, stride: int, count: int, beta: complex, dtype: DType) -> None:
        if beta != 1:
            function = self._stream.functions[f"scale_{CODES[dtype]}"]
            factor = complex(beta)
            blocks = -(-m * n * count // _BLOCK)
            self._stream.launch(function, blocks, _BLOCK, c, m, n, ldc, stride, count, bits(factor.real), bits(factor.imag))

    def conv2d_forward(
        self, input: int, input_shape: Sequence[int], filter: int, filter_shape: Sequence[int], output: int, output_shape: Sequence[int],
        stride: Sequence[int], padding: Sequence[int], *, dtype: DType = DType.FLOAT32,
    ) -> None:  # fmt: skip
        """Enqueue a 2-d cross-correlation of NCHW arrays. May block where the shapes are new."""
        op = "conv2d_forward"
        self._require(op, dtype)
        arguments.convolution(op, input_shape, filter_shape, output_shape, stride, padding)
        if 0 in output_shape:
            return
        arguments.pointers(op, output=output)
        if 0 not in input_shape:
            arguments.pointers(op, input=input, filter=filter)
        x, w, y = tuple(input_shape), tuple(filter_shape), tuple(output_shape)
        work = ConvolutionWork(dtype, x, w, y, tuple(padding), tuple(padding), tuple(stride), (1, 1))
        with self._lent(work, (input, filter, 0, output)) as room:
            self._dnn.convolve(self._stream, work, input, filter, 0, output, room)

    def attention(
        self, q: int, k: int, v: int, o: int, batch: int, heads: int, seq_q: int, seq_kv: int, head_dim: int, scale: float, causal: Causal, *,
        dtype: DType = DType.FLOAT32,
    ) -> None:  # fmt: skip
        """Enqueue ``O = softmax(scale * Q K^T) V``. May block where the sizes are new."""
        op = "attention"
        self._require(op, dtype)
        arguments.not_negative(op, batch=batch, heads=heads, seq_q=seq_q, seq_kv=seq_kv, head_dim=head_dim)
        if causal not in (False, True, "bottom_right"):
            raise InvalidArgumentError(f"causal is {causal!r}", op=op, remedy="Use False, True or 'bottom_right'.")
        if not (batch and heads and seq_q and head_dim):
            return
        arguments.pointers(op, o=o)
        if seq_kv:
            arguments.pointers(op, q=q, k=k, v=v)
        work = AttentionWork.dense(batch, heads, seq_q, seq_kv, head_dim, float(scale), causal, dtype)
        with self._lent(work, (q, k, v, o)) as room:
            self._dnn.attend(self._stream, work, {1: q, 2: k, 3: v, 4: o}, room)

    @contextlib.contextmanager
    def _lent(self, work: ConvolutionWork | AttentionWork, addresses: tuple[int, int, int, int]) -> Iterator[int]:
        """Have memory for a work of the ``dnn`` family. It is used again in the stream's order."""
        nbytes = self._dnn.nbytes(work, addresses)
        room = self.alloc(nbytes) if nbytes else 0
        try:
            yield room
        finally:
            self.free(room)

    @staticmethod
    def _check_sizes(op: str, m: int, n: int, k: int, alpha: complex, a: int, b: int, c: int) -> None:
        if m <= 0 or n <= 0 or k <= 0 or c < BASE or a < BASE or b < BASE:
            arguments.not_negative(op, m=m, n=n, k=k)
            if m and n:
                arguments.pointers(op, c=c)
                if k and alpha:
                    arguments.pointers(op, a=a, b=b)
