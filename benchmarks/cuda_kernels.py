"""How fast the backend's own kernels are on a GPU: ``python benchmarks/cuda_kernels.py [--json FILE] [--only PART]``.

Elementwise functions, reductions over rows of any length and along any axis, and vectors: bytes read and written in a second, beside a copy on the same
device. Ops on arrays, softmax, norms, pooling, convolutions and attention: beside PyTorch where it is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import sys
import time
from collections import deque
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from accel import AccelRef, BinaryOp, DType, ReduceOp, UnaryOp, ops
from accel.compute import DeviceCompute
from accel_cuda import CudaBackend
from accel_cuda.families.convolution import ConvolutionWork, convolve
from accel_cuda.families.cublas import blas_of
from accel_cuda.families.cudnn import Room
from accel_cuda.families.parts import PARTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from accel_cuda.core.stream import CudaStream
    from accel_cuda.device import CudaDevice
    from accel_cuda.families.dnn import DnnLibrary

_BYTES = 256 << 20
_DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "int64")
_LENGTHS = (2, 3, 5, 7, 10, 17, 31, 33, 63, 64, 100, 127, 255, 257, 1000, 1023, 1025, 4096, 4097, 100_003)
_SHAPES = ((7, 100_003, 33), (1_000_003, 3), (3, 1_000_003), (129, 513, 1021), (64, 1024, 1024), (300_007, 7, 33), (2_000_003, 2, 5))
_SUMS = (ReduceOp.SUM, ReduceOp.MEAN)
# Rows and columns: small, typical, large.
_MATRICES = ((64, 256), (2048, 4096), (8192, 8192))
# (N, C, H, W): a small feature map, one of a diffusion model, and a large one.
_IMAGES = ((2, 64, 14, 14), (8, 320, 64, 64), (32, 64, 112, 112))
# (N, C, side, K, window)
_CONVOLUTIONS = (
    (32, 64, 56, 64, 3),
    (64, 256, 56, 64, 3),
    (32, 64, 56, 256, 1),
    (32, 128, 28, 128, 3),
    (32, 256, 14, 256, 3),
    (32, 512, 7, 512, 3),
    (32, 512, 7, 2048, 1),
)
# (batch, heads, queries, keys, head_dim): long sequences, and few queries over many keys
_ATTENTIONS = ((4, 32, 2048, 2048, 128), (4, 16, 2048, 2048, 64), (8, 16, 512, 512, 64), (1, 16, 1, 16_384, 128))


class Report:
    """Rows of one run, printed as they are added."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, unit: str, where: str, value: float, **parts: float) -> None:
        """Add a value, and what belongs to it."""
        self.rows.append({"unit": unit, "where": where, "value": value, **parts})
        print(f"{where:70} {value:10.1f} {unit:8}", *(f"{name} {part:.2f}" for name, part in parts.items()), flush=True)

    def write(self, path: str | None) -> None:
        """Write the rows as JSON."""
        if path is not None:
            Path(path).write_text(json.dumps(self.rows, indent=1) + "\n", encoding="utf-8")


def best(call: Callable[[], object], stream: Any, count: int = 10) -> float:
    """Return the seconds of one of ``count`` calls in a row, of the best of three rounds."""
    call()
    found = float("inf")
    for _ in range(3):
        stream.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            call()
        stream.synchronize()
        found = min(found, (time.perf_counter() - began) / count)
    return found


