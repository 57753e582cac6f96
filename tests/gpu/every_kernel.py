"""Calls of the CUDA compute interface that launch every kernel there is, on memory of exactly the size they need: for memcheck, which sees what goes beyond."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from accel import AccelRef, BinaryOp, DType, KernelOp, ReduceOp, Transpose, UnaryOp
from accel.compute import result_dtype
from accel.cpu.parts import PARTS as CPU_PARTS
from accel.ops import Arange, ArraysOps, Binary, Cast, Clip, Where
from accel.ops.namespace import Submitter
from accel_cuda import CudaBackend
from accel_cuda.families.kernels import CODES
from accel_cuda.families.parts import PARTS
from accel_cuda.families.reduce import BASIC, enqueue_fold

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["every_kernel"]

ODD = 1001
# Few and many rows, short and long axes, narrow and wide columns, aligned and not: every way in which reductions are cut.
SHAPES: tuple[tuple[tuple[int, int, int], int], ...] = (
    ((5, 7, 1), 0),
    ((300, 3, 1), 1),
    ((3, 5001, 1), 0),
    ((1, (1 << 20) + 1, 1), 0),
    ((3, 100, 5), 0),
    ((3, 100, 48), 0),
    ((2, 1 << 17, 3), 0),
    ((2, 1 << 15, 48), 0),
    ((9001, 3, 33), 1),
    ((1 << 15, 2, 160), 0),
    ((33, 257, 1), 1),
    ((40, 64, 1), 0),
    ((2, 40, 1027), 1),
    ((4, 3, 4096), 0),
    ((1, 3, 70_001), 1),
    ((3, 70, 4096), 0),
)


class Memory:
    """Device memory of exact sizes.

    Parameters
    ----------
    context
        Where it is taken.
    """

    def __init__(self, context: Any) -> None:
        self._context = context

    @contextlib.contextmanager
    def take(self, *sizes: int) -> Iterator[list[int]]:
        """Give addresses of pieces of so many bytes, filled with ones."""
        driver = self._context.driver
        with self._context.section:
            pointers = [int(driver.call("cuMemAlloc", max(1, size))) for size in sizes]
            for pointer, size in zip(pointers, sizes, strict=True):
                driver.call("cuMemsetD8", pointer, 1, max(1, size))
            driver.call("cuCtxSynchronize")
            yield pointers
            driver.call("cuCtxSynchronize")
            for pointer in pointers:
                driver.call("cuMemFree", pointer)

    def write(self, pointer: int, array: np.ndarray[Any, Any]) -> None:
        """Copy an array to memory that is taken."""
        if array.size:
            self._context.driver.call("cuMemcpyHtoD", pointer, array.ctypes.data, array.nbytes)


def every_kernel() -> None:
    """Launch every kernel of the backend's own."""
    context = CudaBackend().open(0)
    stream = context.create_stream()
    compute: Any = context.create_compute(stream, "batch")
    memory = Memory(context)
    supported = compute.capabilities()
    for family in (_elementwise, _reductions, _vectors, _dnn, _fills):
        family(compute, memory, supported)
    _attend(context, compute, memory, supported)
    _broadcast(stream, compute, memory, supported)
    _folds(stream, compute, memory, supported)
    _arrays(stream, compute, memory)
    with memory.take(4096) as (pointer,):
        stream.fill(pointer, bytes(range(8)), 512)
        stream.fill(pointer, bytes(range(16)), 256)
        stream.launch(context.functions["empty"], 1, 1)
    stream.close()
    context.close()


def _elementwise(compute: Any, memory: Memory, supported: Any) -> None:
    for unary in UnaryOp:
        for dtype in supported[f"unary.{unary.value}"]:
            with memory.take(ODD * dtype.itemsize, ODD * dtype.itemsize) as (x, y):
                compute.unary(unary, x, y, ODD, dtype=dtype)
    for binary in BinaryOp:
        for dtype in supported[f"binary.{binary.value}"]:
            with memory.take(*[ODD * dtype.itemsize] * 3) as (x, y, z):
                compute.binary(binary, x, y, z, ODD, dtype=dtype)


def _broadcast(stream: Any, compute: Any, memory: Memory, supported: Any) -> None:
    """Operands that are repeated, of which the second begins at any element."""
    owner: Any = SimpleNamespace(dropped=deque())
    lane = SimpleNamespace(stream=stream, compute=compute)
    for shapes in (((ODD,), (1,)), ((7, 32), (32,)), ((5, 33), (5, 1))):
        shape = np.broadcast_shapes(*shapes)
        for dtype in supported["where"]:
            condition, x, y = (
                AccelRef(owner, 1, each, kind, 1) for each, kind in ((shape, DType.BOOL), (shapes[0], dtype), (shapes[1], dtype))
            )
            calls: list[KernelOp] = [
                Where(condition, x, y),
                *(Cast(x, to) for to in CODES if dtype.is_complex <= (to.is_complex or to is DType.BOOL)),
            ]
            calls += [Binary(op, x, y) for op in BinaryOp if dtype in supported[f"binary.{op.value}"]]
            calls += [Clip(x, y)] if dtype in supported["clip"] else []
            for op in calls:
                plan = op.plan()
                skipped = [ref.dtype.itemsize * (number == 1) for number, ref in enumerate(plan.reads)]
                sizes = [ref.nbytes + skip for ref, skip in zip(plan.reads, skipped, strict=True)]
                with memory.take(*sizes, plan.creates[0].nbytes) as (*reads, output):
                    inputs = [address + skip for address, skip in zip(reads, skipped, strict=True)]
                    PARTS["elementwise"].kernels[op.kind](lane, op, inputs, (output,))


