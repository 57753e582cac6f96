"""What is rounded is rounded once: conversions to narrow floats, sums of very many elements, ranges of floats, quotients that are whole numbers."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import accel
from accel.dtype import rounded
from tests import nonfinite_support as table
from tests.device_support import failure

pytestmark = pytest.mark.usefixtures("nothing_left")

NARROW = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
WIDE = ("float64", "float32", "int32", "uint32", "int64", "uint64")
ABOVE = 1 + 2.0**-8 + 2.0**-30
"""A little above the middle of two numbers of bfloat16, and in float32 the middle itself."""


def _narrow(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def _values(dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return all finite numbers of a narrow float, in order."""
    with np.errstate(invalid="ignore"):
        values = np.arange(256**dtype.itemsize, dtype=f"u{dtype.itemsize}").view(dtype).astype(np.float64)
    return np.unique(values[np.isfinite(values)])


@pytest.mark.parametrize("source", WIDE)
@pytest.mark.parametrize("name", NARROW)
def test_what_lies_beside_the_middle_of_two_numbers_goes_to_the_nearer_one(name: str, source: str, rng: np.random.Generator) -> None:
    values = _values(_narrow(name))
    middles = (values[1:] + values[:-1]) / 2
    if source.startswith("float"):
        middles = middles[middles.astype(source) == middles].astype(source)
        x = np.concatenate([np.nextafter(middles, np.array(end, source)) for end in (-np.inf, np.inf)])
    else:
        limits = np.iinfo(source)
        middles = middles[(middles == np.floor(middles)) & (middles > limits.min + 1) & (middles < limits.max - 2)]
        x = np.array([int(each) + side for each in middles for side in (-1, 0, 1)], source)
    x = rng.permutation(x)[:2000]
    above = np.minimum(np.searchsorted(values, x.astype(np.float64)), len(values) - 1)
    for number, found, place in zip(x.tolist(), rounded(x, _narrow(name)).astype(np.float64).tolist(), above.tolist(), strict=True):
        near = [abs(Fraction(number) - Fraction(each)) for each in values[max(0, place - 2) : place + 2].tolist()]
        assert abs(Fraction(number) - Fraction(found)) == min(near), number


def test_what_is_no_number_or_too_large_stays_so() -> None:
    wide = np.array([np.nan, np.inf, -np.inf, 1e300, -0.0, 5e-324, -1e-60])
    made = rounded(wide, _narrow("bfloat16")).astype(np.float64)
    np.testing.assert_array_equal(made, [np.nan, np.inf, -np.inf, np.inf, -0.0, 0.0, -0.0])
    assert np.signbit(made).tolist() == [bool(each) for each in np.signbit(wide)]


async def test_every_way_to_bfloat16_rounds_once(device: accel.Device) -> None:
    xp, wanted = device.xp, 1 + 2.0**-7
    wide = await device.put(np.array([ABOVE]))
    made = {
        "cast": await device.elementwise.cast(wide, "bfloat16"),
        "fused": await device.elementwise.fused((("bfloat16", 0),), (wide,)),
        "astype": (await xp.astype(xp.asarray(np.array([ABOVE])), xp.bfloat16)).ref,
        "asarray": (await xp.asarray([ABOVE], dtype=xp.bfloat16)).ref,
        "full": await device.full(1, ABOVE, "bfloat16"),
        "number": await device.elementwise.binary("add", await device.zeros(1, "bfloat16"), ABOVE),
        "arange": await device.arrays.arange(ABOVE, 2, 1, "bfloat16"),
        "linspace": (await device.arrays.linspace(0, ABOVE, 2, dtype="bfloat16"))[1:],
    }
    for what, ref in made.items():
        assert (await device.get(ref)).astype(np.float64).tolist() == [wanted], what


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "complex64"])
async def test_sums_of_very_many_rows_are_as_good_as_those_of_columns(device: accel.Device, dtype: str) -> None:
    kind = _narrow(dtype)
    x = np.full((400_000, 2), 0.1).astype(kind)
    exact = complex(x[0, 0])
    ref, turned = await device.put(x), (await device.put(np.ascontiguousarray(x.T))).T
    error = 1e-6 if kind.itemsize >= 4 else 0.0
    for op, wanted in (("sum", exact * len(x)), ("mean", exact), ("var", 0.0), ("logsumexp", math.log(len(x)) + exact.real)):
        if (op == "var" and dtype == "complex64") or (op == "logsumexp" and dtype == "complex64"):
            continue
        for each in (ref, turned):
            for axis in (0, None):
                total = wanted * (2 if op == "sum" and axis is None else 1) + (math.log(2) if op == "logsumexp" and axis is None else 0)
                with np.errstate(over="ignore"):
                    stored = complex(np.array(total if dtype == "complex64" else total.real).astype(kind))
                found = (await device.get(await device.reduce(op, each, axis=axis))).astype(np.complex128)  # type: ignore[arg-type]
                np.testing.assert_allclose(found, stored, rtol=error, atol=1e-12, err_msg=f"{op} axis={axis}")


