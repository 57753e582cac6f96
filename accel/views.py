"""Where the elements of a view lie: indexing, reshaping and reinterpreting an array without moving anything. Arithmetic on shapes and strides.

Strides count elements: how far neighbours along each axis are apart.
"""

from __future__ import annotations

import math
import operator
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.dtype import MOST_DIMENSIONS
from accel.errors import InvalidArgumentError

if TYPE_CHECKING:
    from accel.dtype import DType

__all__ = [
    "broadcast",
    "counted",
    "is_contiguous",
    "permutation",
    "recast",
    "reshaped",
    "restrided",
    "selected",
    "share_bytes",
    "span",
    "steps_of",
    "strides_of",
]

Shape = tuple[int, ...]

_MOST_ELEMENTS = (2**63 - 1) // 16
"""Of the widest type, in a dimension or in several that are not 0: more are beyond what numpy counts."""

_INDEX = "Give ints, slices and one `...`, as in ref[1], ref[2:5] or ref[::2, 0]."


def steps_of(shape: Shape) -> Shape:
    """Return the strides of a C-contiguous array."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def is_contiguous(shape: Shape, strides: Shape) -> bool:
    """Return whether elements lie in C order without gaps."""
    expected = 1
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length > 1 and stride != expected and 0 not in shape:
            return False
        expected *= length
    return True


def selected(shape: Shape, strides: Shape, index: Any) -> tuple[int, Shape, Shape]:
    """Return where the elements of ``array[index]`` are, as numpy's basic indexing has it: the first one's place, their lengths and strides.

    Parameters
    ----------
    shape, strides
        Of the array.
    index
        An int, a slice, ``...``, or a tuple of them.

    Raises
    ------
    InvalidArgumentError
        If it is no such index, or is out of range.
    """
    entries = _entries(index, len(shape))
    start, lengths, steps = 0, [], []
    for axis, (length, step, entry) in enumerate(zip(shape, strides, entries, strict=True)):
        if isinstance(entry, slice):
            try:
                chosen = range(length)[entry]
            except Exception as error:
                raise InvalidArgumentError(f"{entry!r} is no slice: {error}", remedy=_INDEX) from None
            start += chosen.start * step if len(chosen) else 0
            lengths.append(len(chosen))
            steps.append(chosen.step * step)
        else:
            if not -length <= entry < length:
                raise InvalidArgumentError(f"index {entry} is out of range for axis {axis}, which has {length}", remedy=_INDEX)
            start += entry % length * step
    return (0 if 0 in lengths else start), tuple(lengths), tuple(steps)


def permutation(axes: Any, ndim: int) -> Shape:
    """Return the axes of an array in another order: reversed, or that of ``axes``, counted from the first one.

    Raises
    ------
    InvalidArgumentError
        If these do not name each axis once.
    """
    if axes is None:
        return tuple(reversed(range(ndim)))
    try:
        order = tuple([operator.index(axis) for axis in axes])
    except TypeError:
        order = ()
    if sorted(axis % ndim for axis in order if -ndim <= axis < ndim) != list(range(ndim)):
        raise InvalidArgumentError(
            f"axes {axes!r} do not name each of {ndim} dimension(s) once", remedy="Give each number once, as in (0, 2, 1)."
        )
    return tuple([axis % ndim for axis in order])


def _entries(index: Any, ndim: int) -> list[Any]:
    """Return one int or slice per axis."""
    parts = list(index) if isinstance(index, tuple) else [index]
    entries: list[Any] = []
    for part in parts:
        if part is Ellipsis:
            if any(each is Ellipsis for each in entries):
                raise InvalidArgumentError("an index has one `...` at most", remedy=_INDEX)
            entries.append(part)
        elif isinstance(part, slice):
            entries.append(part)
        else:
            try:
                entries.append(operator.index(part))
            except Exception:
                raise InvalidArgumentError(f"{part!r} is not an index of a view", remedy=_INDEX) from None
            if isinstance(part, bool):
                raise InvalidArgumentError(f"{part!r} is not an index of a view", remedy=_INDEX)
    given = sum(entry is not Ellipsis for entry in entries)
    if given > ndim:
        raise InvalidArgumentError(f"{given} indices for {ndim} dimension(s)", remedy=_INDEX)
    rest = [slice(None)] * (ndim - given)
    at = next((i for i, entry in enumerate(entries) if entry is Ellipsis), None)
    return entries + rest if at is None else entries[:at] + rest + entries[at + 1 :]


def reshaped(shape: Shape, wanted: Any) -> Shape:
    """Return the shape that ``array.reshape(wanted)`` has; one dimension may be -1, which takes what is left.

    Raises
    ------
    InvalidArgumentError
        If it is no shape, or not of as many elements.
    """
    size = math.prod(shape)
    try:
        result = [operator.index(n) for n in (wanted if isinstance(wanted, (tuple, list)) else (wanted,))]
    except Exception:
        raise InvalidArgumentError(f"{wanted!r} is not a shape", remedy="Use an int or a tuple of ints; one may be -1.") from None
    known = math.prod(n for n in result if n != -1)
    if result.count(-1) == 1 and known and size % known == 0:
        result[result.index(-1)] = size // known
    if min(result, default=0) < 0 or math.prod(result) != size:
        raise InvalidArgumentError(
            f"{size} element(s) of shape {shape} do not make {wanted!r}",
            remedy="Give a shape of as many elements; one dimension may be -1.",
        )
    return tuple(result) if size and len(result) <= MOST_DIMENSIONS else counted(tuple(result))


def counted(shape: Shape) -> Shape:
    """Return the shape of an empty array, or of one of many dimensions, if numpy has arrays of it.

    Raises
    ------
    InvalidArgumentError
        If it has not: there are too many dimensions, or the array is empty, and its other lengths
        are those of an array that no memory holds.
    """
    if len(shape) > MOST_DIMENSIONS:
        raise InvalidArgumentError(
            f"a shape of {len(shape)} dimensions was given", remedy=f"Give at most {MOST_DIMENSIONS}, as many as an array of numpy has."
        )
    if math.prod(filter(None, shape)) > _MOST_ELEMENTS:
        raise InvalidArgumentError(
            f"an array of shape {shape} cannot be had, though it is empty", remedy="Give smaller lengths along the other axes."
        )
    return shape


def restrided(shape: Shape, strides: Shape, wanted: Shape) -> Shape | None:
    """Return the strides of the same elements, at least one, in another shape; ``None`` if there are none, and the elements must be copied."""
    axes = [(length, stride) for length, stride in zip(shape, strides, strict=True) if length > 1]
    lengths = list(wanted)
    found: list[int] = []
    while axes:
        # One run of elements that are equally far apart, from the last axis on; the last axes of the new shape cut it up.
        length, stride = axes.pop()
        while axes and axes[-1][1] == stride * length:
            length *= axes.pop()[0]
        while lengths and length % lengths[-1] == 0 and (length > 1 or lengths[-1] == 1):
            found.append(stride)
            stride *= lengths[-1]
            length //= lengths.pop()
        if length > 1:
            return None
    found += [1] * len(lengths)  # of length 1
    return tuple(reversed(found))


def span(shape: Shape, strides: Shape) -> tuple[int, int]:
    """Return the places of the first and behind the last of an array's elements, counted from element ``[0, 0, ...]``; of none, twice the same."""
    if 0 in shape:
        return 0, 0
    ends = [(length - 1) * stride for length, stride in zip(shape, strides, strict=True)]
    return sum(end for end in ends if end < 0), sum(end for end in ends if end > 0) + 1


