"""Cumulative sums, products and extremes along an axis, and those of segments."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import ClassVar

import numpy as np

from accel.dtype import FLOATS, REAL_OF, DType
from accel.enums import ReduceName, ReduceOp
from accel.errors import InvalidArgumentError, UnsupportedError
from accel.ops.base import FamilyOp, OutOp, Plan, Shape, op, operand, planned, status_of_places
from accel.ops.family import Family
from accel.ops.fields import member, to_axis, to_flag, to_member
from accel.ops.namespace import M, OpNamespace, method
from accel.ops.pieces import axis_of, lines_of
from accel.ref import AccelRef

__all__ = ["Cummax", "Cummin", "Cumprod", "Cumsum", "ScanOps", "SegmentReduce"]


_CUMULATIVE = {ReduceOp.SUM: "cumsum", ReduceOp.PROD: "cumprod", ReduceOp.MAX: "cummax", ReduceOp.MIN: "cummin"}


def _neutral(kind: str, dtype: DType) -> bytes:
    """Return the element that changes nothing."""
    if kind in ("cumsum", "cumprod"):
        return np.asarray(int(kind == "cumprod"), dtype.numpy).tobytes()
    if dtype.is_integer:
        limits = np.iinfo(dtype.numpy)
        return np.asarray(limits.min if kind == "cummax" else limits.max, dtype.numpy).tobytes()
    return np.asarray(-np.inf if kind == "cummax" else np.inf, dtype.numpy).tobytes()


def _check_dtype(op: FamilyOp, x: AccelRef) -> None:
    if not x.dtype.is_integer and x.dtype not in FLOATS:
        raise UnsupportedError(
            f"{op.kind} is not offered for {x.dtype.value}", remedy="Give integers or floats; device.elementwise.cast converts."
        )


@op("scan", convert={"axis": to_axis, "exclusive": to_flag})
class Scan(OutOp):
    """What an operation makes of all elements of ``x`` up to each, along ``axis``.

    Parameters
    ----------
    x
        Any shape but 0-d, of integers, which wrap around, or floats; float16 and bfloat16 are accumulated in float32.
    axis
        Which axis.
    exclusive
        Whether each element itself is left out. The first result is then the operation's neutral element.
    out
        Buffer to write; ``x`` itself, or apart from it.
    """

    x: AccelRef
    axis: int = -1
    _: KW_ONLY
    exclusive: bool = False

    def element(self) -> DType:
        """Return the dtype of what kernels scan: of complex numbers that of their parts, which are added each for itself."""
        return REAL_OF.get(self.x.dtype, self.x.dtype)

    def lines(self) -> Shape:
        """Return the number of elements before, along and behind the axis."""
        before, length, behind = lines_of(self.x.shape, self.axis)
        return before, length, 2 * behind if self.x.dtype in REAL_OF else behind

    def neutral(self) -> bytes:
        """Return the element that changes nothing, of dtype :meth:`element`."""
        return _neutral(self.kind, self.element())

    def plan(self) -> Plan:
        x = operand("x", self.x)
        axis_of(self.axis, x.ndim)
        if self.kind != "cumsum" or x.dtype not in REAL_OF:
            _check_dtype(self, x)
        return planned(self.out, {"x": x}, x.shape, x.dtype, in_place=("x",))


@op()
class Cumsum(Scan):
    """The sums of all elements of ``x`` up to each, along ``axis``, in the dtype of ``x``.

    Parameters
    ----------
    x
        Any shape but 0-d, of integers, which wrap around, floats or complex numbers; float16 and bfloat16 are accumulated in float32.
    axis
        Which axis.
    exclusive
        Whether each element itself is left out. The first result is then 0.
    out
        Buffer to write; ``x`` itself, or apart from it.
    """


@op()
class Cumprod(Scan):
    """The products of all elements of ``x`` up to each, along ``axis``, in the dtype of ``x``.

    Parameters
    ----------
    x, axis, out
        As for ``cumsum``.
    exclusive
        Whether each element itself is left out. The first result is then 1.
    """


@op()
class Cummax(Scan):
    """The largest of all elements of ``x`` up to each, along ``axis``; NaN from the first NaN on.

    Parameters
    ----------
    x, axis, out
        As for ``cumsum``.
    exclusive
        Whether each element itself is left out. The first result is then the least number of the dtype, which for floats is minus infinity.
    """


@op()
class Cummin(Scan):
    """The least of all elements of ``x`` up to each, along ``axis``; NaN from the first NaN on.

    Parameters
    ----------
    x, axis, out
        As for ``cumsum``.
    exclusive
        Whether each element itself is left out. The first result is then the largest number of the dtype, which for floats is infinity.
    """


_STATUS = status_of_places("segment {} is no part of x", "Give rising offsets, from 0 to the length of x.")


@op("scan", convert={"op": to_member(ReduceOp)})
class SegmentReduce(OutOp):
    """What ``op`` makes of each segment of ``x`` along its first axis, in the dtype of ``x``; of an empty one the operation's neutral element.

    Parameters
    ----------
    op
        sum, prod, max or min. float16 and bfloat16 are accumulated in float32; NaN is the largest and the least.
    x
        Any shape but 0-d, of integers, which wrap around, or floats.
    offsets
        int64, of one dimension, rising: segment i is ``x[offsets[i]:offsets[i + 1]]``. Elements outside all segments are left out. The op raises if a
        segment is no part of ``x``.
    out
        Buffer to write; not ``x`` or ``offsets``.
    """

    op: ReduceName | ReduceOp
    x: AccelRef
    offsets: AccelRef

    def cumulative(self) -> str:
        """Return the kind of the cumulative op that has the same operation."""
        return _CUMULATIVE[member(ReduceOp, self.op)]

    def neutral(self) -> bytes:
        """Return the element that changes nothing, in the dtype of ``x``."""
        return _neutral(self.cumulative(), self.x.dtype)

    def plan(self) -> Plan:
        x, offsets = operand("x", self.x), operand("offsets", self.offsets, ndim=1)
        if self.op not in _CUMULATIVE:
            raise UnsupportedError(f"{member(ReduceOp, self.op).value} of segments is not offered", remedy="Use sum, prod, max or min.")
        if not x.ndim or offsets.dtype is not DType.INT64 or not offsets.size:
            raise InvalidArgumentError(
                f"x has shape {x.shape}, offsets are {offsets.dtype.value}{list(offsets.shape)}",
                remedy="Give x at least one dimension, and one int64 more than there are segments.",
            )
        _check_dtype(self, x)
        return planned(self.out, {"x": x, "offsets": offsets}, (offsets.size - 1, *x.shape[1:]), x.dtype, status=_STATUS)


class ScanOps(OpNamespace[M]):
    """Cumulative sums, products and extremes, and those of segments."""

    __slots__ = ()

    library: ClassVar = "scan"
    aliases: ClassVar = {
        "cumulative_sum": ".cumsum(x, axis)",
        "cumulative_prod": ".cumprod(x, axis)",
        "associative_scan": ".cumsum(x, axis)",
        "segment_sum": ".segment_reduce('sum', x, offsets)",
        "reduceat": ".segment_reduce(op, x, offsets)",
    }

    cumsum = method(Cumsum)
    cumprod = method(Cumprod)
    cummax = method(Cummax)
    cummin = method(Cummin)
    segment_reduce = method(SegmentReduce)


FAMILY = Family(ScanOps)
