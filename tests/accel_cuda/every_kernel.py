"""Calls of kernels that launch every kernel there is, on memory of exactly the size they need: for memcheck, which sees what goes beyond."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import deque
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from accel import AccelRef, BinaryOp, DType, KernelOp, ReduceOp, Transpose, UnaryOp
from accel.compute import DeviceCompute
from accel.cpu.parts import PARTS as CPU_PARTS
from accel.enums import result_dtype
from accel.ops import (
    Arange,
    ArraysOps,
    BatchNorm,
    Binary,
    Cast,
    Clip,
    Cummax,
    Cummin,
    Cumprod,
    Cumsum,
    DnnOps,
    LayerNorm,
    LogSoftmax,
    Matmul,
    RmsNorm,
    Softmax,
    Sort,
    Unary,
    Where,
)
from accel.ops.contraction import Term
from accel.ops.families import FAMILIES
from accel.ops.namespace import Submitter
from accel.sparse_ref import ELEMENTS
from accel.views import steps_of
from accel_cuda import CudaBackend
from accel_cuda.families import blas_matrices, loss, normalization, pooling, training
from accel_cuda.families.attention import AttentionWork, attend
from accel_cuda.families.attention_grad import attend_backward
from accel_cuda.families.cudnn import Room
from accel_cuda.families.kernels import CODES
from accel_cuda.families.parts import PARTS
from accel_cuda.families.reduce import BASIC, enqueue_fold
from accel_cuda.families.tensor import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from accel_cuda.families.tensor import Call

__all__ = ["every_contraction", "every_kernel", "every_order", "every_solver", "every_sparse"]

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
    """Launch every kernel of the backend's own but those of :func:`every_order`."""
    context = CudaBackend().open(0)
    stream = context.create_stream()
    compute = DeviceCompute(context, stream)
    compute.init()
    memory = Memory(context)
    supported = compute.capabilities()
    for family in (_elementwise, _reductions, _addresses, _dnn, _fills):
        family(compute, memory, supported)
    _attend(compute, memory, supported)
    _broadcast(stream, compute, memory, supported)
    _folds(stream, compute, memory, supported)
    _samples(stream, compute, memory, "arrays", ArraysOps, ())
    _samples(
        stream,
        compute,
        memory,
        "dnn",
        DnnOps,
        (*normalization.KERNELS, *pooling.KERNELS, *loss.KERNELS, *training.KERNELS, *training.WORKING),
    )
    _long_rows(stream, compute, memory)
    _integer_products(context, stream, memory)
    with memory.take(4096) as (pointer,):
        stream.fill(pointer, bytes(range(8)), 512)
        stream.fill(pointer, bytes(range(16)), 256)
        stream.launch(context.functions["empty"], 1, 1)
    stream.close()
    compute.close()
    context.close()


def every_order() -> None:
    """Launch every kernel of scans and sorts, which are many, and of elements in random order."""
    context = CudaBackend().open(0)
    stream = context.create_stream()
    compute = DeviceCompute(context, stream)
    compute.init()
    memory = Memory(context)
    for name in ("scan", "sort", "rng"):
        _ordered(context, stream, compute, memory, name)
    _many_and_long_lines(context, stream, compute, memory)
    stream.close()
    compute.close()
    context.close()


def every_solver() -> None:
    """Launch every kernel that prepares and finishes cuSOLVER's factorizations."""
    context = CudaBackend().open(0)
    stream = context.create_stream()
    _ordered(context, stream, None, Memory(context), "solver")
    stream.close()
    context.close()


def every_sparse() -> None:
    """Launch the kernels of sparse matrices, with indices of both widths: most samples have int32 only."""
    context = CudaBackend().open(0)
    stream, memory = context.create_stream(), Memory(context)
    widths: tuple[Any, ...] = np.dtype(np.int32), np.dtype(np.int64)
    for dtype, index in itertools.product(ELEMENTS, widths):
        name, kind = f"{CODES[dtype]}_{index.itemsize}", dtype.numpy
        for shape, block in (((300, 211), (1, 1)), ((3, 1), (2, 3)), ((67, 41), (3, 5))):
            _launch_sparse(stream, memory, name, (kind, index), shape, block)
    stream.close()
    context.close()


