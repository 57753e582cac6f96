"""Windows that slide over the spatial dimensions of signals, images and volumes: what convolutions and pooling share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from accel.errors import InvalidArgumentError
from accel.ops.fields import integer

if TYPE_CHECKING:
    from accel.ops.base import Shape

__all__ = ["LONGEST", "Padding", "Steps", "borders_of", "counts_of", "steps_of"]

Steps: TypeAlias = int | Sequence[int]
"""A number for each dimension, or one number for all."""

Padding: TypeAlias = int | Sequence[int | Sequence[int]]
"""For each dimension a number, or (before, after); or one number for all."""

LONGEST = 2**31
"""What strides and padded dimensions stay below: kernels count in 32 bits."""


def steps_of(name: str, value: object, rank: int) -> Shape:
    """Return a number for each of ``rank`` dimensions.

    Raises
    ------
    InvalidArgumentError
        If there are not as many, or they are no ints.
    """
    if type(value) is int:
        return (value,) * rank
    remedy = f"Give an int, or {rank} of them."
    steps = value if isinstance(value, (tuple, list)) else (value,) * rank
    if len(steps) != rank:
        raise InvalidArgumentError(f"{name} is {value!r}", remedy=remedy)
    return tuple([integer(name, step, remedy) for step in steps])


def borders_of(value: object, rank: int) -> tuple[tuple[int, int], ...]:
    """Return how much is padded (before, after) in each of ``rank`` dimensions.

    Raises
    ------
    InvalidArgumentError
        If there are not as many, or they are no ints.
    """
    if type(value) is int:
        return ((value, value),) * rank
    remedy = f"Give an int, or for each of {rank} dimension(s) an int or (before, after)."
    borders = value if isinstance(value, (tuple, list)) else (value,) * rank
    pairs = [each if isinstance(each, (tuple, list)) else (each, each) for each in borders]
    if len(pairs) != rank or any(len(pair) != 2 for pair in pairs):
        raise InvalidArgumentError(f"padding is {value!r}", remedy=remedy)
    return tuple([(integer("padding", before, remedy), integer("padding", after, remedy)) for before, after in pairs])


def counts_of(sizes: Sequence[int], reach: Sequence[int], strides: Sequence[int], borders: Sequence[tuple[int, int]]) -> Shape:
    """Return how many windows there are along each dimension.

    Parameters
    ----------
    sizes, reach
        Elements along each dimension, and from the first to the last one of a window.
    strides, borders
        From one window to the next, and how much is padded (before, after).

    Raises
    ------
    InvalidArgumentError
        If no window fits, or a number is out of range.
    """
    if min(*strides, *map(min, borders)) < 0 or 0 in strides:
        raise InvalidArgumentError(
            f"stride is {strides} and padding {borders}", remedy="Give strides of at least 1, and paddings of at least 0."
        )
    padded = [size + sum(pair) for size, pair in zip(sizes, borders, strict=True)]
    if max(*strides, *padded, *reach) >= LONGEST:
        raise InvalidArgumentError(
            f"windows of {tuple(reach)} over {tuple(sizes)} with padding {borders} and stride {strides} are too large",
            remedy=f"Keep strides, windows, and what is padded in each direction, below {LONGEST}: kernels count in 32 bits.",
        )
    counts = tuple([(whole - far) // step + 1 for whole, far, step in zip(padded, reach, strides, strict=True)])
    if min(*counts, *reach) < 1:
        raise InvalidArgumentError(
            f"a window of {tuple(reach)} does not fit into {tuple(sizes)} padded by {borders}",
            remedy="Give a smaller window, of at least 1, or more padding.",
        )
    return counts
