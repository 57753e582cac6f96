"""Random numbers: pure functions of a seed and a place in the seed's stream.

The stream of a seed is a sequence of blocks of four 32-bit words w0 w1 w2 w3. Number i of the stream comes from block i // 4 (float32, and integers of
at most 2**32 values) or i // 2 (float64, and integers of more), and from nothing else: so it does not matter in how many pieces, and on how many
threads, a stream is read. A block is Philox4x32-10 (Salmon et al., *Parallel random numbers: as easy as 1, 2, 3*, 2011) of the key ``seed`` and the
counter (block's low half, block's high half, attempt, 0), a word each. The attempt is 0 but for integers. What a number is:

- uniform: the upper 24 bits of a word, or 53 bits of w0 + 2**32 * w1, as a fraction u of one; then ``low + u * (high - low)``, below ``high``.
- normal: Box and Muller's transform of two words into two numbers (float32), or of the four into two (float64).
- log-normal: the exponential of a normal number.
- integers: ``low`` plus the upper half of the product of a word, or two, with the number of values. Where that would favour some values (Lemire, *Fast
  random integer generation in an interval*, 2019) the word is taken from the next attempt of the same block.

Backends that follow this give the same integers and uniform numbers, bit by bit, and normal ones that differ in the last places.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal, TypeVar

import numpy as np

from accel.dtype import DType, DTypeLike
from accel.errors import InvalidArgumentError, UnsupportedError
from accel.ops.base import FamilyOp, Plan, Shape, as_shape, number, result_in
from accel.ops.family import Family
from accel.ops.fields import integer, set_fields
from accel.ops.namespace import OpNamespace, method
from accel.ref import AccelRef

__all__ = ["FAMILY", "Generator", "Integers", "Lognormal", "Normal", "RngOps", "Uniform"]

M = TypeVar("M")

Generator = Literal["philox"]
"""Name of the generator of a stream's blocks; see this module."""

_FLOATS = (DType.FLOAT32, DType.FLOAT64)
_END = 1 << 64
_LONGEST = 1 << 62
_LARGEST = {dtype: float(np.finfo(dtype.numpy).max) for dtype in _FLOATS}


def _int(name: str, value: object, low: int, high: int) -> int:
    remedy = f"Give an int of {low} or more, below {high}."
    result = integer(name, value, remedy)
    if not low <= result < high:
        raise InvalidArgumentError(f"{name} is {result}", remedy=remedy)
    return result


def _real(name: str, value: object, dtype: DType) -> float:
    """Return a parameter, rounded to the elements' type."""
    result = value if type(value) is float else number(name, value)
    if isinstance(result, complex) or not abs(result) <= _LARGEST[dtype]:
        raise InvalidArgumentError(f"{name} is {value!r}", remedy=f"Give a finite real number that {dtype.value} can hold.")
    return float(dtype.numpy.type(result))


@dataclass(frozen=True, eq=False, slots=True)
class Draw(FamilyOp):
    """What the distributions share. Each has ``shape`` and ``dtype``, of the result, besides.

    Parameters
    ----------
    seed
        From 0 to 2**64 - 1. ``None``: one is drawn from the system's entropy when the op is made, and kept in it.
    offset
        How many numbers of the stream are skipped.
    generator
        ``"philox"``, the only one.
    out
        Buffer to write.
    """

    library: ClassVar[str] = "rng"

    _: KW_ONLY
    seed: int | None = None
    offset: int = 0
    generator: Generator = "philox"
    out: AccelRef | None = None

    def _drawn(self, shape: object, dtype: DTypeLike) -> DType:
        """Convert what all distributions have, draw the seed if there is none, and return the dtype."""
        set_fields(
            self,
            shape=as_shape(shape),  # type: ignore[arg-type]  # which raises where it is none
            dtype=(found := DType.of(dtype)),
            seed=secrets.randbits(64) if self.seed is None else _int("seed", self.seed, 0, _END),
            offset=_int("offset", self.offset, 0, _LONGEST),
        )
        return found

    def _drawn_floats(self, shape: object, dtype: DTypeLike) -> DType:
        found = self._drawn(shape, dtype)
        if found not in _FLOATS:
            raise UnsupportedError(f"{self.kind} numbers are not offered in {found.value}", remedy="Use float32 or float64.")
        return found

    def _planned(self, shape: Shape, dtype: DType) -> Plan:
        if self.generator != "philox":
            raise InvalidArgumentError(
                f"there is no generator {self.generator!r}", op=self.kind, remedy="Use generator='philox', the default."
            )
        writes, creates = result_in(self.out, shape, dtype)
        return Plan((), writes, creates, "", dtype)


