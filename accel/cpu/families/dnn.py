"""Convolution and attention."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu.families import sampling
from accel.cpu.families.precision import WORKSPACE, blocks, wider
from accel.cpu.views import Array, array
from accel.family import BackendPart, Sample

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accel.compute import Causal

__all__ = ["PART", "attention", "convolution"]


@np.errstate(all="ignore")
def convolution(
    image: int,
    image_shape: tuple[int, ...],
    filters: int,
    filter_shape: tuple[int, ...],
    output: int,
    output_size: tuple[int, int],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dtype: np.dtype[Any],
) -> None:
    """Compute a 2-d cross-correlation as matrix products with the windows of the padded images laid out as columns.

    Images are done in groups, and the rows of a large one in bands, so that the columns stay within the workspace. There may be no channels.
    """
    count, channels, height, width = image_shape
    kernels, _, *window = filter_shape
    rows, columns = output_size
    out = array(output, (count, kernels, rows, columns), dtype)
    if channels == 0:
        out[...] = 0
        return
    wide = wider(dtype)
    x = array(image, image_shape, dtype)
    weights = array(filters, (kernels, channels * window[0] * window[1]), dtype).astype(wide, copy=False)
    padded_size = channels * (height + 2 * padding[0]) * (width + 2 * padding[1])
    per_row = channels * window[0] * window[1] * columns
    # Padding that is nearly all there is would take more memory than the image and the result together.
    is_made = padded_size <= max(16 * channels * height * width, WORKSPACE // wide.itemsize)
    for group in blocks(count, (padded_size * is_made + per_row * rows) * wide.itemsize):
        windows = _windows(_padded(x[group], padding, wide), window, stride) if is_made else None
        for band in blocks(rows, (group.stop - group.start) * per_row * wide.itemsize):
            part = out[group, :, band]
            tiles = _gathered(x[group], window, stride, padding, band, columns) if windows is None else windows[..., band, :]
            patches = tiles.reshape(group.stop - group.start, weights.shape[1], -1).astype(wide, copy=False)
            if wide is dtype:
                # A view: the rows of a band follow each other.
                np.matmul(weights, patches, out=part.reshape(patches.shape[0], kernels, -1))
            else:
                part[...] = np.matmul(weights, patches).reshape(part.shape)


def _padded(x: Array, padding: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    vertical, horizontal = padding
    if vertical == horizontal == 0:
        return x.astype(dtype, copy=False)
    count, channels, height, width = x.shape
    result = np.zeros((count, channels, height + 2 * vertical, width + 2 * horizontal), dtype)
    result[:, :, vertical : vertical + height, horizontal : horizontal + width] = x
    return result


def _windows(x: Array, window: list[int], stride: tuple[int, ...]) -> Array:
    """Return the windows of x as a view ``[count, channels, window rows, window columns, output rows, output columns]``."""
    view = np.lib.stride_tricks.sliding_window_view(x, window, axis=(2, 3))[:, :, :: stride[0], :: stride[1]]
    return view.transpose(0, 1, 4, 5, 2, 3)


def _gathered(x: Array, window: list[int], stride: tuple[int, ...], padding: tuple[int, ...], band: slice, columns: int) -> Array:
    """Return the windows of some rows of the output, as :func:`_windows` does, without padding anything."""
    count, channels, height, width = x.shape
    row = np.arange(window[0])[:, None] + np.arange(band.start, band.stop) * stride[0] - padding[0]
    column = np.arange(window[1])[:, None] + np.arange(columns) * stride[1] - padding[1]
    row, column = row[:, None, :, None], column[None, :, None, :]
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    if not inside.any():
        return np.zeros((count, channels, *inside.shape), x.dtype)
    found = x[:, :, np.clip(row, 0, height - 1), np.clip(column, 0, width - 1)]
    found[:, :, ~inside] = 0
    return found


@np.errstate(all="ignore")
def attention(
    q: int, k: int, v: int, o: int, groups: int, seq_q: int, seq_kv: int, head_dim: int, scale: float, first: int, dtype: np.dtype[Any]
) -> None:
    """Compute ``softmax(scale * Q K^T) V`` for ``groups`` heads; query i sees the first ``first + i`` keys, or all keys where there are fewer.

    Heads are done together while their scores fit the workspace, and the queries of one head in blocks otherwise.
    """
    out = array(o, (groups, seq_q, head_dim), dtype)
    blind = min(seq_q, max(0, 1 - first)) if seq_kv else seq_q
    out[:, :blind] = 0
    if blind == seq_q:
        return
    wide = wider(dtype)
    queries = array(q, (groups, seq_q, head_dim), dtype)
    keys, values = array(k, (groups, seq_kv, head_dim), dtype), array(v, (groups, seq_kv, head_dim), dtype)
    row = seq_kv * wide.itemsize
    for heads in blocks(groups, row * (seq_q + 2 * head_dim)):
        key, value = keys[heads].astype(wide, copy=False), values[heads].astype(wide, copy=False)
        # A weight of 0 does not hide a NaN or an infinity in the value of a key that is not seen, so no query shares a product with such a key.
        together = first >= seq_kv or bool(np.isfinite(value).all())
        workspace = WORKSPACE if together else 1
        for block in blocks(seq_q - blind, (heads.stop - heads.start) * row, workspace):
            start, stop = block.start + blind, block.stop + blind
            query = queries[heads, start:stop].astype(wide) * wide.type(scale)
            seen = min(seq_kv, first + stop - 1)
            out[heads, start:stop] = _attend(query, key[:, :seen], value[:, :seen], first + start)


def _attend(query: Array, key: Array, value: Array, first: int) -> Array:
    scores = np.matmul(query, key.swapaxes(1, 2))
    count, seen = scores.shape[1:]
    if first < seen:
        hidden = np.arange(first, seen) >= first + np.arange(count)[:, None]
        np.copyto(scores[:, :, first:], -np.inf, where=hidden)
    scores -= scores.max(axis=2, keepdims=True)
    np.exp(scores, out=scores)
    total = scores.sum(axis=2, keepdims=True)
    result: Array = np.matmul(scores, value)
    result /= total
    return result


def _convolved(x: Array, w: Array, stride: tuple[int, int], padding: tuple[int, int]) -> Array:
    padded = np.pad(x, ((0, 0), (0, 0), (padding[0],) * 2, (padding[1],) * 2))
    windows = np.lib.stride_tricks.sliding_window_view(padded, w.shape[2:], (2, 3))[:, :, :: stride[0], :: stride[1]]
    result: Array = np.einsum("nchwrs,kcrs->nkhw", windows, w)
    return result


def _attended(q: Array, k: Array, v: Array, causal: Causal) -> Array:
    scores = q @ k.swapaxes(2, 3) / np.sqrt(q.shape[3])
    queries, keys = np.arange(q.shape[2])[:, None], np.arange(k.shape[2])
    shift = k.shape[2] - q.shape[2] if causal == "bottom_right" else 0
    if causal is not False:
        scores = np.where(keys <= queries + shift, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=3, keepdims=True))
    result: Array = weights / weights.sum(axis=3, keepdims=True) @ v
    return result


def _call_conv2d(stride: Any, padding: Any, dnn: Any, x: Any, w: Any) -> Any:
    return dnn.conv2d(x, w, stride=stride, padding=padding)


def _call_attention(causal: Causal, dnn: Any, q: Any, k: Any, v: Any) -> Any:
    return dnn.attention(q, k, v, causal=causal)


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    for dtype in sampling.ALL_FLOATS:
        for stride, padding in (((1, 1), (0, 0)), ((2, 1), (1, 2))):
            x, w = sampling.random(rng, (2, 3, 9, 8), dtype), sampling.random(rng, (4, 3, 3, 2), dtype)
            expected = _convolved(sampling.wide(x), sampling.wide(w), stride, padding)
            yield Sample(
                f"conv2d {dtype.value} stride={stride} padding={padding}",
                partial(_call_conv2d, stride, padding),
                (x, w),
                expected,
                sampling.sums(dtype, 18),
            )
        causals: tuple[Causal, ...] = (False, True, "bottom_right")
        for causal in causals:
            q = sampling.random(rng, (2, 3, 5, 8), dtype)
            k, v = sampling.random(rng, (2, 3, 7, 8), dtype), sampling.random(rng, (2, 3, 7, 8), dtype)
            expected = _attended(sampling.wide(q), sampling.wide(k), sampling.wide(v), causal)
            # The weights may be rounded to the operands' type before the second product.
            error = sampling.sums(dtype, 16) + 2 * sampling.rounding(dtype)
            yield Sample(f"attention {dtype.value} causal={causal}", partial(_call_attention, causal), (q, k, v), expected, error)


PART = BackendPart({}, samples=_samples)
