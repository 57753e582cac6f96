"""Convolution and attention of a compute interface."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import numpy as np

from accel.testing.conformance.harness import rounding, sum_rounding, wide

if TYPE_CHECKING:
    from accel.compute import ComputeBackend
    from accel.dtype import DType
    from accel.enums import Causal
    from accel.testing.conformance.harness import Array, Case, Harness

__all__ = [
    "check_attention_is_stable",
    "check_attention_of_nothing",
    "check_attention_propagates_nan",
    "check_attention_values",
    "check_conv2d_of_nothing",
    "check_conv2d_propagates_nan",
    "check_conv2d_values",
]

# N, C, H, W; K, R, S; stride; padding
_CONVOLUTIONS = (
    ((1, 1, 1, 1), (1, 1, 1), (1, 1), (0, 0)),
    ((2, 3, 8, 9), (4, 3, 3), (1, 1), (1, 1)),
    ((2, 3, 8, 9), (4, 3, 3), (1, 1), (0, 0)),
    ((3, 2, 11, 7), (5, 3, 2), (2, 3), (1, 0)),
    ((1, 4, 5, 5), (3, 1, 1), (1, 1), (0, 0)),
    ((2, 4, 6, 6), (3, 1, 1), (2, 2), (0, 1)),
    ((1, 2, 3, 4), (2, 5, 6), (1, 2), (2, 3)),
    ((2, 1, 6, 5), (2, 6, 5), (4, 4), (0, 0)),
    ((4, 8, 32, 32), (16, 3, 3), (1, 1), (1, 1)),
)
_CAUSAL: tuple[Causal, ...] = (False, True, "bottom_right")
# batch, heads, queries, keys, head dimension
_ATTENTIONS = ((1, 1, 1, 1, 8), (2, 3, 5, 5, 8), (1, 2, 7, 3, 16), (2, 1, 3, 9, 16), (1, 4, 65, 130, 64))


def _dtypes(compute: ComputeBackend, call: str) -> list[DType]:
    return sorted(compute.capabilities().get(call, ()), key=lambda dtype: dtype.value)


def _cross_correlation(x: Array, w: Array, stride: tuple[int, int], padding: tuple[int, int]) -> Array:
    """Return the convolution in the operands' precision: one tap of the filter at a time."""
    x = np.pad(x, ((0, 0), (0, 0), (padding[0],) * 2, (padding[1],) * 2))
    rows = (x.shape[2] - w.shape[2]) // stride[0] + 1
    columns = (x.shape[3] - w.shape[3]) // stride[1] + 1
    out = np.zeros((x.shape[0], w.shape[0], rows, columns))
    for r, s in itertools.product(range(w.shape[2]), range(w.shape[3])):
        tap = x[:, :, r : r + rows * stride[0] : stride[0], s : s + columns * stride[1] : stride[1]][:, :, :rows, :columns]
        out += np.einsum("nchw,kc->nkhw", tap, w[:, :, r, s])
    return out


def _check_convolution(case: Case, x: Array, w: Array, stride: tuple[int, int], padding: tuple[int, int], dtype: DType) -> None:
    expected = _cross_correlation(wide(x), wide(w), stride, padding)
    magnitude = _cross_correlation(np.abs(wide(x)), np.abs(wide(w)), stride, padding)
    image, filters, out = case.put(x), case.put(w), case.poisoned(expected.shape, dtype)
    case.compute.conv2d_forward(image, x.shape, filters, w.shape, out, expected.shape, stride, padding, dtype=dtype)
    terms = math.prod(w.shape[1:]) + 8
    case.close_to(case.get(out, expected.shape, dtype), expected, terms * sum_rounding(dtype) * magnitude)
    case.same(case.get(image, x.shape, dtype), x, "the input")
    case.same(case.get(filters, w.shape, dtype), w, "the filter")


