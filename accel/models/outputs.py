"""What a model returns: its arrays in order, how they are split among requests, and how they are put together again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from accel.dtype import DType
from accel.errors import InvalidArgumentError
from accel.models.tensor_spec import BATCH
from accel.ops import Spec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel.models.tensor_spec import Sizes

__all__ = ["Dim", "Follows", "OutputSpecs", "Structure", "encoded", "flattened"]

Structure = Literal["array", "tuple", "dict"]

DESCRIPTION_NBYTES = 1 << 18
"""Bytes of the buffer in which a model describes its outputs."""


@dataclass(frozen=True, slots=True)
class Follows:
    """A length of an output that is ``(times * n + plus) // over`` for a length n of a named dimension of the inputs."""

    dim: str
    times: int = 1
    plus: int = 0
    over: int = 1

    def __str__(self) -> str:
        text = (f"{self.times}*" if self.times != 1 else "") + self.dim + (f"{self.plus:+d}" if self.plus else "")
        if self.over == 1:
            return text
        return f"({text})//{self.over}" if self.plus else f"{text}//{self.over}"

    def of(self, length: int) -> int:
        """Return the length for one of the inputs' dimension."""
        return max((self.times * length + self.plus) // self.over, 0)


Dim: TypeAlias = int | str | Follows | None
"""Length of an output's dimension: a number, that of the inputs' dimension of the name, one made of it; ``None``: only a run on inputs of a size tells."""


def flattened(result: Any, wanted: Sequence[str] | None = None) -> tuple[Structure, tuple[str, ...], list[Any]]:
    """Return how a model's result is put together, the names of its arrays, and the arrays.

    A mapping, a dataclass (its fields that are not ``None``), a tuple, a list or one array.

    Parameters
    ----------
    result
        What the model returned.
    wanted
        Names of the arrays to return, of a tuple their places; ``None``: all.

    Raises
    ------
    InvalidArgumentError
        If there is anything but arrays in what is wanted, or it is not there.
    """
    if dataclasses.is_dataclass(result) and not isinstance(result, (type, Mapping)):
        result = {each.name: getattr(result, each.name) for each in dataclasses.fields(result)}
    if isinstance(result, Mapping):
        structure, named = "dict", {str(name): value for name, value in result.items() if value is not None}
    elif isinstance(result, (tuple, list)):
        structure, named = "tuple", {str(place): value for place, value in enumerate(result)}
    else:
        structure, named = "array", {"0": result}
    if wanted is not None:
        missing = [name for name in wanted if name not in named]
        if missing:
            raise InvalidArgumentError(
                f"the model returns no output {missing[0]!r}", argument="outputs", remedy=f"It returns {', '.join(named) or 'nothing'}."
            )
        named = {name: named[name] for name in wanted}
    for name, array in named.items():
        if not (hasattr(array, "shape") and hasattr(array, "dtype")):
            raise InvalidArgumentError(
                f"output {name!r} of the model is a {type(array).__name__}",
                remedy="Return an array, or a tuple or dict of arrays; load_model(outputs=) names those that are wanted.",
            )
    return structure, tuple(named), list(named.values())  # type: ignore[return-value]


def dtype_of(array: Any) -> DType:
    """Return the dtype of an array of numpy or torch."""
    return DType.of(str(array.dtype).removeprefix("torch."))


def encoded(result: Any, wanted: Sequence[str] | None = None, *, is_captured: bool = False) -> np.ndarray[Any, Any]:
    """Return the description of a model's result, for :meth:`OutputSpecs.decoded`, as an array of bytes.

    Parameters
    ----------
    result, wanted
        As of :func:`flattened`.
    is_captured
        Whether it replays CUDA graphs.

    Raises
    ------
    InvalidArgumentError
        If the result is none, or has very many arrays.
    """
    structure, names, arrays = flattened(result, wanted)
    outputs = [[name, [int(n) for n in array.shape], dtype_of(array).value] for name, array in zip(names, arrays, strict=True)]
    text = json.dumps([structure, outputs, is_captured]).encode()
    if len(text) > DESCRIPTION_NBYTES:
        raise InvalidArgumentError(f"the model has {len(names)} outputs", remedy="Return fewer arrays.")
    return np.frombuffer(text.ljust(DESCRIPTION_NBYTES), np.uint8)


@dataclass(frozen=True, slots=True)
class OutputSpecs:
    """The arrays that a model returns.

    Attributes
    ----------
    structure
        How they are put together.
    names
        Of the arrays; their places in a tuple.
    shapes
        Of the arrays. A dimension that follows one of the inputs' has its name, or is a :class:`Follows`; ``None`` follows in no way that is known.
    dtypes
        Of the arrays.
    is_captured
        Whether the model makes them by replaying CUDA graphs.
    batch_axes
        The dimension of each array along which it is split among requests; ``None``: each gets it whole.
    item_shapes
        The shapes of the arrays in the answer to one request.
    is_cut
        Whether a dimension of an array in the answer follows one of the request's.
    places
        How many places of the first dimension of each array a row has; ``None``: it is not split along that.
    """

    structure: Structure
    names: tuple[str, ...]
    shapes: tuple[tuple[Dim, ...], ...]
    dtypes: tuple[DType, ...]
    is_captured: bool = field(default=False, compare=False)
    batch_axes: tuple[int | None, ...] = field(init=False, compare=False, repr=False)
    item_shapes: tuple[tuple[Dim, ...], ...] = field(init=False, compare=False, repr=False)
    is_cut: tuple[bool, ...] = field(init=False, compare=False, repr=False)
    places: tuple[int | None, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        # A frozen class that finds them once: they are needed for each batch.
        object.__setattr__(self, "batch_axes", tuple(map(_batch_axis, self.shapes)))
        object.__setattr__(self, "item_shapes", tuple(map(_item_shape, self.shapes, self.batch_axes)))
        follows = [any(isinstance(dim, (str, Follows)) for dim in shape) for shape in self.item_shapes]
        object.__setattr__(self, "is_cut", tuple(follows))
        firsts = [_length(shape[0], {BATCH: 1}) if axis == 0 else None for shape, axis in zip(self.shapes, self.batch_axes, strict=True)]
        object.__setattr__(self, "places", tuple(firsts))

    @classmethod
    def decoded(cls, data: np.ndarray[Any, Any]) -> OutputSpecs:
        """Return the specs, with lengths alone, that :func:`encoded` described."""
        structure, outputs, is_captured = json.loads(data.tobytes())
        names, shapes, dtypes = zip(*outputs, strict=True) if outputs else ((), (), ())
        return cls(structure, tuple(names), tuple(map(tuple, shapes)), tuple(map(DType.of, dtypes)), is_captured)

    @property
    def form(self) -> tuple[Any, ...]:
        """What does not depend on the sizes of the inputs."""
        return self.structure, self.names, self.dtypes, tuple(map(len, self.shapes))

    def specs(self, sizes: Sizes) -> tuple[Spec, ...]:
        """Return shapes and dtypes for inputs of ``sizes``, which tell them."""
        return tuple(
            [Spec(tuple([_length(dim, sizes) for dim in shape]), dtype) for shape, dtype in zip(self.shapes, self.dtypes, strict=True)]
        )

    def admits(self, found: OutputSpecs, sizes: Sizes) -> bool:
        """Return whether these are the outputs that a run on inputs of ``sizes`` returned."""
        return self.form == found.form and all(
            dim is None or _length(dim, sizes) == length
            for shape, lengths in zip(self.shapes, found.shapes, strict=True)
            for dim, length in zip(shape, lengths, strict=True)
        )

    def check_serves_for(self, old: OutputSpecs) -> None:
        """Raise unless a model that returns these can take the place of one that returned ``old``.

        Raises
        ------
        InvalidArgumentError
            Names, order, dtypes or shapes differ.
        """
        if self == old:
            return
        texts = [each.described() for each in (self, old)]
        raise InvalidArgumentError(
            f"with these weights the model returns {texts[0]}, and it serves {texts[1]}",
            argument="weights",
            remedy="Load them as another model: what a service answers must not change its form.",
        )

    def described(self) -> str:
        """Return structure, names, dtypes and shapes in a line."""
        each = [
            f"{name}: {dtype.value}({', '.join(map(str, shape))})"
            for name, dtype, shape in zip(self.names, self.dtypes, self.shapes, strict=True)
        ]
        return f"{self.structure} of {', '.join(each)}"

    def leading(self, rows: int, bucket: Sizes) -> list[int | None]:
        """Return how much of the first dimension of each array belongs to the first rows of a bucket; ``None``: all."""
        if rows == bucket.get(BATCH, 0):
            return [None] * len(self.places)
        return [None if places is None else rows * places for places in self.places]

    def cut(self, arrays: Sequence[Any], sizes: Sizes) -> list[Any]:
        """Return the parts of the arrays, or refs, that belong to inputs of ``sizes``."""
        return [_cut(array, shape, sizes) for array, shape in zip(arrays, self.shapes, strict=True)]

    def rows(self, arrays: Sequence[Any], sizes: Sequence[Sizes]) -> list[Any]:
        """Return what a model gives for each row of a batch; ``sizes`` are those of the rows' other dimensions.

        An array that is common to all is given to each, and cannot be written.
        """
        found = []
        for array, shape, inner, axis, is_cut in zip(arrays, self.shapes, self.item_shapes, self.batch_axes, self.is_cut, strict=True):
            parts = _parts(array, shape[axis], axis, len(sizes)) if axis is not None else [_frozen(array)] * len(sizes)
            if is_cut:
                # Requests of one shape share their sizes.
                ends = {key: _ends(inner, each) for key, each in {id(each): each for each in sizes}.items()}
                parts = [part[ends[id(each)]] for part, each in zip(parts, sizes, strict=True)]
            found.append(parts)
        if self.structure == "array":
            return found[0]
        return [self.joined(answer) for answer in (zip(*found, strict=True) if found else [()] * len(sizes))]

    def joined(self, arrays: Sequence[Any]) -> Any:
        """Return arrays as the model returns them: one array, a tuple or a dict."""
        if self.structure == "array":
            return arrays[0]
        return tuple(arrays) if self.structure == "tuple" else dict(zip(self.names, arrays, strict=True))


def is_of_batch(dim: Dim) -> bool:
    """Return whether a dimension of an output follows the batch."""
    return dim == BATCH or (isinstance(dim, Follows) and dim.dim == BATCH)


def _batch_axis(shape: Sequence[Dim]) -> int | None:
    return next((axis for axis, dim in enumerate(shape) if is_of_batch(dim)), None)


def _item_shape(shape: tuple[Dim, ...], axis: int | None) -> tuple[Dim, ...]:
    """Return a shape without its batch dimension, or, if a row has several places there, with as many."""
    if axis is None:
        return shape
    dim = shape[axis]
    return (*shape[:axis], *([dim.times] if isinstance(dim, Follows) else []), *shape[axis + 1 :])


def _length(dim: Dim, sizes: Sizes) -> int:
    if isinstance(dim, Follows):
        return dim.of(sizes[dim.dim])
    if dim is None:
        raise AssertionError("a run must tell this length")
    return sizes[dim] if isinstance(dim, str) else dim


def _parts(array: Any, dim: Dim, axis: int, rows: int) -> list[Any]:
    """Return the part of an array that belongs to each row: one place of its batch dimension, or as many as follow each other for a row."""
    before = (slice(None),) * axis
    if isinstance(dim, Follows):
        return [array[(*before, slice(place * dim.times, (place + 1) * dim.times))] for place in range(rows)]
    return [array[(*before, place)] for place in range(rows)] if axis else list(array[:rows])


def _frozen(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


def _cut(array: Any, shape: Sequence[Dim], sizes: Sizes) -> Any:
    """Return the part of an output, an array or a ref, that belongs to inputs of ``sizes``."""
    ends = _ends(shape, sizes)
    is_whole = all(end.stop is None or end.stop == length for end, length in zip(ends, array.shape, strict=True))
    return array if is_whole else array[ends]


def _ends(shape: Sequence[Dim], sizes: Sizes) -> tuple[slice, ...]:
    """Return the index of what belongs to inputs of ``sizes``; dimensions that follow none of these stay whole."""
    return tuple([slice(_length(dim, sizes) if (dim.dim if isinstance(dim, Follows) else dim) in sizes else None) for dim in shape])
