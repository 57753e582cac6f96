"""What ops that draw random numbers share."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY
from functools import lru_cache, partial
from typing import Any, ClassVar, Literal

import numpy as np

from accel.dtype import WIDE_FLOATS, DType, DTypeLike
from accel.errors import InvalidArgumentError, UnsupportedError
from accel.ops.base import OutOp, Plan, as_shape, op, planned, to_shape
from accel.ops.fields import convert_fields, integer, set_fields, to_dtype
from accel.values import number

__all__ = ["Draw", "Floats", "Generator", "Shaped", "VendorFloats", "at_least_zero", "key_of", "real", "whole"]

Generator = Literal["philox", "curand_philox", "curand_mrg32k3a"]
"""Name of a generator: accel's own, see :mod:`accel.ops.rng`; or one of cuRAND's, for numbers that are cuRAND's bit by bit."""

_END = 1 << 64
_LONGEST = 1 << 62
_LARGEST = {dtype: float(np.finfo(dtype.numpy).max) for dtype in WIDE_FLOATS}


def key_of(seed: int, stream: str) -> int:
    """Return the key of the blocks of words of one of a seed's streams; see :mod:`accel.ops.rng`."""
    return seed ^ _mark(stream)


@lru_cache(maxsize=64)
def _mark(stream: str) -> int:
    return int.from_bytes(hashlib.sha256(stream.encode()).digest()[:8], "little")


def whole(name: str, value: object, low: int, high: int) -> int:
    """Return an int from ``low`` up to, and without, ``high``."""
    remedy = f"Give an int of {low} or more, below {high}."
    result = integer(name, value, remedy)
    if not low <= result < high:
        raise InvalidArgumentError(f"{name} is {result}", remedy=remedy)
    return result


def real(name: str, value: object, dtype: DType) -> float:
    """Return a parameter, rounded to the elements' type."""
    result = value if type(value) is float else number(name, value)
    if isinstance(result, complex) or not abs(result) <= _LARGEST[dtype]:
        raise InvalidArgumentError(f"{name} is {value!r}", remedy=f"Give a finite real number that {dtype.value} can hold.")
    return float(dtype.numpy.type(result))


def _seed(name: str, value: object) -> int:
    return secrets.randbits(64) if value is None else whole(name, value, 0, _END)


@op("rng", convert={"seed": _seed, "offset": partial(whole, low=0, high=_LONGEST)})
class Draw(OutOp):
    """What the distributions share. Each has ``shape`` and ``dtype``, of the result, besides.

    Parameters
    ----------
    seed
        From 0 to 2**64 - 1. ``None``: one is drawn from the system's entropy when the op is made, and kept in it.
    offset
        How many numbers of the stream are skipped.
    generator
        ``"philox"``; uniform and normal numbers on CUDA have ``"curand_philox"`` and ``"curand_mrg32k3a"`` too.
    out
        Buffer to write.
    """

    generators: ClassVar[tuple[Generator, ...]] = ("philox",)

    _: KW_ONLY
    seed: int | None = None
    offset: int = 0
    generator: Generator = "philox"

    def stream(self) -> str:
        """Return the name of the stream, of those of the seed, that numbers are of."""
        return self.kind

    def key(self) -> int:
        """Return the key of the stream's blocks of words."""
        assert self.seed is not None, "it is drawn when the op is made"
        return key_of(self.seed, self.stream())

    def __post_init__(self) -> None:
        """Convert fields, and draw the seed if there is none."""
        if not isinstance(self.generator, str) or self.generator not in self.generators:
            names = " or ".join(map(repr, self.generators))
            raise InvalidArgumentError(
                f"{self.kind} has no generator {self.generator!r:.100}", op=self.kind, remedy=f"Use generator={names}."
            )
        convert_fields(self)


@op(convert={"shape": to_shape})
class Shaped(Draw):
    """What the distributions share whose numbers are each drawn by itself."""

    shape: int | Iterable[int]

    def plan(self) -> Plan:
        mine: Any = self  # each has a dtype
        return planned(self.out, {}, as_shape(self.shape), mine.dtype)

    @property
    def size(self) -> int:
        """How many numbers are drawn."""
        return math.prod(as_shape(self.shape))


@op(convert={"dtype": to_dtype})
class Floats(Shaped):
    """What the distributions of floats share."""

    parameters: ClassVar[Mapping[str, Callable[[str, Any, DType], float]]]
    """Parameter -> what converts it, given its name, what a caller wrote, and the elements' type."""

    dtype: DTypeLike = DType.FLOAT32

    def __post_init__(self) -> None:
        """Convert fields; parameters are rounded to the elements' type."""
        Draw.__post_init__(self)
        if self.dtype not in WIDE_FLOATS:
            raise UnsupportedError(f"{self.kind} numbers are not offered in {self.dtype.value}", remedy="Use float32 or float64.")
        set_fields(self, **{name: convert(name, getattr(self, name), self.dtype) for name, convert in self.parameters.items()})

    def per_block(self) -> int:
        """Return how many numbers come from one block of the stream."""
        return 4 if self.dtype is DType.FLOAT32 else 2

    def stream(self) -> str:
        return f"{self.kind} {self.per_block()}"


class VendorFloats(Floats):
    """What distributions share that cuRAND's generators have too."""

    __slots__ = ()

    generators: ClassVar[tuple[Generator, ...]] = ("philox", "curand_philox", "curand_mrg32k3a")


def at_least_zero(name: str, value: object, dtype: DType) -> float:
    """Return a parameter that is not negative, rounded to the elements' type."""
    result = real(name, value, dtype)
    if result < 0:
        raise InvalidArgumentError(f"{name} is {value!r}", remedy="Give 0 or more.")
    return result