async def check_conv2d_values(harness: Harness) -> None:
    """Check every dtype; strides and paddings that differ by direction, filters of one pixel, of all pixels, and larger than the image."""
    with harness.open_compute() as compute:
        for dtype, (image, (kernels, rows, columns), stride, padding) in itertools.product(
            _dtypes(compute, "conv2d_forward"), _CONVOLUTIONS
        ):
            with harness.case(compute, f"conv2d {dtype.value} {image} {(kernels, rows, columns)} {stride=} {padding=}") as case:
                x, w = harness.random(image, dtype), harness.random((kernels, image[1], rows, columns), dtype)
                _check_convolution(case, x, w, stride, padding, dtype)


async def check_conv2d_of_nothing(harness: Harness) -> None:
    """Check that no images and no filters give nothing, and that no channels give zeros."""
    with harness.open_compute() as compute:
        for dtype in _dtypes(compute, "conv2d_forward"):
            for image, kernels in (((0, 2, 4, 4), 3), ((2, 2, 4, 4), 0), ((2, 0, 4, 4), 3)):
                with harness.case(compute, f"conv2d {dtype.value} {image} of {kernels} filters") as case:
                    x, w = harness.random(image, dtype), harness.random((kernels, image[1], 3, 3), dtype)
                    _check_convolution(case, x, w, (1, 1), (1, 1), dtype)


async def check_conv2d_propagates_nan(harness: Harness) -> None:
    """Check that a NaN in the image spoils the outputs whose window holds it."""
    with harness.open_compute() as compute:
        for dtype in _dtypes(compute, "conv2d_forward"):
            with harness.case(compute, f"conv2d {dtype.value} of NaN") as case:
                x, w = harness.random((1, 2, 9, 9), dtype), harness.random((3, 2, 3, 3), dtype)
                x[0, 1, 4, 4] = np.nan
                out = case.poisoned((1, 3, 7, 7), dtype)
                compute.conv2d_forward(case.put(x), x.shape, case.put(w), w.shape, out, (1, 3, 7, 7), (1, 1), (0, 0), dtype=dtype)
                got = np.isnan(wide(case.get(out, (1, 3, 7, 7), dtype)))
                case.require(bool(got[:, :, 2:5, 2:5].all()), "a window with the NaN lost it")
                case.require(not got[:, :, (0, 6)].any(), "the NaN spread to windows without it")


def _visible(seq_q: int, seq_kv: int, causal: Causal) -> Array:
    queries, keys = np.arange(seq_q)[:, None], np.arange(seq_kv)[None, :]
    if causal is False:
        return np.ones((seq_q, seq_kv), bool)
    result: Array = keys <= queries + (seq_kv - seq_q if causal == "bottom_right" else 0)
    return result


def _softmax_of(q: Array, k: Array, v: Array, scale: float, causal: Causal) -> Array:
    """Return attention in the operands' precision, query by query, over the keys it sees alone."""
    out = np.zeros_like(q)
    for (i, sees), head in itertools.product(enumerate(_visible(q.shape[2], k.shape[2], causal)), np.ndindex(*q.shape[:2])):
        if sees.any():
            scores = scale * (k[head][sees] @ q[head][i])
            weights = np.exp(scores - scores.max())
            out[head][i] = weights @ v[head][sees] / weights.sum()
    return out


def _check_attention(case: Case, q: Array, k: Array, v: Array, scale: float, causal: Causal, dtype: DType) -> None:
    batch, heads, seq_q, dim = q.shape
    out = case.poisoned(q.shape, dtype)
    pointers = (case.put(q), case.put(k), case.put(v))
    case.compute.attention(*pointers, out, batch, heads, seq_q, k.shape[2], dim, scale, causal, dtype=dtype)
    expected = _softmax_of(wide(q), wide(k), wide(v), scale, causal)
    got = case.get(out, q.shape, dtype)
    # Scores are sums, whose error the exponential makes relative; fused kernels round the weights to the operands' type.
    finite = [np.nan_to_num(wide(x), nan=0.0, posinf=0.0, neginf=0.0) for x in (q, k, v)]
    largest = [float(np.abs(x).max(initial=0.0)) for x in finite]
    scores = abs(scale) * dim * largest[0] * largest[1]
    error = (2 * rounding(dtype) + (8 * scores + k.shape[2] + 16) * sum_rounding(dtype)) * largest[2]
    case.close_to(got, expected, error)
    hidden = ~_visible(seq_q, k.shape[2], causal).any(axis=1)
    case.require(bool((wide(got[:, :, hidden]) == 0).all()), "a query that sees no key did not give zeros")


