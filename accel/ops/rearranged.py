"""One array with its elements in another order, repeated, or padded."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import KW_ONLY
from types import EllipsisType
from typing import Any, Literal, get_args

from accel.errors import InvalidArgumentError
from accel.ops.base import Shape, as_shape, element, op, to_shape
from accel.ops.fields import AXIS, set_fields, to_axis, to_int, to_integer, unless_none
from accel.ops.pieces import OfOne, Piece, axes_of, axis_of, integers, whole
from accel.ref import AccelRef
from accel.values import check_choice
from accel.views import broadcast, selected, steps_of, strides_of

__all__ = ["BroadcastTo", "Flip", "Pad", "Part", "Repeat", "Roll", "Tile", "Transpose"]

PadMode = Literal["constant", "edge", "reflect", "symmetric", "wrap"]
_PAD_MODES: tuple[PadMode, ...] = get_args(PadMode)

Axes = int | Sequence[int] | None
Index = int | slice | EllipsisType | tuple[int | slice | EllipsisType, ...]


@op(convert={"axes": unless_none(integers)})
class Transpose(OfOne):
    """``x`` with its axes in another order: reversed, or that of ``axes``."""

    axes: Sequence[int] | None = None

    def _order(self) -> Shape:
        ndim = self.x.ndim
        order = tuple(reversed(range(ndim))) if self.axes is None else axes_of(self.axes, ndim)
        if len(order) != ndim:
            raise InvalidArgumentError(f"axes {self.axes} do not name each of {ndim} dimension(s)", remedy=AXIS)
        return order

    def shape(self) -> Shape:
        return tuple([self.x.shape[axis] for axis in self._order()])

    def pieces(self) -> list[Piece]:
        steps = self.x.strides
        return whole(self.shape(), 0, tuple([steps[axis] for axis in self._order()]))


@op(convert={"axis": unless_none(integers)})
class Flip(OfOne):
    """``x`` with the elements along ``axis``, or all axes, in reverse."""

    axis: Axes = None

    def shape(self) -> Shape:
        axes_of(self.axis, self.x.ndim)
        return self.x.shape

    def pieces(self) -> list[Piece]:
        shape, strides, flipped = self.x.shape, self.x.strides, axes_of(self.axis, self.x.ndim)
        start = sum(strides[axis] * (shape[axis] - 1) for axis in flipped)
        return whole(shape, start, tuple([-step if axis in flipped else step for axis, step in enumerate(strides)]))


@op(convert={"shift": integers, "axis": unless_none(integers)})
class Roll(OfOne):
    """``x`` with its elements moved ``shift`` places along ``axis``, those at the end to the beginning; without ``axis`` as if it had one dimension."""

    shift: int | Sequence[int]
    axis: Axes = None

    def _shifts(self) -> tuple[Shape, dict[int, int]]:
        """Return the shape in which elements are moved, and how far along each axis."""
        shifts = integers("shift", self.shift)
        axes = (0,) if self.axis is None else axes_of(self.axis, self.x.ndim)
        if len(shifts) != len(axes):
            raise InvalidArgumentError(f"shift {shifts} and axis {self.axis} are not as many", remedy="Give one shift for each axis.")
        return (self.x.size,) if self.axis is None else self.x.shape, dict(zip(axes, shifts, strict=True))

    def shape(self) -> Shape:
        self._shifts()
        return self.x.shape

    def takes_strided(self, ref: AccelRef) -> bool:
        return self.axis is not None and ref is not self.out

    def pieces(self) -> list[Piece]:
        shape, shifts = self._shifts()
        target_steps = steps_of(shape)
        steps = target_steps if self.axis is None else self.x.strides
        if 0 in shape:
            return []
        # Along each axis: where a part begins, where it goes to, and its length.
        parts = []
        for axis, length in enumerate(shape):
            shift = shifts.get(axis, 0) % length
            parts.append([(0, shift, length - shift), (length - shift, 0, shift)] if shift else [(0, 0, length)])
        pieces = []
        for chosen in itertools.product(*parts):
            start = sum(part[0] * step for part, step in zip(chosen, steps, strict=True))
            target = sum(part[1] * step for part, step in zip(chosen, target_steps, strict=True))
            pieces.append(Piece(tuple([part[2] for part in chosen]), start, steps, target, target_steps))
        return pieces


@op(convert={"to": to_shape})
class BroadcastTo(OfOne):
    """``x`` repeated to ``shape``, as numpy broadcasts."""

    to: int | Sequence[int]

    def shape(self) -> Shape:
        shape = as_shape(self.to)
        if broadcast(self.x.shape, shape) != shape:
            raise InvalidArgumentError(f"x of shape {self.x.shape} cannot be broadcast to {shape}", remedy="Give lengths where x has 1.")
        return shape

    def pieces(self) -> list[Piece]:
        return whole(self.shape(), 0, strides_of(self.x.shape, self.shape(), self.x.strides))


@op(convert={"reps": to_shape})
class Tile(OfOne):
    """``x`` repeated ``reps`` times along each axis, one copy after the other."""

    reps: int | Sequence[int]

    def _aligned(self) -> tuple[Shape, Shape]:
        """Return the shape of x and how often it is repeated along each axis, of as many axes."""
        shape, reps = self.x.shape, as_shape(self.reps)
        ndim = max(len(shape), len(reps))
        return (1,) * (ndim - len(shape)) + shape, (1,) * (ndim - len(reps)) + reps

    def shape(self) -> Shape:
        return as_shape([length * count for length, count in zip(*self._aligned(), strict=True)])

    def pieces(self) -> list[Piece]:
        shape, reps = self._aligned()
        steps = strides_of(self.x.shape, shape, self.x.strides)
        return whole(tuple(itertools.chain(*zip(reps, shape, strict=True))), 0, tuple(itertools.chain(*((0, step) for step in steps))))


@op(convert={"repeats": to_integer("Give one int, of 0 or more."), "axis": unless_none(to_axis)})
class Repeat(OfOne):
    """``x`` with each element repeated along ``axis``; without ``axis`` as if it had one dimension."""

    repeats: int
    axis: int | None = None

    def _parts(self) -> tuple[Shape, int]:
        if self.repeats < 0:
            raise InvalidArgumentError(f"repeats is {self.repeats}", remedy="Give an int of 0 or more.")
        return ((self.x.size,), 0) if self.axis is None else (self.x.shape, axis_of(self.axis, self.x.ndim))

    def shape(self) -> Shape:
        shape, axis = self._parts()
        return (*shape[:axis], shape[axis] * self.repeats, *shape[axis + 1 :])

    def takes_strided(self, ref: AccelRef) -> bool:
        return self.axis is not None and ref is not self.out

    def pieces(self) -> list[Piece]:
        shape, axis = self._parts()
        steps = steps_of(shape) if self.axis is None else self.x.strides
        return whole((*shape[: axis + 1], self.repeats, *shape[axis + 1 :]), 0, (*steps[: axis + 1], 0, *steps[axis + 1 :]))


@op()
class Pad(OfOne):
    """``x`` with ``width`` elements more before and after each axis: ``value``, or elements of ``x``.

    Parameters
    ----------
    x
        Any shape.
    width
        An int for all ends, or one pair (before, after) for each axis.
    value
        A number that the dtype of ``x`` can hold.
    mode
        As numpy's: ``"constant"`` for ``value``; ``"edge"`` for the last element; ``"reflect"`` and ``"symmetric"`` for the axis mirrored at, and behind,
        the last element; ``"wrap"`` for its other end. An axis that gets any has an element.
    out
        Buffer to write; not ``x``.
    """

    width: int | Sequence[Sequence[int]]
    value: complex = 0
    _: KW_ONLY
    mode: PadMode = "constant"

    def __post_init__(self) -> None:
        """Convert ``width``."""
        if isinstance(self.x, AccelRef) and not self.x.ndim and isinstance(self.mode, str) and self.mode in _PAD_MODES:
            set_fields(self, mode="constant")  # there is nothing to pad
        if isinstance(self.width, (tuple, list)):
            set_fields(self, width=tuple([integers("width", pair) for pair in self.width]))
        else:
            set_fields(self, width=to_int("width", self.width))

    def _widths(self) -> tuple[tuple[int, int], ...]:
        width: Any = self.width if isinstance(self.width, tuple) else ((self.width, self.width),) * self.x.ndim
        if len(width) != self.x.ndim or any(len(pair) != 2 or min(pair) < 0 for pair in width):
            raise InvalidArgumentError(f"width is {self.width}", remedy="Give one pair of sizes, of 0 or more, for each dimension of x.")
        return tuple([(before, after) for before, after in width])

    def before(self) -> Shape:
        """Return how many elements come before each axis."""
        return tuple([before for before, _ in self._widths()])

    def shape(self) -> Shape:
        check_choice("mode", self.mode, *_PAD_MODES)
        if self.mode == "constant":
            self.filled()
        elif self.value != 0:
            raise InvalidArgumentError(f"value is given, and mode is {self.mode!r}", remedy="Leave one of the two out.")
        elif any(length == 0 < max(pair) for length, pair in zip(self.x.shape, self._widths(), strict=True)):
            raise InvalidArgumentError(f"x of shape {self.x.shape} has no elements to go on with", remedy="Use mode='constant'.")
        return tuple([before + length + after for length, (before, after) in zip(self.x.shape, self._widths(), strict=True)])

    def filled(self) -> bytes:
        return element("value", self.value, self.x.dtype).tobytes()

    def pieces(self) -> list[Piece]:
        steps = steps_of(self.shape())
        target = sum(before * step for (before, _), step in zip(self._widths(), steps, strict=True))
        return [Piece(self.x.shape, 0, self.x.strides, target, steps)]


@op()
class Part(OfOne):
    """The elements of ``x`` that ``index`` selects, as numpy's basic indexing does, in a buffer of their own: ``x[index]``, which is a view, copied.

    Parameters
    ----------
    x
        Any shape.
    index
        An int, a slice, ``...`` (for all of ``x``), or a tuple of them: ``np.s_[:, 2:5]``, ``np.s_[::-1, 0]``.
    out
        Buffer to write; not ``x``.
    """

    index: Index

    def shape(self) -> Shape:
        _, lengths, _ = selected(self.x.shape, self.x.strides, self.index)
        return lengths

    def takes_strided(self, ref: AccelRef) -> bool:
        return True

    def pieces(self) -> list[Piece]:
        start, lengths, steps = selected(self.x.shape, self.x.strides, self.index)
        return [Piece(lengths, start, steps, 0, steps_of(lengths) if self.out is None else self.out.strides)]
