"""Pooling, axis by axis: the largest of a window is the largest of the largest in its rows, and so for sums.

Gradients are shared out element by element of a window, for all windows at once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu import costs
from accel.cpu.families import sampling
from accel.cpu.families.precision import wider
from accel.cpu.kernels import kernel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from accel.backend import Kernel
    from accel.cpu.views import Array
    from accel.dtype import DType
    from accel.family import Sample
    from accel.ops.pooling import Windows

__all__ = ["KERNELS", "samples"]


def _cost(op: Any, operands: list[Array], results: list[Array]) -> float:
    """Return the cost of a pooling, axis by axis, or of its gradient, element by element of a window."""
    window = op.windows().window
    count = 8 * math.prod(window) if op.kind.endswith("_grad") else 4 * sum(window)
    return costs.elements(count * operands[0].size, operands[0].dtype)


def _unpooled(op: Any, x: Array) -> Array:
    """Return an array of one element for each of the input's, as [before, ..., behind]."""
    before, behind = op.ends()
    return x.reshape(before, *op.windows().sizes, behind)


def _pooled(op: Any, x: Array) -> Array:
    """Return an array of one element for each window, as [before, ..., behind]."""
    before, behind = op.ends()
    return x.reshape(before, *op.windows().counts, behind)


def _largest(op: Any, operands: list[Array], results: list[Array]) -> None:
    windows, x = op.windows(), _unpooled(op, operands[0])
    for axis in range(len(windows.sizes)):
        x = _along(x, axis, windows, np.maximum, -math.inf)
    _pooled(op, results[0])[...] = x


def _means(op: Any, operands: list[Array], results: list[Array]) -> None:
    windows, x = op.windows(), _unpooled(op, operands[0])
    made = x.astype(wider(x.dtype))
    for axis, (size, length) in enumerate(zip(windows.sizes, windows.window, strict=True)):
        made = _along(made, axis, windows, np.add, 0)
        ones = np.ones((1, *(size if each == axis else 1 for each in range(len(windows.sizes))), 1), made.dtype)
        made /= length if op.count_include_pad else _along(ones, axis, windows, np.add, 0)
    _pooled(op, results[0])[...] = made


