"""Distributions whose numbers are made of more than one function of a word; :mod:`accel.ops.rng` says how.

What backends compute with is computed here, once: so backends that follow the module agree about it to the last bit.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import KW_ONLY
from functools import partial
from typing import ClassVar, Literal

from accel.dtype import DType
from accel.errors import InvalidArgumentError
from accel.ops.base import op
from accel.ops.draws import Floats, Shaped, at_least_zero, real, whole
from accel.values import number

__all__ = ["Bernoulli", "Beta", "Binomial", "Exponential", "Gamma", "Poisson", "TruncatedNormal"]

_FEW = 10.0
"""Mean below which counts are searched for, value by value."""
_MOST = 1 << 52
"""Counts and means up to which a float64 tells neighbouring counts apart."""
_SMALLEST = 1e-300
"""Parameter whose reciprocal is finite, whatever it is multiplied by."""
_LEAST = 1e-290
"""Probability of a range from which on a float64 holds its parts."""


def _stirling_error(k: float) -> float:
    """Return what Stirling's formula lacks of the logarithm of k!, for k of 1 or more."""
    if k < len(Counts.stirling_errors):
        return Counts.stirling_errors[int(k)]
    square = k * k
    return (1 / 12 - (1 / 360 - (1 / 1260 - 1 / 1680 / square) / square) / square) / k


def _log_term(k: float, mean: float) -> float:
    """Return the logarithm of ``mean**k * exp(-mean) / k!``, and of the root of 2 pi; see Loader, *Fast and accurate computation of binomial probabilities*."""
    if not k:
        return 0.5 * math.log(2 * math.pi) - mean
    ratio = (k - mean) / mean
    return -(_stirling_error(k) + mean * ((1 + ratio) * math.log1p(ratio) - ratio) + 0.5 * math.log(k))


def _positive(name: str, value: object, dtype: DType) -> float:
    result = real(name, value, dtype)
    if not result >= _SMALLEST:
        raise InvalidArgumentError(f"{name} is {value!r}", remedy="Give a number above 0, of 1e-300 at least.")
    return result


def _bound(name: str, value: object, dtype: DType) -> float:
    given = number(name, value)
    return float(given) if isinstance(given, float) and math.isinf(given) else real(name, value, dtype)


def _probability(name: str, value: object) -> float:
    result = real(name, value, DType.FLOAT64)
    if not 0 <= result <= 1:
        raise InvalidArgumentError(f"p is {value!r}", remedy="Give a probability, from 0 to 1.")
    return result


@op()
class Exponential(Floats):
    """Exponentially distributed numbers of mean ``scale``: float32 or float64. See :class:`Draw` for the other parameters."""

    parameters: ClassVar = {"scale": at_least_zero}

    _: KW_ONLY
    scale: float = 1.0


@op()
class TruncatedNormal(Floats):
    """Normal numbers of mean ``mean`` and deviation ``std`` of which those outside of ``low`` to ``high`` are left out: float32 or float64.

    See :class:`Draw` for the other parameters.

    Parameters
    ----------
    mean, std
        Of the normal distribution before it is cut.
    low, high
        The range; infinity means no bound. Its probability before the cut is 1e-290 at least: it begins within 36 deviations of the mean.
    """

    parameters: ClassVar = {"mean": real, "std": _positive, "low": _bound, "high": _bound}

    _: KW_ONLY
    mean: float = 0.0
    std: float = 1.0
    low: float = -2.0
    high: float = 2.0

    def __post_init__(self) -> None:
        """Convert fields; finite ones are rounded to the elements' type."""
        Floats.__post_init__(self)
        low, high, dtype = self.low, self.high, DType.of(self.dtype)
        if not low < high:
            raise InvalidArgumentError(f"low is {low} and high is {high} in {dtype.value}", remedy="Give a high that is larger than low.")
        if self.constants()[1] < _LEAST:
            raise InvalidArgumentError(
                f"a range from {low} to {high} is too improbable, with mean {self.mean} and std {self.std}",
                remedy="Give a range that begins within 36 deviations of the mean.",
            )

    def per_block(self) -> int:
        return 2

    def constants(self) -> tuple[float, ...]:
        """Return what kernels compute with: ``mean + deviation * clip(inverse(first + u * width), a, b)``, clipped from low to high.

        They are ``(first, width, a, b, mean, deviation, low, high)``; a range above the mean is turned over, since float64 is finest near 0.
        """
        a, b, deviation = (self.low - self.mean) / self.std, (self.high - self.mean) / self.std, self.std
        if a > 0:
            a, b, deviation = -b, -a, -deviation
        first = 0.5 * math.erfc(-a / math.sqrt(2))
        return first, 0.5 * math.erfc(-b / math.sqrt(2)) - first, a, b, self.mean, deviation, self.low, self.high


def _squeeze(a: float) -> tuple[float, float, float]:
    """Return the numbers d and c of Marsaglia and Tsang, and 1 / a where a number of ``a + 1`` is made to one of ``a``, else 0."""
    d = (a if a >= 1 else a + 1) - 1 / 3
    return d, 1 / math.sqrt(9 * d), 0.0 if a >= 1 else 1 / a


