"""Elements that are read and written where indices say, which only the device knows."""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from dataclasses import KW_ONLY, dataclass
from typing import Literal, get_args

import numpy as np

from accel.dtype import DType
from accel.errors import InvalidArgumentError
from accel.ops.base import FamilyOp, Plan, Shape, element, not_aliased, op, operand, planned, same_dtype, status_of_places
from accel.ops.fields import to_axis, unless_none
from accel.ops.pieces import axis_of
from accel.ref import AccelRef
from accel.values import check_choice
from accel.views import steps_of

__all__ = ["PutAlongAxis", "ScatterAdd", "Take", "TakeAlongAxis", "Walk"]

Mode = Literal["raise", "wrap", "clip"]

_INTEGERS = (DType.INT32, DType.INT64)


@dataclass(frozen=True, slots=True)
class Walk:
    """Where elements are: ``x`` is ``[before, length, behind]``, and the elements at its indices are ``[before, count, behind]``.

    Parameters
    ----------
    before, length, behind
        Elements before, along and behind the axis.
    count
        Indices along the axis.
    steps
        How many indices one lies from the next along each of the three axes; 0 where all use the same.
    places
        The same of elements of ``x``.
    """

    before: int
    length: int
    behind: int
    count: int
    steps: tuple[int, int, int]
    places: tuple[int, int, int]

    @property
    def size(self) -> int:
        """How many elements are at the indices."""
        return self.before * self.count * self.behind


_STATUS = status_of_places("index {} is out of range", "Count elements from 0 or, from the end, from -1.")


@op("arrays")
class Indexed(FamilyOp):
    """An op on elements of ``x`` at indices along one axis."""

    x: AccelRef
    indices: AccelRef

    def operands(self) -> tuple[AccelRef, AccelRef]:
        """Return ``x`` and the indices, if they are refs and the latter integers."""
        indices = operand("indices", self.indices)
        if indices.dtype not in _INTEGERS:
            raise InvalidArgumentError(
                f"indices are {indices.dtype.value}", remedy="Give int32 or int64; device.elementwise.cast converts."
            )
        return operand("x", self.x), indices

    @abstractmethod
    def lies(self) -> tuple[Shape, Shape, int]:
        """Return the shape and strides of ``x``, and along which axis of it indices count."""

    def takes_strided(self, ref: AccelRef) -> bool:
        """See :meth:`KernelOp.takes_strided`: x, if the axes before and behind the one of the indices can be walked through as one each."""
        return ref is self.x and None not in _places(*self.lies())

    @abstractmethod
    def walk(self) -> Walk:
        """Return where elements are; raise if the operands do not fit together."""


def _places(shape: Shape, strides: Shape, axis: int) -> tuple[int | None, ...]:
    """Return how far elements lie apart before, along and behind an axis; ``None`` where that differs."""
    return _stride(shape[:axis], strides[:axis]), strides[axis], _stride(shape[axis + 1 :], strides[axis + 1 :])


def _stride(shape: Shape, strides: Shape) -> int | None:
    """Return the stride of several axes as one, if they have one."""
    axes = [(length, stride) for length, stride in zip(shape, strides, strict=True) if length != 1]
    is_one = all(before == stride * length for (_, before), (length, stride) in itertools.pairwise(axes))
    return (axes[-1][1] if axes else 0) if is_one else None


def _walk(op: Indexed, count: int, *, all_alike: bool) -> Walk:
    shape, strides, axis = op.lies()
    before, behind = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    first, along, last = (place or 0 for place in _places(shape, strides, axis))
    steps = (0, 1, 0) if all_alike else (count * behind, behind, 1)
    return Walk(before, shape[axis], behind, count, steps, (first, along, last))


def _along(x: AccelRef, indices: AccelRef, axis: int) -> Shape:
    """Return the shape of the elements at indices that are as many as the elements of ``x`` along all other axes."""
    shape = (*x.shape[:axis], indices.shape[axis], *x.shape[axis + 1 :]) if indices.ndim == x.ndim else ()
    if indices.shape != shape or indices.ndim != x.ndim:
        raise InvalidArgumentError(
            f"indices of shape {indices.shape} do not fit x of shape {x.shape} along axis {axis}",
            remedy="Give as many along all other axes.",
        )
    return shape


