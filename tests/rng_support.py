"""What the tests of random numbers share over the backends: the laws of the stream, and statistics that a wrong distribution fails."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    import accel

Array = np.ndarray[Any, Any]

SURE = 1e-6
"""What a right generator's p-value is below once in a million tests."""

KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("uniform", {"dtype": "float32", "low": -3.0, "high": 5.0}),
    ("uniform", {"dtype": "float64", "low": 1.0, "high": 1.5}),
    ("normal", {"dtype": "float32", "mean": 2.0, "std": 0.5}),
    ("normal", {"dtype": "float64", "mean": -1.0, "std": 3.0}),
    ("lognormal", {"dtype": "float32", "mean": 0.5, "sigma": 0.25}),
    ("lognormal", {"dtype": "float64", "mean": 0.0, "sigma": 1.0}),
    ("integers", {"dtype": "int32", "low": -7, "high": 12}),
    ("integers", {"dtype": "uint32", "low": 0, "high": 3 << 30}),
    ("integers", {"dtype": "int64", "low": -(2**63), "high": 2**62}),
    ("integers", {"dtype": "uint8", "low": 3, "high": 256}),
    ("exponential", {"dtype": "float32", "scale": 2.0}),
    ("exponential", {"dtype": "float64", "scale": 0.25}),
    ("gamma", {"dtype": "float32", "a": 0.3, "scale": 2.0}),
    ("gamma", {"dtype": "float64", "a": 4.5}),
    ("gamma", {"dtype": "float64", "a": 1e6}),
    ("beta", {"dtype": "float32", "a": 0.75, "b": 3.0}),
    ("beta", {"dtype": "float64", "a": 0.1, "b": 0.2}),
    ("truncated_normal", {"dtype": "float32", "mean": 1.0, "std": 2.0, "low": -1.0, "high": 2.0}),
    ("truncated_normal", {"dtype": "float64", "low": 8.0, "high": math.inf}),
    ("bernoulli", {"p": 0.3}),
    ("poisson", {"lam": 0.7}),
    ("poisson", {"lam": 9.5}),
    ("poisson", {"lam": 10.0}),
    ("poisson", {"lam": 1e6}),
    ("binomial", {"n": 12, "p": 0.3}),
    ("binomial", {"n": 30, "p": 0.9}),
    ("binomial", {"n": 25, "p": 0.5}),
    ("binomial", {"n": 10**6, "p": 0.99}),
)
IDS = [f"{kind}-{'-'.join(str(value) for value in options.values())}" for kind, options in KINDS]

EXACT = frozenset({"uniform", "integers", "bernoulli", "poisson", "binomial"})
"""Distributions whose numbers are the same on every backend, with the seeds that tests meet."""


async def drawn(device: accel.Device, kind: str, shape: Any, **options: Any) -> Array:
    """Draw on the device, and get it."""
    return await device.get(await getattr(device.rng, kind)(shape, **options))


async def check_pieces(device: accel.Device, kind: str, options: dict[str, Any], rng: np.random.Generator) -> None:
    """Read a stream at once, in two halves, and from any place: the numbers are the same."""
    # Beyond one chunk and one thread's share, and at no round number.
    count, seed = int(rng.integers(70_000, 90_000)), int(rng.integers(2**64, dtype=np.uint64))
    start = int(rng.choice([0, int(rng.integers(100)), 2**40 + 12345]))
    common = {**options, "seed": seed}
    whole = await drawn(device, kind, count, offset=start, **common)
    again = await drawn(device, kind, (count,), offset=start, **common)
    np.testing.assert_array_equal(whole, again)
    middle = int(rng.integers(1, count))
    halves = [
        await drawn(device, kind, middle, offset=start, **common),
        await drawn(device, kind, count - middle, offset=start + middle, **common),
    ]
    np.testing.assert_array_equal(np.concatenate(halves), whole, err_msg=f"{common} {start} {middle}")
    for _ in range(5):
        at, length = int(rng.integers(count)), int(rng.integers(8))
        few = await drawn(device, kind, length, offset=start + at, **common)
        np.testing.assert_array_equal(few[: count - at], whole[at : at + length], err_msg=f"{common} {start} {at} {length}")
    other = await drawn(device, kind, count, **{**common, "seed": seed ^ 1})
    assert not np.array_equal(other, whole)
    if not exact_few(whole):
        assert np.mean(other == whole) < 0.2


def exact_few(sample: Array) -> bool:
    """Return whether a sample has so few values that two of them are often equal."""
    return len(np.unique(sample[:10_000])) < 100


