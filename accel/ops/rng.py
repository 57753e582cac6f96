"""Random numbers: pure functions of a seed and a place in a stream of the seed.

A seed has a stream for each kind of numbers: ``uniform``, ``normal`` (log-normal too), ``exponential``, ``truncated_normal``, ``gamma``, ``beta`` and
``integers`` (choice with ``replace`` and without ``p`` too), whose names are followed by a space and how many numbers a block has, 4, 2 or 1;
``bernoulli``, ``poisson``, ``binomial``; ``permutation`` (choice without either too) and ``choice``. Dropout is of ``uniform 4``. The key of a stream is the
seed, exclusive-or the first 8 bytes, the lowest first, of the SHA-256 of its name.

A stream is a sequence of blocks of four 32-bit words w0 w1 w2 w3. Number i of the stream comes from block i // 4 (float32, and integers of
at most 2**32 values) or i // 2 (float64, and integers of more), and from nothing else: so it does not matter in how many pieces, and on how many
threads, a stream is read. A block is Philox4x32-10 (Salmon et al., *Parallel random numbers: as easy as 1, 2, 3*, 2011) of the key and the
counter (block's low half, block's high half, attempt, 0), a word each. The attempt is 0 but where numbers are drawn again. What a number is:

- uniform: the upper 24 bits of a word, or 53 bits of w0 + 2**32 * w1, as a fraction u of one; then ``low + u * (high - low)``, below ``high``.
- normal: Box and Muller's transform of two words into two numbers (float32), or of the four into two (float64).
- log-normal: the exponential of a normal number.
- exponential: the negative logarithm of a word, or two, as a fraction that is not 0.
- truncated normal: the inverse of the normal distribution function at a fraction of the range's probability. The fraction is 53 bits of w0 + 2**32 * w1.
- gamma: Marsaglia and Tsang's method (*A simple method for generating gamma variables*, 2000). Number i is of block i alone: of (w0, w1) and (w2, w3) with the
  fourth word of the counter 0 the normal number, of (w0, w1) with 1 the uniform one; attempts are counted. For ``a`` below 1, a number of ``a + 1`` is
  multiplied by the power 1 / a of (w0, w1) with 2.
- beta: x / (x + y) of a gamma number x, and another one y of the same block whose fourth words are 3 to 5.
- bernoulli: whether a word is below ``p`` times 2**32.
- poisson, binomial: for means below 10, the count whose distribution function first exceeds a fraction of 53 bits. Else Hörmann's transformed rejection (*The
  transformed rejection method for generating Poisson random variables*, 1993; *The generation of binomial random variates*, 1993) of the two fractions of a
  block, in which attempts are counted. Number i is of block i alone.
- permutation, and choice without ``replace``: the elements in the order of keys, which are the pairs w0 + 2**32 * w1 and w2 + 2**32 * w3 of blocks. With
  weights, keys are the logarithms of the negative logarithms of 52 bits of the pairs as fractions that are not 0, less those of the weights.
- choice: the elements at random integers; with weights, where their running sums in float64 first exceed a fraction of 53 bits of the whole. Float64 weights
  are multiplied by a power of 2 before, so that the largest is about 1.
- sobol: no random numbers; see :mod:`accel.ops.quasi`.
- integers: ``low`` plus the upper half of the product of a word, or two, with the number of values. Where that would favour some values (Lemire, *Fast
  random integer generation in an interval*, 2019) the word is taken from the next attempt of the same block.

Backends that follow this give the same integers, uniform and Bernoulli numbers, and counts of means below 10, bit by bit. Numbers that are made by functions
such as the logarithm differ in the last places. Where these decide, about one count or gamma number in 1e13 is another one. Numbers of gamma, beta and
truncated normal are computed in float64, and rounded to float32.
"""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import ClassVar

import numpy as np

from accel.dtype import DType, DTypeLike
from accel.errors import InvalidArgumentError, UnsupportedError
from accel.ops.base import op
from accel.ops.choices import Choice, Permutation
from accel.ops.distributions import Bernoulli, Beta, Binomial, Exponential, Gamma, Poisson, TruncatedNormal
from accel.ops.draws import Floats, Shaped, VendorFloats, at_least_zero, real, whole
from accel.ops.family import Family
from accel.ops.fields import set_fields, to_dtype
from accel.ops.namespace import M, OpNamespace, method
from accel.ops.quasi import Sobol

__all__ = ["Integers", "Lognormal", "Normal", "RngOps", "Uniform"]


