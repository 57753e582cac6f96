"""What the inputs of a model look like, and the sizes that they are padded to. Only numpy; nothing here awaits."""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from accel.dtype import DType
from accel.errors import InvalidArgumentError
from accel.ref import AccelRef
from accel.values import converted, number

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BATCH", "Buckets", "Inputs", "Item", "Sizes", "TensorSpec"]

BATCH = "batch"
"""The dimension along which requests are put together and large inputs are split."""

Array: TypeAlias = np.ndarray[Any, Any]
Sizes: TypeAlias = Mapping[str, int]
"""A length for each named dimension."""
Inputs: TypeAlias = Mapping[str, Any]
"""Arrays, or what numpy makes one of, by the names of a model's inputs."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one input of a model.

    Parameters
    ----------
    shape
        A length or a name for each dimension, such as ``("batch", "length", 3)``. Dimensions of one name have one length in all inputs. ``"batch"`` is
        the one along which requests are put together, wherever it is.
    dtype
        Of the elements: a :class:`~accel.DType` or its name.
    pad
        What fills an input up to the size of its bucket: a number that the dtype can hold.
    example
        Values that the model can be run on before there are requests: a number for all elements, or an array of one item, without the batch dimension,
        or of several, with it. It is repeated, or cut, to the size that is needed. Without it the model is run on ones, random numbers from 0.5 to 1.5,
        and, of ints and bools, also zeros.

    Attributes
    ----------
    batch_axis : int or None
        The dimension along which requests are put together.

    Raises
    ------
    InvalidArgumentError
        If a dimension is neither a positive length nor a name, ``"batch"`` is there twice, or ``pad`` or ``example`` is not of the dtype or shape.
    """

    shape: tuple[int | str, ...]
    dtype: DType
    pad: float = 0
    example: Array | None = field(default=None, compare=False)
    batch_axis: int | None = field(init=False, compare=False, repr=False)

    def __init__(self, shape: Sequence[int | str], dtype: Any = "float32", *, pad: float = 0, example: Any = None) -> None:
        try:
            dims = (shape,) if isinstance(shape, (int, str)) else tuple(shape)
        except Exception as error:  # of an iterable of the caller's
            raise InvalidArgumentError(f"shape is {shape!r:.200}", remedy=f"Give lengths and names: ({BATCH!r}, 784).") from error
        for place, dim in enumerate(dims):
            is_length = isinstance(dim, int) and not isinstance(dim, bool) and dim > 0
            if not (is_length or (isinstance(dim, str) and dim.isidentifier())):
                raise InvalidArgumentError(f"dimension {place} of a TensorSpec is {dim!r}", remedy="Give positive lengths and names.")
        if dims.count(BATCH) > 1:
            raise InvalidArgumentError(f"a TensorSpec has the shape {dims}", remedy=f"Call one dimension {BATCH!r}.")
        of, filling = DType.of(dtype), number("pad", pad)
        converted("pad", filling, of, argument="pad")
        # A frozen class that converts what it is given.
        object.__setattr__(self, "shape", dims)
        object.__setattr__(self, "dtype", of)
        object.__setattr__(self, "pad", filling)
        object.__setattr__(self, "batch_axis", dims.index(BATCH) if BATCH in dims else None)
        object.__setattr__(self, "example", None if example is None else _checked_example(example, self))

    @property
    def item_shape(self) -> tuple[int | str, ...]:
        """The shape of one request: without the batch dimension."""
        return tuple([dim for dim in self.shape if dim != BATCH])

    @property
    def names(self) -> tuple[str, ...]:
        """The named dimensions."""
        return tuple([dim for dim in self.shape if isinstance(dim, str)])

    def of_size(self, sizes: Sizes) -> tuple[int, ...]:
        """Return the shape with a length for each name."""
        return tuple([sizes[dim] if isinstance(dim, str) else dim for dim in self.shape])


class Item(dict[str, Array]):
    """One request that fits the model: an array for each input, without the batch dimension.

    Attributes
    ----------
    sizes : mapping of str to int
        The length of each of its named dimensions.
    """

    __slots__ = ("sizes",)

    def __init__(self, arrays: Mapping[str, Array], sizes: Sizes) -> None:
        super().__init__(arrays)
        self.sizes = sizes


