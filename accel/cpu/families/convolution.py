"""Convolutions on the CPU, and their samples."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu import costs
from accel.cpu.families import sampling
from accel.cpu.families.precision import WORKSPACE, blocks, wider
from accel.cpu.kernels import kernel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from accel.backend import Kernel
    from accel.cpu.views import Array
    from accel.dtype import DType
    from accel.family import Sample

__all__ = ["KERNELS", "Borders", "channels_first", "cost", "expected_convolution", "forms", "samples"]

Borders = tuple[tuple[int, int], ...]


def cost(op: Any, operands: list[Array], results: list[Array]) -> float:
    """Return the cost of a convolution, or of one of its gradients."""
    (_, w_shape, y_shape), dtype = op.sizes(), op.dtype().numpy
    return costs.convolution(y_shape[0] * math.prod(y_shape[2:]), y_shape[1], math.prod(w_shape[1:]), dtype)


def channels_first(op: Any, *arrays: Array) -> list[Array]:
    """Return arrays with the channels at axis 1, wherever they are in memory."""
    return [np.moveaxis(each, -1, 1) if op.channels_last else each for each in arrays]


def _convolve(op: Any, operands: list[Array], results: list[Array]) -> None:
    """Compute a cross-correlation of any number of dimensions: (N, C, ...) with (K, C / groups, ...) to (N, K, ...). There may be no channels."""
    x, w, out = channels_first(op, *operands[:2], results[0])
    bias = operands[2] if len(operands) > 2 else None
    channels, filters = w.shape[1], w.shape[0] // op.groups
    form = op.stride, op.padding, op.dilation
    for group in range(op.groups):
        own, made = slice(group * channels, (group + 1) * channels), slice(group * filters, (group + 1) * filters)
        _convolved(x[:, own], w[made], out[:, made], *form, None if bias is None else bias[made], op.activation == "relu")


KERNELS: Mapping[str, Kernel] = dict.fromkeys(
    ("conv1d", "conv2d", "conv3d"), kernel(_convolve, lambda op, *arrays: op.groups * 4e-6 + cost(op, *arrays))
)


def _convolved(
    x: Array, w: Array, out: Array, stride: Sequence[int], borders: Borders, dilation: Sequence[int], bias: Array | None, is_rectified: bool
) -> None:
    """Compute one group as matrix products with the windows of the padded images laid out as columns.

    Images are done in blocks, and the rows of a large one in bands, so that the columns stay within the workspace.
    """
    count, filters, rows, *others = out.shape
    window, wide = w.shape[2:], wider(out.dtype)
    weights = w.reshape(filters, -1).astype(wide, copy=False)
    shift = None if bias is None else bias.astype(wide).reshape(-1, *(1,) * (out.ndim - 2))
    padded = [length + sum(border) for length, border in zip(x.shape[2:], borders, strict=True)]
    padded_size = x.shape[1] * math.prod(padded)
    per_row = weights.shape[1] * math.prod(others)
    # Padding that is nearly all there is would take more memory than the image and the result together.
    is_made = padded_size <= max(16 * math.prod(x.shape[1:]), WORKSPACE // wide.itemsize)
    for some in blocks(count, (padded_size * is_made + per_row * rows) * wide.itemsize):
        windows = _windows(_padded(x[some], borders, wide), window, stride, dilation) if is_made else None
        for band in blocks(rows, (some.stop - some.start) * per_row * wide.itemsize):
            if windows is None:
                tiles = _gathered(x[some], window, out.shape[2:], stride, borders, dilation, band)
            else:
                tiles = windows[(slice(None),) * (2 + len(window)) + (band,)]
            patches = tiles.reshape(some.stop - some.start, weights.shape[1], math.prod(tiles.shape[2 + len(window) :])).astype(
                wide, copy=False
            )
            part = out[some, :, band]
            result = np.matmul(weights, patches).reshape(part.shape)
            if shift is not None:
                result += shift
            part[...] = np.maximum(result, 0, out=result) if is_rectified else result


def _padded(x: Array, borders: Borders, dtype: np.dtype[Any]) -> Array:
    if not any(before or after for before, after in borders):
        return x.astype(dtype, copy=False)
    shape = [length + sum(border) for length, border in zip(x.shape[2:], borders, strict=True)]
    result = np.zeros((*x.shape[:2], *shape), dtype)
    inner = tuple([slice(before, before + length) for length, (before, _) in zip(x.shape[2:], borders, strict=True)])
    result[:, :, *inner] = x
    return result


def _windows(x: Array, window: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Array:
    """Return the windows of x as a view ``[count, channels, *window, *output]``."""
    rank = len(window)
    reach = [(length - 1) * step + 1 for length, step in zip(window, dilation, strict=True)]
    view = np.lib.stride_tricks.sliding_window_view(x, reach, axis=tuple(range(2, 2 + rank)))
    view = view[:, :, *(slice(None, None, step) for step in (*stride, *dilation))]
    return view.transpose(0, 1, *range(2 + rank, 2 + 2 * rank), *range(2, 2 + rank))


def _gathered(
    x: Array,
    window: Sequence[int],
    output: Sequence[int],
    stride: Sequence[int],
    borders: Borders,
    dilation: Sequence[int],
    band: slice,
) -> Array:
    """Return the windows of some rows of the output, as :func:`_windows` does, without padding anything."""
    rank = len(window)
    places, inside = [], np.ones((1,) * (2 * rank), bool)
    for axis in range(rank):
        along = np.arange(band.start, band.stop) if axis == 0 else np.arange(output[axis])
        place = np.arange(window[axis])[:, None] * dilation[axis] + along * stride[axis] - borders[axis][0]
        shape = [1] * (2 * rank)
        shape[axis], shape[rank + axis] = place.shape
        place = place.reshape(shape)
        inside = inside & (place >= 0) & (place < x.shape[2 + axis])
        places.append(np.clip(place, 0, max(0, x.shape[2 + axis] - 1)))
    if not inside.any():
        return np.zeros((*x.shape[:2], *inside.shape), x.dtype)
    found: Array = x[:, :, *places]
    found[:, :, ~inside] = 0
    return found


def expected_convolution(
    x: Array, w: Array, bias: Array | None, stride: Sequence[int], borders: Borders, dilation: Sequence[int], groups: int
) -> Array:
    """Return a convolution in the operands' precision: a sum over the elements of the filter."""
    padded = np.pad(x, ((0, 0), (0, 0), *borders))
    reach = [(length - 1) * step + 1 for length, step in zip(w.shape[2:], dilation, strict=True)]
    sizes = [(whole - far) // step + 1 for whole, far, step in zip(padded.shape[2:], reach, stride, strict=True)]
    x_groups, w_groups = np.split(padded, groups, axis=1), np.split(w, groups)
    results = []
    for some, filters in zip(x_groups, w_groups, strict=True):
        total = np.zeros((x.shape[0], filters.shape[0], *sizes), x.dtype)
        for place in np.ndindex(*w.shape[2:]):
            begins = [index * step for index, step in zip(place, dilation, strict=True)]
            part = some[:, :, *(slice(b, b + (n - 1) * s + 1, s) for b, n, s in zip(begins, sizes, stride, strict=True))]
            total += np.einsum("nc...,kc->nk...", part, filters[:, :, *place])
        results.append(total)
    result: Array = np.concatenate(results, axis=1)
    return result if bias is None else result + bias.reshape(-1, *(1,) * len(sizes))


# Shapes of input and filter, and options.
_FORMS: tuple[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]], ...] = (
    ((2, 3, 9, 8), (4, 3, 3, 2), {}),
    ((2, 3, 9, 8), (4, 3, 3, 2), {"stride": (2, 1), "padding": (1, 2)}),
    ((2, 8, 9, 8), (16, 4, 3, 3), {"groups": 2, "padding": ((0, 1), (2, 1)), "has_bias": True}),
    ((1, 6, 9, 7), (6, 1, 3, 2), {"groups": 6, "dilation": (2, 3), "padding": 2}),
    ((2, 4, 23), (5, 4, 5), {"stride": 2, "padding": ((3, 1),), "dilation": 2, "has_bias": True, "activation": "relu"}),
    ((2, 4, 5, 6, 7), (6, 2, 2, 3, 3), {"groups": 2, "padding": (0, 1, (1, 0)), "stride": (1, 2, 1), "activation": "relu"}),
)


def samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Yield samples of all convolutions."""
    for dtype in sampling.ALL_FLOATS:
        for number, (x_shape, w_shape, options) in enumerate(_FORMS):
            # Each form is one order of the channels in memory for one dtype, the other for the next.
            is_last = bool((number + len(dtype.value)) % 2)
            yield _sample(rng, dtype, x_shape, w_shape, dict(options), is_last)


def _sample(
    rng: np.random.Generator, dtype: DType, x_shape: tuple[int, ...], w_shape: tuple[int, ...], options: dict[str, Any], is_last: bool
) -> Sample:
    kind, has_bias = f"conv{len(x_shape) - 2}d", options.pop("has_bias", False)
    x, w = sampling.random(rng, x_shape, dtype), sampling.random(rng, w_shape, dtype)
    bias = sampling.random(rng, w_shape[:1], dtype)
    steps = forms(options, len(x_shape) - 2)
    expected = expected_convolution(sampling.wide(x), sampling.wide(w), sampling.wide(bias) if has_bias else None, *steps)
    if options.get("activation"):
        expected = np.maximum(expected, 0)
    if is_last:
        x, w, expected = (np.ascontiguousarray(np.moveaxis(each, 1, -1)) for each in (x, w, expected))
    words = " ".join(f"{name}={value}" for name, value in {**options, "last": is_last, "bias": has_bias}.items() if value)
    operands, error = (x, w, bias)[: 2 + has_bias], sampling.sums(dtype, math.prod(w_shape[1:]))
    names = ("bias",)[: int(has_bias)]
    return sampling.sample(kind, f"{dtype.value} {words}", operands, expected, error, names=names, channels_last=is_last, **options)


def forms(options: dict[str, Any], rank: int) -> tuple[tuple[int, ...], Borders, tuple[int, ...], int]:
    """Return strides, borders, dilations and groups of options of a convolution."""

    def each(value: Any) -> tuple[Any, ...]:
        return value if isinstance(value, tuple) else (value,) * rank

    borders = tuple([pair if isinstance(pair, tuple) else (pair, pair) for pair in each(options.get("padding", 0))])
    return each(options.get("stride", 1)), borders, each(options.get("dilation", 1)), options.get("groups", 1)
