"""Elements in random order, and random elements; :mod:`accel.ops.rng` says of which numbers they are made."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar, cast

import numpy as np

from accel.dtype import WIDE_FLOATS, DType
from accel.errors import AccelError, InvalidArgumentError
from accel.ops.base import Plan, Shape, Spec, Status, as_shape, op, operand, planned, to_shape
from accel.ops.draws import Draw, whole
from accel.ops.fields import to_axis, to_flag
from accel.ops.pieces import axis_of
from accel.ref import AccelRef

__all__ = ["Choice", "Permutation"]

_MOST = 1 << 31
"""How many elements are brought into order at most, and one more."""
_NO_WEIGHT, _TOO_FEW = 1, 2
"""What the status of weights says, as a sum: one is no weight; and there are fewer weights above 0 than elements to choose."""


class Picking(Draw):
    """What ops share that put elements of ``source()`` along an axis into a result."""

    __slots__ = ()

    of: ClassVar[str]
    """Name of the field that holds the array, or how many integers from 0 on stand for one."""

    def source(self) -> int | AccelRef:
        """Return the array, or the number of integers."""
        found: int | AccelRef = getattr(self, self.of)
        return found

    @abstractmethod
    def counts(self) -> tuple[int, int]:
        """Return how many elements there are to choose from, and how many are chosen."""

    @abstractmethod
    def way(self) -> str:
        """Return how they are chosen: ``"ordered"``, ``"weighed"``, or ``"drawn"``."""

    def parts(self) -> tuple[Shape, int, Shape]:
        """Return the dimensions before the axis, its length, and the dimensions behind it."""
        source, mine = self.source(), cast("Any", self)
        if isinstance(source, int):
            return (), source, ()
        shape = operand(self.of, source).shape
        axis = axis_of(mine.axis, len(shape))
        return shape[:axis], shape[axis], shape[axis + 1 :]

    def lines(self) -> tuple[int, int]:
        """Return how many elements there are before the axis, and behind it."""
        before, _, behind = self.parts()
        return math.prod(before), math.prod(behind)

    def _picked(self, chosen: Shape, status: Status | None = None, **others: AccelRef) -> Plan:
        """Return the plan of an op whose result has ``chosen`` in the place of the axis."""
        source, (before, _, behind), mine = self.source(), self.parts(), cast("Any", self)
        if not isinstance(source, int):
            return planned(self.out, {self.of: source, **others}, (*before, *chosen, *behind), source.dtype, status=status)
        if mine.axis:
            raise InvalidArgumentError(f"axis is {mine.axis}, and {self.of} is a number", remedy="Leave axis out.")
        return planned(self.out, others, chosen, DType.INT64, status=status)


def _source(name: str, value: Any) -> Any:
    """Return a number of elements as an int; leave refs, and what stands for them."""
    return whole(name, value, 0, 1 << 62) if isinstance(value, (int, np.integer)) and not isinstance(value, bool) else value


@op(convert={"x": _source, "axis": to_axis})
class Permutation(Picking):
    """``x`` with its elements along an axis in random order; of an int, the integers below it, int64. All orders have the same probability.

    See :class:`Draw` for the other parameters; a stream has one number for each element along the axis.

    Parameters
    ----------
    x
        Any shape and dtype with less than 2**31 elements along the axis, or an int.
    axis
        Whose elements, which may be arrays, are moved as a whole.
    """

    of: ClassVar[str] = "x"

    x: int | AccelRef
    axis: int = 0

    def counts(self) -> tuple[int, int]:
        return (self.parts()[1],) * 2

    def way(self) -> str:
        return "ordered"

    def plan(self) -> Plan:
        length = self.parts()[1]
        _orderable(length)
        return self._picked((length,))


@op(convert={"shape": to_shape, "a": _source, "axis": to_axis, "replace": to_flag})
class Choice(Picking):
    """Random elements of ``a`` along an axis, as numpy's ``Generator.choice``; of an int, of the integers below it, int64.

    See :class:`Draw` for the other parameters.

    Parameters
    ----------
    a
        Any shape and dtype, or an int.
    shape
        Takes the place of the axis in the result.
    replace
        Whether an element may be chosen more than once. If not, or with ``p``, there are less than 2**31 to choose from.
    p
        How probable elements are, each in proportion to its number: float32 or float64, one for each element along the axis. ``None``: all are alike.
        A number below 0 or that is not finite raises :class:`~accel.InvalidArgumentError`, and so do fewer numbers above 0 than elements to choose.
    axis
        Whose elements, which may be arrays, are chosen as a whole.
    """

    of: ClassVar[str] = "a"

    a: int | AccelRef
    shape: int | Iterable[int] = ()
    replace: bool = True
    p: AccelRef | None = None
    axis: int = 0

    def counts(self) -> tuple[int, int]:
        return self.parts()[1], math.prod(as_shape(self.shape))

    def way(self) -> str:
        return "ordered" if not self.replace else "drawn" if self.p is None else "weighed"

    def per_block(self) -> int:
        """Return how many numbers come from one block of the stream, where elements are drawn; see :class:`accel.ops.Integers`."""
        return 4 if self.parts()[1] <= 1 << 32 else 2

    def stream(self) -> str:
        if self.p is not None:
            return self.kind
        return f"integers {self.per_block()}" if self.replace else "permutation"

    def plan(self) -> Plan:
        length, count = self.counts()
        if not length and count:
            raise InvalidArgumentError("there is nothing to choose from", remedy="Give elements, or a shape without any.")
        if not self.replace and count > length:
            raise InvalidArgumentError(f"{count} of {length} elements are to be chosen once each", remedy="Give replace=True or fewer.")
        if self.way() != "drawn":
            _orderable(length)
        shape = as_shape(self.shape)
        if self.p is None:
            return self._picked(shape)
        p = operand("p", self.p, ndim=1)
        if p.dtype not in WIDE_FLOATS or p.shape != (length,):
            raise InvalidArgumentError(
                f"p is {p.dtype.value}{list(p.shape)}, for {length} elements",
                remedy="Give float32 or float64, one number for each element.",
            )
        return self._picked(shape, Status(Spec((), DType.INT32), _weights_are_wrong), p=p)


def _orderable(length: int) -> None:
    if length >= _MOST:
        raise InvalidArgumentError(
            f"there are {length} elements", remedy=f"Give {_MOST - 1} at most, or choose with replacement, without p."
        )


def _weights_are_wrong(status: np.ndarray[Any, Any]) -> AccelError | None:
    found = int(status)
    if found & _NO_WEIGHT:
        return InvalidArgumentError("p has elements that are negative or not finite", op="choice", remedy="Give numbers of 0 or more.")
    if found & _TOO_FEW:
        return InvalidArgumentError(
            "p has fewer elements above 0 than are to be chosen", op="choice", remedy="Choose fewer, or with replace=True."
        )
    return None
