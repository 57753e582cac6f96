"""What P17 compares: an op of a family, and the same of PyTorch's, at a small, a typical and a large size. A new op is a line of :data:`LINES`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from accel import SparseRef

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LINES", "Line", "Operand", "Size"]

Size: TypeAlias = tuple[int, ...]
Operand: TypeAlias = "tuple[Size, str] | np.ndarray[Any, Any]"


class Line(NamedTuple):
    """One op.

    Attributes
    ----------
    family, what
        What it is called in the table.
    sizes
        A small, a typical and a large one; they were chosen before anything was measured.
    operands
        Shapes and dtypes of the operands at a size, or their elements, where any will not do.
    ours
        The call, given a device or a graph, and refs.
    theirs
        The call, given the module ``torch`` and tensors of the same shapes and dtypes.
    is_awaited
        Whether the host waits in the middle of the op, so that neither a graph nor a batch holds several.
    """

    family: str
    what: str
    sizes: tuple[Size, Size, Size]
    operands: Callable[..., tuple[Operand, ...]]
    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    is_awaited: bool = False


_SIDES = ((64,), (1024,), (4096,))
_MATRICES = ((64, 256), (2048, 4096), (8192, 8192))
_FLAT = ((1 << 12,), (1 << 20,), (1 << 24,))
_ROWS = ((16, 256), (4096, 1024), (16_384, 4096))

_CHAIN = (
    *(("mul", 0, 1), ("add", 3, 2), ("mul", 4, 1), ("add", 5, 2)),
    *(("mul", 6, 1), ("add", 7, 2), ("mul", 8, 1), ("relu", 9)),
)


def _product(dtype: str) -> Callable[[int], tuple[Operand, ...]]:
    return lambda n: (((n, n), dtype), ((n, n), dtype))


def _one(dtype: str) -> Callable[..., tuple[Operand, ...]]:
    return lambda *size: ((size, dtype),)


def _square(n: int, dtype: Any = np.float32) -> tuple[Operand, ...]:
    # Elements that come again would make it singular.
    return (np.random.default_rng(n).standard_normal((n, n)).astype(dtype),)


def _linear(n: int) -> tuple[Operand, ...]:
    return ((n, n), "bfloat16"), ((n, n), "bfloat16"), ((n,), "bfloat16")


def _float8(n: int) -> tuple[Operand, ...]:
    return ((n, n), "float8_e4m3fn"), ((n, n), "float8_e4m3fn"), ((1,), "float32")


def _image(n: int, side: int, channels: int) -> tuple[Operand, ...]:
    return ((n, side, side, channels), "float16"), ((channels, 3, 3, channels), "float16")


def _heads(batch: int, heads: int, tokens: int, depth: int) -> tuple[Operand, ...]:
    return (((batch, heads, tokens, depth), "bfloat16"),) * 3


def _apart(batch: int, heads: int, tokens: int, depth: int) -> tuple[Operand, ...]:
    """Return queries and keys whose heads are beside each other, as projections give them."""
    return (((batch, tokens, heads, depth), "bfloat16"),) * 2


def _groups(count: int, n: int) -> tuple[Operand, ...]:
    """Return as many pairs of matrices, of eight different sizes."""
    left = tuple([((n + 16 * (i % 8), n), "bfloat16") for i in range(count)])
    return (*left, *((((n, n), "bfloat16"),) * count))


def _halves(refs: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return refs[: len(refs) // 2], refs[len(refs) // 2 :]


def _norm(rows: int, columns: int) -> tuple[Operand, ...]:
    return ((rows, columns), "bfloat16"), ((columns,), "bfloat16"), ((columns,), "bfloat16")


def _their_dct(torch: Any, x: Any) -> Any:
    """Transform rows as PyTorch's users do, which has no cosine transform: elements in another order, a real transform, and a multiplication."""
    length = x.shape[1]
    spectrum = torch.fft.fft(torch.cat((x[:, ::2], x[:, 1::2].flip(1)), 1))
    angle = torch.arange(length, device=x.device, dtype=x.dtype) * (-np.pi / (2 * length))
    return 2 * (spectrum.real * angle.cos() - spectrum.imag * angle.sin())


