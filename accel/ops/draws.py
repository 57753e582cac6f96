"""What ops that draw random numbers share."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Iterable
from dataclasses import KW_ONLY
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from accel.dtype import DType, DTypeLike
from accel.errors import InvalidArgumentError, UnsupportedError
from accel.ops.base import OutOp, Plan, Shape, Status, as_shape, op, result_in
from accel.ops.fields import integer, set_fields
from accel.values import number

if TYPE_CHECKING:
    from accel.ref import AccelRef

__all__ = ["Draw", "Floats", "Generator", "Shaped", "VendorFloats", "at_least_zero", "key_of", "real", "whole"]

Generator = Literal["philox", "curand_philox", "curand_mrg32k3a"]
"""Name of a generator: accel's own, see :mod:`accel.ops.rng`; or one of cuRAND's, for numbers that are cuRAND's bit by bit."""

_FLOATS = (DType.FLOAT32, DType.FLOAT64)
_END = 1 << 64
_LONGEST = 1 << 62
_LARGEST = {dtype: float(np.finfo(dtype.numpy).max) for dtype in _FLOATS}


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


@op("rng")
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

    def _seeded(self) -> None:
        """Convert what all have, and draw the seed if there is none."""
        if not isinstance(self.generator, str) or self.generator not in self.generators:
            names = " or ".join(map(repr, self.generators))
            raise InvalidArgumentError(
                f"{self.kind} has no generator {self.generator!r:.100}", op=self.kind, remedy=f"Use generator={names}."
            )
        set_fields(
            self,
            seed=secrets.randbits(64) if self.seed is None else whole("seed", self.seed, 0, _END),
            offset=whole("offset", self.offset, 0, _LONGEST),
        )

    def _shaped(self, shape: object) -> None:
        """Convert what those with a shape have."""
        self._seeded()
        set_fields(self, shape=as_shape(shape))  # type: ignore[arg-type]  # which raises where it is none

    def _drawn(self, shape: object, dtype: DTypeLike) -> DType:
        """Convert what distributions with a choice of dtypes have, and return the dtype."""
        self._shaped(shape)
        set_fields(self, dtype=(found := DType.of(dtype)))
        return found

    def _drawn_floats(self, shape: object, dtype: DTypeLike) -> DType:
        found = self._drawn(shape, dtype)
        if found not in _FLOATS:
            raise UnsupportedError(f"{self.kind} numbers are not offered in {found.value}", remedy="Use float32 or float64.")
        return found

    def _planned(self, shape: Shape, dtype: DType, reads: tuple[AccelRef, ...] = (), status: Status | None = None) -> Plan:
        return Plan(reads, *result_in(self.out, shape, dtype), "", dtype, status=status)


@op()
class Shaped(Draw):
    """What the distributions share whose numbers are each drawn by itself."""

    shape: int | Iterable[int]

    @property
    def size(self) -> int:
        """How many numbers are drawn."""
        return math.prod(as_shape(self.shape))


@op()
class Floats(Shaped):
    """What the distributions of floats share."""

    dtype: DTypeLike = DType.FLOAT32

    def per_block(self) -> int:
        """Return how many numbers come from one block of the stream."""
        return 4 if self.dtype is DType.FLOAT32 else 2

    def stream(self) -> str:
        return f"{self.kind} {self.per_block()}"

    def plan(self) -> Plan:
        return self._planned(as_shape(self.shape), DType.of(self.dtype))


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