@op()
class Gamma(Floats):
    """Numbers of the gamma distribution with shape parameter ``a``, times ``scale``: float32 or float64. See :class:`Draw` for the other parameters."""

    parameters: ClassVar = {"a": _positive, "scale": at_least_zero}

    _: KW_ONLY
    a: float
    scale: float = 1.0

    def per_block(self) -> int:
        return 1

    def constants(self) -> tuple[float, ...]:
        """Return what kernels compute with: d, c and 1 / a, then the scale."""
        return *_squeeze(self.a), self.scale


@op()
class Beta(Floats):
    """Numbers of the beta distribution with parameters ``a`` and ``b``, from 0 to 1: float32 or float64. See :class:`Draw` for the other parameters."""

    parameters: ClassVar = {"a": _positive, "b": _positive}

    _: KW_ONLY
    a: float
    b: float

    def per_block(self) -> int:
        return 1

    def constants(self) -> tuple[float, ...]:
        """Return what kernels compute with: d, c and 1 / a of both parameters."""
        return *_squeeze(self.a), *_squeeze(self.b)


@op(convert={"p": _probability})
class Bernoulli(Shaped):
    """``True`` with probability ``p``, rounded to a multiple of 2**-32, and else ``False``. See :class:`Draw` for the other parameters."""

    dtype: ClassVar[DType] = DType.BOOL

    p: float = 0.5

    def per_block(self) -> int:
        """Return how many numbers come from one block of the stream."""
        return 4

    def limit(self) -> int:
        """Return the word below which a number is true."""
        return round(self.p * 2**32)


@op()
class Counts(Shaped):
    """What distributions of counts share."""

    dtype: ClassVar[DType] = DType.INT64
    stirling_errors: ClassVar[tuple[float, ...]] = tuple(
        [math.lgamma(k + 1) - ((k + 0.5) * math.log(k) - k + 0.5 * math.log(2 * math.pi)) if k else 0.0 for k in range(16)]
    )
    """What Stirling's formula lacks of the logarithm of k!, for k below 16; for 0, where it has no value, 0."""

    def per_block(self) -> int:
        """Return how many numbers come from one block of the stream."""
        return 1

    @abstractmethod
    def way(self) -> Literal["searched", "rejected"]:
        """Return how numbers are made."""

    @abstractmethod
    def constants(self) -> tuple[float, ...]:
        """Return what kernels compute with.

        Where counts are searched for: the probability of 0, the numbers A and B by which ``p(k + 1) = p(k) * (A - B * k) / (k + 1)``, and what a count is
        subtracted from, or 0.

        Where they are rejected: a, b, c and v of Hörmann's *transformed rejection with squeeze*; what is added to the logarithm of the proposal; the mean;
        the largest count; the mean of what the largest one leaves; and what a count is subtracted from, or 0.
        """


def _mean(name: str, value: object) -> float:
    mean = at_least_zero(name, value, DType.FLOAT64)
    if mean > _MOST:
        raise InvalidArgumentError(f"{name} is {mean}", remedy="Give 2**52 at most.")
    return mean


@op(convert={"lam": _mean})
class Poisson(Counts):
    """Counts of the Poisson distribution with mean ``lam``, from 0 to 2**52: int64. See :class:`Draw` for the other parameters."""

    lam: float = 1.0

    def way(self) -> Literal["searched", "rejected"]:
        return "searched" if self.lam < _FEW else "rejected"

    def constants(self) -> tuple[float, ...]:
        lam = self.lam
        if self.way() == "searched":
            return math.exp(-lam), lam, 0.0, 0.0
        b = 0.931 + 2.53 * math.sqrt(lam)
        bias = math.log(1.1239 + 1.1328 / (b - 3.4)) + 0.5 * math.log(2 * math.pi)
        return -0.059 + 0.02483 * b, b, lam + 0.43, 0.9277 - 3.6224 / (b - 2), bias, lam, math.inf, 0.0, 0.0


@op(convert={"n": partial(whole, low=0, high=_MOST + 1), "p": _probability})
class Binomial(Counts):
    """How many of ``n`` trials, up to 2**52, succeed, each with probability ``p``: int64. See :class:`Draw` for the other parameters."""

    n: int
    p: float

    def _rarer(self) -> tuple[float, float]:
        """Return the probability of success or failure, whichever is less, and what their count is subtracted from, or 0."""
        return (self.p, 0.0) if self.p <= 0.5 else (1 - self.p, float(self.n))

    def way(self) -> Literal["searched", "rejected"]:
        return "searched" if self.n * self._rarer()[0] < _FEW else "rejected"

    def constants(self) -> tuple[float, ...]:
        (p, base), n = self._rarer(), self.n
        q = 1 - p
        if self.way() == "searched":
            return math.exp(n * math.log1p(-p)), n * (p / q), p / q, base
        spread = math.sqrt(n * p * q)
        b = 1.15 + 2.53 * spread
        mode = math.floor((n + 1) * p)
        bias = math.log((2.83 + 5.1 / b) * spread) + _log_term(mode, n * p) + _log_term(n - mode, n * q)
        return -0.0873 + 0.0248 * b + 0.01 * p, b, n * p + 0.5, 0.92 - 4.2 / b, bias, n * p, float(n), n * q, base
