"""Arrays in other shapes and orders, put together, and parts of them."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

from accel.dtype import DType
from accel.errors import InvalidArgumentError
from accel.expressions.array import Array, AxisError, Shape, broadcast, cast
from accel.expressions.functions import axis_of, call_op, named
from accel.expressions.promotion import INTEGERS, promoted
from accel.expressions.selection import SelectionFunctions
from accel.ops.base import as_shape
from accel.views import reshaped

if TYPE_CHECKING:
    from accel.ref import AccelRef

__all__ = ["ManipulationFunctions", "axes_of", "known"]


def axes_of(axis: Any, ndim: int) -> tuple[int, ...]:
    """Return the numbers of one or several axes; ``None`` names all."""
    if axis is None:
        return tuple(range(ndim))
    axes = tuple([axis_of(each, ndim) for each in (axis if isinstance(axis, (tuple, list)) else (axis,))])
    if len(set(axes)) < len(axes):
        raise InvalidArgumentError(f"axis {axis} names a dimension twice", remedy="Name each once.")
    return axes


def known(shape: Shape) -> tuple[int, ...]:
    """Return a shape, all of whose lengths must be known."""
    if None in shape:
        raise InvalidArgumentError(f"the shape {shape} depends on values", remedy="Await the array first.")
    return shape  # type: ignore[return-value]


def _reshape(batch: Any, x: AccelRef, shape: tuple[int, ...]) -> AccelRef:
    if x.is_strided:  # a view of such a shape need not exist
        x = batch.arrays.part(x, ...)
    return x.reshape(shape)


def _transposed(batch: Any, x: AccelRef, order: tuple[int, ...]) -> AccelRef:
    return x.transpose(order)


def _joined(batch: Any, *arguments: Any) -> AccelRef:
    *refs, name, axis = arguments
    made: AccelRef = getattr(batch.arrays, name)(tuple(refs), axis)
    return made


def _part(batch: Any, x: AccelRef, index: tuple[Any, ...]) -> AccelRef:
    return x[index]


class ManipulationFunctions(SelectionFunctions):
    """Functions that move elements."""

    # -- shapes

    def reshape(self, x: Array, /, shape: Any, *, copy: bool | None = None) -> Array:
        """Return the elements in another shape, in C order; one length may be -1."""
        lengths = shape if isinstance(shape, (tuple, list)) else (shape,)
        if None in x.shape:
            wanted = tuple([operator.index(length) for length in lengths])
            return self.make(tuple([None if length == -1 else length for length in wanted]), x.dtype, _reshape, (x,), (wanted,))
        made = reshaped(known(x.shape), tuple(lengths))
        result = self.make(made, x.dtype, _reshape, (x,), (made,))
        return result if copy is not True else self.make(made, x.dtype, call_op, (result,), named("arrays", "part", ...))

    def squeeze(self, x: Array, /, axis: Any) -> Array:
        """Return ``x`` without axes of length 1."""
        axes = axes_of(axis, x.ndim)
        if any(x.shape[each] not in (1, None) for each in axes):
            raise InvalidArgumentError(f"axis {axis} of shape {x.shape} is not of length 1", remedy="Name axes of length 1.")
        return self.reshape(x, tuple([length for each, length in enumerate(x.shape) if each not in axes]))

    def expand_dims(self, x: Array, /, axis: Any = 0) -> Array:
        """Return ``x`` with a new axis of length 1."""
        axes = axes_of(axis, x.ndim + (len(axis) if isinstance(axis, tuple) else 1))
        lengths = iter(x.shape)
        return self._unknown(x, tuple([1 if each in axes else next(lengths) for each in range(x.ndim + len(axes))]))

    def _unknown(self, x: Array, shape: Shape) -> Array:
        """Reshape to a shape of which one length at most is not known."""
        return self.reshape(x, tuple([-1 if length is None else length for length in shape]))

    def broadcast_to(self, x: Array, /, shape: Any) -> Array:
        """Return ``x`` repeated along axes."""
        wanted = as_shape(shape)
        if broadcast(x.shape, wanted) != wanted:
            raise InvalidArgumentError(f"shape {x.shape} cannot be broadcast to {wanted}", remedy="Lengths must be equal or 1.")
        return x if x.shape == wanted else self.make(wanted, x.dtype, call_op, (x,), named("arrays", "broadcast_to", wanted))

    def broadcast_arrays(self, *arrays: Array) -> list[Array]:
        """Return several arrays repeated to the one shape that they have in common."""
        shape = broadcast(*[each.shape for each in arrays]) if arrays else ()
        return [self.broadcast_to(each, shape) for each in arrays]

    # -- orders

    def permute_dims(self, x: Array, /, axes: Any) -> Array:
        """Return ``x`` with its axes in another order."""
        order = axes_of(tuple(axes), x.ndim)
        if len(order) != x.ndim:
            raise InvalidArgumentError(f"axes {axes} do not name each of {x.ndim} dimension(s)", remedy="Name all.")
        if order == tuple(range(x.ndim)):
            return x
        return self.make(tuple([x.shape[axis] for axis in order]), x.dtype, _transposed, (x,), (order,))

    def matrix_transpose(self, x: Array, /) -> Array:
        """Return the transposes of a stack of matrices."""
        if x.ndim < 2:
            raise InvalidArgumentError(f"an array of {x.ndim} dimension(s) is no matrix", remedy="Give two dimensions or more.")
        return self.permute_dims(x, (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2))

    def moveaxis(self, x: Array, source: Any, destination: Any, /) -> Array:
        """Return ``x`` with axes at other places; the others stay in order."""
        sources, targets = axes_of(source, x.ndim), axes_of(destination, x.ndim)
        if len(sources) != len(targets):
            raise InvalidArgumentError(f"source {source} and destination {destination} are not as many", remedy="Give both as many.")
        order = [axis for axis in range(x.ndim) if axis not in sources]
        for target, axis in sorted(zip(targets, sources, strict=True)):
            order.insert(target, axis)
        return self.permute_dims(x, tuple(order))

    def flip(self, x: Array, /, *, axis: Any = None) -> Array:
        """Return ``x`` with the elements along axes in reverse."""
        axes = axes_of(axis, x.ndim)
        return self.make(x.shape, x.dtype, call_op, (x,), named("arrays", "flip", axes)) if axes else x

    def roll(self, x: Array, /, shift: Any, *, axis: Any = None) -> Array:
        """Return ``x`` with its elements moved along axes, those at the end to the beginning."""
        if axis is None:
            return self.make(x.shape, x.dtype, call_op, (x,), named("arrays", "roll", shift, None))
        axes = tuple([axis_of(each, x.ndim) for each in (axis if isinstance(axis, (tuple, list)) else (axis,))])
        shifts = tuple(shift) if isinstance(shift, (tuple, list)) else (shift,) * len(axes)
        if len(shifts) != len(axes):
            raise InvalidArgumentError(f"shift {shift} and axis {axis} are not as many", remedy="Give both as many.")
        total = dict.fromkeys(axes, 0)
        for each, places in zip(axes, shifts, strict=True):
            total[each] += places
        return self.make(x.shape, x.dtype, call_op, (x,), named("arrays", "roll", tuple(total.values()), tuple(total)))

    # -- more and fewer

    def concat(self, arrays: Any, /, *, axis: int | None = 0) -> Array:
        """Return several arrays, which are promoted, one behind the other along ``axis``; without one as if they had one dimension."""
        several = self._alike(arrays)
        if axis is None:
            several, axis = [self.reshape(each, (-1,) if each.size != 0 else (0,)) for each in several], 0
        first = several[0]
        place = axis_of(axis, first.ndim)
        others = {(*each.shape[:place], *each.shape[place + 1 :]) for each in several}
        if len({each.ndim for each in several}) > 1 or (len(others) > 1 and not any(None in shape for shape in others)):
            raise InvalidArgumentError(
                f"shapes {', '.join(str(each.shape) for each in several)} differ besides axis {axis}", remedy="They may differ along it."
            )
        lengths = [each.shape[place] for each in several]
        length = None if None in lengths else sum(known(tuple(lengths)))
        shape = (*first.shape[:place], length, *first.shape[place + 1 :])
        return self.make(shape, first.dtype, _joined, tuple(several), ("concatenate", place))

    def stack(self, arrays: Any, /, *, axis: int = 0) -> Array:
        """Return several arrays of one shape, which are promoted, along a new axis."""
        several = self._alike(arrays)
        first = several[0]
        if any(each.shape != first.shape for each in several):
            raise InvalidArgumentError(f"shapes {', '.join(str(each.shape) for each in several)} differ", remedy="Give one shape.")
        place = axis_of(axis, first.ndim + 1)
        return self.make((*first.shape[:place], len(several), *first.shape[place:]), first.dtype, _joined, tuple(several), ("stack", place))

    def _alike(self, arrays: Any) -> list[Array]:
        if not isinstance(arrays, (tuple, list)) or not arrays or not all(isinstance(each, Array) for each in arrays):
            raise InvalidArgumentError(f"arrays is {arrays!r:.100}", remedy="Give a tuple or list of arrays.")
        dtype = promoted(*[each.dtype for each in arrays])
        return [cast(each, dtype) for each in arrays]

    def unstack(self, x: Array, /, *, axis: int = 0) -> tuple[Array, ...]:
        """Return the parts of ``x`` along an axis, which they have no more."""
        place = axis_of(axis, x.ndim)
        count = known((x.shape[place],))[0]
        return tuple([self.indexed(x, (*(slice(None),) * place, number)) for number in range(count)])

    def tile(self, x: Array, repetitions: Any, /) -> Array:
        """Return ``x`` repeated as a whole along each axis."""
        counts = as_shape(repetitions)
        ndim = max(len(counts), x.ndim)
        counts, shape = (1,) * (ndim - len(counts)) + counts, (1,) * (ndim - x.ndim) + x.shape
        result = tuple([None if length is None else length * count for length, count in zip(shape, counts, strict=True)])
        return self.make(result, x.dtype, call_op, (self._unknown(x, shape),), named("arrays", "tile", counts))

    def repeat(self, x: Array, repeats: Any, /, *, axis: int | None = None) -> Array:
        """Return ``x`` with each element along ``axis`` repeated; ``repeats`` is an int, or an array of one for each."""
        if axis is None:
            x, axis = self.reshape(x, (-1,) if x.size != 0 else (0,)), 0
        place = axis_of(axis, x.ndim)
        if isinstance(repeats, Array):
            if repeats.ndim > 1 or not repeats.dtype.is_integer:
                raise InvalidArgumentError(f"repeats is {repeats!r}", remedy="Give an int, or a 1-d array of integers.")
            return self.repeated(x, repeats, place)
        length, count = x.shape[place], operator.index(repeats)
        shape = (*x.shape[:place], None if length is None else length * count, *x.shape[place + 1 :])
        return self.make(shape, x.dtype, call_op, (x,), named("arrays", "repeat", count, place))

    # -- parts

    def take(self, x: Array, indices: Array, /, *, axis: int | None = None) -> Array:
        """Return the parts of ``x`` at ``indices`` along ``axis``; negative ones are counted from the end."""
        if axis is None:
            if x.ndim != 1:
                raise InvalidArgumentError(f"x has {x.ndim} dimensions and axis is None", remedy="Name the axis.")
            axis = 0
        place = axis_of(axis, x.ndim)
        shape = (*x.shape[:place], *indices.shape, *x.shape[place + 1 :])
        return self.make(shape, x.dtype, call_op, (x, _index(indices)), named("arrays", "take", place))

    def take_along_axis(self, x: Array, indices: Array, /, *, axis: int = -1) -> Array:
        """Return the elements of ``x`` at ``indices`` along ``axis``; all other axes are broadcast."""
        place = axis_of(axis, x.ndim)
        if indices.ndim != x.ndim:
            raise InvalidArgumentError(f"x has {x.ndim} dimensions and indices {indices.ndim}", remedy="Give both as many.")
        others = broadcast((*x.shape[:place], 1, *x.shape[place + 1 :]), (*indices.shape[:place], 1, *indices.shape[place + 1 :]))
        shapes = [(*others[:place], each.shape[place], *others[place + 1 :]) for each in (x, indices)]
        x, indices = (self.broadcast_to(each, known(shape)) for each, shape in zip((x, indices), shapes, strict=True))
        return self.make(indices.shape, x.dtype, call_op, (x, _index(indices)), named("arrays", "take_along_axis", place))

    def indexed(self, x: Array, key: Any) -> Array:
        """Return ``x[key]``: ints, slices, ``...``, ``None``, arrays of ints, or one array of bools.

        Raises
        ------
        AxisError
            If the key is of another kind, has too many parts, or is out of range.
        """
        parts = list(key) if isinstance(key, tuple) else [key]
        masks = [each for each in parts if isinstance(each, Array) and each.dtype is DType.BOOL]
        if masks:
            if len(parts) != 1:
                raise AxisError("a mask stands beside other indices", remedy="Use it alone: x[mask].")
            return self.masked(x, masks[0])
        parts = _whole(parts, x.ndim)
        given = [slice(None) if isinstance(each, Array) else each for each in parts if each is not None]
        basic = tuple([_basic(each, axis, length) for axis, (each, length) in enumerate(zip(given, x.shape, strict=True))])
        lengths: list[int | None] = []
        for each, length in zip(basic, x.shape, strict=True):
            if isinstance(each, slice):
                whole = each == slice(None)
                lengths.append(length if whole else None if length is None else len(range(length)[each]))
        if basic != (slice(None),) * x.ndim:
            x = self.make(tuple(lengths), x.dtype, _part, (x,), (basic,))
        x = self._gathered(x, [each for each in parts if each is not None and (isinstance(each, (Array, slice)))])
        if None in parts:
            # Behind the parts before them: ints are no axes any more.
            rest = iter(x.shape)
            axes = [each for each in parts if each is None or isinstance(each, (slice, Array))]
            return self._unknown(x, (*[1 if each is None else next(rest) for each in axes], *rest))
        return x

    def _gathered(self, x: Array, parts: list[Any]) -> Array:
        """Return ``x`` at arrays of indices, one for each axis that has no slice."""
        places = [axis for axis, each in enumerate(parts) if isinstance(each, Array)]
        if not places:
            return x
        if len(places) == 1:
            return self.take(x, parts[places[0]], axis=places[0])
        first, last = places[0], places[-1]
        if last - first + 1 != len(places):
            raise AxisError("arrays of indices have slices between them", remedy="Index in two steps.")
        # As one axis, along which rows of all of them lie.
        lengths = known(x.shape[first : last + 1])
        linear: Any = None
        for axis, length in zip(places, lengths, strict=True):
            each = _index(parts[axis])
            each = self.where(each < 0, each + length, each)
            linear = each if linear is None else linear * length + each
        joined = self._unknown(x, (*x.shape[:first], math.prod(lengths), *x.shape[last + 1 :]))
        return self.take(joined, linear, axis=first)


def _index(indices: Array) -> Array:
    if indices.dtype not in INTEGERS:
        raise AxisError(f"indices are {indices.dtype.value}", remedy="Give integers.")
    return indices if indices.dtype in (DType.INT32, DType.INT64) else cast(indices, DType.INT64)


def _whole(parts: list[Any], ndim: int) -> list[Any]:
    """Return a key with a slice for each axis that has none yet, in the place of ``...``."""
    given = sum(each is not None and each is not Ellipsis for each in parts)
    dots = [number for number, each in enumerate(parts) if each is Ellipsis]
    if given > ndim or len(dots) > 1:
        raise AxisError(f"{given} indices for {ndim} dimension(s), and {len(dots)} `...`", remedy="Give one for each, and one `...`.")
    rest = [slice(None)] * (ndim - given)
    return parts + rest if not dots else parts[: dots[0]] + rest + parts[dots[0] + 1 :]


def _basic(part: Any, axis: int, length: int | None) -> slice | int:
    """Return a part of a key as a slice of ints, or as an int that is not out of range."""
    if isinstance(part, slice):
        return slice(*[None if each is None else operator.index(each) for each in (part.start, part.stop, part.step)])
    if isinstance(part, bool) or not hasattr(part, "__index__"):
        raise AxisError(f"{part!r} is not an index", remedy="Give ints, slices, `...`, None, arrays of ints, or one of bools.")
    number = operator.index(part)
    if length is not None and not -length <= number < length:
        raise AxisError(f"index {number} is out of range for axis {axis}, which has {length}", remedy="Give one that is not.")
    return number
