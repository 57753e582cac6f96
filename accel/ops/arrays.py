"""Arrays put together, taken apart, turned and made: ops that move elements and compute nothing with them."""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from accel.dtype import FLOATS, DType, DTypeLike
from accel.errors import InvalidArgumentError, UnsupportedError
from accel.ops.base import OutOp, Plan, Shape, Spec, as_shape, element, op, operand, planned, same_dtype
from accel.ops.family import Family
from accel.ops.fields import flag, set_fields, to_axis, to_dtype, to_int, unless_none
from accel.ops.indexed import PutAlongAxis, ScatterAdd, Take, TakeAlongAxis
from accel.ops.namespace import M, OpNamespace, method
from accel.ops.pieces import Copying, OfOne, Piece, axis_of, integers, whole
from accel.ops.rearranged import BroadcastTo, Flip, Pad, Part, Repeat, Roll, Tile, Transpose
from accel.ref import AccelRef
from accel.values import number
from accel.views import steps_of

__all__ = ["Arange", "ArraysOps", "Concatenate", "Eye", "Linspace", "Split", "Stack", "Tril", "Triu", "Unfold"]


def _arrays(name: str, arrays: Any) -> tuple[AccelRef, ...]:
    """Return several refs as a tuple; tokens are turned into refs later."""
    if not isinstance(arrays, (tuple, list)) or not arrays:
        raise InvalidArgumentError(f"arrays is {type(arrays).__name__} {arrays!r:.100}", remedy="Give a tuple or list of refs.")
    return tuple(arrays)


@op(convert={"arrays": _arrays, "axis": to_axis})
class _Joined(Copying, OutOp):
    """An op that makes one array of several."""

    arrays: Sequence[AccelRef]
    axis: int = 0

    def takes_strided(self, ref: AccelRef) -> bool:
        return ref is not self.out

    @abstractmethod
    def _shape(self) -> tuple[Shape, int]:
        """Return the shape of the result and the axis, counted from the first one; raise if the arrays' shapes do not fit."""

    def plan(self) -> Plan:
        refs = {f"arrays[{number}]": operand(f"arrays[{number}]", each) for number, each in enumerate(self.arrays)}
        return planned(self.out, refs, self._shape()[0], same_dtype(**refs))


@op()
class Concatenate(_Joined):
    """``arrays``, of one dtype, one behind the other along ``axis``; their shapes differ along it alone."""

    def _shape(self) -> tuple[Shape, int]:
        shapes = [ref.shape for ref in self.arrays]
        axis = axis_of(self.axis, len(shapes[0]))
        others = {(*shape[:axis], *shape[axis + 1 :]) for shape in shapes if len(shape) == len(shapes[0])}
        if len(others) > 1 or any(len(shape) != len(shapes[0]) for shape in shapes):
            raise InvalidArgumentError(
                f"shapes {', '.join(map(str, shapes))} differ besides axis {axis}", remedy="Give arrays of one shape but for the axis."
            )
        return (*shapes[0][:axis], sum(shape[axis] for shape in shapes), *shapes[0][axis + 1 :]), axis

    def pieces(self) -> list[Piece]:
        (shape, axis), target = self._shape(), 0
        steps, pieces = steps_of(shape), []
        for place, ref in enumerate(self.arrays):
            pieces.append(Piece(ref.shape, 0, ref.strides, target, steps, place))
            target += ref.shape[axis] * steps[axis]
        return pieces


@op()
class Stack(_Joined):
    """``arrays``, of one dtype and shape, along a new ``axis``."""

    def _shape(self) -> tuple[Shape, int]:
        shapes = {ref.shape for ref in self.arrays}
        if len(shapes) > 1:
            raise InvalidArgumentError(f"shapes {', '.join(map(str, shapes))} differ", remedy="Give arrays of one shape.")
        (shape,) = shapes
        axis = axis_of(self.axis, len(shape) + 1)
        return (*shape[:axis], len(self.arrays), *shape[axis:]), axis

    def pieces(self) -> list[Piece]:
        shape, axis = self._shape()
        steps = steps_of(shape)
        target_steps = (*steps[:axis], *steps[axis + 1 :])
        return [Piece(ref.shape, 0, ref.strides, number * steps[axis], target_steps, number) for number, ref in enumerate(self.arrays)]