@op(convert={"axis": unless_none(to_axis)})
class Take(Indexed):
    """The parts of ``x`` at ``indices`` along ``axis``; without ``axis`` as if it had one dimension.

    Parameters
    ----------
    x
        Any shape.
    indices
        int32 or int64, of any shape, which takes the place of the axis in the result. Negative ones are counted from the end.
    axis
        Which axis.
    mode
        What is done with an index that is out of range: the op raises, or the index wraps around, or is clipped to the first or last element.
    out
        Buffer to write; not ``x`` or ``indices``.
    """

    axis: int | None = None
    _: KW_ONLY
    mode: Mode = "raise"
    out: AccelRef | None = None

    def _shape(self) -> tuple[Shape, int]:
        return ((self.x.size,), 0) if self.axis is None else (self.x.shape, axis_of(self.axis, self.x.ndim))

    def lies(self) -> tuple[Shape, Shape, int]:
        shape, axis = self._shape()
        return shape, steps_of(shape) if self.axis is None else self.x.strides, axis

    def takes_strided(self, ref: AccelRef) -> bool:
        return self.axis is not None and Indexed.takes_strided(self, ref)

    def walk(self) -> Walk:
        return _walk(self, self.indices.size, all_alike=True)

    def plan(self) -> Plan:
        x, indices = self.operands()
        check_choice("mode", self.mode, *get_args(Mode))
        shape, axis = self._shape()
        if not shape[axis] and indices.size and self.mode != "raise":
            raise InvalidArgumentError("x has no elements to wrap around or clip to", remedy="Leave empty buffers out.")
        taken = (*shape[:axis], *indices.shape, *shape[axis + 1 :])
        return planned(self.out, {"x": x, "indices": indices}, taken, x.dtype, status=_STATUS if self.mode == "raise" else None)


@op(convert={"axis": to_axis})
class TakeAlongAxis(Indexed):
    """The elements of ``x`` at ``indices`` along ``axis``: ``result[i, j] = x[i, indices[i, j]]`` along the last axis of a matrix.

    Parameters
    ----------
    x
        Any shape but 0-d.
    indices
        int32 or int64, of the shape of ``x`` but for the axis. Negative ones are counted from the end; the op raises if one is out of range.
    axis
        Which axis.
    out
        Buffer to write; not ``x`` or ``indices``.
    """

    axis: int = -1
    _: KW_ONLY
    out: AccelRef | None = None

    def lies(self) -> tuple[Shape, Shape, int]:
        return self.x.shape, self.x.strides, axis_of(self.axis, self.x.ndim)

    def walk(self) -> Walk:
        return _walk(self, self.indices.shape[self.lies()[2]], all_alike=False)

    def plan(self) -> Plan:
        x, indices = self.operands()
        return planned(self.out, {"x": x, "indices": indices}, _along(x, indices, axis_of(self.axis, x.ndim)), x.dtype, status=_STATUS)


@op(convert={"axis": to_axis})
class _Changing(Indexed):
    """An op that changes ``x`` in place."""

    values: AccelRef | complex | np.generic
    axis: int

    def number(self) -> bytes:
        """Return the bytes of the number that ``values`` is; none if it is a ref."""
        return b"" if isinstance(self.values, AccelRef) else element("values", self.values, self.x.dtype).tobytes()

    def lies(self) -> tuple[Shape, Shape, int]:
        return self.x.shape, self.x.strides, axis_of(self.axis, self.x.ndim)

    def walk(self) -> Walk:
        are_rows = self.indices.ndim == 1
        return _walk(self, self.indices.shape[0 if are_rows else self.lies()[2]], all_alike=are_rows)

    def _planned(self, capability: str) -> Plan:
        x, indices = self.operands()
        axis = axis_of(self.axis, x.ndim)
        shape = (*x.shape[:axis], indices.size, *x.shape[axis + 1 :]) if indices.ndim == 1 else _along(x, indices, axis)
        refs = {"indices": indices}
        if not isinstance(self.values, (complex, float, int, np.generic)):
            values = refs["values"] = operand("values", self.values)
            same_dtype(x=x, values=values)
            if values.shape != shape:
                raise InvalidArgumentError(
                    f"values have shape {values.shape}, their places {shape}", remedy="Give one value for each place."
                )
        self.number()
        not_aliased(x, **refs)
        return Plan(tuple(refs.values()), (x,), (), capability, x.dtype, updates=True, status=_STATUS)


@op()
class PutAlongAxis(_Changing):
    """``x`` with elements at ``indices`` along ``axis`` set to ``values``, in place. The result is ``x``.

    Parameters
    ----------
    x
        Any shape but 0-d; it is changed. Where two indices are equal, it gets either value.
    indices
        int32 or int64, of the shape of ``x`` but for the axis, or of one dimension: the same along all other axes. Negative ones are counted from
        the end; the op raises if one is out of range, and what is in ``x`` then must not be read.
    values
        One for each index along the axis and each element along all others; or a number.
    axis
        Which axis.
    """

    axis: int = -1

    def plan(self) -> Plan:
        return self._planned("")


@op()
class ScatterAdd(_Changing):
    """``values`` added to the elements of ``x`` at ``indices`` along ``axis``, in place. The result is ``x``.

    Parameters
    ----------
    x
        Any shape but 0-d; it is changed. Of float16 to float64, and integers of 32 and 64 bits. Where indices are equal, all their values are added; the
        order of floats is not the same each time. On a GPU each sum of 16-bit floats is rounded to 16 bits.
    indices, values, axis
        As for ``put_along_axis``.
    """

    axis: int = 0

    def plan(self) -> Plan:
        return self._planned("scatter_add")