async def check_attention_values(harness: Harness) -> None:
    """Check every dtype and causal form, with as many, more and fewer queries than keys."""
    with harness.open_compute() as compute:
        for dtype, sizes, causal in itertools.product(_dtypes(compute, "attention"), _ATTENTIONS, _CAUSAL):
            batch, heads, seq_q, seq_kv, dim = sizes
            with harness.case(compute, f"attention {dtype.value} {sizes} {causal=}") as case:
                q = harness.random((batch, heads, seq_q, dim), dtype)
                k, v = (harness.random((batch, heads, seq_kv, dim), dtype) for _ in range(2))
                _check_attention(case, q, k, v, dim**-0.5, causal, dtype)


async def check_attention_is_stable(harness: Harness) -> None:
    """Check scores in the thousands, whose exponentials no type holds."""
    with harness.open_compute() as compute:
        for dtype, causal in itertools.product(_dtypes(compute, "attention"), _CAUSAL):
            with harness.case(compute, f"attention {dtype.value} of large scores {causal=}") as case:
                q = np.full((1, 2, 6, 16), 16.0, dtype.numpy)
                # Powers of two, so that scores are exact and far apart.
                k = (16.0 * np.arange(1, 7)[None, None, :, None] * np.ones((1, 2, 6, 16))).astype(dtype.numpy)
                _check_attention(case, q, k, harness.random((1, 2, 6, 16), dtype), 0.25, causal, dtype)


async def check_attention_of_nothing(harness: Harness) -> None:
    """Check that no queries give nothing, and no keys zeros."""
    with harness.open_compute() as compute:
        for dtype, causal in itertools.product(_dtypes(compute, "attention"), _CAUSAL):
            for sizes in ((0, 2, 3, 3, 8), (2, 0, 3, 3, 8), (1, 2, 0, 3, 8), (1, 2, 3, 0, 8)):
                with harness.case(compute, f"attention {dtype.value} {sizes} {causal=}") as case:
                    batch, heads, seq_q, seq_kv, dim = sizes
                    q = harness.random((batch, heads, seq_q, dim), dtype)
                    k, v = (harness.random((batch, heads, seq_kv, dim), dtype) for _ in range(2))
                    _check_attention(case, q, k, v, 1.0, causal, dtype)


async def check_attention_propagates_nan(harness: Harness) -> None:
    """Check that a NaN in one query spoils that query's row alone; one in a key or value spoils what sees it."""
    with harness.open_compute() as compute:
        for dtype, name in itertools.product(_dtypes(compute, "attention"), "qkv"):
            with harness.case(compute, f"attention {dtype.value} of NaN in {name}") as case:
                arrays = {each: harness.random((1, 1, 6, 8), dtype) for each in "qkv"}
                arrays[name][0, 0, 2, 3] = np.nan
                out = case.poisoned((1, 1, 6, 8), dtype)
                q, k, v = (case.put(x) for x in arrays.values())
                compute.attention(q, k, v, out, 1, 1, 6, 6, 8, 0.5, False, dtype=dtype)
                got = np.isnan(wide(case.get(out, (6, 8), dtype)))
                spoiled = {"q": got[2].all(), "k": got.all(), "v": got[:, 3].all()}[name]
                case.require(bool(spoiled), "the NaN was lost")
                clean = {"q": np.delete(got, 2, axis=0), "k": got[:0], "v": np.delete(got, 3, axis=1)}[name]
                case.require(not clean.any(), "the NaN spread")