def _their_fftconvolve(torch: Any, x: Any, w: Any) -> Any:
    """Convolve rows by transforms of a length that is a power of 2."""
    length = x.shape[1] + w.shape[1] - 1
    padded = 1 << (length - 1).bit_length()
    whole = torch.fft.irfft(torch.fft.rfft(x, padded) * torch.fft.rfft(w, padded), padded)
    start = (w.shape[1] - 1) // 2
    return whole[:, start : start + x.shape[1]].contiguous()


def _their_convolution(torch: Any, x: Any, w: Any) -> Any:
    """Convolve tensors whose channels are last in memory."""
    return torch.nn.functional.conv2d(x.permute(0, 3, 1, 2), w.permute(0, 3, 1, 2), padding=1)


def _of_filter(n: int, side: int, channels: int) -> tuple[Operand, ...]:
    return (((n, side, side, channels), "float16"),) * 2


def _their_input_grad(torch: Any, grad: Any, w: Any) -> Any:
    """Return the gradient of images whose channels are last in memory, as many as the filters are."""
    grad = grad.permute(0, 3, 1, 2)
    return torch.nn.grad.conv2d_input(grad.shape, w.permute(0, 3, 1, 2), grad, padding=1)


def _their_filter_grad(torch: Any, x: Any, grad: Any) -> Any:
    """Return the gradient of 3x3 filters whose channels are last in memory."""
    x, grad = x.permute(0, 3, 1, 2), grad.permute(0, 3, 1, 2)
    return torch.nn.grad.conv2d_weight(x, (grad.shape[1], x.shape[1], 3, 3), grad, padding=1)


def _our_filter_grad(d: Any, x: Any, grad: Any) -> Any:
    return d.dnn.conv2d_filter_grad(x, grad, (grad.shape[3], 3, 3, x.shape[3]), padding=1, channels_last=True)


def _csr(n: int, per_row: int) -> tuple[Operand, ...]:
    """Return the parts of a square matrix with as many elements in each row, spread over it: data, indices and indptr."""
    band = n // per_row
    indices = np.arange(per_row) * band + np.random.default_rng(n).integers(0, band, (n, per_row))
    return ((n * per_row,), "float32"), indices.ravel().astype(np.int32), np.arange(0, n * per_row + 1, per_row, dtype=np.int32)


def _matrix(data: Any, indices: Any, indptr: Any) -> SparseRef:
    rows = indptr.shape[0] - 1
    return SparseRef("csr", data, indices, indptr, (rows, rows))


def _their_matrix(torch: Any, data: Any, indices: Any, indptr: Any) -> Any:
    rows = indptr.shape[0] - 1
    return torch.sparse_csr_tensor(indptr, indices, data, size=(rows, rows), check_invariants=False)


_SPARSE = ((1 << 10, 8), (1 << 16, 16), (1 << 20, 16))


def _attended(batch: int, heads: int, tokens: int, depth: int) -> tuple[Operand, ...]:
    return *((((batch, heads, tokens, depth), "bfloat16"),) * 5), ((batch, heads, tokens), "float32")


def _their_attention_grad(torch: Any, grad: Any, q: Any, k: Any, v: Any, attended: Any, stats: Any) -> Any:
    """Return the gradients by the kernel of flash attention; what dropout would need is not read."""
    backward, tokens = torch.ops.aten._scaled_dot_product_flash_attention_backward, q.shape[2]  # autograd calls it so
    return backward(grad, q, k, v, attended, stats, None, None, tokens, tokens, 0.0, True, stats, stats)


