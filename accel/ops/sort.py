"""Arrays in order, what is found in them, and how often."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import ClassVar, Literal

from accel.dtype import DType
from accel.errors import InvalidArgumentError
from accel.ops.base import FamilyOp, OutOp, Plan, Shape, Spec, op, operand, planned, same_dtype, status_of_places
from accel.ops.family import Family
from accel.ops.fields import to_axis, to_flag, to_int
from accel.ops.found import Bincount, Compress, Histogram, Nonzero, Unique, UniqueAll, ordered
from accel.ops.namespace import M, OpNamespace, method, sized_method
from accel.ops.pieces import axis_of, lines_of
from accel.ref import AccelRef
from accel.values import check_choice

__all__ = ["Argsort", "Partition", "Searchsorted", "SegmentSort", "Sort", "SortOps", "Topk"]


@op("sort", convert={"axis": to_axis, "descending": to_flag})
class _Rising(OutOp):
    x: AccelRef
    axis: int = -1
    _: KW_ONLY
    descending: bool = False

    @property
    def falls(self) -> bool:
        """Whether the largest comes first."""
        return self.descending

    def lines(self) -> Shape:
        """Return the number of elements before, along and behind the axis."""
        return lines_of(self.x.shape, self.axis)

    def _checked(self) -> AccelRef:
        x = ordered(self, "x", self.x)
        axis_of(self.axis, x.ndim)
        return x


@op()
class Sort(_Rising):
    """``x`` with the elements along ``axis`` in rising order, or in falling one.

    Parameters
    ----------
    x
        Any shape but 0-d, of integers, bool or floats. NaN counts as larger than every number; NaNs come out as one NaN.
    axis
        Which axis.
    descending
        Whether the largest comes first.
    out
        Buffer to write; ``x`` itself, or apart from it.
    """

    def plan(self) -> Plan:
        x = self._checked()
        return planned(self.out, {"x": x}, x.shape, x.dtype, in_place=("x",))


_SEGMENTS = status_of_places("offset {} is no end of a segment of x", "Give rising offsets, from 0 to the length of x.")


@op("sort", convert={"descending": to_flag})
class SegmentSort(OutOp):
    """``x`` with the elements of each segment in rising order, or in falling one.

    Parameters
    ----------
    x
        One dimension; as for ``sort``.
    offsets
        int64, of one dimension, rising from 0 to the length of ``x``: segment i is ``x[offsets[i]:offsets[i + 1]]``. The op raises if they are not so.
    descending
        Whether the largest comes first.
    out
        Buffer to write; ``x`` itself, or apart from it.
    """

    x: AccelRef
    offsets: AccelRef
    _: KW_ONLY
    descending: bool = False

    @property
    def falls(self) -> bool:
        """Whether the largest comes first."""
        return self.descending

    def plan(self) -> Plan:
        x, offsets = ordered(self, "x", self.x, ndim=1), operand("offsets", self.offsets, ndim=1)
        if offsets.dtype is not DType.INT64 or not offsets.size:
            raise InvalidArgumentError(
                f"offsets are {offsets.dtype.value}{list(offsets.shape)}", remedy="Give one int64 more than there are segments."
            )
        return planned(self.out, {"x": x, "offsets": offsets}, x.shape, x.dtype, in_place=("x",), status=_SEGMENTS)


@op()
class Argsort(_Rising):
    """The indices, int64, that would sort ``x`` along ``axis``. The sort is stable: of equal elements, the first one stays first.

    Parameters
    ----------
    x, axis, descending
        As for ``sort``.
    out
        Buffer to write; not ``x``.
    """

    def plan(self) -> Plan:
        x = self._checked()
        return planned(self.out, {"x": x}, x.shape, DType.INT64)


@op("sort", convert={"kth": to_int, "axis": to_axis})
class Partition(OutOp):
    """``x`` with the ``kth`` element along ``axis`` where it would be in order, none before it larger, none behind it smaller.

    Parameters
    ----------
    x
        As for ``sort``.
    kth
        An index along the axis; counted from the end where it is negative. Which order the others have is not said.
    axis
        Which axis.
    out
        Buffer to write; ``x`` itself, or apart from it.
    """

    falls: ClassVar[bool] = False

    x: AccelRef
    kth: int
    axis: int = -1

    def lines(self) -> Shape:
        """Return the number of elements before, along and behind the axis."""
        return lines_of(self.x.shape, self.axis)

    def plan(self) -> Plan:
        x = ordered(self, "x", self.x)
        length = x.shape[axis_of(self.axis, x.ndim)]
        if not -length <= self.kth < length:
            raise InvalidArgumentError(f"kth is {self.kth}, and the axis has {length} elements", remedy="Give an index along the axis.")
        return planned(self.out, {"x": x}, x.shape, x.dtype, in_place=("x",))


@op("sort", convert={"k": to_int, "axis": to_axis, "largest": to_flag})
class Topk(FamilyOp[tuple[AccelRef, AccelRef]]):
    """The ``k`` largest elements of ``x`` along ``axis``, or the least, in order; and their indices, int64. Of equal elements the first ones are taken.

    Parameters
    ----------
    x
        As for ``sort``.
    k
        How many; at most the length of the axis.
    axis
        Which axis.
    largest
        Whether the largest are taken, the largest first; else the least, the least first. NaN counts as larger than every number.
    """

    x: AccelRef
    k: int
    axis: int = -1
    _: KW_ONLY
    largest: bool = True

    def lines(self) -> Shape:
        """Return the number of elements before, along and behind the axis."""
        return lines_of(self.x.shape, self.axis)

    @property
    def falls(self) -> bool:
        """Whether the largest comes first."""
        return self.largest

    def plan(self) -> Plan:
        x = ordered(self, "x", self.x)
        axis = axis_of(self.axis, x.ndim)
        length = x.shape[axis]
        if not 0 <= self.k <= length:
            raise InvalidArgumentError(f"k is {self.k}, and the axis has {length} elements", remedy=f"Give 0 to {length}.")
        shape = (*x.shape[:axis], self.k, *x.shape[axis + 1 :])
        return Plan((x,), (), (Spec(shape, x.dtype), Spec(shape, DType.INT64)))


@op("sort")
class Searchsorted(OutOp):
    """Where each element of ``v`` would be put into ``a`` to keep it in order: indices, int64, of the shape of ``v``.

    Parameters
    ----------
    a
        One dimension, in rising order, NaNs last.
    v
        Any shape, of the dtype of ``a``.
    side
        Whether it is put before equal elements, ``"left"``, or behind them, ``"right"``.
    out
        Buffer to write; not ``a`` or ``v``.
    """

    a: AccelRef
    v: AccelRef
    side: Literal["left", "right"] = "left"

    def plan(self) -> Plan:
        a, v = ordered(self, "a", self.a, ndim=1), operand("v", self.v)
        same_dtype(a=a, v=v)
        check_choice("side", self.side, "left", "right")
        return planned(self.out, {"a": a, "v": v}, v.shape, DType.INT64)


class SortOps(OpNamespace[M]):
    """Arrays in order, what is found in them, and how often."""

    __slots__ = ()

    library: ClassVar = "sort"
    aliases: ClassVar = {
        "select": ".compress(condition, x)",
        "masked_select": ".compress(condition, x)",
        "extract": ".compress(condition, x)",
        "flatnonzero": ".nonzero(x.ravel())",
        "argwhere": ".nonzero(x)",
        "lower_bound": ".searchsorted(a, v)",
        "bucketize": ".searchsorted(a, v)",
        "histc": ".histogram(x, bins, range)",
        "unique_counts": ".unique_all(x)",
        "unique_inverse": ".unique_all(x)",
        "argpartition": ".argsort(x, axis)",
    }

    sort = method(Sort)
    argsort = method(Argsort)
    segment_sort = method(SegmentSort)
    topk = method(Topk)
    partition = method(Partition)
    searchsorted = method(Searchsorted)
    nonzero = sized_method(Nonzero)
    compress = sized_method(Compress)
    unique = sized_method(Unique)
    unique_all = sized_method(UniqueAll)
    bincount = method(Bincount)
    histogram = method(Histogram)


FAMILY = Family(SortOps)
