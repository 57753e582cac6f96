"""Random numbers on the CPU: known answers, the laws of the stream, statistics, and what the ops refuse."""

from __future__ import annotations

import math
import pickle
import warnings
from typing import Any

import numpy as np
import pytest

import accel
from accel import ops
from accel.cpu.families.words import philox
from accel.testing import FaultPlan
from tests.device_support import failure, opened
from tests.rng_support import IDS, KINDS, SURE, check_distribution, check_pieces, drawn

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_philox_gives_the_published_answers() -> None:
    cases = (
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    )
    for (c0, c1, c2, c3), (k0, k1), expected in cases:
        blocks = np.array([c0 | c1 << 32], np.uint64)
        assert tuple(philox(k0 | k1 << 32, blocks, c2, c3)[0]) == expected


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=IDS)
async def test_a_stream_is_the_same_in_any_pieces(
    device: accel.Device, kind: str, options: dict[str, Any], rng: np.random.Generator
) -> None:
    await check_pieces(device, kind, options, rng)


async def test_kinds_of_one_seed_are_independent(device: accel.Device, rng: np.random.Generator) -> None:
    seed, n = int(rng.integers(2**63)), 40_000
    calls: tuple[tuple[str, dict[str, Any]], ...] = (
        ("uniform", {}),
        ("uniform", {"dtype": "float64"}),
        ("normal", {}),
        ("normal", {"dtype": "float64"}),
        ("exponential", {}),
        ("exponential", {"dtype": "float64"}),
        ("integers", {"low": 0, "high": 1000}),
        ("integers", {"low": 0, "high": 1 << 40}),
        ("bernoulli", {}),
        ("gamma", {"a": 0.5}),
        ("beta", {"a": 0.5, "b": 0.5}),
        ("truncated_normal", {}),
        ("poisson", {"lam": 3.0}),
        ("poisson", {"lam": 30.0}),
        ("binomial", {"n": 10, "p": 0.5}),
    )
    rows = [(await drawn(device, kind, n, seed=seed, **options)).astype(float) for kind, options in calls]
    rows.append((await device.get(await device.rng.permutation(n, seed=seed))).astype(float))
    rows.append((await device.get(await device.rng.choice(n, n, p=await device.full(n, 1.0, "float64"), seed=seed))).astype(float))
    # A word is in number i of one kind, and in number i, 2 i, 2 i + 1, 4 i, ... of another.
    for i, first in enumerate(rows):
        for j, second in enumerate(rows):
            if (i, j) in ((12, 13), (13, 12)):  # poisson is one kind
                continue
            for step in (1, 2, 4):
                for shift in range(step):
                    a, b = first[: n // step], second[shift::step]
                    if i != j or step > 1:
                        assert abs(np.corrcoef(a, b)[0, 1]) < 6 / math.sqrt(n // step), (seed, i, j, step, shift)


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=IDS)
async def test_the_numbers_are_of_their_distribution(
    device: accel.Device, kind: str, options: dict[str, Any], rng: np.random.Generator
) -> None:
    seed = int(rng.integers(2**63))
    check_distribution(kind, options, await drawn(device, kind, 300_000, seed=seed, **options))


async def test_the_statistics_find_what_is_wrong(rng: np.random.Generator) -> None:
    size = 300_000
    wrong = (
        ("uniform", {"low": 0.0, "high": 1.0}, rng.random(size) ** 1.03),
        ("uniform", {"low": 0.0, "high": 1.0}, np.repeat(rng.random(size // 2), 2)),
        ("uniform", {"low": 0.0, "high": 1.0}, 1 - rng.random(size) * 2.0**-3),
        ("normal", {"mean": 0.0, "std": 1.0}, 1.02 * rng.standard_normal(size)),
        ("normal", {"mean": 0.0, "std": 1.0}, rng.standard_t(30, size)),
        ("lognormal", {"mean": 0.0, "sigma": 1.0}, np.exp(0.03 + rng.standard_normal(size))),
        ("integers", {"low": 0, "high": 10}, np.where(rng.random(size) < 0.02, 9, rng.integers(0, 10, size))),
        ("integers", {"low": 0, "high": 10}, rng.integers(0, 9, size)),
        ("exponential", {"scale": 1.0}, rng.exponential(1.04, size)),
        ("gamma", {"a": 2.0}, rng.gamma(2.05, size=size)),
        ("beta", {"a": 0.5, "b": 0.5}, rng.beta(0.53, 0.5, size)),
        ("truncated_normal", {"low": 0.0, "high": 1.0}, rng.random(size)),
        ("bernoulli", {"p": 0.5}, rng.random(size) < 0.51),
        ("poisson", {"lam": 20.0}, rng.poisson(20.2, size)),
        ("poisson", {"lam": 3.0}, rng.binomial(60, 0.05, size)),
        ("binomial", {"n": 20, "p": 0.5}, rng.binomial(20, 0.505, size)),
    )
    for kind, options, sample in wrong:
        with pytest.raises(AssertionError):
            check_distribution(kind, options, np.asarray(sample))


async def test_integers_have_no_bias_where_words_do_not_divide_evenly(device: accel.Device, rng: np.random.Generator) -> None:
    """Without drawing again, of 3 * 2**30 values from 2**32 words every third would come up twice as often."""
    stats = pytest.importorskip("scipy.stats")
    for dtype, bits in (("uint32", 30), ("uint64", 62)):
        sample = await drawn(device, "integers", 90_000, low=0, high=3 << bits, dtype=dtype, seed=int(rng.integers(2**63)))
        assert stats.chisquare(np.bincount((sample % 3).astype(np.int64))).pvalue > SURE


async def test_the_ends_of_a_range(device: accel.Device, rng: np.random.Generator) -> None:
    seed = int(rng.integers(2**63))
    for low, high, dtype in ((5, 6, "uint8"), (-128, -127, "int8"), (2**64 - 1, 2**64, "uint64"), (-(2**63), 1 - 2**63, "int64")):
        assert (await drawn(device, "integers", 9, low=low, high=high, dtype=dtype, seed=seed)).tolist() == [low] * 9
    for low, high, dtype in ((-128, 128, "int8"), (0, 2, "uint16")):
        found = await drawn(device, "integers", 40_000, low=low, high=high, dtype=dtype, seed=seed)
        assert set(found.tolist()) == set(range(low, high))
    # One step apart: the end would be reached by rounding.
    after = float(np.nextafter(np.float32(1), np.float32(2)))
    assert set((await drawn(device, "uniform", 5000, low=1.0, high=after, seed=seed)).tolist()) == {1.0}
    wide = await drawn(device, "uniform", 5000, low=-1e38, high=1e38, seed=seed)
    assert wide.min() < -0.99e38 < 0.99e38 < wide.max()


async def test_a_seed_is_drawn_once_and_shown(device: accel.Device, rng: np.random.Generator) -> None:
    op = ops.Normal((5,))
    assert op.seed is not None
    assert op.seed != ops.Normal((5,)).seed
    first, second = await device.get(await device.run(op)), await device.get(await device.run(pickle.loads(pickle.dumps(op))))
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(await drawn(device, "normal", 5), await drawn(device, "normal", 5))


async def test_out_batch_empty_and_0d(rng: np.random.Generator) -> None:
    seed = int(rng.integers(2**63))
    async with opened(libraries=("rng",)) as device:
        out = await device.full((3, 5), np.nan)
        assert await device.rng.normal((3, 5), seed=seed, out=out) is out
        async with device.batch() as batch:
            a = batch.rng.normal((3, 5), seed=seed)
            b = batch.elementwise.binary("sub", a, out)
            batch.rng.uniform((3, 5), seed=seed, out=out)
        assert not (await device.get(b)).any()
        np.testing.assert_array_equal(await device.get(out), await drawn(device, "uniform", (3, 5), seed=seed))
        assert (await drawn(device, "uniform", (0, 3))).shape == (0, 3)
        assert (await drawn(device, "integers", (), low=4, high=5)).tolist() == 4


async def test_normal_numbers_reach_far_and_stay_finite(device: accel.Device) -> None:
    sample = await drawn(device, "normal", 1 << 20, seed=5)
    assert 4.5 < np.abs(sample).max() < 6.8
    assert np.isinf(await drawn(device, "lognormal", 50_000, mean=80.0, sigma=20.0, seed=5)).any()
    assert (await drawn(device, "normal", 7, std=0.0, mean=2.5)).tolist() == [2.5] * 7


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("uniform", {"low": 1.0, "high": 1.0}),
        ("uniform", {"low": 1.0, "high": 1.0 + 1e-12}),
        ("uniform", {"low": -3e38, "high": 3e38}),
        ("uniform", {"low": "0"}),
        ("uniform", {"high": math.inf}),
        ("uniform", {"high": 1j}),
        ("uniform", {"high": 10**400}),
        ("normal", {"std": -1.0}),
        ("normal", {"mean": math.nan}),
        ("normal", {"mean": 1e300}),
        ("lognormal", {"sigma": -0.1}),
        ("uniform", {"seed": -1}),
        ("uniform", {"seed": 2**64}),
        ("uniform", {"seed": 1.5}),
        ("uniform", {"offset": -1}),
        ("uniform", {"offset": "3"}),
        ("uniform", {"generator": "mt19937"}),
        ("uniform", {"shape": -1}),
        ("exponential", {"scale": -1.0}),
        ("gamma", {"a": 0.0}),
        ("gamma", {"a": 1.0, "scale": -1.0}),
        ("beta", {"a": 1.0, "b": math.nan}),
        ("truncated_normal", {"low": 1.0, "high": 1.0}),
        ("truncated_normal", {"low": 40.0, "high": math.inf}),
        ("truncated_normal", {"std": 0.0}),
        ("truncated_normal", {"low": math.nan}),
        ("bernoulli", {"p": 1.5}),
        ("poisson", {"lam": -1.0}),
        ("poisson", {"lam": 1e17}),
        ("binomial", {"n": -1, "p": 0.5}),
        ("binomial", {"n": 2.5, "p": 0.5}),
        ("binomial", {"n": 3, "p": -0.1}),
        ("integers", {"low": 3, "high": 3}),
        ("integers", {"low": 0, "high": 2.5}),
        ("integers", {"low": 0, "high": 257, "dtype": "uint8"}),
        ("integers", {"low": -1, "high": 2, "dtype": "uint8"}),
    ],
)
async def test_what_does_not_fit_is_refused(device: accel.Device, kind: str, options: dict[str, Any]) -> None:
    async def draw(device: accel.Device) -> None:
        await getattr(device.rng, kind)(**{"shape": 4, **options})

    await failure(draw(device), accel.InvalidArgumentError)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("uniform", {}), ("normal", {}), ("lognormal", {}), ("integers", {"low": 0, "high": 9}), ("poisson", {}), ("gamma", {"a": 2.0})],
)
async def test_a_generator_that_is_not_offered_is_refused_with_the_one_that_is(
    device: accel.Device, kind: str, options: dict[str, Any]
) -> None:
    error = await failure(getattr(device.rng, kind)(4, generator="xorwow", **options), accel.InvalidArgumentError)
    assert "'xorwow'" in error.message
    assert "philox" in error.remedy
    assert (await drawn(device, kind, 4, generator="philox", seed=3, **options)).shape == (4,)