class Buckets:
    """The inputs of a model, and for each named dimension the lengths that inputs are padded to.

    Parameters
    ----------
    inputs
        Of the model, by name, in the order in which the model takes them.
    lengths
        For each dimension that is padded, the lengths that there are. A dimension without has the length that it is given.

    Raises
    ------
    InvalidArgumentError
        If there are no inputs, or ``lengths`` names no dimension of theirs, or has no positive ints.
    """

    def __init__(self, inputs: Mapping[str, TensorSpec], lengths: Mapping[str, Iterable[int]] | None = None) -> None:
        if not isinstance(inputs, Mapping) or not inputs or not all(isinstance(each, TensorSpec) for each in inputs.values()):
            raise InvalidArgumentError(
                f"inputs is {inputs!r:.200}", remedy='Give a TensorSpec for each: {"x": accel.TensorSpec(("batch", 784), "float32")}.'
            )
        self.inputs = dict(inputs)
        self.dims = tuple(dict.fromkeys(dim for spec in inputs.values() for dim in spec.names))
        self.lengths: dict[str, tuple[int, ...]] = {}
        if lengths is not None and not isinstance(lengths, Mapping):
            raise InvalidArgumentError(f"buckets is {lengths!r:.200}", remedy='Give lengths for each dimension: {"batch": (1, 8, 64)}.')
        for dim, given in (lengths or {}).items():
            found = tuple(given) if isinstance(given, Iterable) else (given,)
            if dim not in self.dims or not found or any(isinstance(each, bool) or not isinstance(each, int) or each < 1 for each in found):
                raise InvalidArgumentError(
                    f"buckets has {found!r} for {dim!r}, and the inputs have the dimensions {', '.join(self.dims) or '(none)'}",
                    remedy='Give lengths for dimensions of the inputs: {"batch": (1, 8, 64)}.',
                )
            self.lengths[dim] = tuple(sorted(set(found)))
        self._sizes_of_item = functools.lru_cache(1024)(self._item_sizes)  # requests have few shapes, and come one by one

    @property
    def is_batched(self) -> bool:
        """Whether every input has a batch dimension: requests can be put together."""
        return all(BATCH in spec.shape for spec in self.inputs.values())

    @property
    def most(self) -> int | None:
        """The largest batch; ``None`` if any size goes."""
        lengths = self.lengths.get(BATCH)
        return None if lengths is None else lengths[-1]

    def all(self) -> list[dict[str, int]]:
        """Return the sizes of every bucket, smallest first; none if a dimension may have any length."""
        if set(self.lengths) != set(self.dims):
            return []
        return [dict(zip(self.lengths, sizes, strict=True)) for sizes in itertools.product(*self.lengths.values())]

    def bucket(self, sizes: Sizes) -> dict[str, int]:
        """Return the sizes of the smallest bucket that has room for ``sizes``.

        Raises
        ------
        InvalidArgumentError
            If one is longer than the longest there is.
        """
        found = {}
        for dim, size in sizes.items():
            lengths = self.lengths.get(dim)
            if lengths is not None and size > lengths[-1]:
                name, spec = next((name, spec) for name, spec in self.inputs.items() if dim in spec.shape)
                raise InvalidArgumentError(
                    f"dimension {dim!r} of input {name!r} has length {size}, and the longest bucket {lengths[-1]}",
                    argument=name,
                    remedy=f"Cut the input, or load the model with a longer bucket. Its shape is {spec.shape}.",
                )
            found[dim] = size if lengths is None else lengths[bisect_left(lengths, size)]
        return found

    def array(self, name: str, value: Any) -> Any:
        """Return an input as an array of its dtype; a ref, whose dtype must be that, as it is.

        Parameters
        ----------
        name
            Of the input.
        value
            An array, a ref, or what numpy makes an array of.

        Raises
        ------
        InvalidArgumentError
            If it is no such array, or has a number that the dtype cannot hold.
        """
        spec = self.inputs[name]
        if not isinstance(value, AccelRef):
            return converted(f"input {name!r}", value, spec.dtype, argument=name)
        if value.dtype is not spec.dtype:
            shape = ", ".join(map(str, spec.shape))
            raise InvalidArgumentError(f"input {name!r} is {value!r}", argument=name, remedy=f"Give {spec.dtype.value} of shape ({shape}).")
        return value

    def check_names(self, given: Inputs) -> None:
        """Raise unless every input is there, and nothing else."""
        if given.keys() == self.inputs.keys():
            return
        for name in (*self.inputs, *given):
            if name not in given or name not in self.inputs:
                what = "is missing" if name in self.inputs else "is none of the model's"
                raise InvalidArgumentError(f"input {name!r} {what}", argument=name, remedy=f"The model takes {', '.join(self.inputs)}.")

    def sizes(self, shapes: Mapping[str, tuple[int, ...]], *, is_item: bool = False) -> dict[str, int]:
        """Return the length of each named dimension in inputs of these shapes.

        Raises
        ------
        InvalidArgumentError
            If a shape does not fit its spec, or two inputs say different lengths.
        """
        found: dict[str, int] = {}
        for name, spec in self.inputs.items():
            expected = spec.item_shape if is_item else spec.shape
            shape = shapes[name]
            fits = len(shape) == len(expected)
            for dim, length in zip(expected, shape, strict=False):
                fits = fits and length > 0 and length == (found.setdefault(dim, length) if isinstance(dim, str) else dim)
            if not fits:
                raise _misfit(name, shape, expected, found)
        return found

    def item(self, given: Any, *, finite: bool = False) -> Item:
        """Return a request: a dict of inputs, or the only one, without a batch dimension. It shares no memory with what was given.

        Raises
        ------
        InvalidArgumentError
            As :meth:`check_names`, :meth:`array`, :meth:`sizes` and :meth:`bucket` do.
        """
        named = given if isinstance(given, dict) else {next(iter(self.inputs)): given}
        self.check_names(named)
        arrays = {}
        for name, spec in self.inputs.items():
            arrays[name] = converted(f"input {name!r}", named[name], spec.dtype, copy=True, finite=finite, argument=name)
        return Item(arrays, self._sizes_of_item(*map(attrgetter("shape"), arrays.values())))

    def _item_sizes(self, *shapes: tuple[int, ...]) -> Sizes:
        found = self.sizes(dict(zip(self.inputs, shapes, strict=True)), is_item=True)
        self.bucket(found)
        return found

    def padded(self, name: str, array: Array, bucket: Sizes) -> Array:
        """Return an input, filled up to the sizes of a bucket; one that fits is not copied."""
        spec = self.inputs[name]
        shape = spec.of_size(bucket)
        return array if array.shape == shape else _filled(spec, shape, [((), array)])

    def stacked(self, items: Sequence[Mapping[str, Array]], shapes: Sequence[tuple[int, ...]]) -> list[Array]:
        """Return one array an input, of these shapes, that has the items, without a batch dimension, as its first rows."""
        return [
            _stacked(spec, shape, list(map(itemgetter(name), items)))
            for (name, spec), shape in zip(self.inputs.items(), shapes, strict=True)
        ]

    def part(self, arrays: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
        """Return rows of a batch: arrays, or refs, of which those that have a batch dimension are cut along it."""
        found = {}
        for name, each in arrays.items():
            axis = self.inputs[name].batch_axis
            found[name] = each if axis is None else each[(*[slice(None)] * axis, slice(start, stop))]
        return found


def _checked_example(example: Any, spec: TensorSpec) -> Array:
    """Return an example with as many dimensions as the shape."""
    array = converted("example", example, spec.dtype, copy=True, argument="example")
    if array.ndim == 0:
        array = array.reshape((1,) * len(spec.shape))
    elif array.ndim == len(spec.shape) - 1 and spec.batch_axis is not None:
        array = np.expand_dims(array, spec.batch_axis)
    fits = array.ndim == len(spec.shape) and array.size > 0
    if not fits or any(isinstance(dim, int) and length not in (1, dim) for dim, length in zip(spec.shape, array.shape, strict=True)):
        raise InvalidArgumentError(
            f"example has the shape {array.shape}",
            argument="example",
            remedy=f"Give a number, or one item or several, of shape ({', '.join(map(str, spec.item_shape))}).",
        )
    return array


def _misfit(name: str, shape: tuple[int, ...], expected: tuple[int | str, ...], found: Sizes) -> InvalidArgumentError:
    """Return the error of an input whose shape does not fit, with what is wrong."""
    text, remedy = f"input {name!r} has shape {shape}, not {expected}", f"Give an array of {len(expected)} dimensions."
    if len(shape) == len(expected):
        for place, (dim, length) in enumerate(zip(expected, shape, strict=True)):
            wanted = found.get(dim, length) if isinstance(dim, str) else dim
            if length != wanted:
                said = f", and {dim!r} is {wanted} so far" if isinstance(dim, str) else ""
                text, remedy = text + said, f"Give dimension {place} the length {wanted}."
                break
            if length < 1:
                remedy = f"Give dimension {place} a length of 1 or more."
                break
    return InvalidArgumentError(text, argument=name, remedy=remedy)


def _stacked(spec: TensorSpec, shape: tuple[int, ...], rows: list[Array]) -> Array:
    axis = spec.batch_axis or 0
    # No row is longer than its place in any dimension: if there are as many elements, all are as long.
    if not axis and len(shape) > 1 and sum(map(attrgetter("size"), rows)) == math.prod(shape):
        # An item is read where it is. np.stack takes three times as long as np.concatenate.
        return (rows[0] if len(rows) == 1 else np.concatenate(rows)).reshape(shape)
    return _filled(spec, shape, [((place,), row) for place, row in enumerate(rows)], axis)


def _filled(spec: TensorSpec, shape: tuple[int, ...], parts: Iterable[tuple[tuple[int, ...], Array]], axis: int = 0) -> Array:
    """Return an array of padding with each part at the begin of the place, in dimension ``axis``, that it is given with."""
    result = np.full(shape, spec.pad, spec.dtype.numpy)
    for place, part in parts:
        ends = [slice(length) for length in part.shape]
        index: Any = (*ends[:axis], *place, *ends[axis:])
        result[index] = part
    return result