def every_contraction() -> None:
    """Make every call of cuTENSOR, where it is installed, for operands of even and odd lengths."""
    context = CudaBackend().open(0)
    stream, memory = context.create_stream(), Memory(context)
    library = context.families.states["tensor"]
    for dtype, n in itertools.product(library.capabilities.get("contract", ()), (8, 33)):
        plans, shape = library.loaded(), (n, n + 2, n + 1)
        x, y, z = (
            Term((0, 1, 2), shape, steps_of(shape)),
            Term((2, 1, 0), shape[::-1], steps_of(shape[::-1])),
            Term((2, 0), (n + 1, n), (n, 1)),
        )
        calls: dict[Call, tuple[Term, ...]] = {"contract": (x, y._replace(labels=(2, 1, 3)), z._replace(labels=(3, 0), lengths=(n, n))),
                                               "reduce": (x, z), "permute": (x, y), "multiply": (x, y, y)}  # fmt: skip
        for call, terms in calls.items():
            spec = TensorSpec(call, terms, (dtype,) * len(terms), (dtype.itemsize,) * len(terms), False, False, False)
            plans.measure(spec)
            sizes = [math.prod(term.lengths) * dtype.itemsize for term in terms]
            with memory.take(*sizes, plans.sizes[spec]) as pointers:
                plans.enqueue(stream, spec, pointers[:-1], pointers[-1])
    stream.close()
    context.close()


