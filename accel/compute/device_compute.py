"""The compute interface of any device: each call is an op, run by the device's kernel."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from accel.backend import TakesScratch
from accel.compute import arguments
from accel.compute.interface import ComputeBackend
from accel.dtype import DType
from accel.enums import EXTREMES, BinaryOp, Causal, ReduceOp, Transpose, UnaryOp
from accel.errors import InvalidArgumentError, NotInitializedError, UnsupportedError
from accel.memory import Allocator
from accel.memory.space import ALIGNMENT, BASE
from accel.ops import Attention, Binary, Conv2d, Gemm, GemmBatched, Reduce, Unary
from accel.ref import AccelRef, view_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from accel.backend import AccelDevice, AccelStream
    from accel.memory import Block
    from accel.ops import KernelOp

__all__ = ["DeviceCompute"]

_NONE = Transpose.NONE


class _Lane(NamedTuple):
    """What kernels are given."""

    device: AccelDevice
    stream: AccelStream


class _Owner:
    """What the refs of the ops belong to: no device that runs, so nothing is freed with them."""

    durable = device = sharing = None
    identity = "compute"
    is_closing = False
    live_generation = 1
    dropped: ClassVar[deque[int]] = deque(maxlen=0)

    def __init__(self, name: str) -> None:
        self.name = name

    def check_process(self) -> None:
        """Do nothing: there is no process to be wrong in."""

    def register_token(self, ref: AccelRef) -> None:
        """Do nothing: these refs are not sent."""


class DeviceCompute(ComputeBackend):
    """:class:`ComputeBackend` on a device of any backend, one instance a stream.

    Not for threads: one at a time calls it. A call may block where a kernel may, at its first use.

    Parameters
    ----------
    device
        An open context, such as ``CpuBackend().open(0)``.
    stream
        Where the work goes: one of its streams.

    Attributes
    ----------
    stream
        The stream.
    """

    def __init__(self, device: AccelDevice, stream: AccelStream) -> None:
        name = device.description.spec
        self._device, self.stream, self._lane = device, stream, _Lane(device, stream)
        self._spec = name
        self._owner: Any = _Owner(name)
        self._memory = Allocator(device.create_slab, device=name, granularity=device.granularity)
        self._blocks: dict[int, Block] = {}
        self._refs = 0
        self._is_initialized = False

    def capabilities(self) -> Mapping[str, frozenset[DType]]:
        """Return the device's."""
        return self._device.capabilities

    @property
    def name(self) -> str:
        """The backend's name."""
        return self._device.description.backend

    def init(self) -> None:
        """Make the instance ready."""
        self._is_initialized = True

    @property
    def is_initialized(self) -> bool:
        """Whether :meth:`init` has been called."""
        return self._is_initialized

    def close(self) -> None:
        """Give all memory back. Called once the stream has ended. Idempotent."""
        self._blocks.clear()
        for slab in self._memory.take_all():
            slab.close()

    # -- memory

    def synchronize(self) -> None:
        self._ready()
        self.stream.synchronize()

    def alloc(self, nbytes: int) -> int:
        """Allocate device memory; what was freed is used again, in the stream's order."""
        self._ready()
        arguments.not_negative("alloc", nbytes=nbytes)
        block = self._memory.allocate_blocking(nbytes)
        self._blocks[block.address] = block
        return block.address

    def free(self, pointer: int) -> None:
        self._ready()
        if pointer:
            block = self._blocks.pop(pointer, None)
            if block is None:
                raise InvalidArgumentError(f"{pointer:#x} is not allocated", device=self._spec, op="free")
            self._memory.free(block)

    def copy_htod(self, destination: int, source: memoryview) -> None:
        self._ready()
        arguments.host_bytes("copy_htod", source)
        if source.nbytes:
            arguments.pointers("copy_htod", destination=destination)
            self.stream.copy_htod(destination, source)

    def copy_dtoh(self, destination: memoryview, source: int) -> None:
        self._ready()
        arguments.host_bytes("copy_dtoh", destination, is_written=True)
        if destination.nbytes:
            arguments.pointers("copy_dtoh", source=source)
            self.stream.copy_dtoh(destination, source)

    # -- calls

    def gemm(
        self, transpose_a: Transpose, transpose_b: Transpose, m: int, n: int, k: int, alpha: complex, a: int, lda: int, b: int, ldb: int,
        beta: complex, c: int, ldc: int, *, dtype: DType = DType.FLOAT64,
    ) -> None:  # fmt: skip
        alpha, beta = self._check_product("gemm", transpose_a, transpose_b, m, n, k, alpha, (a, lda), (b, ldb), beta, (c, ldc), dtype)
        if m and n:
            # A column-major matrix is the transpose of a C-order one, and C^T = op(B)^T op(A)^T.
            left, right = self._columns(b, ldb, transpose_b, k, n, dtype), self._columns(a, lda, transpose_a, m, k, dtype)
            out = self._ref(c, (n, m), dtype, (ldc, 1))
            op = Gemm(left, right, out=out, alpha=alpha, beta=beta, transpose_a=transpose_b, transpose_b=transpose_a)
            self._run(op, (b, a), c)

    def batched_gemm(
        self, transpose_a: Transpose, transpose_b: Transpose, m: int, n: int, k: int, alpha: complex, a: int, lda: int, stride_a: int,
        b: int, ldb: int, stride_b: int, beta: complex, c: int, ldc: int, stride_c: int, batch_count: int, *, dtype: DType = DType.FLOAT32,
    ) -> None:  # fmt: skip
        call = "batched_gemm"
        arguments.not_negative(call, stride_a=stride_a, stride_b=stride_b, stride_c=stride_c, batch_count=batch_count)
        at = (a, lda), (b, ldb), beta, (c if batch_count else BASE, ldc)
        alpha, beta = self._check_product(call, transpose_a, transpose_b, m, n, k if batch_count else 0, alpha, *at, dtype)
        if not (m and n and batch_count):
            return
        arguments.separate(call, stride_c, ldc, batch_count)
        left = self._columns(b, ldb, transpose_b, k, n, dtype, batch_count, stride_b)
        right = self._columns(a, lda, transpose_a, m, k, dtype, batch_count, stride_a)
        out = self._ref(c, (batch_count, n, m), dtype, (stride_c, ldc, 1))
        op = GemmBatched(left, right, out=out, alpha=alpha, beta=beta, transpose_a=transpose_b, transpose_b=transpose_a)
        if (stride_a or stride_b) and all(not ref.is_strided or op.takes_strided(ref) for ref in (left, right, out)):
            self._run(op, (b, a), c)
        else:
            first = transpose_a, transpose_b, m, n, k, alpha, a, lda, stride_a
            super().batched_gemm(*first, b, ldb, stride_b, beta, c, ldc, stride_c, batch_count, dtype=dtype)

    def conv2d_forward(
        self, input: int, input_shape: Sequence[int], filter: int, filter_shape: Sequence[int], output: int, output_shape: Sequence[int],
        stride: Sequence[int], padding: Sequence[int], *, dtype: DType = DType.FLOAT32,
    ) -> None:  # fmt: skip
        call = "conv2d_forward"
        self._require(call, dtype)
        arguments.convolution(call, input_shape, filter_shape, output_shape, stride, padding)
        if 0 in output_shape:
            return
        arguments.pointers(call, output=output)
        if 0 in input_shape:  # no channels
            self._clear(output, math.prod(output_shape), dtype)
            return
        arguments.pointers(call, input=input, filter=filter)
        x, w, y = ((address, tuple(shape)) for address, shape in ((input, input_shape), (filter, filter_shape), (output, output_shape)))
        op = Conv2d(self._ref(*x, dtype), self._ref(*w, dtype), stride=tuple(stride), padding=tuple(padding), out=self._ref(*y, dtype))
        self._run(op, (input, filter), output)

    def attention(
        self, q: int, k: int, v: int, o: int, batch: int, heads: int, seq_q: int, seq_kv: int, head_dim: int, scale: float, causal: Causal, *,
        dtype: DType = DType.FLOAT32,
    ) -> None:  # fmt: skip
        self._require("attention", dtype)
        arguments.not_negative("attention", batch=batch, heads=heads, seq_q=seq_q, seq_kv=seq_kv, head_dim=head_dim)
        queries, keys = (batch, heads, seq_q, head_dim), (batch, heads, seq_kv, head_dim)
        out = self._ref(o, queries, dtype)
        op = Attention(
            self._ref(q, queries, dtype), self._ref(k, keys, dtype), self._ref(v, keys, dtype), scale=scale, causal=causal, out=out
        )
        op.plan()  # which says what is wrong with ``causal``
        if 0 in queries:
            return
        arguments.pointers("attention", o=o)
        if not seq_kv:
            self._clear(o, math.prod(queries), dtype)
            return
        arguments.pointers("attention", q=q, k=k, v=v)
        self._run(op, (q, k, v), o)

    def reduce(self, op: ReduceOp, input: int, output: int, shape: Sequence[int], axis: int, *, dtype: DType = DType.FLOAT32) -> None:
        call = f"reduce.{op.value}"
        self._require(call, dtype)
        outer, length, inner = arguments.reduced_shape(call, shape, axis, empty=op not in EXTREMES)
        if outer and inner:
            arguments.pointers(call, output=output)
            if length:
                arguments.pointers(call, input=input)
            self._run(Reduce(op, self._ref(input, (outer, length, inner), dtype), axis=1), (input,), output)

    def unary(self, op: UnaryOp, input: int, output: int, n: int, *, dtype: DType = DType.FLOAT32) -> None:
        if self._is_to_be_run(f"unary.{op.value}", dtype, n, input=input, output=output):
            self._run(Unary(op, self._ref(input, (n,), dtype)), (input,), output)

    def binary(self, op: BinaryOp, a: int, b: int, output: int, n: int, *, dtype: DType = DType.FLOAT32) -> None:
        if self._is_to_be_run(f"binary.{op.value}", dtype, n, a=a, b=b, output=output):
            self._run(Binary(op, self._ref(a, (n,), dtype), self._ref(b, (n,), dtype)), (a, b), output)

    # -- what calls have in common

    def _ready(self) -> None:
        if not self._is_initialized:
            raise NotInitializedError("the compute interface is not initialized", device=self._spec, remedy="Call init() first.")

    def _require(self, call: str, dtype: DType) -> None:
        """Refuse a call with elements that it is not offered for."""
        self._ready()
        if dtype not in self.capabilities().get(call, ()):
            raise UnsupportedError(f"{call} is not offered for {getattr(dtype, 'value', dtype)!s}", device=self._spec, op=call)

    def _is_to_be_run(self, call: str, dtype: DType, n: int, **addresses: int) -> bool:
        """Check the arguments of an elementwise call; return whether there are elements."""
        self._require(call, dtype)
        arguments.not_negative(call, n=n)
        if n:
            arguments.pointers(call, **addresses)
        return bool(n)

    def _check_product(
        self, call: str, transpose_a: Transpose, transpose_b: Transpose, m: int, n: int, k: int, alpha: complex,
        a: tuple[int, int], b: tuple[int, int], beta: complex, c: tuple[int, int], dtype: DType,
    ) -> tuple[complex, complex]:  # fmt: skip
        """Check a product, whose matrices are (address, leading dimension); return its factors."""
        self._require(call, dtype)
        arguments.not_negative(call, m=m, n=n, k=k)
        rows_a, rows_b = m if transpose_a is _NONE else k, k if transpose_b is _NONE else n
        arguments.leading_dimensions(call, lda=(a[1], rows_a), ldb=(b[1], rows_b), ldc=(c[1], m))
        if m and n:
            arguments.pointers(call, c=c[0])
            if k and alpha:
                arguments.pointers(call, a=a[0], b=b[0])
        return arguments.real_scalars(call, alpha, beta, dtype)

    def _ref(self, address: int, shape: tuple[int, ...], dtype: DType, strides: tuple[int, ...] | None = None) -> AccelRef:
        """Return a ref that describes an array; its offset says how it is aligned."""
        self._refs += 1
        ref = AccelRef(self._owner, self._refs, shape, dtype, 1)
        ref.offset = address % ALIGNMENT
        return ref if strides is None else view_of(ref, ref.offset, shape, dtype, strides)

    def _columns(
        self, address: int, ld: int, transpose: Transpose, rows: int, columns: int, dtype: DType, count: int = 1, stride: int = 0
    ) -> AccelRef:
        """Return the transposes of column-major matrices, of which ``op`` makes rows x columns."""
        stored = (columns, rows) if transpose is _NONE else (rows, columns)
        if stride:
            return self._ref(address, (count, *stored), dtype, (stride, ld, 1))
        return self._ref(address, stored, dtype, (ld, 1))

    def _clear(self, address: int, count: int, dtype: DType) -> None:
        self.stream.fill(address, b"\0", count * dtype.itemsize)

    def _run(self, op: KernelOp[Any], inputs: Sequence[int], output: int) -> None:
        """Have an op's kernel enqueue it, with scratch memory if it takes any."""
        device, outputs = self._device, [output]
        kernel = device.kernels(op.library).get(op.kind)
        if kernel is None:
            raise UnsupportedError(f"{self.name} has no kernel for {op.kind}", device=self._spec, op=op.kind)
        scratch = 0
        if isinstance(device, TakesScratch) and (size := device.scratch.get((op.library, op.kind))) is not None:
            while (nbytes := size(op)) is None:
                device.measure_scratch(op)
            scratch = self.alloc(nbytes)
            outputs.append(scratch)
        try:
            kernel(self._lane, op, op.plan(), [address or BASE for address in inputs], outputs)
        finally:
            self.free(scratch)
