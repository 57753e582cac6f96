"""Ops that move elements: from where to where, in pieces that are regular. A backend's one kernel copies a piece."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, NamedTuple

from accel.errors import InvalidArgumentError
from accel.ops.base import FamilyOp, OutOp, Plan, R_co, Shape, op, operand, planned
from accel.ops.fields import AXIS, integer
from accel.ops.namespace import OpNamespace, ops_of
from accel.ref import AccelRef
from accel.views import steps_of

__all__ = ["Copying", "OfOne", "Piece", "axes_of", "axis_of", "integers", "kinds_of_pieces", "lines_of", "whole"]

_INTEGERS = "Give an int, or a tuple of them."


class Piece(NamedTuple):
    """Elements that are copied from an input to an output. Places and steps are counted in elements.

    Attributes
    ----------
    lengths
        Of the axes along which elements lie.
    start, steps
        The first element in the input, and how far apart neighbours along each axis are.
    target, target_steps
        The same in the output.
    input
        Which of the op's inputs, or ``None`` for the op's number, which is repeated.
    output
        Which of the op's outputs.
    """

    lengths: Shape
    start: int
    steps: Shape
    target: int
    target_steps: Shape
    input: int | None = 0
    output: int = 0


@op("arrays")
class Copying(FamilyOp[R_co]):
    """An op of pieces."""

    @abstractmethod
    def pieces(self) -> list[Piece]:
        """Return what is copied, in places and steps of C-contiguous inputs and outputs; elements of one output are in one piece."""

    def filled(self) -> bytes | None:
        """Return the bytes of the element that outputs are filled with before, or ``None`` if pieces are all."""
        return None

    def number(self) -> bytes:
        """Return the bytes of the element of pieces without an input."""
        return b""


def kinds_of_pieces(namespace: type[OpNamespace[Any]]) -> tuple[str, ...]:
    """Return the kinds of a namespace's ops that are copied in pieces: one kernel of a backend runs them all."""
    return tuple([op.kind for op in ops_of(namespace).values() if hasattr(op, "pieces")])


def integers(name: str, value: Any) -> Shape:
    """Return one or several ints as a tuple."""
    several = value if isinstance(value, (tuple, list)) else (value,)
    return tuple([integer(name, each, _INTEGERS) for each in several])


def axis_of(axis: int, ndim: int) -> int:
    """Return the number of an axis, counted from the first one."""
    if not -ndim <= axis < ndim:
        raise InvalidArgumentError(f"axis {axis} is not one of {ndim} dimension(s)", remedy=AXIS)
    return axis % ndim


def axes_of(value: Any, ndim: int) -> Shape:
    """Return the numbers of different axes; of ``None``, those of all."""
    if value is None:
        return tuple(range(ndim))
    axes = tuple([axis_of(each, ndim) for each in integers("axis", value)])
    if len(set(axes)) < len(axes):
        raise InvalidArgumentError(f"axis {value} names a dimension twice", remedy=AXIS)
    return axes


def lines_of(shape: Shape, axis: int) -> tuple[int, int, int]:
    """Return the number of elements before, along and behind an axis."""
    place = axis_of(axis, len(shape))
    return math.prod(shape[:place]), shape[place], math.prod(shape[place + 1 :])


def whole(lengths: Shape, start: int, steps: Shape) -> list[Piece]:
    """Return the one piece that makes a whole output."""
    return [Piece(lengths, start, steps, 0, steps_of(lengths))]


@op()
class OfOne(Copying, OutOp):
    """An op of pieces of one array."""

    x: AccelRef

    @abstractmethod
    def shape(self) -> Shape:
        """Return the shape of the result; raise if arguments do not fit ``x``."""

    def takes_strided(self, ref: AccelRef) -> bool:
        return ref is not self.out

    def plan(self) -> Plan:
        x = operand("x", self.x)
        return planned(self.out, {"x": x}, self.shape(), x.dtype)
