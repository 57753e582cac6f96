"""How transforms are cut into calls of cuFFT, carried out by numpy on memory that is addressed as cuFFT does; needs no GPU."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from accel_cuda.families.fft_layout import MOST_CALLS, Layout, Pass, passes

Array = np.ndarray[Any, Any]


def addresses(layout: Layout, *, is_real: bool) -> Array:
    """Return where each element of each transform lies, by cuFFT's advanced data layout."""
    lengths = layout.lengths if is_real or layout.transform == "whole" else (*layout.lengths[:-1], layout.lengths[-1] // 2 + 1)
    embed, dist = layout.embed(is_real=is_real), layout.dist(is_real=is_real)
    result = np.zeros((layout.batch, *lengths), np.int64) + (np.arange(layout.batch) * dist).reshape(-1, *[1] * len(lengths))
    places = np.zeros(lengths, np.int64)
    for axis, length in enumerate(lengths):
        places += np.arange(length).reshape(-1, *[1] * (len(lengths) - 1 - axis)) * math.prod(embed[axis + 1 :])
    return result + places * layout.stride


def execute(layout: Layout, source: Array, destination: Array, *, is_forward: bool) -> None:
    """Do what a plan does: nothing is scaled."""
    values = source[addresses(layout, is_real=layout.transform == "real")]
    axes = tuple(range(1, len(layout.lengths) + 1))
    made: Array
    if layout.transform == "real":
        made = np.fft.rfftn(values, axes=axes)
    elif layout.transform == "back":
        made = np.fft.irfftn(values, s=layout.lengths, axes=axes, norm="forward")
    else:
        made = np.fft.fftn(values, axes=axes) if is_forward else np.fft.ifftn(values, axes=axes, norm="forward")
    destination[addresses(layout, is_real=layout.transform == "back")] = made


def run(each: Pass, source: Array, destination: Array, *, is_forward: bool) -> None:
    layout = each.layout
    real_in, real_out = layout.transform == "real", layout.transform == "back"
    if each.is_turned:
        before = source.reshape(each.outer, each.count(is_real=real_in), each.inner).swapaxes(1, 2).ravel()
        after = np.full(each.outer * each.inner * each.count(is_real=real_out), np.nan, destination.dtype)
        execute(layout, before, after, is_forward=is_forward)
        destination[:] = after.reshape(each.outer, each.inner, -1).swapaxes(1, 2).ravel()
        return
    step = each.count(is_real=False) * each.inner
    for call in range(each.calls):
        execute(
            layout, source[call * step :] if call else source, destination[call * step :] if call else destination, is_forward=is_forward
        )


def transformed(kind: str, x: Array, axes: tuple[int, ...], n: int) -> Array:
    """Return what the passes make of an array."""
    reference = getattr(np.fft, f"{kind}n")
    lengths = (*(x.shape[axis] for axis in axes[:-1]), n)
    like = reference(x, s=lengths, axes=axes)
    shape = like.shape if kind == "irfft" else x.shape
    memory = x.ravel().copy()
    for each in passes(kind, shape, axes, n, True):
        target = memory.copy() if each.layout.transform == "whole" else np.full(like.size, np.nan, like.dtype)
        run(each, memory, target, is_forward=not kind.startswith("i"))
        memory = target
    result = memory.reshape(like.shape)
    scale = math.prod(lengths) if kind.startswith("i") else 1
    np.testing.assert_allclose(result / scale, like, rtol=1e-9, atol=1e-9 * np.max(np.abs(like)))
    return result


def test_the_passes_are_numpys_transforms(rng: np.random.Generator) -> None:
    turned, called = 0, 0
    for ndim in range(1, 5):
        for count in range(1, min(3, ndim) + 1):
            for axes in itertools.permutations(range(ndim), count):
                shape = tuple(int(n) for n in rng.choice([1, 2, 3, 4, 5, MOST_CALLS + 1], ndim, p=[0.1, 0.2, 0.2, 0.2, 0.2, 0.1]))
                real = rng.standard_normal(shape)
                whole = real + 1j * rng.standard_normal(shape)
                n = shape[axes[-1]]
                transformed("fft", whole, axes, n)
                transformed("ifft", whole, axes, n)
                spectrum = np.fft.rfftn(real, axes=axes)
                transformed("rfft", real, axes, n)
                transformed("irfft", spectrum, axes, n)
                found = passes("fft", shape, axes, n, False) + passes("rfft", shape, axes, n, False)
                turned += any(each.is_turned for each in found)
                called += any(each.calls > 1 for each in found)
    assert turned
    assert called


def test_adjacent_axes_are_one_call() -> None:
    assert len(passes("fft", (8, 16, 32), (0, 1, 2), 32, False)) == 1
    assert len(passes("rfft", (8, 16, 32), (1, 2), 32, False)) == 1
    assert passes("fft", (8, 16, 32), (0,), 8, False)[0].layout.stride == 16 * 32
    assert passes("fft", (1, 1), (0, 1), 1, False) == ()
