"""Functions that sort and search, and those whose result's shape depends on values: there an expression is cut."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from accel.dtype import DType
from accel.errors import InvalidArgumentError
from accel.expressions.array import Array, AxisError, Cut, cast
from accel.expressions.creation import CreationFunctions
from accel.expressions.functions import axis_of, call_op, named
from accel.expressions.promotion import DEFAULT, SIGNED, UNSIGNED, promoted
from accel.values import check_choice

if TYPE_CHECKING:
    from accel.ref import AccelRef

__all__ = ["SelectionFunctions", "UniqueAll", "UniqueCounts", "UniqueInverse"]


class UniqueAll(NamedTuple):
    """Different elements, where each is first, which of them each element is, and how often each is there."""

    values: Array
    indices: Array
    inverse_indices: Array
    counts: Array


class UniqueCounts(NamedTuple):
    """Different elements, and how often each is there."""

    values: Array
    counts: Array


class UniqueInverse(NamedTuple):
    """Different elements, and which of them each element is."""

    values: Array
    inverse_indices: Array


def _item(batch: Any, refs: Any, number: int) -> AccelRef:
    made: AccelRef = refs[number]
    return made


@Cut
async def _nonzero(device: Any, x: AccelRef) -> Any:
    return await device.sort.nonzero(x)


@Cut
async def _unique(device: Any, x: AccelRef) -> Any:
    return await device.sort.unique_all(x)


@Cut
async def _selected(device: Any, x: AccelRef, mask: AccelRef) -> Any:
    if not mask.ndim:
        x, mask = x.reshape((1, *x.shape)), mask.reshape(1)
    if 0 in mask.shape:  # such a dimension fits any, and selects nothing
        x = x[tuple([slice(length) for length in mask.shape])]
    return await device.sort.compress(mask, x)


@Cut
async def _repeated(device: Any, x: AccelRef, repeats: AccelRef, axis: int) -> Any:
    counts = np.broadcast_to(await device.get(repeats), (x.shape[axis],))
    places = await device.put(np.repeat(np.arange(x.shape[axis]), counts))
    return await device.arrays.take(x, places, axis)


class SelectionFunctions(CreationFunctions):
    """Functions that sort, search and select."""

    def several(self, step: Any, inputs: tuple[Array, ...], *parts: tuple[Any, DType], arguments: tuple[Any, ...] = ()) -> list[Array]:
        """Return arrays of which one step makes all."""
        whole = self.make((), DType.BOOL, step, inputs, arguments)
        return [self.make(shape, dtype, _item, (whole,), (number,)) for number, (shape, dtype) in enumerate(parts)]

    def nonzero(self, x: Array, /) -> tuple[Array, ...]:
        """Return the indices of elements that are not 0, along each axis."""
        if not x.ndim:
            raise InvalidArgumentError("x has no dimensions", remedy="Give one or more.")
        index = DEFAULT["indexing"]
        return tuple(self.several(_nonzero, (x,), *[((None,), index) for _ in range(x.ndim)]))

    def unique_all(self, x: Array, /) -> UniqueAll:
        """Return different elements, sorted; where each is first; which of them each element is; how often each is there."""
        index = DEFAULT["indexing"]
        parts = (((None,), x.dtype), ((None,), index), (x.shape, index), ((None,), index))
        return UniqueAll(*self.several(_unique, (x,), *parts))

    def unique_counts(self, x: Array, /) -> UniqueCounts:
        """Return different elements, sorted, and how often each is there."""
        every = self.unique_all(x)
        return UniqueCounts(every.values, every.counts)

    def unique_inverse(self, x: Array, /) -> UniqueInverse:
        """Return different elements, sorted, and which of them each element is."""
        every = self.unique_all(x)
        return UniqueInverse(every.values, every.inverse_indices)

    def unique_values(self, x: Array, /) -> Array:
        """Return different elements, sorted."""
        return self.unique_all(x).values

    def masked(self, x: Array, mask: Array) -> Array:
        """Return the parts of ``x`` where ``mask`` is true, one behind the other: ``x[mask]``."""
        if mask.ndim > x.ndim or any(a not in (0, None, b) and b is not None for a, b in zip(mask.shape, x.shape, strict=False)):
            raise AxisError(
                f"a mask of shape {mask.shape} does not fit {x.shape}", remedy="Give one of the shape of x, or of its first axes."
            )
        return self.make((None, *x.shape[mask.ndim :]), x.dtype, _selected, (x, mask))

    def repeated(self, x: Array, repeats: Array, axis: int) -> Array:
        """Return ``x`` with each element along ``axis`` repeated as often as ``repeats`` says for it."""
        return self.make((*x.shape[:axis], None, *x.shape[axis + 1 :]), x.dtype, _repeated, (x, repeats), (axis,))

    def searchsorted(self, x1: Array, x2: Array, /, *, side: str = "left", sorter: Array | None = None) -> Array:
        """Return where elements of ``x2`` would stand in the sorted ``x1``: before, or after (``side="right"``), what is equal."""
        check_choice("side", side, "left", "right")
        xp: Any = self
        x1 = x1 if sorter is None else xp.take(x1, sorter, axis=0)
        dtype = promoted(x1.dtype, x2.dtype)
        return self.make(
            x2.shape, DEFAULT["indexing"], call_op, (cast(x1, dtype), cast(x2, dtype)), named("sort", "searchsorted", side=side)
        )

    def sort(self, x: Array, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Array:
        """Return ``x`` sorted along ``axis``; NaN is last. It is stable whatever ``stable`` says."""
        return self.make(x.shape, x.dtype, call_op, (x,), named("sort", "sort", axis=axis_of(axis, x.ndim), descending=descending))

    def argsort(self, x: Array, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Array:
        """Return the indices that sort ``x`` along ``axis``; NaN is last. It is stable whatever ``stable`` says."""
        arguments = named("sort", "argsort", axis=axis_of(axis, x.ndim), descending=descending)
        return self.make(x.shape, DEFAULT["indexing"], call_op, (x,), arguments)

    def topk(self, x: Array, k: int, /, *, axis: int = -1, largest: bool = True) -> tuple[Array, Array]:
        """Return the ``k`` largest elements along ``axis``, or the smallest, in order, and their indices."""
        place = axis_of(axis, x.ndim)
        shape = (*x.shape[:place], k, *x.shape[place + 1 :])
        arguments = named("sort", "topk", k, place, largest=largest)
        values, indices = self.several(call_op, (x,), (shape, x.dtype), (shape, DEFAULT["indexing"]), arguments=arguments)
        return values, indices

    def cumulative_sum(self, x: Array, /, *, axis: int | None = None, dtype: Any = None, include_initial: bool = False) -> Array:
        """Return sums of the elements up to each one along ``axis``; ``include_initial`` puts a 0 before them."""
        return self._cumulative("cumsum", x, axis, dtype, include_initial)

    def cumulative_prod(self, x: Array, /, *, axis: int | None = None, dtype: Any = None, include_initial: bool = False) -> Array:
        """Return products of the elements up to each one along ``axis``; ``include_initial`` puts a 1 before them."""
        return self._cumulative("cumprod", x, axis, dtype, include_initial)

    def _cumulative(self, name: str, x: Array, axis: int | None, dtype: Any, has_initial: bool) -> Array:
        if axis is None and x.ndim != 1:
            raise InvalidArgumentError(f"x has {x.ndim} dimensions and axis is None", remedy="Name the axis.")
        place = axis_of(axis or 0, x.ndim)
        x = cast(x, summed(x.dtype) if dtype is None else DType.of(dtype))
        made = self.make(x.shape, x.dtype, call_op, (x,), named("scan", name, place))
        if not has_initial:
            return made
        xp: Any = self
        first = self.full((*x.shape[:place], 1, *x.shape[place + 1 :]), int(name == "cumprod"), dtype=x.dtype)
        joined: Array = xp.concat((first, made), axis=place)
        return joined


def summed(dtype: DType) -> DType:
    """Return the dtype of sums and products: of smaller integers and bool the default one, or its unsigned twin."""
    if dtype in UNSIGNED:
        return DType.UINT64
    return DEFAULT["integral"] if dtype in SIGNED or dtype is DType.BOOL else dtype
