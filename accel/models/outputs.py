"""What a model returns: its arrays in order, and how they are put together again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from accel.dtype import DType
from accel.errors import InvalidArgumentError
from accel.models.tensor_spec import cut
from accel.ops import Spec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel.models.tensor_spec import Sizes

__all__ = ["OutputSpecs", "Structure", "encoded", "flattened"]

Structure = Literal["array", "tuple", "dict"]

DESCRIPTION_NBYTES = 1 << 18
"""Bytes of the buffer in which a model describes its outputs."""


def flattened(result: Any) -> tuple[Structure, tuple[str, ...], list[Any]]:
    """Return how a model's result is put together, the names of its arrays, and the arrays.

    A mapping, a dataclass (its fields that are not ``None``), a tuple, a list or one array.

    Raises
    ------
    InvalidArgumentError
        If there is anything but arrays in it.
    """
    if dataclasses.is_dataclass(result) and not isinstance(result, (type, Mapping)):
        result = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    if isinstance(result, Mapping):
        result = {str(name): value for name, value in result.items() if value is not None}
        structure, names, arrays = "dict", tuple(result), list(result.values())
    elif isinstance(result, (tuple, list)):
        structure, names, arrays = "tuple", tuple(map(str, range(len(result)))), list(result)
    else:
        structure, names, arrays = "array", ("0",), [result]
    for name, array in zip(names, arrays, strict=True):
        if not (hasattr(array, "shape") and hasattr(array, "dtype")):
            raise InvalidArgumentError(
                f"output {name!r} of the model is a {type(array).__name__}", remedy="Return an array, or a tuple or dict of arrays."
            )
    return structure, names, arrays  # type: ignore[return-value]


def dtype_of(array: Any) -> DType:
    """Return the dtype of an array of numpy or torch."""
    return DType.of(str(array.dtype).removeprefix("torch."))


def encoded(result: Any, *, is_captured: bool = False) -> np.ndarray[Any, Any]:
    """Return the description of a model's result, for :meth:`OutputSpecs.decoded`, as an array of bytes.

    Parameters
    ----------
    result
        What the model returned.
    is_captured
        Whether it replays CUDA graphs.

    Raises
    ------
    InvalidArgumentError
        If the result is none, or has very many arrays.
    """
    structure, names, arrays = flattened(result)
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
        Of the arrays; a dimension that follows one of the inputs' has its name.
    dtypes
        Of the arrays.
    is_captured
        Whether the model makes them by replaying CUDA graphs.
    """

    structure: Structure
    names: tuple[str, ...]
    shapes: tuple[tuple[int | str, ...], ...]
    dtypes: tuple[DType, ...]
    is_captured: bool = False

    @classmethod
    def decoded(cls, data: np.ndarray[Any, Any]) -> OutputSpecs:
        """Return the specs, with lengths alone, that :func:`encoded` described."""
        structure, outputs, is_captured = json.loads(data.tobytes())
        names, shapes, dtypes = zip(*outputs, strict=True) if outputs else ((), (), ())
        return cls(structure, tuple(names), tuple(map(tuple, shapes)), tuple(map(DType.of, dtypes)), is_captured)

    def named(self, sizes: Sizes, other: OutputSpecs, other_sizes: Sizes) -> OutputSpecs:
        """Return the specs with names where the outputs for two sizes of inputs differ as these do.

        Raises
        ------
        InvalidArgumentError
            If the two have not the same arrays.
        """
        mine, others = [(each.structure, each.names, each.dtypes, tuple(map(len, each.shapes))) for each in (self, other)]
        if mine != others:
            raise InvalidArgumentError(f"the model returns {mine} for inputs of {dict(sizes)}, and {others} for {dict(other_sizes)}")
        changed = [dim for dim in sizes if sizes[dim] != other_sizes[dim]]
        shapes = [
            tuple([_name(length, then, changed, sizes, other_sizes) for length, then in zip(shape, shape_then, strict=True)])
            for shape, shape_then in zip(self.shapes, other.shapes, strict=True)
        ]
        return dataclasses.replace(self, shapes=tuple(shapes))

    def specs(self, sizes: Sizes) -> tuple[Spec, ...]:
        """Return shapes and dtypes for inputs of ``sizes``."""
        return tuple(
            [
                Spec(tuple([sizes[dim] if isinstance(dim, str) else dim for dim in shape]), dtype)
                for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
            ]
        )

    def cut(self, arrays: Sequence[Any], sizes: Sizes) -> list[Any]:
        """Return the parts of the arrays, or refs, that belong to inputs of ``sizes``."""
        return [cut(array, shape, sizes) for array, shape in zip(arrays, self.shapes, strict=True)]

    def rows(self, arrays: Sequence[Any], sizes: Sequence[Sizes]) -> list[Any]:
        """Return what a model gives for each row of a batch; ``sizes`` are those of the rows' other dimensions."""
        found = []
        for array, shape in zip(arrays, self.shapes, strict=True):
            inner = shape[1:]
            is_cut = any(isinstance(dim, str) for dim in inner)
            found.append([cut(array[place], inner, each) if is_cut else array[place] for place, each in enumerate(sizes)])
        return found[0] if self.structure == "array" else [self.joined([each[place] for each in found]) for place in range(len(sizes))]

    def joined(self, arrays: Sequence[Any]) -> Any:
        """Return arrays as the model returns them: one array, a tuple or a dict."""
        if self.structure == "array":
            return arrays[0]
        return tuple(arrays) if self.structure == "tuple" else dict(zip(self.names, arrays, strict=True))


def _name(length: int | str, then: int | str, changed: Sequence[str], sizes: Sizes, other_sizes: Sizes) -> int | str:
    """Return the dimension that a length follows, or the length as it is."""
    if isinstance(length, str) or length == then:
        return length
    return next((dim for dim in changed if (sizes[dim], other_sizes[dim]) == (length, then)), length)