async def test_running_sums_of_very_many_elements_stay_exact_enough(device: accel.Device) -> None:
    count = 2_000_000
    x = await device.put(np.full(count, 0.1, np.float32))
    running = await device.get(await device.scan.cumsum(x))
    np.testing.assert_allclose(running[-3:], np.float32(0.1).astype(float) * np.arange(count - 2, count + 1), rtol=1e-6)
    offsets = await device.put(np.array([0, count], np.int64))
    whole = await device.get(await device.scan.segment_reduce("sum", x.reshape((count, 1)), offsets))
    np.testing.assert_allclose(whole, [[np.float32(0.1).astype(float) * count]], rtol=1e-6)


async def test_norms_and_their_gradients_add_very_many_rows(device: accel.Device) -> None:
    rows = 300_000
    x = await device.put(np.tile(np.array([[0.1], [0.3]], np.float32), (rows // 2, 1)))
    ones = await device.full((rows, 1), 0.1, "float32")
    _, mean, variance = [await device.get(each) for each in await device.dnn.batch_norm_train(x)]
    np.testing.assert_allclose((mean, variance), ([0.2], [0.01]), rtol=1e-5)
    _, _, bias = await device.dnn.batch_norm_grad(ones, x)
    np.testing.assert_allclose(await device.get(bias), [0.1 * rows], rtol=1e-5)
    wide = await device.put(np.full((rows, 2), 0.1, np.float32))
    _, _, bias = await device.dnn.layer_norm_grad(wide, wide, 2)
    np.testing.assert_allclose(await device.get(bias), [0.1 * rows] * 2, rtol=1e-5)
    shares = await device.get(await device.dnn.softmax(wide, 0))
    np.testing.assert_allclose(shares, 1 / rows, rtol=1e-5)


@pytest.mark.parametrize(
    "given", [(0.0, 19.0, 0.95), (0.0, 4.2, 0.21), (2.7, -0.7, -0.2), (4.9, -2.4, -0.1), (0.0, 1.0, 3.0), (1.0, 0.0, 0.5)]
)
async def test_a_range_of_floats_ends_where_numpys_does(device: accel.Device, given: tuple[float, float, float]) -> None:
    expected = np.arange(*given)
    np.testing.assert_allclose(await device.get(await device.arrays.arange(*given, "float64")), expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(await (await device.xp.arange(*given, dtype=device.xp.float64)).numpy(), expected, rtol=1e-12, atol=1e-12)


async def test_ranges_end_as_random_ones_of_numpys_do(device: accel.Device, rng: np.random.Generator) -> None:
    for _ in range(300):
        start, step = (round(float(each), 2) for each in rng.uniform(-5, 5, 2))
        if step:
            stop = start + step * int(rng.integers(0, 40))
            assert accel.ops.Arange(start, stop, step).ramp()[0] == len(np.arange(start, stop, step)), (start, stop, step)
    for given in ((0.0, 1e300, 1e-300), (-1e308, 1e308, 1.0)):
        await failure(device.arrays.arange(*given), accel.InvalidArgumentError)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
async def test_quotients_are_whole_numbers_that_are_not_above_the_exact_ones(
    device: accel.Device, rng: np.random.Generator, dtype: str
) -> None:
    xp = device.xp
    y = rng.choice([0.1, 0.05, 6e-8, -0.3, 1.1], 500)
    x, y = (rng.integers(-90, 90, 500) * y).astype(dtype), y.astype(dtype)
    quotients = await (await (xp.asarray(x) // xp.asarray(y))).numpy()
    rests = await (await (xp.asarray(x) % xp.asarray(y))).numpy()
    exact = [math.floor(Fraction(float(a)) / Fraction(float(b))) for a, b in zip(x, y, strict=True)]
    assert quotients.tolist() == exact
    np.testing.assert_allclose(quotients.astype(float) * y + rests, x, rtol=1e-5, atol=1e-5)
    ends = np.array([np.inf, -np.inf, 5, -5, 5, -5, np.inf], dtype), np.array([2, 2, np.inf, np.inf, -np.inf, 0, np.inf], dtype)
    found = await (await (xp.asarray(ends[0]) // xp.asarray(ends[1]))).numpy()
    np.testing.assert_array_equal(found, [np.inf, -np.inf, 0, -0.0, -0.0, -np.inf, np.nan])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
async def test_functions_of_one_number_are_those_of_many(device: accel.Device, rng: np.random.Generator, dtype: str) -> None:
    x = rng.standard_normal(1).astype(_narrow(dtype))
    one, vector = await device.put(x.reshape(())), await device.put(np.arange(3).astype(_narrow(dtype)))
    names = [each.value for each in accel.UnaryOp if each.value != "logical_not"]
    for name in names:
        program: Any = ((name, 0),)
        expected = await device.get(await device.elementwise.unary(name, await device.put(x)))  # type: ignore[arg-type]
        found = await device.get(await device.elementwise.fused(program, (one,)))
        assert found.shape == ()
        np.testing.assert_array_equal(found.astype(float), expected[0].astype(float), err_msg=name)
        if expected.dtype != bool:
            beside = await device.elementwise.fused(((name, 0), ("mul", 2, 1)), (x[0], vector))
            assert beside.shape == (3,)


@pytest.mark.parametrize("kind", [*table.SOLVERS, *table.FAMILIES])
async def test_results_are_numpy_s(device: accel.Device, kind: str, rng: np.random.Generator) -> None:
    found = [each for case in table.cases(kind, rng) if (each := await table.wrong(device, case))]
    assert not found, f"{len(found)} are wrong:\n" + "\n".join(found[:20])
    assert device.generation == 1
