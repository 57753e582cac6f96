"""One array with its elements in another order, repeated, or padded."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import KW_ONLY
from types import EllipsisType
from typing import Any, Literal, get_args

from accel.errors import InvalidArgumentError
from accel.ops.base import Shape, as_shape, element, op
from accel.ops.fields import integer, set_fields
from accel.ops.pieces import AXIS, INTEGERS, OfOne, Piece, axes_of, axis_of, integers, whole
from accel.ref import AccelRef
from accel.views import broadcast, selected, steps_of, strides_of

__all__ = ["BroadcastTo", "Flip", "Pad", "Part", "Repeat", "Roll", "Tile", "Transpose"]

PadMode = Literal["constant", "edge", "reflect", "symmetric", "wrap"]
_PAD_MODES: tuple[PadMode, ...] = get_args(PadMode)

Axes = int | Sequence[int] | None
Index = int | slice | EllipsisType | tuple[int | slice | EllipsisType, ...]


@op()
class Transpose(OfOne):
    """``x`` with its axes in another order: reversed, or that of ``axes``."""

    x: AccelRef
    axes: Sequence[int] | None = None
    _: KW_ONLY
    out: AccelRef | None = None

    def __post_init__(self) -> None:
        """Convert ``axes``."""
        if self.axes is not None:
            set_fields(self, axes=integers("axes", self.axes))

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


@op()
class Flip(OfOne):
    """``x`` with the elements along ``axis``, or all axes, in reverse."""

    x: AccelRef
    axis: Axes = None
    _: KW_ONLY
    out: AccelRef | None = None

    def __post_init__(self) -> None:
        """Convert ``axis``."""
        if self.axis is not None:
            set_fields(self, axis=integers("axis", self.axis))

    def _flipped(self) -> Shape:
        return tuple(range(self.x.ndim)) if self.axis is None else axes_of(self.axis, self.x.ndim)

    def shape(self) -> Shape:
        self._flipped()
        return self.x.shape

    def pieces(self) -> list[Piece]:
        shape, strides, flipped = self.x.shape, self.x.strides, self._flipped()
        start = sum(strides[axis] * (shape[axis] - 1) for axis in flipped)
        return whole(shape, start, tuple([-step if axis in flipped else step for axis, step in enumerate(strides)]))


@op()
class Roll(OfOne):
    """``x`` with its elements moved ``shift`` places along ``axis``, those at the end to the beginning; without ``axis`` as if it had one dimension."""

    x: AccelRef
    shift: int | Sequence[int]
    axis: Axes = None
    _: KW_ONLY
    out: AccelRef | None = None

    def __post_init__(self) -> None:
        """Convert ``shift`` and ``axis``."""
        set_fields(self, shift=integers("shift", self.shift))
        if self.axis is not None:
            set_fields(self, axis=integers("axis", self.axis))

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


@op()
class BroadcastTo(OfOne):
    """``x`` repeated to ``shape``, as numpy broadcasts."""

    x: AccelRef
    to: int | Sequence[int]
    _: KW_ONLY
    out: AccelRef | None = None

    def __post_init__(self) -> None:
        """Convert ``to``."""
        set_fields(self, to=as_shape(self.to))

    def shape(self) -> Shape:
        shape = as_shape(self.to)
        if broadcast(self.x.shape, shape) != shape:
            raise InvalidArgumentError(f"x of shape {self.x.shape} cannot be broadcast to {shape}", remedy="Give lengths where x has 1.")
        return shape

    def pieces(self) -> list[Piece]:
        return whole(self.shape(), 0, strides_of(self.x.shape, self.shape(), self.x.strides))


@op()
class Tile(OfOne):
    """``x`` repeated ``reps`` times along each axis, one copy after the other."""

    x: AccelRef
    reps: int | Sequence[int]
    _: KW_ONLY
    out: AccelRef | None = None

    def __post_init__(self) -> None:
        """Convert ``reps``."""
        set_fields(self, reps=as_shape(self.reps))

    def _aligned(self) -> tuple[Shape, Shape]:
        """Return the shape of x and how often it is repeated along each axis, of as many axes."""
        shape, reps = self.x.shape, as_shape(self.reps)
        ndim = max(len(shape), len(reps))
        return (1,) * (ndim - len(shape)) + shape, (1,) * (ndim - len(reps)) + reps

    def shape(self) -> Shape:
        return tuple([length * count for length, count in zip(*self._aligned(), strict=True)])

    def pieces(self) -> list[Piece]:
        shape, reps = self._aligned()
        steps = strides_of(self.x.shape, shape, self.x.strides)
        return whole(tuple(itertools.chain(*zip(reps, shape, strict=True))), 0, tuple(itertools.chain(*((0, step) for step in steps))))


@op()
class Repeat(OfOne):
    """``x`` with each element repeated along ``axis``; without ``axis`` as if it had one dimension."""

    x: AccelRef
    repeats: int
    axis: int | None = None
    _: KW_ONLY
    out: AccelRef | None = None

    def __post_init__(self) -> None:
        """Convert ``repeats`` and ``axis``."""
        set_fields(self, repeats=integer("repeats", self.repeats, "Give one int, of 0 or more."))
        if self.axis is not None:
            set_fields(self, axis=integer("axis", self.axis, AXIS))

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

    x: AccelRef
    width: int | Sequence[Sequence[int]]
    value: complex = 0
    _: KW_ONLY
    mode: PadMode = "constant"
    out: AccelRef | None = None

    def __post_init__(self) -> None:
        """Convert ``width``."""
        if isinstance(self.x, AccelRef) and not self.x.ndim and isinstance(self.mode, str) and self.mode in _PAD_MODES:
            set_fields(self, mode="constant")  # there is nothing to pad
        if isinstance(self.width, (tuple, list)):
            set_fields(self, width=tuple([integers("width", pair) for pair in self.width]))
        else:
            set_fields(self, width=integer("width", self.width, INTEGERS))

    def _widths(self) -> tuple[tuple[int, int], ...]:
        width: Any = self.width if isinstance(self.width, tuple) else ((self.width, self.width),) * self.x.ndim
        if len(width) != self.x.ndim or any(len(pair) != 2 or min(pair) < 0 for pair in width):
            raise InvalidArgumentError(f"width is {self.width}", remedy="Give one pair of sizes, of 0 or more, for each dimension of x.")
        return tuple([(before, after) for before, after in width])

    def before(self) -> Shape:
        """Return how many elements come before each axis."""
        return tuple([before for before, _ in self._widths()])

    def shape(self) -> Shape:
        if self.mode not in _PAD_MODES:
            raise InvalidArgumentError(f"mode is {self.mode!r}", remedy=f"Use one of {', '.join(map(repr, _PAD_MODES))}.")
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

    x: AccelRef
    index: Index
    _: KW_ONLY
    out: AccelRef | None = None

    def shape(self) -> Shape:
        _, lengths, _ = selected(self.x.shape, self.x.strides, self.index)
        return lengths

    def takes_strided(self, ref: AccelRef) -> bool:
        return True

    def pieces(self) -> list[Piece]:
        start, lengths, steps = selected(self.x.shape, self.x.strides, self.index)
        return [Piece(lengths, start, steps, 0, steps_of(lengths) if self.out is None else self.out.strides)]
