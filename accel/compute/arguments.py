"""What the arguments of :class:`~accel.ComputeBackend`'s calls must be: checks that backends share, made before anything is enqueued.

Each raises :class:`~accel.InvalidArgumentError` with ``op`` set.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.errors import InvalidArgumentError
from accel.memory.space import BASE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel.dtype import DType

__all__ = [
    "convolution",
    "host_bytes",
    "leading_dimensions",
    "not_negative",
    "pointers",
    "real_scalars",
    "reduced_shape",
    "separate",
]


def not_negative(op: str, **sizes: int) -> None:
    """Refuse a negative size."""
    for name, value in sizes.items():
        if value < 0:
            raise InvalidArgumentError(f"{name} is {value}: it cannot be negative", op=op)


def pointers(op: str, **addresses: int) -> None:
    """Refuse addresses at which nothing can be."""
    for name, value in addresses.items():
        if value < BASE:
            raise InvalidArgumentError(f"{name} is {value:#x}: that is not the address of device memory", op=op)


def host_bytes(op: str, view: memoryview, *, is_written: bool = False) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return host memory that is copied, as bytes; refuse what is not C-contiguous, or is read-only and to be written."""
    if is_written and view.readonly:
        raise InvalidArgumentError("the destination is read-only", op=op, remedy="Pass a writable buffer.")
    if not view.c_contiguous:
        raise InvalidArgumentError(
            "the host memory is not C-contiguous", op=op, remedy="Pass contiguous memory, such as accel.native(array)."
        )
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)


def leading_dimensions(op: str, **pairs: tuple[int, int]) -> None:
    """Refuse a leading dimension that is smaller than the stored rows; ``pairs`` are (leading dimension, rows)."""
    for name, (value, rows) in pairs.items():
        if value < max(1, rows):
            raise InvalidArgumentError(
                f"{name} is {value}: the matrix is stored with {rows} rows", op=op, remedy=f"Use {max(1, rows)} or more."
            )


def real_scalars(op: str, alpha: complex, beta: complex, dtype: DType) -> tuple[complex, complex]:
    """Return the scaling factors as elements of ``dtype`` can be multiplied by them: real elements by real numbers only."""
    if dtype.is_complex:
        return alpha, beta
    for name, value in (("alpha", alpha), ("beta", beta)):
        if value.imag:
            raise InvalidArgumentError(f"{name} is {value}: {dtype.value} elements cannot be scaled by a complex number", op=op)
    return alpha.real, beta.real


def reduced_shape(op: str, shape: Sequence[int], axis: int, *, empty: bool) -> tuple[int, int, int]:
    """Return ``shape`` as ``(outer, length, inner)`` around ``axis``, which may only have length 0 if ``empty``."""
    if not 0 <= axis < len(shape):
        raise InvalidArgumentError(f"axis is {axis}, the array has {len(shape)} axes", op=op, remedy="Axes are counted from 0.")
    if any(length < 0 for length in shape):
        raise InvalidArgumentError(f"shape {tuple(shape)} has a negative length", op=op)
    if shape[axis] == 0 and not empty:
        raise InvalidArgumentError(f"axis {axis} is empty, and {op} of nothing is not defined", op=op)
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


def separate(op: str, stride: int, ld: int, count: int) -> None:
    """Refuse a batch whose results would be written over each other."""
    if stride == 0 and count > 1:
        raise InvalidArgumentError(
            f"stride_c is 0: {count} results cannot share their memory", op=op, remedy=f"Use ldc * n, with ldc = {ld}."
        )


def convolution(
    op: str, image: Sequence[int], filters: Sequence[int], output: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> None:
    """Refuse shapes, strides and paddings that do not belong together."""
    for name, lengths, count, least in (
        ("input_shape", image, 4, 0),
        ("filter_shape", filters, 4, 0),
        ("output_shape", output, 4, 0),
        ("stride", stride, 2, 1),
        ("padding", padding, 2, 0),
    ):
        if len(lengths) != count or any(length < least for length in lengths):
            raise InvalidArgumentError(f"{name} is {tuple(lengths)}: it has {count} numbers, each at least {least}", op=op)
    if filters[1] != image[1]:
        raise InvalidArgumentError(f"the filter has {filters[1]} channels, the input {image[1]}", op=op)
    rooms = [image[axis] + 2 * padding[axis - 2] - filters[axis] for axis in (2, 3)]
    if min(rooms) < 0 or min(filters[2:]) < 1:
        raise InvalidArgumentError(f"a filter of {tuple(filters[2:])} does not fit the padded input {tuple(image[2:])}", op=op)
    expected = (image[0], filters[0], rooms[0] // stride[0] + 1, rooms[1] // stride[1] + 1)
    if tuple(output) != expected:
        raise InvalidArgumentError(f"output_shape is {tuple(output)}: these arguments give {expected}", op=op)
