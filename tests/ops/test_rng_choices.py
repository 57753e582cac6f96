"""Elements in random order, and random elements, on the CPU: what is chosen, how often, and what the ops refuse."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import accel
from tests.device_support import failure
from tests.rng_support import SURE

pytestmark = pytest.mark.usefixtures("nothing_left")


async def test_a_permutation_moves_elements_along_one_axis(device: accel.Device, rng: np.random.Generator) -> None:
    seed = int(rng.integers(2**63))
    order = await device.get(await device.rng.permutation(1000, seed=seed))
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(1000)), seed
    assert not np.array_equal(order, np.arange(1000)), seed
    for dtype in ("bool", "uint8", "float16", "float64", "complex128"):
        x = rng.integers(0, 2, (3, 1000, 2)).astype(dtype)
        moved = await device.get(await device.rng.permutation(await device.put(x), axis=1, seed=seed))
        np.testing.assert_array_equal(moved, x[:, order], err_msg=f"{dtype} {seed}")
    view = (await device.put(x)).T
    np.testing.assert_array_equal(
        await device.get(await device.rng.permutation(view, axis=-2, seed=seed)), x.T[:, order], err_msg=str(seed)
    )
    assert (await device.get(await device.rng.permutation(0))).shape == (0,)
    assert (await device.get(await device.rng.permutation(await device.zeros((5, 0))))).shape == (5, 0)


async def test_all_orders_and_all_subsets_are_equally_probable(device: accel.Device, rng: np.random.Generator) -> None:
    stats = pytest.importorskip("scipy.stats")
    first = int(rng.integers(2**62))
    async with device.batch() as batch:
        orders = [batch.rng.permutation(4, seed=first + i) for i in range(2400)]
        pairs = [batch.rng.choice(5, 2, replace=False, seed=first + i) for i in range(2400)]
    found = [tuple((await device.get(order)).tolist()) for order in orders]
    counts = [found.count(order) for order in itertools.permutations(range(4))]
    assert sum(counts) == 2400
    assert stats.chisquare(counts).pvalue > SURE, first
    found = [tuple((await device.get(pair)).tolist()) for pair in pairs]
    counts = [found.count(pair) for pair in itertools.permutations(range(5), 2)]
    assert sum(counts) == 2400
    assert stats.chisquare(counts).pvalue > SURE, first


async def test_elements_are_chosen_as_often_as_their_weights_say(device: accel.Device, rng: np.random.Generator) -> None:
    stats = pytest.importorskip("scipy.stats")
    seed, n = int(rng.integers(2**62)), 60_000
    weights = np.array([0.0, 3.0, 1.0, 0.0, 6.0, 0.5, 0.0], np.float32)
    p = await device.put(weights)
    chosen = await device.get(await device.rng.choice(7, n, p=p, seed=seed))
    counts = np.bincount(chosen, minlength=7)
    assert not counts[weights == 0].any(), seed
    assert stats.chisquare(counts[weights > 0], weights[weights > 0].astype(float) / weights.sum() * n).pvalue > SURE, seed
    even = await device.get(await device.rng.choice(7, n, seed=seed))
    assert stats.chisquare(np.bincount(even, minlength=7)).pvalue > SURE, seed
    async with device.batch() as batch:
        once = [batch.rng.choice(7, 4, replace=False, p=p, seed=seed + i) for i in range(2000)]
    found = np.array([await device.get(each) for each in once])
    assert {tuple(sorted(row)) for row in found.tolist()} == {(1, 2, 4, 5)}, seed
    counts = np.bincount(found[:, 0], minlength=7)
    assert stats.chisquare(counts[weights > 0], weights[weights > 0].astype(float) / weights.sum() * 2000).pvalue > SURE, seed


@pytest.mark.parametrize("scale", [1e308, 5e-324, 1e-310, 1.0])
@pytest.mark.parametrize("replace", [True, False])
async def test_weights_of_any_scale_are_shares(device: accel.Device, rng: np.random.Generator, scale: float, replace: bool) -> None:
    seed, n = int(rng.integers(2**62)), 1000
    p = await device.put(np.array([scale, 0.0, scale, scale]))
    async with device.batch() as batch:
        size, calls = (n, 1) if replace else (1, n)
        refs = [batch.rng.choice(4, size, replace, p, seed=seed + i) for i in range(calls)]
    counts = np.bincount(np.concatenate([await device.get(each) for each in refs]), minlength=4)
    assert counts[1] == 0
    np.testing.assert_allclose(counts[[0, 2, 3]] / n, 1 / 3, atol=0.1, err_msg=str(seed))


async def test_elements_of_tiny_weights_are_chosen_last_and_those_without_never(device: accel.Device, rng: np.random.Generator) -> None:
    seed, n = int(rng.integers(2**62)), 400
    p = await device.put(np.array([1e300, 0.0, 1e-20, 3e-20]))
    async with device.batch() as batch:
        refs = [batch.rng.choice(4, 3, replace=False, p=p, seed=seed + i) for i in range(n)]
    orders = [tuple((await device.get(each)).tolist()) for each in refs]
    assert set(orders) == {(0, 2, 3), (0, 3, 2)}, seed
    assert abs(orders.count((0, 3, 2)) / n - 0.75) < 0.12, seed


async def test_a_choice_takes_the_place_of_the_axis(device: accel.Device, rng: np.random.Generator) -> None:
    seed = int(rng.integers(2**62))
    x = rng.standard_normal((4, 9, 2))
    ref = await device.put(x)
    at = await device.get(await device.rng.choice(9, (3, 5), seed=seed))
    np.testing.assert_array_equal(at, await device.get(await device.rng.integers((3, 5), 0, 9, seed=seed)), err_msg=str(seed))
    np.testing.assert_array_equal(await device.get(await device.rng.choice(ref, (3, 5), axis=1, seed=seed)), x[:, at], err_msg=str(seed))
    one = await device.get(await device.rng.choice(ref, axis=-1, seed=seed))
    assert one.shape == (4, 9)
    out = await device.full((2, 9, 2), np.nan, "float64")
    assert await device.rng.choice(ref, 2, replace=False, seed=seed, out=out) is out
    whole = await device.get(await device.rng.permutation(ref, seed=seed))
    np.testing.assert_array_equal(await device.get(out), whole[:2], err_msg=str(seed))
    assert (await device.get(await device.rng.choice(0, 0))).shape == (0,)


@pytest.mark.parametrize(
    "options",
    [
        {"a": 0},
        {"a": -3},
        {"a": 3, "shape": 4, "replace": False},
        {"a": 1 << 31, "replace": False},
        {"a": 3, "axis": 1},
        {"a": 3, "replace": 1},
        {"a": 3, "p": np.ones(4)},
        {"a": 3, "p": np.ones((3, 1))},
        {"a": 3, "p": np.ones(3, np.int32)},
        {"a": np.ones((2, 3)), "axis": 2},
        {"a": "abc"},
        # What only the device finds:
        {"a": 3, "p": np.array([1.0, -1.0, 1.0])},
        {"a": 3, "p": np.array([1.0, np.nan, 1.0])},
        {"a": 3, "p": np.array([1.0, np.inf, 1.0]), "replace": False},
        {"a": 3, "p": np.zeros(3)},
        {"a": 3, "shape": 3, "p": np.array([1.0, 0.0, 1.0]), "replace": False},
    ],
)
async def test_what_cannot_be_chosen_is_refused(device: accel.Device, options: dict[str, Any]) -> None:
    given: dict[str, Any] = {name: await device.put(value) if isinstance(value, np.ndarray) else value for name, value in options.items()}
    error = await failure(device.rng.choice(**{"shape": 2, **given}), accel.InvalidArgumentError)
    assert error.remedy
    assert (await device.get(await device.rng.choice(3, 2))).shape == (2,)


async def test_a_permutation_refuses_what_it_cannot_move(device: accel.Device) -> None:
    x = await device.zeros((3, 4))
    wrong: tuple[tuple[Any, dict[str, Any]], ...] = ((x, {"axis": 2}), (x, {"out": x}), (1 << 31, {}), (2.5, {}), (5, {"axis": 1}))
    for first, options in wrong:
        await failure(device.rng.permutation(first, **options), accel.InvalidArgumentError)
