"""Matrix products of any rank, with what follows them."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from accel.cpu import costs
from accel.cpu.families import sampling
from accel.cpu.families.blas_matrices import applied
from accel.cpu.families.functions import FUNCTIONS
from accel.cpu.families.precision import pieces, wider
from accel.cpu.views import Array, array
from accel.dtype import DType
from accel.enums import Transpose, UnaryOp
from accel.family import BackendPart, Sample

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from accel.ops.linalg import MatmulMemory

__all__ = ["PART"]

_FLOAT32 = np.dtype(np.float32)
_FLOAT8 = (DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2)
_CONVERTED = frozenset({*_FLOAT8, DType.INT8, DType.INT16, DType.INT32, DType.INT64})
# Sums of products of int8 are whole numbers that float64 holds, and its products are BLAS's.
_COMPUTED: dict[DType, np.dtype[Any]] = {DType.INT8: np.dtype(np.float64), **dict.fromkeys(_FLOAT8, _FLOAT32)}


def _matmul(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    sizes = batch, m, n, k = op.sizes()
    cost = costs.matmul(m, n, k, op.a.dtype.numpy, math.prod(batch))
    if op.bias is not None or op.activation is not None:
        cost += costs.elements(2 * math.prod(batch) * m * n, _FLOAT32)
    lane.stream.submit(partial(_multiply, op, plan.dtype, sizes, op.memory(inputs, outputs)), cost)


@np.errstate(all="ignore")
def _multiply(op: Any, result: DType, sizes: tuple[tuple[int, ...], int, int, int], memory: MatmulMemory) -> None:
    """Compute in pieces, so that converted operands and products stay within the workspace."""
    batch, m, n, k = sizes
    dtype = result.numpy
    wide = _COMPUTED.get(op.a.dtype) or wider(op.a.dtype.numpy)
    x, y = _matrices(memory.a, op.a, op.transpose_a, (1, -1)), _matrices(memory.b, op.b, op.transpose_b, (-1, 1))
    out = array(memory.out, (*batch, m, n), dtype)
    if x.dtype == wide == dtype and op.activation is None and not (memory.bias or memory.aux):  # nothing is converted, nothing follows
        np.matmul(x, y, out=out)
        return
    x, y = np.broadcast_to(x, (*batch, m, k)), np.broadcast_to(y, (*batch, k, n))
    aux = array(memory.aux, out.shape, dtype) if memory.aux else None
    bias = array(memory.bias, (n,), op.bias_type().numpy).astype(wide) if memory.bias else None
    scale = (float(_number(memory.scale_a)) if memory.scale_a else 1.0) * (float(_number(memory.scale_b)) if memory.scale_b else 1.0)
    scale_out = _number(memory.scale_out) if memory.scale_out else None
    most = np.float32(0)
    for index, rows in pieces(batch, m, n, k, wide):
        product = np.matmul(x[index][..., rows, :].astype(wide, copy=False), y[index].astype(wide, copy=False))
        if scale != 1:
            product *= wide.type(scale)
        if bias is not None:
            product += bias
        if aux is not None:
            aux[index][..., rows, :] = product
        if op.activation is not None:
            product = np.maximum(product, wide.type(0)) if op.activation == "relu" else FUNCTIONS[UnaryOp.GELU_TANH](product)
        if memory.amax and product.size:
            most = np.maximum(most, np.abs(product).max())
        if scale_out is not None:
            product *= scale_out
        out[index][..., rows, :] = _stored(product, result) if result in _CONVERTED else product
    if memory.amax:
        _number(memory.amax)[...] = most


def _number(address: int) -> Array:
    return array(address, (), _FLOAT32)


def _matrices(address: int, ref: Any, transpose: Transpose, vector: tuple[int, int]) -> Array:
    """Return what ``op`` makes of an operand, as a view where nothing is conjugated."""
    x = array(address, ref.shape, ref.dtype.numpy)
    if x.ndim == 1:
        return x.reshape(vector)
    return x if transpose is Transpose.NONE else applied(x, transpose)


def _stored(product: Array, result: DType) -> Array:
    """Return products as what the destination's type can hold: float8 has no infinities to overflow to, and integers wrap around."""
    if result not in _FLOAT8:
        return product.astype(np.int64)
    finfo: Any = ml_dtypes.finfo
    most = float(finfo(result.numpy).max)
    return np.clip(product, -most, most)


def _call(options: dict[str, Any], names: tuple[str, ...], linalg: Any, a: Any, b: Any, *more: Any) -> Any:
    return linalg.matmul(a, b, **dict(zip(names, more, strict=True)), **options)


def _sample(a: Array, b: Array, expected: Array, error: float, operands: dict[str, Array] | None = None, **options: Any) -> Sample:
    more = operands or {}
    what = " ".join(f"{name}={value}" for name, value in options.items())
    name = f"matmul {a.dtype}{list(a.shape)} @ {b.dtype}{list(b.shape)} {' '.join(more)} {what}"
    return Sample(name, partial(_call, options, tuple(more)), (a, b, *more.values()), expected, error)


def _gelu(x: Array) -> Array:
    result: Array = x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
    return result


