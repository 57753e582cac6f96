"""How a transform over any axes is made of calls of cuFFT, which knows one stride for all elements and one distance between all transforms of a batch.

Pure arithmetic on shapes: nothing here touches the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

__all__ = ["MOST_CALLS", "Layout", "Pass", "passes"]

MOST_CALLS = 16
"""How often the same plan is called for one pass over the middle axes of an array; beyond that the array is turned so that one call does."""

Transform = Literal["whole", "real", "back"]
"""Complex to complex, real to complex, complex to real."""


class Layout(NamedTuple):
    """What shapes a plan. Elements of one transform lie ``stride`` apart, transforms ``dist``; ``lengths`` are those of the real side."""

    transform: Transform
    is_double: bool
    lengths: tuple[int, ...]
    stride: int
    batch: int

    def embed(self, *, is_real: bool) -> tuple[int, ...]:
        """Return how many elements lie along each axis on one side."""
        return self.lengths if is_real or self.transform == "whole" else (*self.lengths[:-1], self.lengths[-1] // 2 + 1)

    def dist(self, *, is_real: bool) -> int:
        """Return the distance between two transforms on one side: where elements are neighbours, transforms follow each other, and the other way round."""
        return math.prod(self.embed(is_real=is_real)) if self.stride == 1 else 1


@dataclass(frozen=True, slots=True)
class Pass:
    """Transforms over adjacent axes of an array that is seen as (outer, lengths, inner).

    Attributes
    ----------
    layout : Layout
        Of the plan.
    outer, inner : int
        What lies before and behind the axes.
    calls : int
        How often the plan is called, each time for the next of ``outer``.
    is_turned : bool
        Whether the array is brought into the order (outer, inner, lengths) before, and back after.
    """

    layout: Layout
    outer: int
    inner: int
    calls: int = 1
    is_turned: bool = False

    def count(self, *, is_real: bool) -> int:
        """Return the number of elements of one transform, on one side."""
        return math.prod(self.layout.embed(is_real=is_real))


def _pass(transform: Transform, is_double: bool, outer: int, lengths: tuple[int, ...], inner: int) -> Pass:
    if inner == 1:
        return Pass(Layout(transform, is_double, lengths, 1, outer), outer, inner)
    if outer == 1:
        return Pass(Layout(transform, is_double, lengths, inner, inner), outer, inner)
    # Pieces of a real array may not be aligned as cuFFT wants them.
    if transform == "whole" and outer <= MOST_CALLS:
        return Pass(Layout(transform, is_double, lengths, inner, inner), outer, inner, calls=outer)
    return Pass(Layout(transform, is_double, lengths, 1, outer * inner), outer, inner, is_turned=True)


def _runs(shape: tuple[int, ...], axes: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the axes, less those of length 1, which a transform leaves alone, as (first, end) of adjacent ones."""
    runs: list[tuple[int, int]] = []
    for axis in sorted(axis for axis in axes if shape[axis] > 1):
        if runs and math.prod(shape[runs[-1][1] : axis]) == 1:
            runs[-1] = runs[-1][0], axis + 1
        else:
            runs.append((axis, axis + 1))
    return runs


def _whole(shape: tuple[int, ...], axes: tuple[int, ...], is_double: bool) -> list[Pass]:
    return [
        _pass("whole", is_double, math.prod(shape[:first]), tuple(n for n in shape[first:end] if n > 1), math.prod(shape[end:]))
        for first, end in _runs(shape, axes)
    ]


@lru_cache(1024)
def passes(kind: str, shape: tuple[int, ...], axes: tuple[int, ...], last: int, is_double: bool) -> tuple[Pass, ...]:
    """Return the passes of an op, one after the other.

    Parameters
    ----------
    kind
        Of the op.
    shape
        Of the real side, for ``rfft`` and ``irfft``; of the complex one else.
    axes
        Counted from 0.
    last
        The length of the last of ``axes``, in real space.
    is_double
        Whether it is computed in double precision.
    """
    if kind in ("fft", "ifft"):
        return tuple(_whole(shape, axes, is_double))
    axis = axes[-1]
    spectrum = (*shape[:axis], last // 2 + 1, *shape[axis + 1 :])
    outer, inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    single = _pass("real" if kind == "rfft" else "back", is_double, outer, (last,), inner)
    if kind == "irfft":
        # One call would take a spectrum for that of a real signal along the other axes too, without looking.
        return (*_whole(spectrum, axes[:-1], is_double), single)
    first = axis - len(axes) + 1
    if tuple(axes) == tuple(range(first, axis + 1)):
        together = _pass("real", is_double, math.prod(shape[:first]), (*(n for n in shape[first:axis] if n > 1), last), inner)
        if not together.is_turned:
            return (together,)
    return (single, *_whole(spectrum, axes[:-1], is_double))
