"""Where the elements of a tensor are in a file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from accel.dtype import DType

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["StoredTensor", "c_strides", "is_shape", "is_sizes"]

_MAX_DIMENSIONS: Final = 64
"""numpy has no arrays of more."""

_MAX_ELEMENTS: Final = 1 << 59
"""numpy has no arrays of as many, not even empty ones."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file.

    Attributes
    ----------
    shape : tuple of int
    dtype : DType
    start : int
        The byte of the file where its first element is.
    strides : tuple of int or None
        For each dimension, the elements from one to the next; ``None`` if they follow each other in C order.
    """

    shape: tuple[int, ...]
    dtype: DType
    start: int
    strides: tuple[int, ...] | None = None

    @property
    def end(self) -> int:
        """The first byte of the file behind all of its elements."""
        if 0 in self.shape:
            return self.start
        if self.strides is None:
            return self.start + math.prod(self.shape) * self.dtype.itemsize
        last = sum([(length - 1) * stride for length, stride in zip(self.shape, self.strides, strict=True)])
        return self.start + (last + 1) * self.dtype.itemsize

    def part(self, axis: int, start: int, stop: int) -> StoredTensor:
        """Return the tensor of the elements from ``start`` to ``stop`` along one dimension."""
        strides = c_strides(self.shape) if self.strides is None else self.strides
        follows = self.strides is None and math.prod(self.shape[:axis]) == 1
        place = self.start + start * strides[axis] * self.dtype.itemsize
        shape = (*self.shape[:axis], stop - start, *self.shape[axis + 1 :])
        return StoredTensor(shape, self.dtype, place, None if follows else strides)


def is_shape(values: Any) -> bool:
    """Return whether values from outside are the lengths of an array that numpy can have."""
    return is_sizes(values) and len(values) <= _MAX_DIMENSIONS and math.prod(filter(None, values)) < _MAX_ELEMENTS


def is_sizes(values: Any) -> bool:
    """Return whether values from outside are ints that are not negative, and none too large for any file or memory."""
    return isinstance(values, (list, tuple)) and all(type(each) is int and 0 <= each < _MAX_ELEMENTS for each in values)


def c_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of elements that follow each other in C order."""
    return tuple([math.prod(shape[place + 1 :]) for place in range(len(shape))])