async def test_numbers_at_the_ends_of_parameters(device: accel.Device, rng: np.random.Generator) -> None:
    seed = int(rng.integers(2**63))
    for options, expected in (
        ({"n": 7, "p": 0.0}, 0),
        ({"n": 7, "p": 1.0}, 7),
        ({"n": 0, "p": 0.4}, 0),
        ({"n": 1 << 52, "p": 1.0}, 1 << 52),
    ):
        assert set((await drawn(device, "binomial", 500, seed=seed, **options)).tolist()) == {expected}, seed
    assert not (await drawn(device, "poisson", 500, lam=0.0, seed=seed)).any(), seed
    for p in (0.0, 1.0):
        assert set((await drawn(device, "bernoulli", 500, p=p, seed=seed)).tolist()) == {bool(p)}, seed
    large = await drawn(device, "poisson", 2000, lam=2.0**52, seed=seed)
    assert abs(float(np.mean(large - 2**52))) < 6 * 2**26 / math.sqrt(2000), seed
    small = await drawn(device, "gamma", 2000, dtype="float64", a=1e-3, seed=seed)
    assert small.min() == 0.0 <= small.max() < 100, seed
    halves = await drawn(device, "beta", 2000, dtype="float64", a=1e-3, b=1e-3, seed=seed)
    assert abs(float(np.mean(halves > 0.5)) - 0.5) < 0.1, seed
    cut = await drawn(device, "truncated_normal", 5000, low=-0.5, high=0.25, seed=seed)
    assert -0.5 <= cut.min() < -0.49 < 0.24 < cut.max() <= 0.25, seed