@dataclass(frozen=True, eq=False, slots=True)
class _Floats(Draw):
    """What the distributions of floats share."""

    shape: int | Iterable[int]
    dtype: DTypeLike = DType.FLOAT32

    @property
    def size(self) -> int:
        """How many numbers are drawn."""
        return math.prod(as_shape(self.shape))

    def per_block(self) -> int:
        """Return how many numbers come from one block of the stream."""
        return 4 if self.dtype is DType.FLOAT32 else 2

    def plan(self) -> Plan:
        """See :meth:`KernelOp.plan`."""
        return self._planned(as_shape(self.shape), DType.of(self.dtype))


@dataclass(frozen=True, eq=False, slots=True)
class Uniform(_Floats):
    """Numbers of one density from ``low`` up to, and without, ``high``: float32 or float64. See :class:`Draw` for the other parameters."""

    kind: ClassVar[str] = "uniform"

    _: KW_ONLY
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        """Convert fields; ``low`` and ``high`` are rounded to the elements' type."""
        dtype = self._drawn_floats(self.shape, self.dtype)
        low, high = _real("low", self.low, dtype), _real("high", self.high, dtype)
        if not low < high:
            raise InvalidArgumentError(
                f"low is {low} and high is {high} in {dtype.value}", remedy="Give a high that is larger than low in this dtype."
            )
        _real("high - low", high - low, dtype)
        set_fields(self, low=low, high=high)


@dataclass(frozen=True, eq=False, slots=True)
class Normal(_Floats):
    """Normal numbers of mean ``mean`` and standard deviation ``std``: float32 or float64. See :class:`Draw` for the other parameters."""

    kind: ClassVar[str] = "normal"

    _: KW_ONLY
    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        """Convert fields; ``mean`` and ``std`` are rounded to the elements' type."""
        dtype = self._drawn_floats(self.shape, self.dtype)
        set_fields(self, mean=_real("mean", self.mean, dtype), std=_deviation("std", self.std, dtype))


@dataclass(frozen=True, eq=False, slots=True)
class Lognormal(_Floats):
    """Numbers whose logarithm is normal, of mean ``mean`` and deviation ``sigma``: float32 or float64. See :class:`Draw` for the other parameters."""

    kind: ClassVar[str] = "lognormal"

    _: KW_ONLY
    mean: float = 0.0
    sigma: float = 1.0

    def __post_init__(self) -> None:
        """Convert fields; ``mean`` and ``sigma`` are rounded to the elements' type."""
        dtype = self._drawn_floats(self.shape, self.dtype)
        set_fields(self, mean=_real("mean", self.mean, dtype), sigma=_deviation("sigma", self.sigma, dtype))


def _deviation(name: str, value: object, dtype: DType) -> float:
    result = _real(name, value, dtype)
    if result < 0:
        raise InvalidArgumentError(f"{name} is {value!r}", remedy="Give 0 or more.")
    return result


@dataclass(frozen=True, eq=False, slots=True)
class Integers(Draw):
    """Integers from ``low`` up to, and without, ``high``, all of the same probability, in any integer dtype. See :class:`Draw` for the other parameters."""

    kind: ClassVar[str] = "integers"

    shape: int | Iterable[int]
    low: int
    high: int
    dtype: DTypeLike = DType.INT64

    def __post_init__(self) -> None:
        """Convert fields."""
        dtype = self._drawn(self.shape, self.dtype)
        if not dtype.is_integer:
            raise UnsupportedError(f"integers are not offered in {dtype.value}", remedy="Use an integer dtype, such as int64.")
        bounds = np.iinfo(dtype.numpy)
        low = _int("low", self.low, int(bounds.min), int(bounds.max) + 1)
        set_fields(self, low=low, high=_int("high", self.high, low + 1, int(bounds.max) + 2))

    @property
    def size(self) -> int:
        """How many numbers are drawn."""
        return math.prod(as_shape(self.shape))

    def span(self) -> int:
        """Return how many values there are."""
        return self.high - self.low

    def per_block(self) -> int:
        """Return how many numbers come from one block of the stream."""
        return 4 if self.span() <= 1 << 32 else 2

    def plan(self) -> Plan:
        """See :meth:`KernelOp.plan`."""
        return self._planned(as_shape(self.shape), DType.of(self.dtype))


class RngOps(OpNamespace[M]):
    """Random numbers, each a pure function of ``seed`` and its place in the seed's stream; see :mod:`accel.ops.rng`.

    ``seed`` is an int below 2**64, or ``None`` for one from the system's entropy. ``offset`` is how many numbers of the stream to skip: what is read in
    pieces is what is read at once. ``generator`` is ``"philox"``, the only one. ``out=`` names a buffer to write instead of making one; ``timeout=``
    (seconds) is when waiting ends with :class:`~accel.DeadlineExceededError`.
    """

    __slots__ = ()

    library: ClassVar[str] = "rng"
    aliases: ClassVar[Mapping[str, str]] = {"rand": ".uniform(shape)", "randn": ".normal(shape)", "randint": ".integers(shape, low, high)"}

    uniform = method(Uniform)
    normal = method(Normal)
    lognormal = method(Lognormal)
    integers = method(Integers)


FAMILY = Family(RngOps)
