"""What samples are made of: calls of ops, random operands, their values in higher precision, and how far sums of them may be off."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from accel.dtype import DType
from accel.family import Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from accel.cpu.views import Array

__all__ = ["ALL_FLOATS", "COMPLEX", "FLOATS", "random", "rounding", "sample", "sums", "wide"]

FLOATS = (DType.FLOAT32, DType.FLOAT64)
ALL_FLOATS = (DType.FLOAT16, DType.BFLOAT16, *FLOATS)
COMPLEX = (DType.COMPLEX64, DType.COMPLEX128)


def sample(
    kind: str,
    what: object,
    operands: tuple[Array, ...],
    expected: Array | tuple[Array, ...],
    error: float = 0.0,
    terms: float = 0.0,
    *,
    arguments: tuple[Any, ...] = (),
    names: Sequence[str] = (),
    seen: Callable[..., tuple[Array, ...]] | None = None,
    **options: Any,
) -> Sample:
    """Return the sample of a call ``namespace.kind(*refs, *arguments, **options)``.

    Parameters
    ----------
    kind, what
        Of the op, and what is special about the call: its name.
    operands, expected, error, terms, seen
        See :class:`~accel.family.Sample`.
    arguments
        Behind the operands.
    names
        Of the last operands, which are given by name: ``("out",)``.
    **options
        Arguments by name.
    """
    return Sample(f"{kind} {what}", partial(_called, kind, arguments, tuple(names), options), operands, expected, error, terms, seen)


def _called(kind: str, arguments: tuple[Any, ...], names: tuple[str, ...], options: dict[str, Any], namespace: Any, *refs: Any) -> Any:
    count = len(refs) - len(names)
    return getattr(namespace, kind)(*refs[:count], *arguments, **dict(zip(names, refs[count:], strict=True)), **options)


def random(rng: np.random.Generator, shape: int | Sequence[int], dtype: DType) -> Array:
    """Return normally distributed elements, or integers from -50 to 50."""
    if dtype.is_integer:
        least = 0 if dtype.numpy.kind == "u" else -50
        return rng.integers(least, 50, shape).astype(dtype.numpy)
    values: Array = rng.standard_normal(shape)
    if dtype.is_complex:
        values = values + 1j * rng.standard_normal(shape)
    return np.asarray(values, dtype.numpy)


def wide(array: Array) -> Array:
    """Return the same values in a type of about twice the precision; integers as int64."""
    if array.dtype.kind in "iub":
        return array.astype(np.int64)
    if array.dtype.itemsize < 8 or array.dtype == np.complex64:
        return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
    return array.astype(np.clongdouble if array.dtype.kind == "c" else np.longdouble)


def sums(dtype: DType, count: int = 1) -> float:
    """Return the error of sums of ``count`` products, relative to the largest, in the type that ``dtype`` is accumulated in; 0 for integers."""
    if dtype.is_integer:
        return 0.0
    return 4.0 * max(count, 1) * rounding(DType.FLOAT32 if dtype.itemsize <= 2 else dtype)


def rounding(dtype: DType) -> float:
    """Return the distance of 1 to the next number of ``dtype``."""
    finfo: Any = ml_dtypes.finfo if dtype.is_extended else np.finfo
    return float(finfo(dtype.numpy).eps)