_RANKS = (
    ((7, 3), (3, 5)),
    ((3,), (3, 5)),
    ((4, 3), (3,)),
    ((6,), (6,)),
    ((2, 1, 4, 6), (3, 6, 5)),
    ((5, 2, 3), (3, 4)),
    ((4, 0), (0, 3)),
    ((0, 3), (3, 4)),
)


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    for dtype in (*sampling.ALL_FLOATS, *sampling.COMPLEX):
        for shape_a, shape_b in _RANKS:
            a, b = sampling.random(rng, shape_a, dtype), sampling.random(rng, shape_b, dtype)
            wide_a, wide_b = sampling.wide(a), sampling.wide(b)
            sample = _sample(a, b, np.asarray(wide_a @ wide_b), sampling.sums(dtype, 8))
            # A product of two vectors is one sum, which may be close to 0.
            yield replace(sample, terms=float(np.abs(wide_a).max(initial=0.0) * np.abs(wide_b).max(initial=0.0)))
        a, b = sampling.random(rng, (2, 64, 33), dtype), sampling.random(rng, (17, 64), dtype)
        product = sampling.wide(a).swapaxes(1, 2).conj() @ sampling.wide(b).T
        yield _sample(a, b, product, sampling.sums(dtype, 64), transpose_a="c", transpose_b=True)
        turned = partial(_product_of_views, DType.FLOAT32 if dtype is DType.BFLOAT16 else None)
        yield Sample(
            f"matmul {dtype.value} of views", turned, (a, b), sampling.wide(a).swapaxes(1, 2) @ sampling.wide(b).T, sampling.sums(dtype, 64)
        )
    for dtype in sampling.ALL_FLOATS:
        yield from _fused_samples(rng, dtype)
    for dtype in DType:
        if dtype.is_integer and dtype is not DType.INT8:
            yield from _integer_samples(rng, dtype)
    yield from _small_samples(rng)


def _product_of_views(out_dtype: DType | None, linalg: Any, a: Any, b: Any) -> Any:
    return linalg.matmul(a.transpose((0, 2, 1)), b.T, out_dtype=out_dtype)


def _fused_samples(rng: np.random.Generator, dtype: DType) -> Iterator[Sample]:
    """Yield samples of what follows a product."""
    a, b, bias = (sampling.random(rng, shape, dtype) for shape in ((3, 6, 8), (8, 16), (16,)))
    product, error = sampling.wide(a) @ sampling.wide(b), sampling.sums(dtype, 8)
    biased = product + sampling.wide(bias)
    # An approximate tanh is within 2**-11, which bfloat16 and float16 hardly show.
    gelu_error = error + 2.0**-10
    yield _sample(a, b, biased, error, {"bias": bias})
    yield _sample(a, b, np.maximum(product, 0), error, activation="relu")
    yield _sample(a, b, np.maximum(biased, 0), error, {"bias": bias}, activation="relu")
    holed = a.copy()
    holed[1, 2] = np.nan
    wide = sampling.wide(holed) @ sampling.wide(b) + sampling.wide(bias)
    yield _sample(holed, b, np.maximum(wide, 0), error, {"bias": bias}, activation="relu")
    yield _sample(a, b, _gelu(biased), gelu_error, {"bias": bias}, activation="gelu")
    aux = np.zeros_like(product, dtype.numpy)
    yield _sample(a, b, _gelu(biased), gelu_error, {"bias": bias, "aux": aux}, activation="gelu")
    if dtype.itemsize == 2:
        yield _sample(a, b, product, error, out_dtype=DType.FLOAT32)


def _integer_samples(rng: np.random.Generator, dtype: DType) -> Iterator[Sample]:
    """Yield samples of sums that wrap around."""
    limits = np.iinfo(dtype.numpy)
    for shape_a, shape_b in (((33, 70), (70, 41)), ((2, 1, 3, 5), (3, 5, 4))):
        a, b = (rng.integers(limits.min, limits.max, shape, dtype.numpy, endpoint=True) for shape in (shape_a, shape_b))
        product = (a.astype(np.uint64) @ b.astype(np.uint64)).astype(dtype.numpy)
        yield _sample(a, b, product, 0.0)
        turned = np.ascontiguousarray(a.swapaxes(-1, -2)), np.ascontiguousarray(b.swapaxes(-1, -2))
        yield _sample(*turned, product, 0.0, transpose_a=True, transpose_b=True)


def _small_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Yield samples of int8 and float8, whose columns and sums are multiples of 16."""
    a, b = sampling.random(rng, (5, 32), DType.INT8), sampling.random(rng, (16, 32), DType.INT8)
    yield _sample(a, b, sampling.wide(a) @ sampling.wide(b).T, 0.0, transpose_b=True)
    half, quarter = np.asarray(0.5, np.float32), np.asarray([0.25], np.float32)
    for left, right in ((DType.FLOAT8_E4M3FN,) * 2, (DType.FLOAT8_E5M2, DType.FLOAT8_E4M3FN)):
        a, b = sampling.random(rng, (16, 32), left), sampling.random(rng, (48, 32), right)
        bias = sampling.random(rng, 48, DType.BFLOAT16)
        scaled = sampling.wide(a) @ sampling.wide(b).T / 8
        # Tensor cores keep 13 bits of sums of float8.
        error = 2.0**-10
        scales = {"scale_a": half, "scale_b": quarter}
        yield _sample(a, b, 8 * scaled, error, transpose_b=True)
        yield _sample(a, b, scaled, error, scales, transpose_b=True, out_dtype=DType.FLOAT32)
        biased = np.maximum(scaled + sampling.wide(bias), 0)
        yield _sample(a, b, biased, error, {**scales, "bias": bias}, transpose_b=True, activation="relu")
        # What is rounded to float8 may be off by a little that makes it another number of float8.
        yield _sample(
            a, b, scaled / 2, error + 2.0**-6, {**scales, "scale_out": half}, transpose_b=True, out_dtype=left if left is right else right
        )


PART = BackendPart({"matmul": _matmul}, samples=_samples)