async def test_float32_numbers_of_chains_are_the_float64_ones_rounded(device: accel.Device, rng: np.random.Generator) -> None:
    seed = int(rng.integers(2**63))
    for kind, options in (("gamma", {"a": 0.5}), ("beta", {"a": 2.0, "b": 0.5}), ("truncated_normal", {"low": -1.0})):
        narrow, wide = [await drawn(device, kind, 999, dtype=dtype, seed=seed, **options) for dtype in ("float32", "float64")]
        np.testing.assert_array_equal(narrow, wide.astype(np.float32), err_msg=f"{kind} {seed}")


async def test_sobols_sequence_is_scipys(device: accel.Device, rng: np.random.Generator) -> None:
    qmc = pytest.importorskip("scipy.stats.qmc")
    d, offset = int(rng.integers(2, 1025)), int(rng.integers(1000))
    exact = qmc.Sobol(d, scramble=False, bits=32).fast_forward(offset)
    directions = await device.put(ops.sobol_directions(d))
    points = await device.get(await device.rng.sobol(directions, 256, "float64", offset=offset))
    np.testing.assert_array_equal(points, exact.random_base2(8) if not offset else _random(exact, 256), err_msg=f"{d} {offset}")
    halves = [await device.get(await device.rng.sobol(directions, n, offset=offset + start)) for start, n in ((0, 99), (99, 157))]
    np.testing.assert_array_equal(np.concatenate(halves), points.astype(np.float32), err_msg=f"{d} {offset}")
    assert (await device.get(await device.rng.sobol(directions, 0))).shape == (0, d)


