"""What is found in arrays, and how often."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from accel.dtype import FLOATS, DType
from accel.errors import InvalidArgumentError, UnsupportedError
from accel.ops.base import FamilyOp, OutOp, Plan, SizedOp, Spec, op, operand, planned, status_of_places
from accel.ops.fields import set_fields, to_int
from accel.ref import AccelRef
from accel.values import number

__all__ = ["Bincount", "Compress", "Histogram", "Nonzero", "Unique", "UniqueAll"]

_MOST_EDGES = 1 << 16
_COUNT = Spec((), DType.INT64)
_DIMENSIONS = 8


def ordered(op: FamilyOp[Any], name: str, value: object, *, ndim: int | None = None) -> AccelRef:
    """Return an operand whose elements have an order."""
    ref = operand(name, value, ndim=ndim)
    if not ref.dtype.is_integer and ref.dtype not in FLOATS and ref.dtype is not DType.BOOL:
        raise UnsupportedError(
            f"{op.kind} is not offered for {ref.dtype.value}",
            remedy="Give integers, bool, float16, bfloat16, float32 or float64; device.elementwise.cast converts.",
        )
    return ref


@op("sort")
class Nonzero(SizedOp[tuple[AccelRef, ...], tuple[AccelRef, ...]]):
    """The indices, int64, of the elements of ``x`` that are not 0, in order: one array for each dimension; with ``size``, and their number.

    Parameters
    ----------
    x
        Any shape of 1 to 8 dimensions, any dtype but float8 and float4. NaN is not 0.
    size
        How many there is room for. A batch or graph needs it, and gets the arrays and then the number, a 0-d int64; indices behind it are 0. A device
        returns views of what is there, which keep the room: of all elements where ``size`` is left out. It raises if ``size`` is too small.
    """

    x: AccelRef

    def plan(self) -> Plan:
        x = operand("x", self.x)
        if not 1 <= x.ndim <= _DIMENSIONS:
            raise InvalidArgumentError(f"x has shape {x.shape}", remedy=f"Give 1 to {_DIMENSIONS} dimensions: reshape it.")
        if not x.dtype.is_complex:
            ordered(self, "x", x)
        return Plan((x,), (), (*(Spec((self.room(x.size),), DType.INT64),) * x.ndim, _COUNT))

    @classmethod
    def trimmed(cls, made: tuple[AccelRef, ...], count: int) -> tuple[AccelRef, ...]:
        return tuple([each[:count] for each in made[:-1]])


@op("sort")
class Compress(SizedOp[AccelRef, tuple[AccelRef, AccelRef]]):
    """The parts of ``x`` where ``condition`` is true, one behind the other: ``x[condition]``; with ``size``, and their number.

    Parameters
    ----------
    condition
        bool, of the shape of ``x`` or of its first dimensions: then rows are taken.
    x
        Any shape but 0-d, any dtype.
    size
        As for ``nonzero``; parts behind the number are 0.
    """

    condition: AccelRef
    x: AccelRef

    def plan(self) -> Plan:
        condition, x = operand("condition", self.condition), operand("x", self.x)
        if condition.dtype is not DType.BOOL:
            raise InvalidArgumentError(f"condition is {condition.dtype.value}", remedy="Give bool, as comparisons make.")
        if not condition.ndim or condition.shape != x.shape[: condition.ndim]:
            raise InvalidArgumentError(
                f"condition of shape {condition.shape} does not fit x of shape {x.shape}", remedy="Give the first dimensions of x."
            )
        shape = (self.room(condition.size), *x.shape[condition.ndim :])
        return Plan((condition, x), (), (Spec(shape, x.dtype), _COUNT))

    def width(self) -> int:
        """Return how many elements a part has."""
        return math.prod(self.x.shape[self.condition.ndim :])


@op("sort")
class Unique(SizedOp[AccelRef, tuple[AccelRef, AccelRef]]):
    """The different elements of ``x`` in rising order; with ``size``, and their number.

    Parameters
    ----------
    x
        Any shape, of integers, bool or floats. NaNs are equal, and last; so are 0 and -0.
    size
        As for ``nonzero``; the least elements are kept, elements behind the number are 0.
    """

    x: AccelRef

    def plan(self) -> Plan:
        x = ordered(self, "x", self.x)
        return Plan((x,), (), (Spec((self.room(x.size),), x.dtype), _COUNT))


@op("sort")
class UniqueAll(SizedOp[tuple[AccelRef, AccelRef, AccelRef, AccelRef], tuple[AccelRef, ...]]):
    """The different elements of ``x`` in rising order, where each is first, which one each element of ``x`` is, and how often each is there.

    The results are the elements, the first indices into ``x.ravel()``, the inverse indices of the shape of ``x``, and the counts; with ``size`` their
    number besides. All but the elements are int64.

    Parameters
    ----------
    x, size
        As for ``unique``. The inverse indices count all elements that are different, also those that find no room.
    """

    x: AccelRef

    def plan(self) -> Plan:
        x = ordered(self, "x", self.x)
        indices = Spec((self.room(x.size),), DType.INT64)
        return Plan((x,), (), (Spec(indices.shape, x.dtype), indices, Spec(x.shape, DType.INT64), indices, _COUNT))

    @classmethod
    def trimmed(cls, made: tuple[AccelRef, ...], count: int) -> tuple[AccelRef, AccelRef, AccelRef, AccelRef]:
        values, indices, inverse, counts = made[:4]
        return values[:count], indices[:count], inverse, counts[:count]


_STATUS = status_of_places("{} is out of range", "Give numbers from 0 to length - 1.")


@op("sort", convert={"length": to_int})
class Bincount(OutOp):
    """How often each number from 0 to ``length - 1`` is in ``x``, int64; or the sums of the ``weights`` of each.

    Parameters
    ----------
    x
        Integers, of any shape; the op raises if one is out of range.
    length
        How many numbers there are.
    weights
        float32 or float64, of the shape of ``x``. The result has their dtype; the order in which they are added is not the same each time.
    out
        Buffer to write; not ``x`` or ``weights``.
    """

    x: AccelRef
    length: int
    weights: AccelRef | None = None

    def plan(self) -> Plan:
        x = operand("x", self.x)
        if not x.dtype.is_integer:
            raise InvalidArgumentError(f"x is {x.dtype.value}", remedy="Give integers.")
        if self.length < 0:
            raise InvalidArgumentError(f"length is {self.length}", remedy="Give an int of 0 or more.")
        refs, dtype = {"x": x}, DType.INT64
        if self.weights is not None:
            weights = refs["weights"] = operand("weights", self.weights)
            dtype = weights.dtype
            if weights.shape != x.shape or dtype not in (DType.FLOAT32, DType.FLOAT64):
                raise InvalidArgumentError(
                    f"weights are {dtype.value}{list(weights.shape)}, x has shape {x.shape}",
                    remedy="Give float32 or float64, one for each element of x.",
                )
        return planned(self.out, refs, (self.length,), dtype, status=_STATUS)


def _has_room(low: float, high: float, bins: int) -> bool:
    """Return whether edges of bins that are hardly wider than the distance of two numbers rise; there is no room for very many."""
    return bins <= _MOST_EDGES and bool((np.diff(np.linspace(low, high, bins + 1)) > 0).all())


@op("sort")
class Histogram(OutOp):
    """How many elements of ``x`` are in each of ``bins`` equal parts of ``range``, int64.

    The edges are ``numpy.linspace(*range, bins + 1)``. A bin has its left edge; the last one has both.

    Parameters
    ----------
    x
        Any shape, of integers or floats. Elements outside the range, and NaN, are not counted.
    bins
        How many parts.
    range
        The least and the largest edge.
    out
        Buffer to write; not ``x``.
    """

    x: AccelRef
    bins: int
    range: tuple[float, float]

    def __post_init__(self) -> None:
        """Convert ``bins`` and ``range``."""
        limits = self.range if isinstance(self.range, (tuple, list)) else ()
        ends = tuple([number("range", each) for each in limits])
        if len(ends) != 2 or any(isinstance(each, complex) for each in ends):
            raise InvalidArgumentError(f"range is {self.range!r}", remedy="Give a pair of numbers.")
        set_fields(self, bins=to_int("bins", self.bins), range=(float(ends[0]), float(ends[1])))

    def plan(self) -> Plan:
        x, (low, high) = ordered(self, "x", self.x), self.range
        if x.dtype is DType.BOOL:
            raise UnsupportedError("histogram is not offered for bool", remedy="device.elementwise.cast converts.")
        if self.bins < 1:
            raise InvalidArgumentError(f"bins is {self.bins}", remedy="Give an int of 1 or more.")
        if not low < high or not math.isfinite(high - low):
            raise InvalidArgumentError(f"range is {self.range}", remedy="Give finite numbers, the least first.")
        if (high - low) / self.bins < 2 * np.spacing(max(abs(low), abs(high))) and not _has_room(low, high, self.bins):
            raise InvalidArgumentError(
                f"range {self.range} has no {self.bins} parts in float64", remedy="Give fewer bins, or a wider range."
            )
        return planned(self.out, {"x": x}, (self.bins,), DType.INT64)
