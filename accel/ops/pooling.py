"""Pooling: what is left of the elements in windows, and the gradients of it."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY
from functools import lru_cache
from typing import Any, NamedTuple, cast

from accel.errors import InvalidArgumentError
from accel.ops.base import OutOp, Plan, Shape, op, operand, planned, same_dtype, to_shape
from accel.ops.fields import Convert, integer, to_flag, unless_none
from accel.ops.windows import Padding, Steps, borders_of, counts_of, steps_of
from accel.ref import AccelRef

__all__ = ["AvgPool", "AvgPoolGrad", "MaxPool", "MaxPoolGrad"]


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


_OPTIONS: dict[str, Convert] = {"window": _numbers, "stride": unless_none(_numbers), "padding": _numbers}


@op("dnn", convert={"channels_last": to_flag})
class PoolForm(OutOp):
    """What pooling and its gradients share: windows of one, two or three spatial axes."""

    _: KW_ONLY
    channels_last: bool = False

    @abstractmethod
    def pooled(self) -> Shape:
        """Return the shape of what is pooled."""

    def counts_padding(self) -> bool:
        """Return whether elements of the padding count."""
        return getattr(self, "count_include_pad", False)

    def windows(self) -> Windows:
        """Return the windows along the spatial dimensions."""
        shape, form = self.pooled(), cast("Any", self)
        return _windows(shape[1:-1] if self.channels_last else shape[2:], form.window, form.stride, form.padding)

    def ends(self) -> tuple[int, int]:
        """Return how many elements are before and behind the spatial axes: images times channels and 1, or images and channels."""
        shape = self.pooled()
        return (shape[0], shape[-1]) if self.channels_last else (math.prod(shape[:2]), 1)

    def _result(self) -> Shape:
        """Return the shape of what pooling makes; raise if options do not fit."""
        shape = self.pooled()
        if not 3 <= len(shape) <= 5:
            raise InvalidArgumentError(
                f"what is pooled has shape {shape}",
                remedy="Give images, channels, and one to three spatial dimensions; reshape adds some of length 1.",
            )
        counts = self.windows().counts
        return (shape[0], *counts, shape[-1]) if self.channels_last else (*shape[:2], *counts)

    def _grad(self, grad: object) -> AccelRef:
        """Return the gradient of the result, if it has its shape."""
        ref, shape = operand("grad", grad), self._result()
        if ref.shape != shape:
            raise InvalidArgumentError(
                f"grad has shape {ref.shape}, and the result of pooling {shape}", remedy="Give the shapes and options of the pooling."
            )
        return ref


@op(convert=_OPTIONS)
class Pool(PoolForm):
    """An op on windows of one, two or three spatial axes."""

    x: AccelRef
    window: Steps
    stride: Steps | None = None
    padding: Padding = 0

    def pooled(self) -> Shape:
        return self.x.shape

    def plan(self) -> Plan:
        x = operand("x", self.x)
        return planned(self.out, {"x": x}, self._result(), x.dtype, "pool")


@op()
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


@op(convert={"count_include_pad": to_flag})
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

    _: KW_ONLY
    count_include_pad: bool = True


@op(convert=_OPTIONS)
class MaxPoolGrad(PoolForm):
    """The gradient of ``max_pool``'s operand. That of a window goes to its largest element: the first of several, and the first NaN where one is.

    Parameters
    ----------
    grad
        Gradient of the result, of its shape.
    x
        The operand of ``max_pool``.
    window, stride, padding, channels_last
        Those of ``max_pool``.
    out
        As ``x``; neither operand.
    """

    grad: AccelRef
    x: AccelRef
    window: Steps
    stride: Steps | None = None
    padding: Padding = 0

    def pooled(self) -> Shape:
        return self.x.shape

    def plan(self) -> Plan:
        x = operand("x", self.x)
        grad = self._grad(self.grad)
        return planned(self.out, {"grad": grad, "x": x}, x.shape, same_dtype(grad=grad, x=x), "pool")


@op(convert={"shape": to_shape, **_OPTIONS, "count_include_pad": to_flag})
class AvgPoolGrad(PoolForm):
    """The gradient of ``avg_pool``'s operand: that of a window is shared out among its elements.

    Parameters
    ----------
    grad
        Gradient of the result, of its shape.
    shape
        Shape of the operand of ``avg_pool``: several may give the same result's.
    window, stride, padding, channels_last, count_include_pad
        Those of ``avg_pool``.
    out
        Of ``shape``; not ``grad``.
    """

    grad: AccelRef
    shape: Sequence[int]
    window: Steps
    stride: Steps | None = None
    padding: Padding = 0
    _: KW_ONLY
    count_include_pad: bool = True

    def pooled(self) -> Shape:
        return cast("Shape", self.shape)

    def plan(self) -> Plan:
        grad = self._grad(self.grad)
        return planned(self.out, {"grad": grad}, self.pooled(), grad.dtype, "pool")