def _random(exact: Any, n: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of places that are not balanced
        return exact.random(n)


async def test_scrambled_points_stay_even_and_differ(device: accel.Device, rng: np.random.Generator) -> None:
    qmc = pytest.importorskip("scipy.stats.qmc")
    seed, n = int(rng.integers(2**63)), 1 << 10
    first, again, other = (ops.sobol_directions(6, scramble=True, seed=each) for each in (seed, seed, seed ^ 1))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    assert not np.array_equal(ops.sobol_directions(1, scramble=True), ops.sobol_directions(1, scramble=True))
    points = await device.get(await device.rng.sobol(await device.put(first), n, "float64"))
    for coordinate in points.T:
        assert sorted((coordinate * n).astype(int)) == list(range(n)), seed
    assert qmc.discrepancy(points) < qmc.discrepancy(rng.random((n, 6))) / 4, seed


async def test_what_sobol_refuses(device: accel.Device) -> None:
    wrong: tuple[dict[str, Any], ...] = (
        {"d": 0},
        {"d": 1025},
        {"d": 2, "scramble": 1},
        {"d": 2, "seed": 3},
        {"d": 2, "scramble": True, "seed": -1},
    )
    for arguments in wrong:
        with pytest.raises(accel.InvalidArgumentError):
            ops.sobol_directions(**arguments)
    directions = await device.put(ops.sobol_directions(3))
    await failure(device.rng.sobol(directions, -1), accel.InvalidArgumentError)
    await failure(device.rng.sobol(directions, 1 << 32, offset=1), accel.InvalidArgumentError)
    await failure(device.rng.sobol(directions, 2, "float16"), accel.UnsupportedError)
    await failure(device.rng.sobol(await device.zeros((3, 32), "uint32"), 2), accel.InvalidArgumentError)
    await failure(device.rng.sobol(await device.zeros((3, 33), "float32"), 2), accel.InvalidArgumentError)


async def test_generators_of_curand_are_not_the_cpus(device: accel.Device) -> None:
    for generator in ("curand_philox", "curand_mrg32k3a"):
        for kind in ("uniform", "normal"):
            for count in (4, 0):
                error = await failure(getattr(device.rng, kind)(count, generator=generator), accel.UnsupportedError)
                assert "philox" in error.remedy
        await failure(device.rng.uniform(4, low=1.0, high=2.0, generator=generator), accel.InvalidArgumentError)
        await failure(device.rng.normal(5, generator=generator), accel.InvalidArgumentError)
        await failure(device.rng.lognormal(4, generator=generator), accel.InvalidArgumentError)
        await failure(device.rng.permutation(4, generator=generator), accel.InvalidArgumentError)


async def test_other_elements_are_not_offered() -> None:
    async with opened(faults=FaultPlan().fail_at(9, accel.LibraryError("never"), op="lognormal")) as device:
        await failure(device.rng.normal(3, "float16"), accel.UnsupportedError)
        await failure(device.rng.uniform(3, "int32"), accel.UnsupportedError)
        await failure(device.rng.integers(3, 0, 2, "float32"), accel.UnsupportedError)