def _launch_sparse(stream: Any, memory: Memory, name: str, dtypes: tuple[Any, Any], shape: tuple[int, int], block: tuple[int, int]) -> None:
    """Launch the kernels for a matrix of blocks, given its rows and columns of blocks; some rows have none."""
    (kind, index), (rows, columns), (height, width) = dtypes, shape, block
    stored = np.random.default_rng(1).random(shape) < 0.2
    stored[rows // 2], stored[0, 0] = False, True
    major, minor = np.nonzero(stored)
    indices, indptr = minor.astype(index), np.searchsorted(major, np.arange(rows + 1)).astype(index)
    data, nnz, least = np.ones(major.size * height * width, kind), major.size * height * width, min(shape)
    matrix = data, indices, indptr
    _launch(stream, memory, f"sparse_blocks_csr_{name}", max(nnz, rows * height + 1), matrix,
            (data.nbytes, nnz * index.itemsize, (rows * height + 1) * index.itemsize), (rows, height, width, columns * width, nnz))  # fmt: skip
    _launch(stream, memory, f"sparse_blocks_dense_{name}", nnz, matrix, (rows * height * columns * width * data.itemsize,),
            (rows, height, width, columns * width, nnz))  # fmt: skip
    if block != (1, 1):
        return
    if name.startswith("f32"):
        for marks, is_coo in ((indptr, 0), (major.astype(index), 1)):
            for wrong in (indices, np.full_like(indices, np.iinfo(index).max)):
                _launch_check(stream, memory, (wrong, marks), (rows, columns, is_coo))
    _launch(stream, memory, f"sparse_extract_{name}", least, matrix, (least * data.itemsize,), (least,))
    _launch(stream, memory, f"sparse_extract_coo_{name}", nnz, (data, indices, major.astype(index)), (least * data.itemsize,), (nnz,))
    if not name.startswith(("f16", "bf16")):
        _launch(stream, memory, f"sparse_diagonal_{name}", rows, matrix, (4,), (rows,))
    x, warps = stored.astype(kind), -(-rows // 8)
    _launch(stream, memory, f"sparse_count_{name}", warps * 256, (x,), (indptr.nbytes,), (rows, columns))
    for room in (nnz, nnz // 2):
        _launch(stream, memory, f"sparse_pick_{name}", warps * 256, (x, indptr), (room * data.itemsize, room * index.itemsize, 8),
                (rows, columns, room))  # fmt: skip


def _launch_check(stream: Any, memory: Memory, arrays: tuple[Any, Any], numbers: tuple[int, int, int]) -> None:
    """Launch the kernels that check and copy indices, and those that replace the copies of wrong ones."""
    (indices, indptr), width = arrays, arrays[0].itemsize
    sizes = indices.size, indptr.size, *numbers
    with memory.take(indices.nbytes, indptr.nbytes, indices.nbytes, indptr.nbytes, 16) as (*given, out, out_marks, status):
        for pointer, array in zip(given, arrays, strict=True):
            memory.write(pointer, array)
        stream.fill(status, bytes(1), 16)
        blocks = -(-max(indices.size, indptr.size) // 256)
        stream.launch(stream.functions[f"sparse_check_{width}"], blocks, 256, *given, out, out_marks, status, *sizes, 1)
        stream.launch(stream.functions[f"sparse_replace_{width}"], blocks, 256, out, out_marks, status, *sizes)


def _launch(
    stream: Any, memory: Memory, name: str, threads: int, arrays: tuple[Any, ...], sizes: tuple[int, ...], numbers: tuple[int, ...]
) -> None:
    """Launch a kernel that takes arrays, each in memory of exactly its size, and numbers."""
    with memory.take(*(each.nbytes for each in arrays), *sizes) as pointers:
        for pointer, array in zip(pointers, arrays, strict=False):
            memory.write(pointer, np.ascontiguousarray(array))
        stream.launch(stream.functions[name], -(-threads // 256), 256, *pointers, *numbers)


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
            calls += [Unary(op, x.T) for op in UnaryOp if dtype in supported[f"unary.{op.value}"]]
            for op in calls:
                plan = op.plan()
                skipped = [ref.dtype.itemsize * (number == 1) for number, ref in enumerate(plan.reads)]
                sizes = [ref.nbytes + skip for ref, skip in zip(plan.reads, skipped, strict=True)]
                with memory.take(*sizes, plan.creates[0].nbytes) as (*reads, output):
                    inputs = [address + skip for address, skip in zip(reads, skipped, strict=True)]
                    PARTS["elementwise"].kernels[op.kind](lane, op, plan, inputs, (output,))


def _reductions(compute: Any, memory: Memory, supported: Any) -> None:
    for op in ReduceOp:
        for dtype in supported[f"reduce.{op.value}"]:
            for (outer, length, inner), offset in SHAPES:
                results, skipped = outer * inner, offset * dtype.itemsize
                with memory.take(results * length * dtype.itemsize + skipped, results * result_dtype(op, dtype).itemsize) as (x, y):
                    compute.reduce(op, x + skipped, y, (outer, length, inner), 1, dtype=dtype)


def _folds(stream: Any, compute: Any, memory: Memory, supported: Any) -> None:
    """Axes that are no neighbours: many results, and few results of many elements, which are cut."""
    workspace = stream.prepare_workspace()
    for op in BASIC:
        for dtype in supported[f"reduce.{op.value}"]:
            for lengths in ((5, 301, 7), (900, 2, 1100)):
                size = math.prod(lengths)
                with memory.take(size * dtype.itemsize, lengths[1] * dtype.itemsize) as (x, y):
                    runs = (lengths[0], True, lengths[1] * lengths[2]), (lengths[1], False, lengths[2]), (lengths[2], True, 1)
                    enqueue_fold(stream, workspace, op, x, y, runs, dtype)


def _samples(stream: Any, compute: Any, memory: Memory, library: str, namespace: Any, kinds: Sequence[str]) -> None:
    """Some or all ops of a family by its samples; of arrays, ranges of all integers too."""
    owner: Any = SimpleNamespace(dropped=deque())
    named: Any = namespace(Submitter(lambda op: op, lambda error: error, "device"))
    calls: list[tuple[Any, tuple[Any, ...]]] = [(Arange(9, dtype=dtype), ()) for dtype in CODES if dtype.is_integer and library == "arrays"]
    for sample in CPU_PARTS[library].samples(np.random.default_rng(1)):
        if kinds and sample.name.split()[0] not in kinds:
            continue
        arrays = tuple(np.array(each, order="C") for each in sample.operands)
        refs = [AccelRef(owner, number, each.shape, DType.of(each.dtype), 1) for number, each in enumerate(arrays)]
        calls.append((sample.call(named, *refs), arrays))
    for op, arrays in calls:
        _run(stream, compute, memory, op, arrays)


def _run(stream: Any, compute: Any, memory: Memory, op: Any, arrays: tuple[Any, ...], skipped: int = 0) -> None:
    """Run an op whose refs are numbered as the arrays are; the first array begins ``skipped`` bytes behind an aligned address."""
    plan = op.plan()
    if any(ref.is_strided and not op.takes_strided(ref) for ref in plan.reads + plan.writes):
        return  # the engine copies it first
    first, *further = [each.nbytes for each in (*arrays, *plan.creates)]
    working = training.WORKING.get(op.kind)
    with memory.take(first + skipped, *further, training.scratch_nbytes(op) if working else 16) as taken:
        pointers = [taken[0] + skipped, *taken[1:]]
        for pointer, array in zip(pointers, arrays, strict=False):
            memory.write(pointer, array)
        inputs = [pointers[ref.buffer] + ref.offset for ref in plan.reads]
        outputs = [pointers[ref.buffer] + ref.offset for ref in plan.writes] + pointers[len(arrays) :]
        kernel = working or PARTS[op.library].kernels[op.kind]
        kernel(SimpleNamespace(stream=stream, compute=compute), op, plan, inputs, outputs)


def _integer_products(context: Any, stream: Any, memory: Memory) -> None:
    """Products of integers whose rows, columns and sums are not multiples of a block's."""
    owner: Any = SimpleNamespace(dropped=deque())
    kernel, lane = context.families.states["linalg"].kernels["matmul"], SimpleNamespace(stream=stream)
    for dtype in CODES:
        if not dtype.is_integer or dtype is DType.INT8:  # which is cuBLASLt's
            continue
        for shape_a, shape_b, is_turned in (((33, 65), (65, 3), False), ((3, 2, 33), (31, 2), True), ((1,), (1, 1), False)):
            a, b = AccelRef(owner, 0, shape_a, dtype, 1), AccelRef(owner, 1, shape_b, dtype, 1)
            op = Matmul(a, b, transpose_a=is_turned, transpose_b=is_turned)
            with memory.take(a.nbytes, b.nbytes, op.plan().creates[0].nbytes) as (x, y, output):
                kernel(lane, op, op.plan(), (x, y), (output, 0))


def _long_rows(stream: Any, compute: Any, memory: Memory) -> None:
    """Softmax and norms of rows that warps and blocks hold, and of longer ones."""
    owner: Any = SimpleNamespace(dropped=deque())
    for dtype in compute.capabilities()["normalize"]:
        for length in (1000, 1001, 5000, 20_000, 20_001):
            arrays = tuple(np.ones(shape, dtype.numpy) for shape in ((3, length), (length,), (length,)))
            x, weight, bias = (AccelRef(owner, number, each.shape, dtype, 1) for number, each in enumerate(arrays))
            for op in (Softmax(x), LogSoftmax(x), LayerNorm(x, length, weight, bias), RmsNorm(x, length, weight)):
                _run(stream, compute, memory, op, arrays)
            channels = np.ones((3, 5, 7), dtype.numpy), *(np.ones(5, dtype.numpy),) * 2
            x, mean, var = (AccelRef(owner, number, each.shape, dtype, 1) for number, each in enumerate(channels))
            _run(stream, compute, memory, BatchNorm(x, mean, var), channels, dtype.itemsize)


def _ordered(context: Any, stream: Any, compute: Any, memory: Memory, name: str) -> None:
    """A family's samples, of ops that work in memory of their own."""
    kinds = context.families.states[name].kernels
    family = next(family for family in FAMILIES if family.name == name)
    named: Any = family.namespace(Submitter(lambda op: op, lambda error: error, "device"))
    for sample in CPU_PARTS[name].samples(np.random.default_rng(1)):
        if sample.name.split()[0] not in kinds and name == "rng":
            continue
        arrays = tuple(np.array(each, order="C") for each in sample.operands)
        _run_ordered(context, stream, compute, memory, arrays, partial(sample.call, named))


def _many_and_long_lines(context: Any, stream: Any, compute: Any, memory: Memory) -> None:
    """Scans of a line that several blocks share, and sorts of so many lines that a key of 4 bytes has no room for their numbers."""
    for dtype in CODES:
        if dtype.is_complex or dtype is DType.BOOL:
            continue
        line = (np.ones(20_001, dtype.numpy),)
        for scan in (Cumsum, Cumprod, Cummax, Cummin):
            _run_ordered(context, stream, compute, memory, line, scan)
        if dtype.itemsize < 4:
            lines = np.ones((1 + (1 << (32 - 8 * dtype.itemsize)), 1), dtype.numpy)
            _run_ordered(context, stream, compute, memory, (lines,), Sort)


def _run_ordered(context: Any, stream: Any, compute: Any, memory: Memory, arrays: tuple[Any, ...], make: Callable[..., Any]) -> None:
    """Run an op of scans or sorts, with exactly the memory that it works in."""
    owner: Any = SimpleNamespace(dropped=deque())
    lane = SimpleNamespace(stream=stream, compute=compute)
    op = make(*[AccelRef(owner, number, each.shape, DType.of(each.dtype), 1) for number, each in enumerate(arrays)])
    plan, state = op.plan(), context.families.states[op.library]
    state.measure(op)
    status = [] if plan.status is None else [plan.status.spec.nbytes]
    sizes = (*(each.nbytes for each in arrays), *(spec.nbytes for spec in plan.creates), *status, state.scratch_nbytes(op))
    with memory.take(*sizes) as pointers:
        for pointer, array in zip(pointers, arrays, strict=False):
            memory.write(pointer, array)
        inputs = [pointers[ref.buffer] for ref in plan.reads]
        state.kernels[op.kind](lane, op, plan, inputs, pointers[len(arrays) :])


def _addresses(compute: Any, memory: Memory, supported: Any) -> None:
    with memory.take(8 * 300, 8) as (apart, index):
        blas_matrices.write_addresses(compute.stream, apart, 4096, 24, 300)
        for width in (32, 64):
            compute.stream.launch(compute.stream.functions[f"index_of_nan_f{width}"], 2, 128, index, apart, 300, 1)
        compute.stream.launch(compute.stream.functions["index_from_zero"], 1, 1, index, 300)


def _dnn(compute: Any, memory: Memory, supported: Any) -> None:
    for dtype in supported["conv2d_forward"]:
        _convolve(compute, memory, dtype, (2, 3, 17, 13), (5, 3, 3, 2), (2, 5, 9, 14), (2, 1), (1, 1))
        _convolve(compute, memory, dtype, (2, 16, 9, 9), (72, 16, 3, 3), (2, 72, 9, 9), (1, 1), (1, 1))
        _convolve(compute, memory, dtype, (1, 123, 4, 4), (70, 123, 3, 3), (1, 70, 2, 2), (1, 1), (0, 0))
        _convolve(compute, memory, dtype, (2, 16, 5, 5), (9, 16, 1, 1), (2, 9, 5, 5), (1, 1), (0, 0))


def _attend(compute: Any, memory: Memory, supported: Any) -> None:
    """Attention by the backend's own kernel, and with sequences in one array: of few and many queries, few and many keys, and heads of every width."""
    for dtype in supported["attention"]:
        for (queries, keys), dim in itertools.product(((1, 150), (37, 41)), (24, 33, 250)):
            sizes = [6 * rows * dim * dtype.itemsize for rows in (queries, keys, keys, queries)]
            for causal in (False, True, "bottom_right"):
                with memory.take(*sizes) as (q, k, v, o):
                    work = AttentionWork.dense(2, 3, queries, keys, dim, 0.2, causal, dtype)
                    attend(compute.stream, None, work, {1: q, 2: k, 3: v, 4: o}, Room())
                rows, stats = 6 * queries * max(dtype.itemsize, 4), replace(work, form="attention_with_stats")
                with memory.take(*sizes, *sizes[:3], sizes[3], rows) as (q, k, v, o, of_q, of_k, of_v, grad, s):
                    attend(compute.stream, None, stats, {1: q, 2: k, 3: v, 4: o, 11: s}, Room())
                    pointers = dict(enumerate((q, k, v, of_q, of_k, of_v, o, grad, s), 1))
                    attend_backward(compute.stream, None, replace(work, form="attention_grad"), pointers, Room())
        with memory.take(4, 4, 4, 4, 4, 4) as addresses:
            # Of no sequences: memory is filled with ones, and 0x01010101 tokens would be many.
            compute.stream.launch(compute.stream.functions[f"attention_ragged_{CODES[dtype]}"], 1, 32, *addresses, 0, 1, 1, 9, 9, 9, 9)
        with memory.take(*(28,) * 4, 168, 168) as (q, to_q, kv, to_kv, table, to_table):
            numbers = q, to_q, kv, to_kv, table, to_table, 7, 42, 33, 35, 4
            compute.stream.launch(compute.stream.functions[f"attention_numbers_{CODES[dtype]}"], 1, 64, *numbers)


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
