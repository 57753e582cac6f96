"""What a model is run on before there are requests: values that are valid for it, as far as its specs say. Only numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from accel.dtype import DType
    from accel.models.tensor_spec import Sizes, TensorSpec

__all__ = ["Fill", "example_rows", "expanded", "fill_of"]

Array: TypeAlias = np.ndarray[Any, Any]
Fill: TypeAlias = "float | Array"
"""What an input is filled with: a number, or an array with as many dimensions that is repeated, or cut, in each of them."""


def fill_of(spec: TensorSpec) -> Fill:
    """Return what an input is filled with when the model is warmed up: its example, or 1, which also divisors, shapes, indices and masks can be."""
    return 1 if spec.example is None else spec.example


def expanded(fill: Fill, shape: tuple[int, ...], dtype: DType) -> Array:
    """Return an array of a shape and dtype, filled."""
    if not isinstance(fill, np.ndarray):
        return np.full(shape, fill, dtype.numpy)
    return fill[np.ix_(*[np.arange(length) % repeated for length, repeated in zip(shape, fill.shape, strict=True)])].astype(dtype.numpy)


def example_rows(spec: TensorSpec, sizes: Sizes, seed: int, *, is_varied: bool = True) -> Array:
    """Return an input of the batch's size whose rows are different from one seed to the next, as far as valid values are known.

    Without an example floats are random numbers from 0.5 to 1.5, and ints and bools random ones and zeros: token ids, masks, and classes can be that.

    Parameters
    ----------
    spec, sizes
        Of the input, and the length of each named dimension.
    seed
        Of the rows.
    is_varied
        ``False`` has ones alone for ints and bools: divisors and lengths cannot be 0.
    """
    shape, axis, kind = spec.of_size(sizes), spec.batch_axis, spec.dtype.kind
    assert axis is not None, "it has rows"
    if spec.example is not None:
        return expanded(np.roll(spec.example, -seed, axis), shape, spec.dtype)
    if kind in ("float", "complex"):
        random = np.random.default_rng(seed).random(shape, np.float64 if spec.dtype.itemsize > 4 else np.float32)
        return (random + random.dtype.type(0.5)).astype(spec.dtype.numpy, copy=False)
    if not is_varied:
        return np.ones(shape, spec.dtype.numpy)
    is_one = np.random.default_rng(seed // 2).random(shape) < 0.5
    return (~is_one if seed % 2 else is_one).astype(spec.dtype.numpy)  # no element is that of the seed before