def check_distribution(kind: str, options: dict[str, Any], sample: Array) -> None:
    """Fail where a sample is not of its distribution, or its neighbours depend on each other."""
    stats = pytest.importorskip("scipy.stats")
    if kind == "integers":
        _check_integers(stats, options, sample)
        return
    if kind in ("bernoulli", "poisson", "binomial"):
        _check_counts(stats, kind, options, sample)
        return
    wide = sample.astype(np.float64)
    if kind == "uniform":
        assert wide.min() >= options["low"]
        assert wide.max() < options["high"]
        unit = (wide - options["low"]) / (options["high"] - options["low"])
    elif kind == "normal":
        unit = stats.norm.cdf(wide, options["mean"], options["std"])
    elif kind == "lognormal":
        unit = stats.norm.cdf(np.log(wide), options["mean"], options["sigma"])
    else:
        unit = _exact(stats, kind, options).cdf(wide)
    _check_uniform(stats, unit)
    if kind == "normal":
        _check_moments((wide - options["mean"]) / options["std"])


def _exact(stats: Any, kind: str, options: dict[str, Any]) -> Any:
    """Return the distribution as scipy has it."""
    if kind == "truncated_normal":
        mean, std = options.get("mean", 0.0), options.get("std", 1.0)
        return stats.truncnorm((options["low"] - mean) / std, (options["high"] - mean) / std, mean, std)
    parameters = {name: value for name, value in options.items() if name != "dtype"}
    names = {"exponential": "expon", "binomial": "binom", "lam": "mu"}
    return getattr(stats, names.get(kind, kind))(**{names.get(name, name): value for name, value in parameters.items()})


def _check_counts(stats: Any, kind: str, options: dict[str, Any], sample: Array) -> None:
    """Compare how often values, or ranges of them, come up with how often they should, and each number with the next one."""
    exact, numbers = _exact(stats, kind, options), sample.astype(np.int64)
    ends = np.unique(exact.ppf(np.linspace(0, 1, 102)[1:-1]).astype(np.int64))  # the last of each range
    expected = np.diff(np.concatenate(([0.0], exact.cdf(ends), [1.0])))
    bins = np.searchsorted(ends, numbers)
    counts = np.bincount(bins, minlength=len(expected))
    assert not counts[expected < 1e-12].any()
    expected, counts = expected[expected >= 1e-12], counts[expected >= 1e-12]
    assert stats.chisquare(counts, expected / expected.sum() * len(sample)).pvalue > SURE
    deviation = abs(float(np.mean(numbers - exact.mean()))) / (exact.std() / math.sqrt(len(sample)))
    assert deviation < 6
    low = bins <= np.median(bins)
    pairs = np.histogram2d(low[:-1:2], low[1::2], 2)[0]
    assert stats.chi2_contingency(pairs + 1e-9).pvalue > SURE


def _check_uniform(stats: Any, unit: Array) -> None:
    # The exact p-value takes longer than all else here, and differs by less than 1e-3 at such sizes.
    assert stats.kstest(unit, "uniform", method="asymp").pvalue > SURE
    cells = np.clip(16 * unit, 0, 15).astype(np.intp)
    for distance in (1, 2, 3, 4, 5, 4096, 16384):
        correlation = np.corrcoef(unit[:-distance], unit[distance:])[0, 1]
        assert abs(correlation) * math.sqrt(len(unit)) < 6, distance
        # Pairs fill the square evenly. Overlapping pairs are a little dependent: each half is not.
        halves = cells[: len(cells) // (2 * distance) * 2 * distance].reshape(-1, 2, distance)
        counts = np.bincount((16 * halves[:, 0] + halves[:, 1]).ravel(), minlength=256)
        assert stats.chisquare(counts).pvalue > SURE, distance


def _check_moments(standard: Array) -> None:
    for power, expected, variance in ((1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0)):
        deviation = abs(float(np.mean(standard**power)) - expected) / math.sqrt(variance / len(standard))
        assert deviation < 6, power


def _check_integers(stats: Any, options: dict[str, Any], sample: Array) -> None:
    low, high = options["low"], options["high"]
    assert int(sample.min()) >= low
    assert int(sample.max()) < high
    shifted = (
        np.array([int(value) - low for value in sample[:100_000]], dtype=object) if high - low > 2**53 else sample.astype(np.int64) - low
    )
    bins = min(high - low, 96)
    numbers = np.asarray(shifted * bins // (high - low), dtype=np.int64)
    expected = np.diff([-(-(i * (high - low)) // bins) for i in range(bins + 1)])
    counts = np.bincount(numbers, minlength=bins)
    assert len(counts) == bins
    assert stats.chisquare(counts, np.asarray(expected / (high - low) * len(numbers), dtype=float)).pvalue > SURE
    pairs = np.histogram2d(numbers[:-1:2], numbers[1::2], 8)[0]
    assert stats.chi2_contingency(pairs + 1e-9).pvalue > SURE