class Kernels:
    """The kernels of one stream, on three buffers."""

    def __init__(self, context: CudaDevice, stream: CudaStream, compute: DeviceCompute, report: Report) -> None:
        self.stream, self.compute, self.report = stream, compute, report
        self.dnn = cast("DnnLibrary", context.families.states["dnn"])
        slab = context.create_slab(3 * (_BYTES + 4096) + (64 << 20))
        self.a, self.b, self.c = (slab.address + part * (_BYTES + 4096) for part in range(3))
        self._scatter(slab.address, slab.nbytes)
        self._copy = self._rate(2 * _BYTES, lambda: stream.copy(self.b, self.a, _BYTES))
        report.add("GB/s", "copy", self._copy, of_copy=1.0)

    def _scatter(self, address: int, nbytes: int) -> None:
        """Fill memory with what are numbers in every type: pairs of ordinary float16 make ordinary float32 and so on."""
        rng = np.random.default_rng()
        part = rng.standard_normal(8 << 20, np.float32).astype(np.float16).view(np.uint8)
        self.compute.copy_htod(address, part.data)
        for place in range(part.nbytes, nbytes, part.nbytes):
            self.stream.copy(address + place, address, min(part.nbytes, nbytes - place))
        self.stream.synchronize()

    def _rate(self, nbytes: int, call: Callable[[], object]) -> float:
        return nbytes / best(call, self.stream) / 1e9

    def add(self, where: str, nbytes: int, call: Callable[[], object]) -> None:
        """Measure a call that reads and writes ``nbytes`` bytes."""
        rate = self._rate(nbytes, call)
        self.report.add("GB/s", where, rate, of_copy=rate / self._copy)

    def elementwise(self) -> None:
        """Functions of one and of two arrays; at aligned addresses, and one element behind them."""
        for name in _DTYPES:
            size = DType.of(name).itemsize
            self._functions(name, "aligned", self.a, self.c)
            self._functions(name, "x odd", self.a + size, self.c)
            self._functions(name, "out odd", self.a, self.c + size)

    def _functions(self, name: str, where: str, x: int, y: int) -> None:
        dtype = DType.of(name)
        n = _BYTES // dtype.itemsize
        self.add(f"neg {name} {where}", 2 * _BYTES, lambda: self.compute.unary(UnaryOp.NEG, x, y, n, dtype=dtype))
        self.add(f"add {name} {where}", 3 * _BYTES, lambda: self.compute.binary(BinaryOp.ADD, x, self.b, y, n, dtype=dtype))

    def reductions(self) -> None:
        """Rows of any length, and any axis of odd shapes, made long enough."""
        for name in _DTYPES:
            itemsize = DType.of(name).itemsize
            for length in _LENGTHS:
                self._reduce(name, (_BYTES // itemsize // length, length), 1)
            for shape in _SHAPES:
                for axis in range(len(shape)):
                    grown = list(shape)
                    other = 0 if axis else len(shape) - 1
                    grown[other] *= max(1, round(_BYTES / itemsize / math.prod(shape)))
                    self._reduce(name, tuple(grown), axis)
                    if grown[axis] == shape[axis]:
                        grown = list(shape)
                        grown[axis] *= max(1, round(_BYTES / itemsize / math.prod(shape)))
                        self._reduce(name, tuple(grown), axis)

    def _reduce(self, name: str, shape: tuple[int, ...], axis: int) -> None:
        dtype = DType.of(name)
        read = math.prod(shape) * dtype.itemsize
        if read > _BYTES + (64 << 20):
            return
        for op in (ReduceOp.SUM, ReduceOp.MAX) if name != "float32" else (*_SUMS, ReduceOp.MAX, ReduceOp.MIN):
            call = partial(self.compute.reduce, op, self.a, self.b, shape, axis, dtype=dtype)
            self.add(f"{op.value} {name} {shape} axis {axis}", read + read // shape[axis], call)

    def arrays(self) -> None:
        """Ops on matrices that are broadcast, converted, moved, indexed and reduced by states, beside PyTorch's."""
        # Indices are before the results, in the third buffer.
        self.compute.copy_htod(self.c, np.arange(_MATRICES[-1][0]).view(np.uint8).data)
        for name in ("float32", "bfloat16"):
            for shape in _MATRICES:
                for where, op, theirs in _array_ops(DType.of(name), shape):
                    self._op(f"{where} {name} {shape}", op, _torch_op(name, shape, theirs))

    def _op(self, where: str, op: Any, theirs: float) -> None:
        plan = op.plan()
        moved = sum(ref.nbytes for ref in plan.reads) + sum(spec.nbytes for spec in plan.creates)
        addresses = [self.c if ref.dtype is DType.INT64 else (self.a, self.b)[min(place, 1)] for place, ref in enumerate(plan.reads)]
        kernel, lane = PARTS[op.library].kernels[op.kind], SimpleNamespace(stream=self.stream, compute=self.compute)
        ours = best(lambda: kernel(lane, op, plan, addresses, (self.c + (64 << 10),)), self.stream)
        self.report.add("GB/s", where, moved / ours / 1e9, us=ours * 1e6, **({"torch_us": theirs * 1e6} if theirs else {}))

    def norms(self) -> None:
        """Softmax and norms of matrices, and norms and pooling of images, beside PyTorch's."""
        for name in ("float32", "bfloat16"):
            for shapes, calls in ((_MATRICES, _row_ops), (_IMAGES, _image_ops)):
                for shape in shapes:
                    for where, op, theirs in calls(DType.of(name), shape):
                        self._op(f"{where} {name} {op.x.shape}", op, _torch_op(name, op.x.shape, theirs))

    def vectors(self) -> None:
        """BLAS on vectors."""
        for name in ("float16", "float32", "float64", "complex64"):
            dtype, blas = DType.of(name), blas_of(self.stream)
            n = _BYTES // dtype.itemsize
            self.add(f"axpy {name}", 3 * _BYTES, partial(blas.axpy, n, 0.5, self.a, self.b, dtype))
            self.add(f"scal {name}", 2 * _BYTES, partial(blas.scal, n, 0.5, self.a, dtype))
            self.add(f"dot {name}", 2 * _BYTES, partial(blas.dot, n, self.a, self.b, self.c, dtype))
            if not dtype.is_complex:
                self.add(f"nrm2 {name}", _BYTES, partial(blas.nrm2, n, self.a, self.c, dtype))

    def convolutions(self) -> None:
        """Layers of a residual network, channels last, beside PyTorch's (without TF32)."""
        for name in ("float32", "float16", "bfloat16", "float64"):
            for n, c, side, k, window in _CONVOLUTIONS:
                shape, filters, out = (n, c, side, side), (k, c, window, window), (n, k, side, side)
                if math.prod(shape) * DType.of(name).itemsize > _BYTES:
                    continue
                flops, pad = 2 * math.prod(out) * c * window**2, (window // 2,) * 2
                ours = best(self._convolution(name, shape, filters, out, pad), self.stream)
                theirs = _torch(name, shape, filters, pad)
                beside = {"torch_TFLOP/s": flops / theirs / 1e12} if theirs else {}
                self.report.add("TFLOP/s", f"conv2d {name} {shape} {filters}", flops / ours / 1e12, **beside)

    def _convolution(self, name: str, shape: Any, filters: Any, out: Any, pad: Any) -> Callable[[], object]:
        work = ConvolutionWork(DType.of(name), shape, filters, out, pad, pad, (1, 1), (1, 1), is_last=True)
        room = self.compute.alloc(self.dnn.measured(work))
        self.compute.free(room)  # it stays this stream's, which uses it for nothing else meanwhile
        return lambda: convolve(self.stream, self.dnn.loaded(), work, self.a, self.b, 0, self.c, Room(room))

    def attentions(self) -> None:
        """Attention without and with a causal mask, beside PyTorch's by cuDNN; float32 beside what PyTorch chooses."""
        for name in ("float16", "bfloat16", "float32"):
            for sizes in _ATTENTIONS:
                batch, heads, queries, keys, depth = sizes
                for causal in (False, True) if queries == keys else (False,):
                    flops = 4 * math.prod(sizes) // (2 if causal else 1)
                    ours = best(self._attention(name, sizes, causal), self.stream)
                    theirs = _torch_attention(name, (batch, heads, queries, depth), (batch, heads, keys, depth), causal)
                    beside = {"torch_TFLOP/s": flops / theirs / 1e12} if theirs else {}
                    where = f"attention {name} {sizes}{' causal' if causal else ''}"
                    self.report.add("TFLOP/s", where, flops / ours / 1e12, **beside)

    def _attention(self, name: str, sizes: tuple[int, int, int, int, int], causal: bool) -> Callable[[], object]:
        dtype, values = DType.of(name), self.b + _BYTES // 2
        return lambda: self.compute.attention(self.a, self.b, values, self.c, *sizes, sizes[-1] ** -0.5, causal, dtype=dtype)


def _array_ops(dtype: DType, shape: tuple[int, int]) -> Iterator[tuple[str, Any, Callable[[Any, Any], object]]]:
    """Yield what an op is called, the op, and how PyTorch does it with a matrix and indices."""
    owner: Any = SimpleNamespace(dropped=deque())
    x, row, column = (AccelRef(owner, 1 + place, each, dtype, 1) for place, each in enumerate((shape, shape[1:], (shape[0], 1))))
    indices = AccelRef(owner, 9, shape[:1], DType.INT64, 1)
    yield "add a row", ops.Binary("add", x, row), lambda x, i: x + x[0]
    yield "add a column", ops.Binary("add", x, column), lambda x, i: x + x[:, :1]
    yield "multiply by a number", ops.Binary("mul", x, 2), lambda x, i: x * 2
    yield "less than a number", ops.Binary("less", x, 0), lambda x, i: x < 0
    yield "clip", ops.Clip(x, -1, 1), lambda x, i: x.clip(-1, 1)
    yield "cast to float16", ops.Cast(x, "float16"), lambda x, i: x.half()
    yield "transpose", ops.Transpose(x), lambda x, i: x.T.contiguous()
    yield "take rows", ops.Take(x, indices, axis=0, mode="clip"), lambda x, i: x[i]
    yield "var of rows", ops.Reduce("var", x, axis=1), lambda x, i: x.var(1, correction=0)
    yield "var of columns", ops.Reduce("var", x, axis=0), lambda x, i: x.var(0, correction=0)
    yield "argmax of rows", ops.Reduce("argmax", x, axis=1), lambda x, i: x.argmax(1)
    yield "logsumexp of rows", ops.Reduce("logsumexp", x, axis=1), lambda x, i: x.logsumexp(1)
    even, inner = x[:, ::2], x[:, 8 : shape[1] - 8]
    yield "add every second column", ops.Binary("add", even, even), lambda x, i: x[:, ::2] + x[:, ::2]
    yield "add inner columns", ops.Binary("add", inner, inner), lambda x, i: x[:, 8:-8] + x[:, 8:-8]
    yield "add a transpose", ops.Binary("add", x.T, x.T), lambda x, i: (x.T + x.T).contiguous()
    yield "sum of every second column", ops.Reduce("sum", even, axis=1), lambda x, i: x[:, ::2].sum(1)


def _row_ops(dtype: DType, shape: tuple[int, ...]) -> Iterator[tuple[str, Any, Callable[[Any, Any], object]]]:
    """Yield what an op on rows of a matrix is called, the op, and how PyTorch does it with a matrix."""
    owner: Any = SimpleNamespace(dropped=deque())
    length, f = shape[1], _functional
    x, row = (AccelRef(owner, 1 + place, each, dtype, 1) for place, each in enumerate((shape, shape[1:])))
    yield "softmax", ops.Softmax(x), lambda x, i: x.softmax(1)
    yield "log_softmax", ops.LogSoftmax(x), lambda x, i: x.log_softmax(1)
    yield "softmax of columns", ops.Softmax(x, 0), lambda x, i: x.softmax(0)
    yield "layer_norm", ops.LayerNorm(x, length, row, row), lambda x, i: f().layer_norm(x, (length,), x[0], x[1])
    yield "rms_norm", ops.RmsNorm(x, length, row), lambda x, i: f().rms_norm(x, (length,), x[0], 1e-6)


def _image_ops(dtype: DType, shape: tuple[int, ...]) -> Iterator[tuple[str, Any, Callable[[Any, Any], object]]]:
    """Yield the same for images, with channels first or, for pooling, also last."""
    owner: Any = SimpleNamespace(dropped=deque())
    (n, channels, height, width), f = shape, _functional
    x, row = (AccelRef(owner, 1 + place, each, dtype, 1) for place, each in enumerate((shape, (channels,))))
    yield "group_norm", ops.GroupNorm(x, 32, row, row), lambda x, i: f().group_norm(x, 32, x[0, :, 0, 0], x[0, :, 1, 0])
    yield (
        "batch_norm",
        ops.BatchNorm(x, row, row, row, row),
        lambda x, i: f().batch_norm(x, x[0, :, 0, 0], x[0, :, 1, 0], x[0, :, 2, 0], x[0, :, 3, 0]),
    )
    yield "max_pool", ops.MaxPool(x, 3, 2, 1), lambda x, i: f().max_pool2d(x, 3, 2, 1)
    yield "avg_pool", ops.AvgPool(x, 2), lambda x, i: f().avg_pool2d(x, 2)
    last = AccelRef(owner, 3, (n, height, width, channels), dtype, 1)
    yield (
        "max_pool, channels last",
        ops.MaxPool(last, 3, 2, 1, channels_last=True),
        lambda x, i: f().max_pool2d(x.permute(0, 3, 1, 2), 3, 2, 1),
    )
    yield "avg_pool, channels last", ops.AvgPool(last, 2, channels_last=True), lambda x, i: f().avg_pool2d(x.permute(0, 3, 1, 2), 2)


def _functional() -> Any:
    return importlib.import_module("torch.nn.functional")


def _torch_op(name: str, shape: tuple[int, ...], call: Callable[[Any, Any], object]) -> float:
    """Return the seconds that PyTorch takes, 0 without it."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return 0.0
    x = torch.randn(shape, device="cuda").to(getattr(torch, name))
    indices = torch.arange(shape[0], device="cuda")
    return best(lambda: call(x, indices), torch.cuda)


def _torch_attention(name: str, of_queries: tuple[int, ...], of_keys: tuple[int, ...], causal: bool) -> float:
    """Return the seconds that PyTorch takes, 0 without it."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return 0.0
    q = torch.zeros(of_queries, dtype=getattr(torch, name), device="cuda")
    k = torch.zeros(of_keys, dtype=q.dtype, device="cuda")
    attention: Any = importlib.import_module("torch.nn.attention")
    by_cudnn = attention.sdpa_kernel(attention.SDPBackend.CUDNN_ATTENTION) if q.itemsize == 2 else contextlib.nullcontext()
    with by_cudnn:
        return best(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=causal), torch.cuda)


def _torch(name: str, shape: tuple[int, ...], filters: tuple[int, ...], pad: tuple[int, int]) -> float:
    """Return the seconds that PyTorch takes, 0 without it."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return 0.0
    torch.backends.cudnn.allow_tf32 = False
    x = torch.zeros(shape, dtype=getattr(torch, name), device="cuda").to(memory_format=torch.channels_last)
    f = torch.zeros(filters, dtype=x.dtype, device="cuda").to(memory_format=torch.channels_last)
    return best(lambda: torch.nn.functional.conv2d(x, f, padding=pad), torch.cuda)


def main() -> None:
    """Run it."""
    parts = ("elementwise", "reductions", "arrays", "norms", "vectors", "convolutions", "attentions")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the numbers to FILE")
    parser.add_argument("--only", choices=parts, action="append", help="measure this part (may be given again)")
    options = parser.parse_args()
    report = Report()
    print(CudaBackend().devices()[0].name)
    context = CudaBackend().open(0)
    stream = context.create_stream()
    compute = DeviceCompute(context, stream)
    compute.init()
    kernels = Kernels(context, stream, compute, report)
    for part in options.only or parts:
        getattr(kernels, part)()
    report.write(options.json)
    context.close()


if __name__ == "__main__":
    main()