class _Place:
    """What numpy takes for an array whose memory it does not read."""

    def __init__(self, offset: int, shape: Shape, strides: Shape, itemsize: int) -> None:
        steps = tuple([stride * itemsize for stride in strides])
        self.__array_interface__ = {
            "version": 3,
            "data": (offset + _FAR, False),
            "shape": shape,
            "strides": steps,
            "typestr": f"|V{itemsize}",
        }


_FAR = 1 << 20  # some address: 0 would be none
_MOST_WORK: Any = 10_000  # any int, and stubs know two


def share_bytes(a: tuple[int, Shape, Shape, int], b: tuple[int, Shape, Shape, int]) -> bool:
    """Return whether two arrays have bytes in common, or that takes too long to find out.

    Parameters
    ----------
    a, b
        The byte at which element ``[0, 0, ...]`` starts, shape, strides, and bytes of an element.
    """
    first, second = (np.asarray(_Place(*each)) for each in (a, b))
    try:
        return np.shares_memory(first, second, max_work=_MOST_WORK)
    except np.exceptions.TooHardError:
        return True


def recast(shape: Shape, old: DType, new: DType) -> Shape:
    """Return the shape of the same bytes as elements of another dtype: the last axis grows or shrinks.

    Raises
    ------
    InvalidArgumentError
        If the bytes of the last axis are no whole number of elements.
    """
    if old.itemsize == new.itemsize:
        return shape
    nbytes = shape[-1] * old.itemsize if shape else 0
    if not shape or nbytes % new.itemsize:
        what = f"the last axis of {old.value}{list(shape)}" if shape else f"a 0-d {old.value}"
        raise InvalidArgumentError(
            f"{what} is no whole number of {new.value}", remedy="Reshape it first, so that the last axis can be divided."
        )
    return (*shape[:-1], nbytes // new.itemsize)


def broadcast(*shapes: Shape) -> Shape:
    """Return the shape that numpy broadcasts arrays of these shapes to.

    Raises
    ------
    InvalidArgumentError
        If an axis has two lengths other than 1.
    """
    first, *others = shapes
    if all(shape == first or not shape for shape in others):
        return first
    result = []
    for lengths in zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1):
        longest = {length for length in lengths if length != 1}
        if len(longest) > 1:
            raise InvalidArgumentError(
                f"shapes {' and '.join(map(str, shapes))} cannot be broadcast",
                remedy="Counted from the last axis, lengths must be equal or 1.",
            )
        result.append(longest.pop() if longest else 1)
    return tuple(reversed(result))


def strides_of(shape: Shape, wanted: Shape, strides: Shape | None = None) -> Shape:
    """Return the strides of an array, of C order where none are given, in the shape that it is broadcast to: 0 where it is repeated."""
    own = steps_of(shape) if strides is None else strides
    repeated = [0 if length == 1 else step for length, step in zip(shape, own, strict=True)]
    return (*[0] * (len(wanted) - len(shape)), *repeated)
