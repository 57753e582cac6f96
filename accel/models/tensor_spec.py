"""What the inputs of a model look like, and the sizes that they are padded to. Only numpy; nothing here awaits."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from accel.dtype import DType
from accel.errors import InvalidArgumentError
from accel.ref import AccelRef
from accel.values import converted, number

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["BATCH", "Buckets", "Inputs", "Sizes", "TensorSpec"]

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
        the one along which requests are put together; it comes first.
    dtype
        Of the elements: a :class:`~accel.DType` or its name.
    pad
        What fills an input up to the size of its bucket: a number that the dtype can hold.

    Raises
    ------
    InvalidArgumentError
        If a dimension is neither a positive length nor a name, ``"batch"`` does not come first, or ``pad`` is no number of the dtype.
    """

    shape: tuple[int | str, ...]
    dtype: DType
    pad: float = 0

    def __init__(self, shape: Sequence[int | str], dtype: Any = "float32", *, pad: float = 0) -> None:
        dims = (shape,) if isinstance(shape, (int, str)) else tuple(shape)
        for place, dim in enumerate(dims):
            is_length = isinstance(dim, int) and not isinstance(dim, bool) and dim > 0
            if not (is_length or (isinstance(dim, str) and dim.isidentifier())) or (dim == BATCH and place):
                raise InvalidArgumentError(
                    f"dimension {place} of a TensorSpec is {dim!r}", remedy=f"Give positive lengths and names; {BATCH!r} comes first."
                )
        of, filling = DType.of(dtype), number("pad", pad)
        converted("pad", filling, of)
        # A frozen class that converts what it is given.
        object.__setattr__(self, "shape", dims)
        object.__setattr__(self, "dtype", of)
        object.__setattr__(self, "pad", filling)

    @property
    def names(self) -> tuple[str, ...]:
        """The named dimensions."""
        return tuple([dim for dim in self.shape if isinstance(dim, str)])

    def of_size(self, sizes: Sizes) -> tuple[int, ...]:
        """Return the shape with a length for each name."""
        return tuple([sizes[dim] if isinstance(dim, str) else dim for dim in self.shape])


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
        for dim, given in (lengths or {}).items():
            found = (given,) if isinstance(given, int) else tuple(given)
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
        return all(spec.shape[:1] == (BATCH,) for spec in self.inputs.values())

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
            found[dim] = size if lengths is None else next((each for each in lengths if each >= size), 0)
            if found[dim] < size:
                name, spec = next((name, spec) for name, spec in self.inputs.items() if dim in spec.shape)
                raise InvalidArgumentError(
                    f"dimension {dim!r} of input {name!r} has length {size}, and the longest bucket {lengths[-1] if lengths else 0}",
                    argument=name,
                    remedy=f"Cut the input, or load the model with a longer bucket. Its shape is {spec.shape}.",
                )
        return found

    def array(self, name: str, value: Any, *, is_item: bool = False, finite: bool = False) -> Any:
        """Return an input as an array of its dtype; a ref, whose dtype must be that, as it is.

        Parameters
        ----------
        name
            Of the input.
        value
            An array, a ref, or what numpy makes an array of.
        is_item
            Whether it is without the batch dimension, and no ref. What is returned then shares no memory with ``value``.
        finite
            Whether NaN and infinities are refused.

        Raises
        ------
        InvalidArgumentError
            If it is no such array, or has a number that the dtype cannot hold.
        """
        spec = self.inputs[name]
        if not isinstance(value, AccelRef):
            return converted(f"input {name!r}", value, spec.dtype, copy=is_item, finite=finite, argument=name)
        if is_item or value.dtype is not spec.dtype:
            shape = spec.shape[1:] if is_item else spec.shape
            raise InvalidArgumentError(
                f"input {name!r} is {value!r}", argument=name, remedy=f"Give {spec.dtype.value} of shape ({', '.join(map(str, shape))})."
            )
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
            expected = spec.shape[1:] if is_item else spec.shape
            shape = shapes[name]
            fits = len(shape) == len(expected)
            for dim, length in zip(expected, shape, strict=False):
                fits = fits and length > 0 and length == (found.setdefault(dim, length) if isinstance(dim, str) else dim)
            if not fits:
                said = "".join(f", and {dim!r} is {found[dim]} so far" for dim in expected if isinstance(dim, str) and dim in found)
                raise InvalidArgumentError(
                    f"input {name!r} has shape {shape}, not {expected}{said}",
                    argument=name,
                    remedy="Give every named dimension one length of 1 or more.",
                )
        return found

    def item_sizes(self, item: Mapping[str, Array]) -> Sizes:
        """Return the length of each named dimension in a request, whose inputs have no batch dimension.

        Raises
        ------
        InvalidArgumentError
            As :meth:`sizes` and :meth:`bucket` do.
        """
        return self._sizes_of_item(*[item[name].shape for name in self.inputs])

    def _item_sizes(self, *shapes: tuple[int, ...]) -> Sizes:
        found = self.sizes(dict(zip(self.inputs, shapes, strict=True)), is_item=True)
        self.bucket(found)
        return found

    def padded(self, name: str, array: Array, bucket: Sizes) -> Array:
        """Return an input, filled up to the sizes of a bucket; one that fits is not copied."""
        spec = self.inputs[name]
        shape = spec.of_size(bucket)
        return array if array.shape == shape else _filled(spec, shape, [((), array)])

    def stacked(self, items: Sequence[Mapping[str, Array]], bucket: Sizes) -> dict[str, Array]:
        """Return one array an input, of the sizes of a bucket, that has the items, without a batch dimension, as its first rows."""
        return {name: _stacked(spec, spec.of_size(bucket), [item[name] for item in items]) for name, spec in self.inputs.items()}


def cut(array: Any, shape: Sequence[int | str], sizes: Sizes) -> Any:
    """Return the part of an output, an array or a ref, that belongs to inputs of ``sizes``; dimensions that ``shape`` does not name stay."""
    index = tuple([slice(sizes[dim]) if isinstance(dim, str) and dim in sizes else slice(None) for dim in shape])
    lengths = [each.stop for each in index]
    return array if all(stop is None or stop == length for stop, length in zip(lengths, array.shape, strict=True)) else array[index]


def _stacked(spec: TensorSpec, shape: tuple[int, ...], rows: list[Array]) -> Array:
    if len(shape) > 1 and len(rows) == shape[0] and all(row.shape == shape[1:] for row in rows):
        return np.concatenate(rows).reshape(shape)  # np.stack takes three times as long
    return _filled(spec, shape, [((place,), row) for place, row in enumerate(rows)])


def _filled(spec: TensorSpec, shape: tuple[int, ...], parts: Iterable[tuple[tuple[int, ...], Array]]) -> Array:
    """Return an array of padding with each part at the begin of the place that it is given with."""
    result = np.full(shape, spec.pad, spec.dtype.numpy)
    for place, part in parts:
        index: Any = (*place, *[slice(length) for length in part.shape])
        result[index] = part
    return result
