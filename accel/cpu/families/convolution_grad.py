"""Gradients of convolutions on the CPU, and their samples: a matrix product for each element of the filter, over the pixels that it meets."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu.families import sampling
from accel.cpu.families.convolution import Borders, channels_first, cost, expected_convolution, forms
from accel.cpu.families.precision import blocks, wider
from accel.cpu.kernels import kernel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from accel.backend import Kernel
    from accel.cpu.views import Array
    from accel.dtype import DType
    from accel.family import Sample

__all__ = ["KERNELS", "samples"]


def _met(
    place: Sequence[int], size: Sequence[int], count: Sequence[int], stride: Sequence[int], borders: Borders, dilation: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return the pixels that one element of the filter meets, and the results it meets them for; ``None`` if it meets padding alone."""
    pixels, results = [], []
    for at, length, most, step, (before, _), apart in zip(place, size, count, stride, borders, dilation, strict=True):
        off = at * apart - before
        first, last = max(0, -(off // step)), min(most, (length - 1 - off) // step + 1)
        if first >= last:
            return None
        begin = first * step + off
        pixels.append(slice(begin, begin + (last - first - 1) * step + 1, step))
        results.append(slice(first, last))
    return tuple(pixels), tuple(results)


def _of_input(op: Any, operands: list[Array], results: list[Array]) -> None:
    """Compute the gradient of the input, (N, C, ...), of that of the result, (N, K, ...), and the filter, (K, C / groups, ...)."""
    grad, w, out = channels_first(op, *operands, *results)
    wide, channels, filters = wider(out.dtype), w.shape[1], w.shape[0] // op.groups
    form = op.stride, op.padding, op.dilation
    for group in range(op.groups):
        own, made = slice(group * channels, (group + 1) * channels), slice(group * filters, (group + 1) * filters)
        weights = w[made].astype(wide, copy=False)
        for some in blocks(len(out), (channels * math.prod(out.shape[2:]) + filters * math.prod(grad.shape[2:])) * wide.itemsize):
            part, total = grad[some, made].astype(wide, copy=False), np.zeros((some.stop - some.start, channels, *out.shape[2:]), wide)
            for place in np.ndindex(*w.shape[2:]):
                met = _met(place, out.shape[2:], grad.shape[2:], *form)
                if met is None or not filters:
                    continue
                (pixels, within), factors = met, weights[:, :, *place].T
                values = part[:, :, *within]
                product = np.matmul(factors, values.reshape(len(values), filters, -1))
                total[:, :, *pixels] += product.reshape(len(values), channels, *values.shape[2:])
            out[some, own] = total


def _of_filter(op: Any, operands: list[Array], results: list[Array]) -> None:
    """Compute the gradient of the filter, (K, C / groups, ...), of the input, (N, C, ...), and that of the result, (N, K, ...)."""
    x, grad, out = channels_first(op, *operands, *results)
    wide, channels, filters = wider(out.dtype), out.shape[1], out.shape[0] // op.groups
    total, form = np.zeros(out.shape, wide), (op.stride, op.padding, op.dilation)
    for group in range(op.groups):
        own, made = slice(group * channels, (group + 1) * channels), slice(group * filters, (group + 1) * filters)
        for some in blocks(len(x), (channels * math.prod(x.shape[2:]) + filters * math.prod(grad.shape[2:])) * wide.itemsize):
            image, part = (each.astype(wide, copy=False) for each in (x[some, own], grad[some, made]))
            for place in np.ndindex(*out.shape[2:]):
                met = _met(place, x.shape[2:], grad.shape[2:], *form)
                if met is not None:
                    pixels, within = met
                    axes = (0, *range(2, x.ndim))
                    total[made, :, *place] += np.tensordot(part[:, :, *within], image[:, :, *pixels], (axes, axes))
    out[...] = total


def _cost(op: Any, operands: list[Array], results: list[Array]) -> float:
    products: int = op.groups * math.prod(op.sizes()[1][2:])
    return products * 10e-6 + cost(op, operands, results)


KERNELS: Mapping[str, Kernel] = {
    **{f"conv{rank}d_input_grad": kernel(_of_input, _cost) for rank in (1, 2, 3)},
    **{f"conv{rank}d_filter_grad": kernel(_of_filter, _cost) for rank in (1, 2, 3)},
}


def _adjoint(
    grad: Array, x: Array, w: Array, stride: Sequence[int], borders: Borders, dilation: Sequence[int], groups: int
) -> tuple[Array, Array]:
    """Return the gradients of input and filter: results are sums of theirs, times the convolution of arrays that are 1 at one place and 0 elsewhere."""
    (count, _, *size), (filters, each, *window) = x.shape, w.shape
    share = filters // groups
    ones = np.eye(each * math.prod(size), dtype=x.dtype).reshape(-1, each, *size)
    of_places = np.eye(each * math.prod(window), dtype=x.dtype).reshape(-1, each, *window)
    of_input, of_filter = np.zeros(x.shape, x.dtype), np.zeros(w.shape, w.dtype)
    for group in range(groups):
        own, made = slice(group * each, (group + 1) * each), slice(group * share, (group + 1) * share)
        moved = expected_convolution(ones, w[made], None, stride, borders, dilation, 1)
        of_input[:, own] = (grad[:, made].reshape(count, -1) @ moved.reshape(len(ones), -1).T).reshape(count, each, *size)
        seen = np.moveaxis(expected_convolution(x[:, own], of_places, None, stride, borders, dilation, 1), 1, 0)
        results = np.moveaxis(grad[:, made], 1, 0).reshape(share, -1)
        of_filter[made] = (results @ seen.reshape(len(of_places), -1).T).reshape(share, each, *window)
    return of_input, of_filter


# Shapes of input and filter, and options.
_FORMS: tuple[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]], ...] = (
    ((2, 3, 7, 6), (4, 3, 3, 2), {}),
    ((2, 3, 8, 7), (4, 3, 3, 2), {"stride": (2, 3), "padding": (1, 2)}),
    ((2, 8, 6, 5), (16, 4, 3, 3), {"groups": 2, "padding": 1}),
    ((1, 4, 6, 7), (6, 2, 3, 3), {"groups": 2, "padding": ((0, 1), (2, 1))}),
    ((1, 4, 9, 7), (4, 1, 3, 2), {"groups": 4, "dilation": (2, 3), "padding": 2}),
    ((2, 8, 5, 5), (8, 8, 1, 1), {"stride": 2}),
    ((2, 4, 15), (5, 4, 5), {"stride": 2, "padding": ((3, 1),), "dilation": 2}),
    ((3, 2, 9), (2, 2, 3), {"padding": 1}),
    ((1, 2, 4, 5, 4), (4, 2, 2, 3, 3), {"padding": 1, "stride": (1, 2, 1)}),
)


def samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Yield samples of all gradients."""
    for dtype in sampling.ALL_FLOATS:
        for number, (x_shape, w_shape, options) in enumerate(_FORMS):
            is_last = bool((number + len(dtype.value)) % 2)
            yield from _samples(rng, dtype, x_shape, w_shape, options, is_last)


def _samples(
    rng: np.random.Generator, dtype: DType, x_shape: tuple[int, ...], w_shape: tuple[int, ...], options: dict[str, Any], is_last: bool
) -> Iterator[Sample]:
    rank = len(x_shape) - 2
    steps = forms(options, rank)
    x, w = sampling.random(rng, x_shape, dtype), sampling.random(rng, w_shape, dtype)
    made = expected_convolution(sampling.wide(x), sampling.wide(w), None, *steps)
    grad = sampling.random(rng, made.shape, dtype)
    of_input, of_filter = _adjoint(sampling.wide(grad), sampling.wide(x), sampling.wide(w), *steps)
    if is_last:
        x, w, grad, of_input, of_filter = (np.ascontiguousarray(np.moveaxis(a, 1, -1)) for a in (x, w, grad, of_input, of_filter))
    words = " ".join(f"{name}={value}" for name, value in {**options, "last": is_last}.items() if value)
    for kind, operands, shape, expected, terms in (
        (f"conv{rank}d_input_grad", (grad, w), x.shape, of_input, w.size),
        (f"conv{rank}d_filter_grad", (x, grad), w.shape, of_filter, grad.size // made.shape[1]),
    ):
        what, error = f"{dtype.value}{list(shape)} {words}", sampling.sums(dtype, terms)
        yield sampling.sample(kind, what, operands, expected, error, arguments=(shape,), channels_last=is_last, **options)
