"""Elements in random order, and random elements; :mod:`accel.ops.rng` says of which numbers they are made."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

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

    @abstractmethod
    def along(self) -> int:
        """Return the axis as it was given."""

    @abstractmethod
    def source(self) -> int | AccelRef:
        """Return the array, or the number of integers from 0 on that stand for one."""

    @abstractmethod
    def counts(self) -> tuple[int, int]:
        """Return how many elements there are to choose from, and how many are chosen."""

    @abstractmethod
    def way(self) -> str:
        """Return how they are chosen: ``"ordered"``, ``"weighed"``, or ``"drawn"``."""

    def lines(self) -> tuple[int, int]:
        """Return how many elements there are before the axis, and behind it."""
        source = self.source()
        if isinstance(source, int):
            return 1, 1
        axis = axis_of(self.along(), source.ndim)
        return math.prod(source.shape[:axis]), math.prod(source.shape[axis + 1 :])

    def _made(self, chosen: Shape) -> Spec:
        """Return the result: ``chosen`` in the place of the axis."""
        source = self.source()
        if isinstance(source, int):
            return Spec(chosen, DType.INT64)
        axis = axis_of(self.along(), source.ndim)
        return Spec((*source.shape[:axis], *chosen, *source.shape[axis + 1 :]), source.dtype)

    def _length(self, name: str) -> int:
        source = self.source()
        return source if isinstance(source, int) else operand(name, source).shape[axis_of(self.along(), source.ndim)]

    def _checked(self, name: str) -> dict[str, AccelRef]:
        """Return the refs that are read, of the source."""
        source = self.source()
        if isinstance(source, int):
            if self.along():
                raise InvalidArgumentError(f"axis is {self.along()}, and {name} is a number", remedy="Leave axis out.")
            return {}
        return {name: source}


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

    x: int | AccelRef
    axis: int = 0

    def along(self) -> int:
        return self.axis

    def source(self) -> int | AccelRef:
        return self.x

    def counts(self) -> tuple[int, int]:
        return self._length("x"), self._length("x")

    def way(self) -> str:
        return "ordered"

    def plan(self) -> Plan:
        length = self._length("x")
        _orderable(length)
        made = self._made((length,))
        return planned(self.out, self._checked("x"), made.shape, made.dtype)


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

    a: int | AccelRef
    shape: int | Iterable[int] = ()
    replace: bool = True
    p: AccelRef | None = None
    axis: int = 0

    def along(self) -> int:
        return self.axis

    def source(self) -> int | AccelRef:
        return self.a

    def counts(self) -> tuple[int, int]:
        return self._length("a"), math.prod(as_shape(self.shape))

    def way(self) -> str:
        return "ordered" if not self.replace else "drawn" if self.p is None else "weighed"

    def per_block(self) -> int:
        """Return how many numbers come from one block of the stream, where elements are drawn; see :class:`accel.ops.Integers`."""
        return 4 if self._length("a") <= 1 << 32 else 2

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
        shape, dtype, _ = self._made(as_shape(self.shape))
        reads = self._checked("a")
        if self.p is None:
            return planned(self.out, reads, shape, dtype)
        p = reads["p"] = operand("p", self.p, ndim=1)
        if p.dtype not in WIDE_FLOATS or p.shape != (length,):
            raise InvalidArgumentError(
                f"p is {p.dtype.value}{list(p.shape)}, for {length} elements",
                remedy="Give float32 or float64, one number for each element.",
            )
        return planned(self.out, reads, shape, dtype, status=Status(Spec((), DType.INT32), _weights_are_wrong))


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
