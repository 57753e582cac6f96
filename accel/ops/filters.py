"""Convolution and correlation by Fourier transforms, with the meaning of ``scipy.signal.fftconvolve`` and ``correlate``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import KW_ONLY
from functools import lru_cache
from typing import ClassVar, Literal, NamedTuple, get_args

from accel.dtype import WIDE
from accel.errors import InvalidArgumentError, UnsupportedError
from accel.ops.base import OutOp, Plan, Shape, op, operand, planned, same_dtype
from accel.ops.fields import unless_none
from accel.ops.pieces import axes_of, integers
from accel.ref import AccelRef
from accel.values import check_choice

__all__ = ["Convolve", "Correlate"]

Mode = Literal["full", "same", "valid"]
_MOST_AXES = 3
_PRIMES = (7, 5, 3, 2)


class Extent(NamedTuple):
    """Sizes of a convolution. All but the batches are lengths along the axes.

    Attributes
    ----------
    batch_a, batch_b
        How many arrays there are of each; one is used for all of the other.
    a, b
        Of the operands.
    padded
        Of the transforms: products of small primes.
    starts, result
        Where in the whole convolution the result begins, and how long it is.
    """

    batch_a: int
    batch_b: int
    a: Shape
    b: Shape
    padded: Shape
    starts: Shape
    result: Shape

    @property
    def batch(self) -> int:
        """How many results there are."""
        return max(self.batch_a, self.batch_b) if self.batch_a and self.batch_b else 0


@lru_cache(1024)
def _fast_length(least: int) -> int:
    """Return the first product of 2, 3, 5 and 7 that is not below ``least``."""
    length = least
    while True:
        rest = length
        for prime in _PRIMES:
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return length
        length += 1


@op("fft", convert={"axes": unless_none(integers)})
class Convolve(OutOp):
    """scipy's ``fftconvolve(a, b, mode, axes)``: float32, float64, complex64 or complex128. Its rounding errors are relative to the largest result.

    Parameters
    ----------
    a, b
        Of the same dtype and as many dimensions. Axes before ``axes`` are a batch: equal, or of one element in all of one operand.
    mode
        ``"full"``: all that is not 0 by definition. ``"same"``: the middle of it, as long as ``a``. ``"valid"``: where one operand lies within the other.
    axes
        The last one, two or three axes, in any order. ``None``: all, of which there are three at most.
    out
        Buffer to write.
    """

    is_turned: ClassVar[bool] = False

    a: AccelRef
    b: AccelRef
    mode: Mode = "full"
    _: KW_ONLY
    axes: int | Iterable[int] | None = None

    def extent(self) -> Extent:
        """Return the sizes; raise where they do not fit."""
        shape_a, shape_b = self.a.shape, self.b.shape
        ndim = len(shape_a)
        if not ndim or len(shape_b) != ndim:
            raise InvalidArgumentError(f"a has {ndim} dimensions, and b {len(shape_b)}", remedy="Give as many, one at least.")
        axes = tuple(sorted(axes_of(self.axes, ndim)))
        if not 1 <= len(axes) <= _MOST_AXES or axes != tuple(range(ndim - len(axes), ndim)):
            raise UnsupportedError(
                f"axes is {self.axes} of {ndim} dimensions", remedy="Name the last one, two or three; transpose others first."
            )
        first = axes[0]
        a, b = shape_a[first:], shape_b[first:]
        batch_a, batch_b = math.prod(shape_a[:first]), math.prod(shape_b[:first])
        if shape_a[:first] != shape_b[:first] and 1 not in (batch_a, batch_b):
            raise InvalidArgumentError(f"a has shape {shape_a}, and b {shape_b}", remedy="Give equal batches, or one array in one of them.")
        if 0 in (*a, *b):
            raise InvalidArgumentError(f"a has shape {shape_a}, and b {shape_b}", remedy="Give elements along each axis.")
        whole = tuple([n + m - 1 for n, m in zip(a, b, strict=True)])
        starts, result = tuple([0 for _ in a]), whole
        if self.mode == "same":
            starts, result = tuple([(m - 1) // 2 for m in b]), a
        elif self.mode == "valid":
            if not (all(n >= m for n, m in zip(a, b, strict=True)) or all(n <= m for n, m in zip(a, b, strict=True))):
                raise InvalidArgumentError(f"neither of {a} and {b} lies within the other", remedy="Use mode='full', or cut one of them.")
            starts = tuple([min(n, m) - 1 for n, m in zip(a, b, strict=True)])
            result = tuple([abs(n - m) + 1 for n, m in zip(a, b, strict=True)])
        return Extent(batch_a, batch_b, a, b, tuple(map(_fast_length, whole)), starts, result)

    def plan(self) -> Plan:
        a, b = operand("a", self.a), operand("b", self.b)
        dtype = same_dtype(a=a, b=b)
        if dtype not in WIDE:
            raise UnsupportedError(f"there is no {self.kind} of {dtype.value}", remedy="Use float32, float64, complex64 or complex128.")
        check_choice("mode", self.mode, *get_args(Mode))
        extent = self.extent()
        batch = (a if extent.batch_a == extent.batch else b).shape[: a.ndim - len(extent.a)]
        return planned(self.out, {"a": a, "b": b}, (*batch, *extent.result), dtype)


@op()
class Correlate(Convolve):
    """scipy's ``correlate(a, b, mode)`` by Fourier transforms: ``a`` convolved with the conjugate of ``b``, reversed along ``axes``.

    See :class:`Convolve` for the parameters.
    """

    is_turned: ClassVar[bool] = True