@op()
class Uniform(VendorFloats):
    """Numbers of one density from ``low`` up to, and without, ``high``: float32 or float64. See :class:`Draw` for the other parameters.

    Those of cuRAND's generators are from 0 to 1, without 0 and with 1.
    """

    parameters: ClassVar = {"low": real, "high": real}

    _: KW_ONLY
    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        """Convert fields; there is a number between ``low`` and ``high``."""
        Floats.__post_init__(self)
        low, high, dtype = self.low, self.high, DType.of(self.dtype)
        if not low < high:
            raise InvalidArgumentError(
                f"low is {low} and high is {high} in {dtype.value}", remedy="Give a high that is larger than low in this dtype."
            )
        real("high - low", high - low, dtype)
        if self.generator != "philox" and (low, high) != (0.0, 1.0):
            raise InvalidArgumentError(f"{self.generator} has no numbers from {low} to {high}", remedy="Leave low and high out.")


@op()
class Normal(VendorFloats):
    """Normal numbers of mean ``mean`` and standard deviation ``std``: float32 or float64. See :class:`Draw` for the other parameters.

    cuRAND's generators make an even number of them.
    """

    parameters: ClassVar = {"mean": real, "std": at_least_zero}

    _: KW_ONLY
    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        """Convert fields; a generator of cuRAND's makes an even number of them."""
        Floats.__post_init__(self)
        if self.generator != "philox" and self.size % 2:
            raise InvalidArgumentError(f"{self.generator} does not make {self.size} numbers", remedy="Give a shape of an even size.")


@op()
class Lognormal(Floats):
    """Numbers whose logarithm is normal, of mean ``mean`` and deviation ``sigma``: float32 or float64. See :class:`Draw` for the other parameters."""

    parameters: ClassVar = {"mean": real, "sigma": at_least_zero}

    _: KW_ONLY
    mean: float = 0.0
    sigma: float = 1.0

    def stream(self) -> str:
        return f"normal {self.per_block()}"


@op(convert={"dtype": to_dtype})
class Integers(Shaped):
    """Integers from ``low`` up to, and without, ``high``, all of the same probability, in any integer dtype. See :class:`Draw` for the other parameters."""

    low: int
    high: int
    dtype: DTypeLike = DType.INT64

    def __post_init__(self) -> None:
        Shaped.__post_init__(self)
        dtype = DType.of(self.dtype)
        if not dtype.is_integer:
            raise UnsupportedError(f"integers are not offered in {dtype.value}", remedy="Use an integer dtype, such as int64.")
        bounds = np.iinfo(dtype.numpy)
        low = whole("low", self.low, int(bounds.min), int(bounds.max) + 1)
        set_fields(self, low=low, high=whole("high", self.high, low + 1, int(bounds.max) + 2))

    def span(self) -> int:
        """Return how many values there are."""
        return self.high - self.low

    def per_block(self) -> int:
        """Return how many numbers come from one block of the stream."""
        return 4 if self.span() <= 1 << 32 else 2

    def stream(self) -> str:
        return f"integers {self.per_block()}"


class RngOps(OpNamespace[M]):
    """Random numbers, each a pure function of ``seed`` and its place in the seed's stream; see :mod:`accel.ops.rng`.

    ``seed`` is an int below 2**64, or ``None`` for one from the system's entropy. ``offset`` is how many numbers of the stream to skip: what is read in
    pieces is what is read at once. ``generator`` is ``"philox"``, or for some on CUDA one of cuRAND's. ``out=`` names a buffer to write instead of making
    one; ``timeout=`` (seconds) is when waiting ends with :class:`~accel.DeadlineExceededError`.
    """

    __slots__ = ()

    library: ClassVar = "rng"
    aliases: ClassVar = {
        "rand": ".uniform(shape)",
        "randn": ".normal(shape)",
        "randint": ".integers(shape, low, high)",
        "shuffle": ".permutation(x)",
    }

    uniform = method(Uniform)
    normal = method(Normal)
    lognormal = method(Lognormal)
    exponential = method(Exponential)
    gamma = method(Gamma)
    beta = method(Beta)
    truncated_normal = method(TruncatedNormal)
    integers = method(Integers)
    bernoulli = method(Bernoulli)
    poisson = method(Poisson)
    binomial = method(Binomial)
    permutation = method(Permutation)
    choice = method(Choice)
    sobol = method(Sobol)


FAMILY = Family(RngOps)
