"""Where the elements of a view lie: indexing, reshaping and reinterpreting a C-order array without moving anything. Pure arithmetic on shapes."""

from __future__ import annotations

import math
import operator
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from accel.errors import InvalidArgumentError

if TYPE_CHECKING:
    from accel.dtype import DType

__all__ = ["broadcast", "indexed", "recast", "reshaped", "selected", "strides_of"]

Shape = tuple[int, ...]

_COPY = "A view is one contiguous run of elements; await device.arrays.part(ref, index) copies others."
_INDEX = "Give ints, slices and one `...`, as in ref[1], ref[2:5] or ref[0, 2:5]."


def indexed(shape: Shape, itemsize: int, index: Any) -> tuple[int, Shape]:
    """Return the byte offset and the shape of ``array[index]``, as numpy's basic indexing has it, for a C-order array.

    Parameters
    ----------
    shape, itemsize
        Of the array.
    index
        An int, a slice, ``...``, or a tuple of them.

    Raises
    ------
    InvalidArgumentError
        If it is no such index, is out of range, or selects elements that are not contiguous in C order.
    """
    start, result, steps = selected(shape, index)
    expected = 1
    for length, step in zip(reversed(result), reversed(steps), strict=True):
        if length > 1 and step != expected and 0 not in result:
            raise InvalidArgumentError(f"[{index!r}] of shape {shape} is not contiguous", remedy=_COPY)
        expected *= length
    return (start * itemsize if expected else 0), result


def selected(shape: Shape, index: Any) -> tuple[int, Shape, Shape]:
    """Return where the elements of ``array[index]`` are in a C-order array: the first one's place, lengths and steps along axes, in elements.

    Raises
    ------
    InvalidArgumentError
        If it is no index of :func:`indexed`, or is out of range.
    """
    entries = _entries(index, len(shape))
    start, lengths, steps = 0, [], []
    for axis, (length, entry) in enumerate(zip(shape, entries, strict=True)):
        step = math.prod(shape[axis + 1 :])
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
    return start, tuple(lengths), tuple(steps)


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
    return tuple(result)


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


def strides_of(shape: Shape, wanted: Shape) -> tuple[int, ...]:
    """Return by how many elements a C-order array advances along each axis of the shape that it is broadcast to; 0 where it is repeated."""
    strides, step = [0] * len(wanted), 1
    for axis, length in zip(range(-1, -len(shape) - 1, -1), reversed(shape), strict=True):
        strides[axis] = 0 if length == 1 else step
        step *= length
    return tuple(strides)
