"""Pooling: what is left of the elements in windows."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np

from accel.errors import InvalidArgumentError
from accel.ops.base import FamilyOp, Plan, Shape, not_aliased, operand, result_in
from accel.ops.fields import integer, set_fields
from accel.ops.windows import Padding, Steps, borders_of, counts_of, steps_of
from accel.ref import AccelRef

__all__ = ["AvgPool", "MaxPool", "Pool", "Windows"]


class Windows(NamedTuple):
    """Where windows lie along each spatial dimension.

    Attributes
    ----------
    sizes, counts
        Elements along it, and windows.
    window, stride
        Elements of a window, and from one window to the next.
    before, after
        How much is padded at either end.
    """

    sizes: Shape
    counts: Shape
    window: Shape
    stride: Shape
    before: Shape
    after: Shape


def _numbers(name: str, value: object) -> Any:
    """Return an int, or tuples of ints."""
    if isinstance(value, (tuple, list)):
        return tuple([_numbers(name, each) for each in value])
    return integer(name, value, "Give an int, or one for each spatial dimension; a padding may be (before, after).")


@lru_cache(maxsize=1024)
def _windows(sizes: Shape, window: Any, stride: Any, padding: Any) -> Windows:
    rank = len(sizes)
    window = steps_of("window", window, rank)
    stride = window if stride is None else steps_of("stride", stride, rank)
    borders = borders_of(padding, rank)
    counts = counts_of(sizes, window, stride, borders)
    if min(sizes) < 1 or any(max(pair) >= reach for pair, reach in zip(borders, window, strict=True)):
        raise InvalidArgumentError(
            f"a window of {window} over {sizes} padded by {borders} can hold padding alone",
            remedy="Give less padding at either end than a window has, and at least one element.",
        )
    before, after = zip(*borders, strict=True)
    return Windows(sizes, counts, window, stride, before, after)


@dataclass(frozen=True, eq=False, slots=True)
class Pool(FamilyOp):
    """An op on windows of one, two or three spatial axes."""

    library: ClassVar[str] = "dnn"

    x: AccelRef
    window: Steps
    stride: Steps | None = None
    padding: Padding = 0
    _: KW_ONLY
    channels_last: bool = False
    out: AccelRef | None = None

    def __post_init__(self) -> None:
        """Convert ``window``, ``stride`` and ``padding``."""
        stride = None if self.stride is None else _numbers("stride", self.stride)
        set_fields(self, window=_numbers("window", self.window), stride=stride, padding=_numbers("padding", self.padding))

    @abstractmethod
    def counts_padding(self) -> bool:
        """Return whether elements of the padding count."""

    def windows(self) -> Windows:
        """Return the windows along the spatial dimensions."""
        sizes = self.x.shape[1:-1] if self.channels_last else self.x.shape[2:]
        return _windows(sizes, self.window, self.stride, self.padding)

    def ends(self) -> tuple[int, int]:
        """Return how many elements are before and behind the spatial axes: images times channels and 1, or images and channels."""
        shape = self.x.shape
        return (shape[0], shape[-1]) if self.channels_last else (math.prod(shape[:2]), 1)

    def plan(self) -> Plan:
        """See :meth:`KernelOp.plan`."""
        x = operand("x", self.x)
        if not 3 <= x.ndim <= 5:
            raise InvalidArgumentError(
                f"x has shape {x.shape}",
                remedy="Give images, channels, and one to three spatial dimensions; reshape adds some of length 1.",
            )
        for name, value in (("channels_last", self.channels_last), ("count_include_pad", self.counts_padding())):
            if not isinstance(value, (bool, np.bool_)):
                raise InvalidArgumentError(f"{name} is {value!r}", remedy="Give True or False.")
        counts = self.windows().counts
        shape: Shape = (x.shape[0], *counts, x.shape[-1]) if self.channels_last else (*x.shape[:2], *counts)
        not_aliased(self.out, x=x)
        writes, creates = result_in(self.out, shape, x.dtype)
        return Plan((x,), writes, creates, "pool", x.dtype)


@dataclass(frozen=True, eq=False, slots=True)
class MaxPool(Pool):
    """The largest element of each window, which is NaN if one is. Padding is never the largest.

    Parameters
    ----------
    x
        (N, C, ...) with one to three spatial dimensions, or (N, ..., C) with ``channels_last``.
    window
        Elements along each spatial dimension, or one number for all.
    stride
        From one window to the next; ``None`` means ``window``.
    padding
        At both ends of each spatial dimension: one number for all, or for each a number or (before, after); less than ``window``.
    channels_last
        Whether channels are the last dimension of ``x`` and of the result.
    out
        As ``x``, with ``(size + before + after - window) // stride + 1`` elements along each spatial dimension; not ``x``.
    """

    kind: ClassVar[str] = "max_pool"

    def counts_padding(self) -> bool:
        """See :meth:`Pool.counts_padding`."""
        return False


@dataclass(frozen=True, eq=False, slots=True)
class AvgPool(Pool):
    """The mean of each window.

    Parameters
    ----------
    x
        (N, C, ...) with one to three spatial dimensions, or (N, ..., C) with ``channels_last``.
    window
        Elements along each spatial dimension, or one number for all.
    stride
        From one window to the next; ``None`` means ``window``.
    padding
        At both ends of each spatial dimension: one number for all, or for each a number or (before, after); less than ``window``.
    channels_last
        Whether channels are the last dimension of ``x`` and of the result.
    count_include_pad
        Whether padding counts as zeros; else the mean is that of the elements of ``x`` in the window.
    out
        As ``x``, with ``(size + before + after - window) // stride + 1`` elements along each spatial dimension; not ``x``.
    """

    kind: ClassVar[str] = "avg_pool"

    _: KW_ONLY
    count_include_pad: bool = True

    def counts_padding(self) -> bool:
        """See :meth:`Pool.counts_padding`."""
        return self.count_include_pad