def _sections(name: str, value: Any) -> int | Shape:
    several = integers(name, value)
    return several if isinstance(value, (tuple, list)) else several[0]


@op(convert={"sections": _sections, "axis": to_axis})
class Split(Copying[tuple[AccelRef, ...]]):
    """``x`` cut along ``axis``: into equal sections, or at the indices given.

    Parameters
    ----------
    x
        Any shape but 0-d.
    sections
        How many equal sections; or where the second and all further parts begin, in order.
    axis
        Which axis is cut.
    """

    x: AccelRef
    sections: int | Sequence[int]
    axis: int = 0

    def _bounds(self) -> tuple[int, list[tuple[int, int]]]:
        """Return the axis, and where parts begin and end along it."""
        axis, sections = axis_of(self.axis, self.x.ndim), self.sections
        length = self.x.shape[axis]
        if isinstance(sections, int):
            if not 1 <= sections <= max(length, 1) or length % sections:  # an empty axis has no number of empty sections
                raise InvalidArgumentError(f"{length} elements are not {sections} equal sections", remedy="Give indices, as a tuple.")
            cuts = [length // sections * number for number in range(sections + 1)]
        else:
            cuts = [0, *sections, length]
            if cuts != sorted(cuts):
                raise InvalidArgumentError(f"sections {sections} are no cuts of {length} elements", remedy="Give rising indices within x.")
        return axis, list(itertools.pairwise(cuts))

    def plan(self) -> Plan:
        x = operand("x", self.x)
        axis, bounds = self._bounds()
        return Plan((x,), (), tuple([Spec((*x.shape[:axis], end - begin, *x.shape[axis + 1 :]), x.dtype) for begin, end in bounds]))

    def takes_strided(self, ref: AccelRef) -> bool:
        return True

    def result(self, refs: tuple[AccelRef, ...]) -> tuple[AccelRef, ...]:
        """Return all parts."""
        return refs

    def pieces(self) -> list[Piece]:
        (axis, bounds), shape = self._bounds(), self.x.shape
        steps, pieces = self.x.strides, []
        for output, (begin, end) in enumerate(bounds):
            lengths = (*shape[:axis], end - begin, *shape[axis + 1 :])
            pieces.append(Piece(lengths, begin * steps[axis], steps, 0, steps_of(lengths), 0, output))
        return pieces


@op(convert={"n": to_int, "m": unless_none(to_int), "k": to_int, "dtype": to_dtype})
class Eye(Copying, OutOp):
    """A matrix with ones on one diagonal, the main one or the ``k``-th above it, and zeros elsewhere."""

    n: int
    m: int | None = None
    k: int = 0
    dtype: DTypeLike = DType.FLOAT32

    def plan(self) -> Plan:
        return planned(self.out, {}, as_shape((self.n, self.n if self.m is None else self.m)), DType.of(self.dtype))

    def filled(self) -> bytes:
        return np.zeros((), DType.of(self.dtype).numpy).tobytes()

    def number(self) -> bytes:
        return np.ones((), DType.of(self.dtype).numpy).tobytes()

    def pieces(self) -> list[Piece]:
        rows, columns = self.n, self.n if self.m is None else self.m
        row, column = max(0, -self.k), max(0, self.k)
        length = min(rows - row, columns - column)
        return [Piece((length,), 0, (0,), row * columns + column, (columns + 1,), None)] if length > 0 else []


@op(convert=dict.fromkeys(("size", "step", "axis"), to_int))
class Unfold(OfOne):
    """Windows of ``size`` elements along an axis, ``step`` apart; they may overlap. The axis counts windows, and their elements are a new last axis.

    It is torch's ``x.unfold(axis, size, step)``, and for ``step=1`` numpy's ``sliding_window_view``, but a copy.

    Parameters
    ----------
    x
        Of any dtype.
    size
        Elements of a window, at least 1.
    step
        From the beginning of one window to that of the next, at least 1. Elements behind the last whole window are left out.
    axis
        The axis, which is ``size`` long at least.
    """

    size: int
    step: int = 1
    axis: int = -1

    def shape(self) -> Shape:
        x, axis = self.x.shape, axis_of(self.axis, self.x.ndim)
        if self.size < 1 or self.step < 1:
            raise InvalidArgumentError(f"size is {self.size} and step {self.step}", remedy="Give 1 or more for both.")
        if x[axis] < self.size:
            raise InvalidArgumentError(
                f"axis {axis} has {x[axis]} elements, and a window {self.size}", remedy="Pad it first, with arrays.pad."
            )
        return (*x[:axis], (x[axis] - self.size) // self.step + 1, *x[axis + 1 :], self.size)

    def pieces(self) -> list[Piece]:
        strides, axis = self.x.strides, axis_of(self.axis, self.x.ndim)
        return whole(self.shape(), 0, (*strides[:axis], strides[axis] * self.step, *strides[axis + 1 :], strides[axis]))


@op("arrays", convert={"k": to_int})
class _Triangle(OutOp):
    """A part of the last two axes of ``x``, zeros elsewhere."""

    x: AccelRef
    k: int = 0

    def plan(self) -> Plan:
        x = operand("x", self.x)
        if x.ndim < 2:
            raise InvalidArgumentError(f"x has shape {x.shape}; a matrix has two dimensions at least", remedy="Reshape it.")
        return planned(self.out, {"x": x}, x.shape, x.dtype)


@op()
class Tril(_Triangle):
    """The matrices of ``x`` with zeros above the ``k``-th diagonal."""


@op()
class Triu(_Triangle):
    """The matrices of ``x`` with zeros below the ``k``-th diagonal."""


def _is_finite(value: float) -> bool:
    """Return whether a number is finite as a float, which an int need not be."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


@op("arrays")
class _Ramp(OutOp):
    """Numbers that rise by one step."""

    @abstractmethod
    def ramp(self) -> tuple[int, float, float, float | None]:
        """Return how many numbers there are, the first one, the step, and the last one where it is to be exact."""


@op()
class Arange(_Ramp):
    """Numbers from ``start`` up to, and without, ``stop``: float32, or int64 if all are ints; with one number from 0 up to it."""

    start: float
    stop: float | None = None
    step: float = 1
    dtype: DTypeLike = None

    def __post_init__(self) -> None:
        given = (0, self.start, self.step) if self.stop is None else (self.start, self.stop, self.step)
        start, stop, step = (number("start, stop or step", each) for each in given)
        if any(isinstance(each, complex) or not _is_finite(each) for each in (start, stop, step)) or not step:
            raise InvalidArgumentError(
                f"start {start}, stop {stop} and step {step} are no range", remedy="Give finite numbers, and a step."
            )
        are_whole = all(isinstance(each, int) for each in (start, stop, step))
        dtype = (DType.INT64 if are_whole else DType.FLOAT32) if self.dtype is None else DType.of(self.dtype)
        if dtype not in FLOATS and not (dtype.is_integer and are_whole):
            raise UnsupportedError(
                f"a range of {start}, {stop} and {step} in {dtype.value}", remedy="Give whole numbers, or a float dtype."
            )
        set_fields(self, start=start, stop=stop, step=step, dtype=dtype)

    def ramp(self) -> tuple[int, float, float, float | None]:
        start, stop, step = self.start, self.start if self.stop is None else self.stop, self.step
        if all(isinstance(each, int) for each in (start, stop, step)):
            count: float = -(-(stop - start) // step)
        else:  # as numpy counts: floor division knows that a step of 0.95 is a little less, and would reach stop itself
            exact = (stop - start) / step
            if not math.isfinite(exact):
                raise InvalidArgumentError(f"a range of {start}, {stop} and {step} has too many numbers", remedy="Give a larger step.")
            count = math.ceil(exact)
        return max(0, int(count)), start, step, None

    def plan(self) -> Plan:
        count, start, step, _ = self.ramp()
        dtype = DType.of(self.dtype)
        if dtype.is_integer and count:
            element("start", start, dtype), element("the last number", start + (count - 1) * step, dtype)
        return planned(self.out, {}, (count,), dtype)


@op()
class Linspace(_Ramp):
    """``num`` numbers from ``start`` to ``stop``, or up to it without ``endpoint``, at equal distances, in a float dtype."""

    start: float
    stop: float
    num: int = 50
    endpoint: bool = True
    dtype: DTypeLike = DType.FLOAT32

    def __post_init__(self) -> None:
        start, stop = number("start", self.start), number("stop", self.stop)
        dtype, num = DType.of(self.dtype), to_int("num", self.num)
        if any(isinstance(each, complex) or (isinstance(each, int) and not _is_finite(each)) for each in (start, stop)) or num < 0:
            raise InvalidArgumentError(f"{num} numbers from {start} to {stop}", remedy="Give real numbers, and a count of 0 or more.")
        if dtype not in FLOATS:
            raise UnsupportedError(f"linspace is not offered in {dtype.value}", remedy="Give float16, bfloat16, float32 or float64.")
        endpoint = flag("endpoint", self.endpoint)
        set_fields(self, start=float(start), stop=float(stop), num=num, endpoint=endpoint, dtype=dtype)

    def ramp(self) -> tuple[int, float, float, float | None]:
        parts = self.num - self.endpoint
        step = (self.stop - self.start) / parts if parts > 0 else 0.0
        return self.num, self.start, step, self.stop if self.endpoint and self.num > 1 else None

    def plan(self) -> Plan:
        return planned(self.out, {}, (self.num,), DType.of(self.dtype))


class ArraysOps(OpNamespace[M]):
    """Arrays put together, taken apart, turned and made. Elements keep their dtype, and may be of any."""

    __slots__ = ()

    library: ClassVar = "arrays"
    aliases: ClassVar = {
        "permute_dims": ".transpose(x, axes)",
        "concat": ".concatenate(arrays, axis)",
        "cat": ".concatenate(arrays, axis)",
        "vstack": ".concatenate(arrays)",
        "hstack": ".concatenate(arrays, 1)",
        "chunk": ".split(x, sections)",
        "expand": ".broadcast_to(x, shape)",
        "gather": ".take_along_axis(x, indices, axis)",
        "embedding": ".take(x, indices, axis=0)",
        "scatter": ".put_along_axis(x, indices, values, axis)",
        "index_select": ".take(x, indices, axis)",
        "identity": ".eye(n)",
        "sliding_window_view": ".unfold(x, size)",
    }

    part = method(Part)
    transpose = method(Transpose)
    flip = method(Flip)
    roll = method(Roll)
    broadcast_to = method(BroadcastTo)
    tile = method(Tile)
    repeat = method(Repeat)
    pad = method(Pad)
    concatenate = method(Concatenate)
    stack = method(Stack)
    split = method(Split)
    take = method(Take)
    take_along_axis = method(TakeAlongAxis)
    put_along_axis = method(PutAlongAxis)
    scatter_add = method(ScatterAdd)
    unfold = method(Unfold)
    tril = method(Tril)
    triu = method(Triu)
    eye = method(Eye)
    arange = method(Arange)
    linspace = method(Linspace)


FAMILY = Family(ArraysOps)