def _along(x: Array, axis: int, windows: Windows, combine: np.ufunc, nothing: float) -> Array:
    """Combine the elements in windows along one axis of [before, ..., behind]; padding is left out."""
    count, stride, before = windows.counts[axis], windows.stride[axis], windows.before[axis]
    place, size = axis + 1, windows.sizes[axis]
    made = np.full((*x.shape[:place], count, *x.shape[place + 1 :]), nothing, x.dtype)
    ahead = (slice(None),) * place
    for step in range(windows.window[axis]):
        # The windows whose element number `step` is none of the padding.
        first = max(0, -(-(before - step) // stride))
        last = min(count, (size - 1 + before - step) // stride + 1)
        if first < last:
            start = first * stride - before + step
            target = made[(*ahead, slice(first, last))]
            combine(target, x[(*ahead, slice(start, start + (last - first - 1) * stride + 1, stride))], out=target)
    return made


def _met(windows: Windows) -> Iterator[tuple[int, tuple[slice, ...], tuple[slice, ...]]]:
    """Yield, for each element of a window that is not padding everywhere, its number, the elements that it is and the windows that these are in."""
    for number, place in enumerate(np.ndindex(*windows.window)):
        elements, within = [slice(None)], [slice(None)]
        for at, size, count, stride, before in zip(place, windows.sizes, windows.counts, windows.stride, windows.before, strict=True):
            first, last = max(0, -((at - before) // stride)), min(count, (size - 1 + before - at) // stride + 1)
            start = first * stride - before + at
            elements.append(slice(start, max(start, start + (last - first - 1) * stride + 1), stride))
            within.append(slice(first, max(first, last)))
        yield number, tuple(elements), tuple(within)


def _to_the_largest(op: Any, operands: list[Array], results: list[Array]) -> None:
    windows, grad, x = op.windows(), _pooled(op, operands[0]), _unpooled(op, operands[1])
    largest, found = np.full(grad.shape, -np.inf, x.dtype), np.full(grad.shape, -1, np.int64)
    for number, elements, within in _met(windows):
        value, best, place = x[elements], largest[within], found[within]
        is_larger = (place < 0) | (value > best) | (np.isnan(value) & ~np.isnan(best))
        np.copyto(best, value, where=is_larger)
        np.copyto(place, number, where=is_larger)
    total = np.zeros(x.shape, wider(x.dtype))
    for number, elements, within in _met(windows):
        total[elements] += np.where(found[within] == number, grad[within], grad.dtype.type(0))
    _unpooled(op, results[0])[...] = total


def _shared_out(op: Any, operands: list[Array], results: list[Array]) -> None:
    windows, grad, out = op.windows(), _pooled(op, operands[0]), _unpooled(op, results[0])
    wide, counts_padding = wider(grad.dtype), op.counts_padding()
    counts = np.full((1, *windows.counts, 1), math.prod(windows.window) if counts_padding else 0, wide)
    if not counts_padding:
        for _, _, within in _met(windows):
            counts[within] += 1
    shares, total = grad / counts, np.zeros(out.shape, wide)
    for _, elements, within in _met(windows):
        total[elements] += shares[within]
    out[...] = total


KERNELS: Mapping[str, Kernel] = {
    "max_pool": kernel(_largest, _cost),
    "avg_pool": kernel(_means, _cost),
    "max_pool_grad": kernel(_to_the_largest, _cost),
    "avg_pool_grad": kernel(_shared_out, _cost),
}


def samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Yield samples of every op here."""
    calls: tuple[tuple[tuple[int, ...], Any, Any, Any], ...] = (
        ((2, 3, 9), 3, 2, 1),
        ((2, 8, 7, 5), (2, 3), None, 0),
        ((1, 3, 8, 9), (3, 2), (1, 3), ((2, 0), (0, 1))),
        ((2, 16, 3, 5, 4), (2, 3, 1), (1, 2, 2), (1, (2, 0), 0)),
        ((3, 5, 1, 1), 1, 1, 0),
        ((2, 4, 6, 6), 2, 3, 0),
        ((0, 2, 4), 2, None, 0),
    )
    for dtype in sampling.ALL_FLOATS:
        for number, (shape, window, stride, padding) in enumerate(calls):
            x = sampling.random(rng, shape, dtype)
            if x.size > 30:
                x.flat[7], x.flat[29] = np.nan, -np.inf
            options = {"stride": stride, "padding": padding, "channels_last": number % 2 == 1}
            yield from _samples(x, dtype, window, options, counts_padding=number % 3 != 0)


@np.errstate(all="ignore")
def _samples(x: Array, dtype: DType, window: Any, options: dict[str, Any], *, counts_padding: bool) -> Iterator[Sample]:
    """Yield the samples of one (N, C, ...) array."""
    spatial = tuple(range(2, x.ndim))
    reach = window if isinstance(window, tuple) else (window,) * len(spatial)
    steps = options["stride"] or window
    pads = options["padding"] if isinstance(options["padding"], tuple) else (options["padding"],) * len(spatial)
    every = (
        slice(None),
        slice(None),
        *(slice(None, None, step) for step in (steps if isinstance(steps, tuple) else (steps,) * len(spatial))),
    )

    def patches(values: Array) -> Array:
        padded = np.pad(values, ((0, 0), (0, 0), *(pad if isinstance(pad, tuple) else (pad, pad) for pad in pads)))
        return np.lib.stride_tricks.sliding_window_view(padded, reach, spatial)[every]

    within = tuple(range(x.ndim, 2 * x.ndim - 2))
    values, is_inside = patches(sampling.wide(x)), patches(np.ones(x.shape, np.bool_))
    count = math.prod(reach) if counts_padding else is_inside.sum(within)
    largest, mean = np.where(is_inside, values, -np.inf).max(within), values.sum(within) / count
    last = options["channels_last"]
    for kind, expected, given in (("max_pool", largest, options), ("avg_pool", mean, {**options, "count_include_pad": counts_padding})):
        x_given, made = (np.moveaxis(each, 1, -1).copy() if last else each for each in (x, expected))
        name = f"{dtype.value}{list(x_given.shape)} {window} {given}"
        error = sampling.sums(dtype, math.prod(reach)) if kind == "avg_pool" else 0.0
        yield sampling.sample(kind, name, (x_given,), made, error, arguments=(window,), **given)
    yield from _grad_samples(x, dtype, window, options, patches(np.arange(x.size).reshape(x.shape)), is_inside, counts_padding)


def _grad_samples(
    x: Array, dtype: DType, window: Any, options: dict[str, Any], places: Array, is_inside: Array, counts_padding: bool
) -> Iterator[Sample]:
    """Yield the samples of gradients, given the number of the element that each element of each window is, and whether it is none of the padding."""
    results = is_inside.shape[: x.ndim]
    # Numbers that 16-bit floats hold, and whose sums they hold.
    grad = np.asarray(np.arange(math.prod(results)).reshape(results) % 13 - 6, dtype.numpy)
    reach = math.prod(is_inside.shape[x.ndim :])
    flat, elements, inside = sampling.wide(x).ravel(), places.reshape(*results, reach), is_inside.reshape(*results, reach)
    of_max, of_mean = np.zeros(x.size), np.zeros(x.size)
    for at in np.ndindex(*results):
        own = elements[at][inside[at]]
        of_max[own[np.argmax(flat[own])]] += float(grad[at])  # of numpy's, a NaN is the largest
        of_mean[own] += float(grad[at]) / (reach if counts_padding else own.size)
    last = options["channels_last"]
    x_given, grad, *made = (
        np.moveaxis(each, 1, -1).copy() if last else each for each in (x, grad, of_max.reshape(x.shape), of_mean.reshape(x.shape))
    )
    name = f"{dtype.value}{list(x_given.shape)} {window} {options}"
    yield sampling.sample("max_pool_grad", name, (grad, x_given), made[0], arguments=(window,), **options)
    error, options = sampling.sums(dtype, reach), {**options, "count_include_pad": counts_padding}
    arguments = x_given.shape, window
    yield sampling.sample("avg_pool_grad", f"{name} {counts_padding}", (grad,), made[1], error, arguments=arguments, **options)