LINES: tuple[Line, ...] = (
    Line("blas", "gemm float32", _SIDES, _product("float32"), lambda d, a, b: d.blas.gemm(a, b), lambda t, a, b: a @ b),
    Line("blas", "gemm bfloat16", _SIDES, _product("bfloat16"), lambda d, a, b: d.blas.gemm(a, b), lambda t, a, b: a @ b),
    Line("blas", "axpy float32", _FLAT, lambda n: (((n,), "float32"),) * 2, lambda d, x, y: d.blas.axpy(x, y), lambda t, x, y: y.add_(x)),
    Line(
        "blas",
        "gemm_grouped bfloat16, PyTorch's calls one by one",
        ((8, 64), (64, 256), (64, 1024)),
        _groups,
        lambda d, *refs: d.blas.gemm_grouped(*_halves(refs)),
        lambda t, *tensors: [a @ b for a, b in zip(*_halves(tensors), strict=True)],
    ),
    Line(
        "tensor",
        "einsum bqhd,bkhd->bhqk bfloat16",
        ((1, 8, 128, 64), (8, 16, 512, 64), (4, 32, 2048, 128)),
        _apart,
        lambda d, q, k: d.tensor.einsum("bqhd,bkhd->bhqk", q, k),
        lambda t, q, k: t.einsum("bqhd,bkhd->bhqk", q, k),
    ),
    Line(
        "tensor",
        "einsum abcd,dcbe->ea float32",
        ((16,), (48,), (96,)),
        lambda n: (((n, n, n, n), "float32"),) * 2,
        lambda d, a, b: d.tensor.einsum("abcd,dcbe->ea", a, b),
        lambda t, a, b: t.einsum("abcd,dcbe->ea", a, b),
    ),
    Line(
        "tensor",
        "einsum of a chain ij,jk,kl->il float32",
        ((64, 8), (1024, 64), (8192, 256)),
        lambda n, m: (((n, m), "float32"), ((m, n), "float32"), ((n, m), "float32")),
        lambda d, a, b, c: d.tensor.einsum("ij,jk,kl->il", a, b, c),
        lambda t, a, b, c: t.einsum("ij,jk,kl->il", a, b, c),
    ),
    Line(
        "linalg",
        "matmul + bias + gelu bfloat16",
        _SIDES,
        _linear,
        lambda d, a, b, bias: d.linalg.matmul(a, b, bias=bias, activation="gelu"),
        lambda t, a, b, bias: t._addmm_activation(bias, a, b, use_gelu=True),
    ),
    Line(
        "linalg",
        "linear + gelu bfloat16, PyTorch's two calls",
        _SIDES,
        _linear,
        lambda d, x, w, bias: d.linalg.matmul(x, w, transpose_b=True, bias=bias, activation="gelu"),
        lambda t, x, w, bias: t.nn.functional.gelu(t.nn.functional.linear(x, w, bias), approximate="tanh"),
    ),
    Line(
        "linalg",
        "matmul of stacks bfloat16",
        ((8, 64), (64, 256), (64, 1024)),
        lambda count, n: (((count, n, n), "bfloat16"),) * 2,
        lambda d, a, b: d.linalg.matmul(a, b),
        lambda t, a, b: t.bmm(a, b),
    ),
    Line(
        "linalg",
        "matmul of broadcast stacks float32",
        ((4, 2, 32), (16, 8, 128), (16, 8, 512)),
        lambda m, count, n: (((m, 1, n, n), "float32"), ((count, n, n), "float32")),
        lambda d, a, b: d.linalg.matmul(a, b),
        lambda t, a, b: t.matmul(a, b),
    ),
    Line(
        "linalg",
        "matmul float8 to bfloat16",
        _SIDES,
        _float8,
        lambda d, a, b, s: d.linalg.matmul(a, b, transpose_b=True, scale_a=s, scale_b=s),
        lambda t, a, b, s: t._scaled_mm(a, b.t(), scale_a=s, scale_b=s, out_dtype=t.bfloat16),
    ),
    Line(
        "linalg",
        "matmul int8 to int32",
        _SIDES,
        _product("int8"),
        lambda d, a, b: d.linalg.matmul(a, b, transpose_b=True),
        lambda t, a, b: t._int_mm(a, b.t()),
    ),
    Line(
        "elementwise",
        "add a row float32",
        _MATRICES,
        lambda m, n: (((m, n), "float32"), ((n,), "float32")),
        lambda d, x, y: d.elementwise.binary("add", x, y),
        lambda t, x, y: x + y,
    ),
    Line(
        "elementwise",
        "gelu bfloat16",
        _MATRICES,
        _one("bfloat16"),
        lambda d, x: d.elementwise.unary("gelu", x),
        lambda t, x: t.nn.functional.gelu(x),
    ),
    Line(
        "elementwise",
        "fused chain of 8 float32",
        _FLAT,
        _one("float32"),
        lambda d, x: d.elementwise.fused(_CHAIN, (x, np.float32(0.75), np.float32(0.5))),
        lambda t, x: t.relu((((x * 0.75 + 0.5) * 0.75 + 0.5) * 0.75 + 0.5) * 0.75),
    ),
    Line("reduce", "sum of rows float32", _MATRICES, _one("float32"), lambda d, x: d.reduce("sum", x, axis=1), lambda t, x: x.sum(1)),
    Line("reduce", "sum of columns float32", _MATRICES, _one("float32"), lambda d, x: d.reduce("sum", x, axis=0), lambda t, x: x.sum(0)),
    Line("reduce", "argmax of rows bfloat16", _MATRICES, _one("bfloat16"), lambda d, x: d.reduce("argmax", x, axis=1), lambda t, x: x.argmax(1)),
    Line("arrays", "transpose float32", _MATRICES, _one("float32"), lambda d, x: d.arrays.transpose(x), lambda t, x: x.t().contiguous()),
    Line(
        "arrays",
        "concatenate float32",
        _MATRICES,
        lambda m, n: (((m, n), "float32"),) * 2,
        lambda d, x, y: d.arrays.concatenate((x, y), axis=1),
        lambda t, x, y: t.cat((x, y), 1),
    ),
    Line("scan", "cumsum float32", _FLAT, _one("float32"), lambda d, x: d.scan.cumsum(x), lambda t, x: x.cumsum(0)),
    Line("sort", "sort float32", _FLAT, _one("float32"), lambda d, x: d.sort.sort(x), lambda t, x: t.sort(x)[0]),
    Line("sort", "argsort float32", _FLAT, _one("float32"), lambda d, x: d.sort.argsort(x), lambda t, x: t.argsort(x, stable=True)),
    Line("sort", "topk 10 of rows float32", _ROWS, _one("float32"), lambda d, x: d.sort.topk(x, 10), lambda t, x: t.topk(x, 10)),
    Line(
        "dnn",
        "conv2d 3x3 float16, channels last",
        ((1, 14, 64), (32, 56, 64), (64, 56, 256)),
        _image,
        lambda d, x, w: d.dnn.conv2d(x, w, padding=1, channels_last=True),
        _their_convolution,
    ),
    Line(
        "dnn",
        "conv2d 3x3 input gradient float16, channels last",
        ((1, 14, 64), (32, 56, 64), (64, 56, 256)),
        _image,
        lambda d, grad, w: d.dnn.conv2d_input_grad(grad, w, grad.shape, padding=1, channels_last=True),
        _their_input_grad,
    ),
    Line(
        "dnn",
        "conv2d 3x3 filter gradient float16, channels last",
        ((1, 14, 64), (32, 56, 64), (64, 56, 256)),
        _of_filter,
        _our_filter_grad,
        _their_filter_grad,
    ),
    Line(
        "dnn",
        "attention bfloat16",
        ((1, 8, 128, 64), (8, 16, 512, 64), (4, 32, 2048, 128)),
        _heads,
        lambda d, q, k, v: d.dnn.attention(q, k, v),
        lambda t, q, k, v: t.nn.functional.scaled_dot_product_attention(q, k, v),
    ),
    Line(
        "dnn",
        "attention causal bfloat16",
        ((1, 8, 128, 64), (8, 16, 512, 64), (4, 32, 2048, 128)),
        _heads,
        lambda d, q, k, v: d.dnn.attention(q, k, v, causal=True),
        lambda t, q, k, v: t.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True),
    ),
    Line(
        "dnn",
        "attention gradient causal bfloat16",
        ((1, 8, 128, 64), (8, 16, 512, 64), (4, 32, 2048, 128)),
        _attended,
        lambda d, grad, q, k, v, attended, stats: d.dnn.attention_grad(grad, q, k, v, attended, stats, causal=True),
        _their_attention_grad,
    ),
    Line("dnn", "softmax of rows bfloat16", _ROWS, _one("bfloat16"), lambda d, x: d.dnn.softmax(x), lambda t, x: t.softmax(x, -1)),
    Line(
        "dnn",
        "layer norm bfloat16",
        _ROWS,
        _norm,
        lambda d, x, w, b: d.dnn.layer_norm(x, w.shape, w, b),
        lambda t, x, w, b: t.nn.functional.layer_norm(x, w.shape, w, b),
    ),
    Line("fft", "fft of rows complex64", _ROWS, _one("complex64"), lambda d, x: d.fft.fft(x), lambda t, x: t.fft.fft(x)),
    Line("fft", "fft of planes complex64", ((64, 64), (1024, 1024), (4096, 4096)), _one("complex64"),
         lambda d, x: d.fft.fft(x, axes=(0, 1)), lambda t, x: t.fft.fft2(x)),
    Line(
        "solver",
        "solve float64",
        ((64,), (512,), (4096,)),
        lambda n: (*_square(n, np.float64), ((n, 1), "float64")),
        lambda d, a, b: d.solver.solve(a, b),
        lambda t, a, b: t.linalg.solve(a, b),
        is_awaited=True,
    ),
    Line("solver", "qr float32", ((64,), (512,), (2048,)), _square, lambda d, x: d.solver.qr(x), lambda t, x: t.linalg.qr(x), is_awaited=True),
    Line("solver", "eigh float32", ((64,), (256,), (1024,)), _square, lambda d, x: d.solver.eigh(x), lambda t, x: t.linalg.eigh(x), is_awaited=True),
    Line(
        "sparse",
        "spmv float32, csr",
        _SPARSE,
        lambda n, per_row: (*_csr(n, per_row), ((n,), "float32")),
        lambda d, *refs: d.sparse.spmv(_matrix(*refs[:3]), refs[3]),
        lambda t, *tensors: _their_matrix(t, *tensors[:3]) @ tensors[3],
    ),
    Line(
        "sparse",
        "spmm float32, csr, 32 columns",
        _SPARSE,
        lambda n, per_row: (*_csr(n, per_row), ((n, 32), "float32")),
        lambda d, *refs: d.sparse.spmm(_matrix(*refs[:3]), refs[3]),
        lambda t, *tensors: _their_matrix(t, *tensors[:3]) @ tensors[3],
    ),
    Line(
        "sparse",
        "spgemm float32, csr",
        ((1 << 10, 4), (1 << 14, 8), (1 << 18, 8)),
        _csr,
        lambda d, *refs: d.sparse.spgemm(_matrix(*refs), _matrix(*refs)),
        lambda t, *tensors: _their_matrix(t, *tensors) @ _their_matrix(t, *tensors),
        is_awaited=True,
    ),
    Line("fft", "fft of one line complex64", _FLAT, _one("complex64"), lambda d, x: d.fft.fft(x), lambda t, x: t.fft.fft(x)),
    Line("fft", "rfft of rows float32", _ROWS, _one("float32"), lambda d, x: d.fft.rfft(x), lambda t, x: t.fft.rfft(x)),
    Line("fft", "dct of rows float32, PyTorch's calls", _ROWS, _one("float32"), lambda d, x: d.fft.dct(x), _their_dct),
    Line(
        "fft",
        "convolve of rows float32, PyTorch's calls",
        ((16, 1000, 25), (256, 16_000, 385), (256, 250_000, 12_145)),
        lambda rows, n, m: (((rows, n), "float32"), ((1, m), "float32")),
        lambda d, x, w: d.fft.convolve(x, w, "same", axes=1),
        _their_fftconvolve,
    ),
    Line("rng", "uniform float32", _FLAT, _one("float32"), lambda d, x: d.rng.uniform(x.shape, seed=1), lambda t, x: t.rand_like(x)),
    Line("rng", "normal float32", _FLAT, _one("float32"), lambda d, x: d.rng.normal(x.shape, seed=1), lambda t, x: t.randn_like(x)),
    Line("rng", "exponential float32", _FLAT, _one("float32"),
         lambda d, x: d.rng.exponential(x.shape, seed=1), lambda t, x: t.empty_like(x).exponential_()),
    Line("rng", "permutation", _FLAT, _one("float32"),
         lambda d, x: d.rng.permutation(x.shape[0], seed=1), lambda t, x: t.randperm(x.shape[0], device=x.device)),
)  # fmt: skip