def _reductions(compute: Any, memory: Memory, supported: Any) -> None:
    for op in ReduceOp:
        for dtype in supported[f"reduce.{op.value}"]:
            for (outer, length, inner), offset in SHAPES:
                results, skipped = outer * inner, offset * dtype.itemsize
                with memory.take(results * length * dtype.itemsize + skipped, results * result_dtype(op, dtype).itemsize) as (x, y):
                    compute.reduce(op, x + skipped, y, (outer, length, inner), 1, dtype=dtype)


def _folds(stream: Any, compute: Any, memory: Memory, supported: Any) -> None:
    """Axes that are no neighbours: many results, and few results of many elements, which are cut."""
    workspace = compute.prepare_workspace()
    for op in BASIC:
        for dtype in supported[f"reduce.{op.value}"]:
            for lengths in ((5, 301, 7), (900, 2, 1100)):
                size = math.prod(lengths)
                with memory.take(size * dtype.itemsize, lengths[1] * dtype.itemsize) as (x, y):
                    runs = (1, False), (lengths[0], True), (lengths[1], False), (lengths[2], True)
                    enqueue_fold(stream, workspace, op, x, y, runs, dtype)


def _arrays(stream: Any, compute: Any, memory: Memory) -> None:
    """All ops of the family by its samples, and ranges of all integers."""
    owner: Any = SimpleNamespace(dropped=deque())
    lane = SimpleNamespace(stream=stream, compute=compute)
    named: Any = ArraysOps(Submitter(lambda op: op, lambda error: error, "device"))
    calls: list[tuple[Any, tuple[Any, ...]]] = [(Arange(9, dtype=dtype), ()) for dtype in CODES if dtype.is_integer]
    for sample in CPU_PARTS["arrays"].samples(np.random.default_rng(1)):
        arrays = tuple(np.array(each, order="C") for each in sample.operands)
        refs = [AccelRef(owner, number, each.shape, DType.of(each.dtype), 1) for number, each in enumerate(arrays)]
        calls.append((sample.call(named, *refs), arrays))
    for op, arrays in calls:
        plan = op.plan()
        with memory.take(*(each.nbytes for each in arrays), *(spec.nbytes for spec in plan.creates), 16) as pointers:
            for pointer, array in zip(pointers, arrays, strict=False):
                memory.write(pointer, array)
            inputs = [pointers[ref.buffer] for ref in plan.reads]
            outputs = [pointers[ref.buffer] for ref in plan.writes] + pointers[len(arrays) :]
            PARTS["arrays"].kernels[op.kind](lane, op, inputs, outputs)


def _vectors(compute: Any, memory: Memory, supported: Any) -> None:
    for dtype in supported["gemm"]:
        for n, skipped in ((ODD, 0), (ODD, 1), (70_001, 1)):
            size, offset = (n + skipped) * dtype.itemsize, skipped * dtype.itemsize
            with memory.take(size, size, dtype.itemsize) as (x, y, out):
                compute.axpy(n, 0.5, x + offset, y + offset, dtype)
                compute.axpy(n, 0.5, x + offset, y, dtype)
                compute.scal(n, 0.5, x + offset, dtype)
                compute.dot(n, x + offset, y, out, dtype)
                if not dtype.is_complex:
                    compute.nrm2(n, x + offset, out, dtype)


def _dnn(compute: Any, memory: Memory, supported: Any) -> None:
    for dtype in supported["conv2d_forward"]:
        _convolve(compute, memory, dtype, (2, 3, 17, 13), (5, 3, 3, 2), (2, 5, 9, 14), (2, 1), (1, 1))
        _convolve(compute, memory, dtype, (2, 16, 9, 9), (72, 16, 3, 3), (2, 72, 9, 9), (1, 1), (1, 1))
        _convolve(compute, memory, dtype, (1, 123, 4, 4), (70, 123, 3, 3), (1, 70, 2, 2), (1, 1), (0, 0))
        _convolve(compute, memory, dtype, (2, 16, 5, 5), (9, 16, 1, 1), (2, 9, 5, 5), (1, 1), (0, 0))


def _attend(context: Any, compute: Any, memory: Memory, supported: Any) -> None:
    """Attention by the kernels of this and of lesser devices: of few and many queries, few and many keys, and heads of every width."""
    own = context.capability
    for capability in (own, min(own, (8, 0)), min(own, (7, 5))):
        context.capability = capability
        for dtype in supported["attention"]:
            for (queries, keys), dim in itertools.product(((1, 1500), (37, 41), (37, 1500)), (24, 64, 33, 128, 250)):
                sizes = [6 * rows * dim * dtype.itemsize for rows in (queries, keys, keys, queries)]
                for causal in (False, True, "bottom_right"):
                    with memory.take(*sizes) as (q, k, v, o):
                        compute.attention(q, k, v, o, 2, 3, queries, keys, dim, 0.2, causal, dtype=dtype)
    context.capability = own


def _convolve(
    compute: Any, memory: Memory, dtype: DType, x: Sequence[int], f: Sequence[int], y: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> None:  # fmt: skip
    with memory.take(*(math.prod(shape) * dtype.itemsize for shape in (x, f, y))) as (a, b, c):
        compute.conv2d_forward(a, x, b, f, c, y, stride, padding, dtype=dtype)


def _fills(compute: Any, memory: Memory, supported: Any) -> None:
    """Scale matrices, which is what a product without terms is."""
    none, m, n, ld = Transpose.NONE, 33, 17, 40
    for dtype in supported["gemm"]:
        with memory.take(((n - 1) * ld + m) * dtype.itemsize) as (c,):
            compute.gemm(none, none, m, n, 0, 1.0, 0, m, 0, 1, 2.0, c, ld, dtype=dtype)
