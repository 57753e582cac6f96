"""Numbers of :mod:`accel.ops.distributions` from blocks of random words, and the samples of these ops."""

from __future__ import annotations

import math
from functools import partial
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu.families import sampling
from accel.cpu.families.words import key_of, philox, wide
from accel.dtype import DType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from accel.cpu.views import Array
    from accel.family import Sample

__all__ = ["NUMBERS", "inner", "samples", "sobol", "truncated_normal", "unit"]

_HALF_LOG = 0.5 * math.log(2 * math.pi)


def unit(words: Array) -> Array:
    """Return pairs of words as fractions of 53 bits, from 0 and below 1."""
    result: Array = (wide(words) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return result


def inner(words: Array) -> Array:
    """Return pairs of words as fractions of 52 bits between 0 and 1."""
    result: Array = ((wide(words) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return result


def _exponential(op: Any, words: Array, blocks: Array) -> Array:
    kind = op.dtype.numpy.type
    if kind is np.float32:
        fractions = words.astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
    else:
        fractions = ((wide(words) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    result: Array = -np.log(fractions) * kind(op.scale)
    return result


def truncated_normal(op: Any, inverse: Callable[[Array], Array], words: Array) -> Array:
    """Return the numbers of an op, given the inverse of the normal distribution function."""
    first, width, a, b, mean, deviation, low, high = op.constants()
    standard = np.clip(inverse(first + unit(words) * width), a, b)
    result: Array = np.clip(mean + deviation * standard, low, high).astype(op.dtype.numpy)
    return result


def _until_accepted(attempt: Callable[[Array, Array, int], tuple[Array, Array]], key: int, words: Array, blocks: Array, last: int) -> Array:
    """Return one number for each block: what the first ``attempt(words, blocks, number)`` that accepts it gives."""
    made, left, number = np.empty(len(blocks)), np.arange(len(blocks)), 0
    while True:
        values, is_accepted = attempt(words, blocks[left], number)
        made[left[is_accepted]] = values[is_accepted]
        left = left[~is_accepted]
        if not len(left):
            return made
        number += 1
        words = philox(key, blocks[left], number, last)


@np.errstate(invalid="ignore", divide="ignore", over="ignore")
def _gamma_parts(key: int, words: Array, blocks: Array, last: int, d: float, c: float, power: float) -> tuple[Array, Array]:
    """Return numbers of the gamma distribution, and the logarithm of what they are to be multiplied by."""

    def attempt(words: Array, blocks: Array, number: int) -> tuple[Array, Array]:
        radius, angle = inner(words).T
        x = np.sqrt(-2 * np.log(radius)) * np.cos(angle * (2 * np.pi))
        root = 1 + c * x
        v = root * root * root
        uniform = inner(philox(key, blocks, number, last + 1)[:, :2])[:, 0]
        return d * v, (root > 0) & (np.log(uniform) < 0.5 * x * x + d * (1 - v + np.log(v)))

    made = _until_accepted(attempt, key, words, blocks, last)
    boost: Array = np.log(inner(philox(key, blocks, 0, last + 2)[:, :2])[:, 0]) * power if power else np.zeros(len(blocks))
    return made, boost


@np.errstate(over="ignore", under="ignore")
def _gamma(op: Any, words: Array, blocks: Array) -> Array:
    d, c, power, scale = op.constants()
    made, boost = _gamma_parts(op.key(), words, blocks, 0, d, c, power)
    result: Array = (made * np.exp(boost) * scale).astype(op.dtype.numpy)
    return result


@np.errstate(over="ignore", under="ignore")
def _beta(op: Any, words: Array, blocks: Array) -> Array:
    constants = op.constants()
    x, boost_x = _gamma_parts(op.key(), words, blocks, 0, *constants[:3])
    y, boost_y = _gamma_parts(op.key(), philox(op.key(), blocks, 0, 3), blocks, 3, *constants[3:])
    result: Array = (1 / (1 + y / x * np.exp(boost_y - boost_x))).astype(op.dtype.numpy)
    return result


def _bernoulli(op: Any, words: Array, blocks: Array) -> Array:
    result: Array = words < np.uint64(op.limit())
    return result


def _counts(op: Any, words: Array, blocks: Array) -> Array:
    constants = op.constants()
    made = (
        _found(words, *constants[:3])
        if op.way() == "searched"
        else _rejected(op.key(), words, blocks, constants, np.array(op.stirling_errors))
    )
    base = constants[-1]
    return (base - made if base else made).astype(np.int64)


def _found(words: Array, first: float, a: float, b: float) -> Array:
    fractions = unit(words[:, :2])[:, 0]
    made, left = np.zeros(len(words)), np.arange(len(words))
    count, probability, total = 0, first, first
    while len(left := left[fractions[left] >= total]):
        probability = probability * (a - b * count) / (count + 1)
        if total + probability == total:
            break
        count, total = count + 1, total + probability
        made[left] = count
    return made


def _rejected(key: int, words: Array, blocks: Array, constants: tuple[float, ...], errors: Array) -> Array:
    a, b, c, squeeze, bias, mean, most, other, _ = constants

    def attempt(words: Array, blocks: Array, number: int) -> tuple[Array, Array]:
        u, v = inner(words).T
        u = u - 0.5
        room = 0.5 - np.abs(u)
        count = np.floor((2 * a / room + b) * u + c)
        is_inside = (count >= 0) & (count <= most)
        kept = np.where(is_inside, count, 1.0)
        bound = _log_terms(kept, mean, errors) + (_log_terms(most - kept, other, errors) if most < math.inf else 0.0)
        is_below = np.log(v / (a / (room * room) + b)) + bias <= bound
        return count, ((room >= 0.07) & (v <= squeeze)) | (is_inside & is_below)

    return _until_accepted(attempt, key, words, blocks, 0)


def _log_terms(counts: Array, mean: float, errors: Array) -> Array:
    """Return the logarithm of ``mean**k * exp(-mean) / k!``, and of the root of 2 pi."""
    k = np.maximum(counts, 1.0)
    ratio, square = (k - mean) / mean, k * k
    series = (1 / 12 - (1 / 360 - (1 / 1260 - 1 / 1680 / square) / square) / square) / k
    error = np.where(k < len(errors), errors[np.minimum(k, len(errors) - 1).astype(np.int64)], series)
    result: Array = np.where(counts == 0, _HALF_LOG - mean, -(error + mean * ((1 + ratio) * np.log1p(ratio) - ratio) + 0.5 * np.log(k)))
    return result


NUMBERS: dict[str, Callable[[Any, Array, Array], Array]] = {
    "exponential": _exponential,
    "gamma": _gamma,
    "beta": _beta,
    "bernoulli": _bernoulli,
    "poisson": _counts,
    "binomial": _counts,
}
"""Kind of an op -> what makes its numbers of blocks of words and their indices."""


def sobol(directions: Array, first: int, count: int) -> Array:
    """Return points of Sobol's sequence as words: (count, dimensions)."""
    places = np.arange(first, first + count, dtype=np.uint64)
    codes = (places ^ places >> np.uint64(1)).astype(np.uint32)
    result: Array = np.repeat(directions[None, :, 32], count, axis=0)
    for bit in range(int(codes.max(initial=0)).bit_length()):
        chosen = (codes >> np.uint32(bit) & np.uint32(1)).astype(np.bool_)
        result[chosen] ^= directions[:, bit]
    return result


def _one(key: int, index: int, attempt: int = 0, last: int = 0) -> tuple[float, float]:
    """Return the two fractions between 0 and 1 of a block."""
    first, second = inner(philox(key, np.array([index], np.uint64), attempt, last))[0]
    return float(first), float(second)


def _gamma_number(key: int, index: int, last: int, a: float) -> tuple[float, float]:
    """Return a number of the gamma distribution, number by number, and what it is to be multiplied by."""
    d = (a if a >= 1 else a + 1) - 1 / 3
    attempt = 0
    while True:
        radius, angle = _one(key, index, attempt, last)
        x = math.sqrt(-2 * math.log(radius)) * math.cos(2 * math.pi * angle)
        v = (1 + x / math.sqrt(9 * d)) ** 3
        if v > 0 and math.log(_one(key, index, attempt, last + 1)[0]) < x * x / 2 + d - d * v + d * math.log(v):
            return d * v, 1.0 if a >= 1 else _one(key, index, 0, last + 2)[0] ** (1 / a)
        attempt += 1


def _poisson_rejected(lam: float, key: int, index: int) -> int:
    """Return a count by Hörmann's transformed rejection, number by number, with the logarithm of the gamma function."""
    b = 0.931 + 2.53 * math.sqrt(lam)
    a = -0.059 + 0.02483 * b
    attempt = 0
    while True:
        u, v = _one(key, index, attempt)
        u -= 0.5
        room = 0.5 - abs(u)
        k = math.floor((2 * a / room + b) * u + lam + 0.43)
        area = math.log(v * (1.1239 + 1.1328 / (b - 3.4)) / (a / room**2 + b))
        if k >= 0 and area <= k * math.log(lam) - lam - math.lgamma(k + 1):
            return k
        attempt += 1


def _binomial_rejected(n: int, p: float, key: int, index: int) -> int:
    """Return a count by Hörmann's transformed rejection, number by number, with the logarithm of the gamma function."""
    rarer = min(p, 1 - p)
    spread = math.sqrt(n * rarer * (1 - rarer))
    b = 1.15 + 2.53 * spread
    a = -0.0873 + 0.0248 * b + 0.01 * rarer

    def logarithm(k: int) -> float:
        return k * math.log(rarer) + (n - k) * math.log(1 - rarer) - math.lgamma(k + 1) - math.lgamma(n - k + 1)

    mode = math.floor((n + 1) * rarer)
    attempt = 0
    while True:
        u, v = _one(key, index, attempt)
        u -= 0.5
        room = 0.5 - abs(u)
        k = math.floor((2 * a / room + b) * u + n * rarer + 0.5)
        if 0 <= k <= n and math.log(v * (2.83 + 5.1 / b) * spread / (a / room**2 + b)) <= logarithm(k) - logarithm(mode):
            return k if p <= 0.5 else n - k
        attempt += 1


def _searched(probability: Callable[[int], float], key: int, index: int) -> int:
    """Return the first count whose distribution function exceeds a fraction."""
    fraction = float(unit(philox(key, np.array([index], np.uint64)))[0, 0])
    total, count = probability(0), 0
    while fraction >= total:
        count += 1
        total += probability(count)
    return count


def _floats(rng: np.random.Generator, dtype: DType, seed: int, offset: int, count: int) -> Iterator[Sample]:
    places = range(offset, offset + count)
    common: dict[str, Any] = {"shape": count, "dtype": dtype, "seed": seed, "offset": offset}
    what, error = f"{dtype.value} count={count} offset={offset} seed={seed}", sampling.sums(dtype, 32)
    blocks = np.arange((offset + count) // 2 + 1 - offset // 2, dtype=np.uint64) + np.uint64(offset // 2)
    if dtype is DType.FLOAT32:
        words = philox(
            key_of(seed, "exponential 4"), np.arange((offset + count) // 4 + 1 - offset // 4, dtype=np.uint64) + np.uint64(offset // 4)
        )
        fractions = (words.reshape(-1)[offset % 4 :][:count].astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)).astype(float)
    else:
        pairs = wide(philox(key_of(seed, "exponential 2"), blocks)).reshape(-1)[offset % 2 :][:count]
        fractions = ((pairs >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    yield sampling.sample("exponential", what, (), -2 * np.log(fractions), error, scale=2.0, **common)
    a = float(dtype.numpy.type(rng.uniform(0.2, 0.9)))
    for shape in (a, 2.5, 1000.0):
        expected = np.array([0.5 * math.prod(_gamma_number(key_of(seed, "gamma 1"), place, 0, shape)) for place in places])
        yield sampling.sample("gamma", f"{what} a={shape}", (), expected, error, a=shape, scale=0.5, **common)
    for first, second in ((a, 0.5), (2.0, 7.5)):
        key = key_of(seed, "beta 1")
        x, y = ([math.prod(_gamma_number(key, place, last, each)) for place in places] for last, each in ((0, first), (3, second)))
        expected = np.array(x) / (np.array(x) + np.array(y))
        yield sampling.sample("beta", f"{what} a={first} b={second}", (), expected, error, a=first, b=second, **common)
    inverse = NormalDist().inv_cdf
    pairs = wide(philox(key_of(seed, "truncated_normal 2"), blocks)).reshape(-1)[offset % 2 :][:count]
    for mean, low, high in ((0.0, -2.0, 1.0), (-1.0, 1.0, math.inf)):
        sides = NormalDist(mean, 2.0)
        first, last = sides.cdf(low), 1.0 if high == math.inf else sides.cdf(high)
        if low > mean:  # the range is turned over
            first, last = (0.0 if high == math.inf else sides.cdf(2 * mean - high)), sides.cdf(2 * mean - low)
        sign = -2.0 if low > mean else 2.0
        at = first + (pairs >> np.uint64(11)).astype(np.float64) * 2.0**-53 * (last - first)
        expected = np.array([mean + sign * inverse(each) for each in at])
        options = {**common, "mean": mean, "std": 2.0, "low": low, "high": high}
        yield sampling.sample("truncated_normal", f"{what} low={low} high={high}", (), expected, error, **options)


def _whole(seed: int, offset: int, count: int) -> Iterator[Sample]:
    places = range(offset, offset + count)
    common: dict[str, Any] = {"shape": count, "seed": seed, "offset": offset}
    what = f"count={count} offset={offset} seed={seed}"
    blocks = np.arange((offset + count) // 4 + 1 - offset // 4, dtype=np.uint64) + np.uint64(offset // 4)
    words = philox(key_of(seed, "bernoulli"), blocks)
    expected = words.reshape(-1)[offset % 4 :][:count] < 0.3 * 2**32
    yield sampling.sample("bernoulli", what, (), expected, p=0.3, **common)
    counts: tuple[tuple[str, dict[str, Any], Callable[[int, int], int]], ...] = (
        ("poisson", {"lam": 0.0}, lambda key, place: 0),
        ("poisson", {"lam": 3.5}, partial(_searched, partial(_poisson, 3.5))),
        ("poisson", {"lam": 10.0}, partial(_poisson_rejected, 10.0)),
        ("poisson", {"lam": 1234.5}, partial(_poisson_rejected, 1234.5)),
        ("binomial", {"n": 12, "p": 0.25}, partial(_searched, partial(_binomial, 12, 0.25))),
        ("binomial", {"n": 15, "p": 0.75}, lambda key, place: 15 - _searched(partial(_binomial, 15, 0.25), key, place)),
        ("binomial", {"n": 25, "p": 0.5}, partial(_binomial_rejected, 25, 0.5)),
        ("binomial", {"n": 1000, "p": 0.9}, partial(_binomial_rejected, 1000, 0.9)),
        ("binomial", {"n": 10_000, "p": 0.125}, partial(_binomial_rejected, 10_000, 0.125)),
    )
    for kind, options, number in counts:
        expected = np.array([number(key_of(seed, kind), place) for place in places], np.int64)
        yield sampling.sample(kind, f"{what} {options}", (), expected, **common, **options)


def _poisson(lam: float, k: int) -> float:
    return math.exp(-lam) * lam**k / math.factorial(k)


def _binomial(n: int, p: float, k: int) -> float:
    return math.comb(n, k) * p**k * (1 - p) ** (n - k)


def samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Yield samples whose numbers are made one by one, by functions of Python."""
    for count, offset in ((1, 0), (37, 3), (20, (1 << 40) + 1)):
        for dtype in (DType.FLOAT32, DType.FLOAT64):
            yield from _floats(rng, dtype, int(rng.integers(1 << 63)), offset, count)
        yield from _whole(int(rng.integers(1 << 63)), offset, count)
    for d, n, offset in ((1, 1, 0), (5, 1000, 3), (40, 17, (1 << 32) - 17)):
        directions = rng.integers(0, 1 << 32, (d, 33), np.uint32)
        code = np.array([place ^ place >> 1 for place in range(offset, offset + n)])
        words = np.array([np.bitwise_xor.reduce(directions[:, :32][:, (each >> np.arange(32) & 1) == 1], axis=1) for each in code])
        expected = (words ^ directions[:, 32]) * 2.0**-32
        for dtype in (DType.FLOAT32, DType.FLOAT64):
            # float32 has 24 of the bits.
            error = 2.0**-24 if dtype is DType.FLOAT32 else 0.0
            what = f"{dtype.value} d={d} n={n} offset={offset}"
            yield sampling.sample("sobol", what, (directions,), expected, error, 1.0, arguments=(n,), dtype=dtype, offset=offset)
