"""Numbers from outside: what each dtype takes, by value, and how the rest is refused."""

from __future__ import annotations

import asyncio
import enum
import math
import tracemalloc
import warnings
from decimal import Decimal
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import accel
from accel import DType, InvalidArgumentError
from accel.dtype import native
from accel.values import converted, number
from tests.model_support import Mean

WHOLE = [dtype for dtype in DType if dtype.is_integer]
FLOATS = [dtype for dtype in DType if dtype.is_floating]


class Level(enum.IntEnum):
    ONE = 1


def limits(dtype: DType) -> tuple[int, int]:
    info = np.iinfo(dtype.numpy)
    return int(info.min), int(info.max)


@pytest.mark.parametrize("dtype", WHOLE, ids=lambda each: each.value)
def test_an_integer_type_takes_every_whole_number_in_its_range_and_no_other(dtype: DType, rng: np.random.Generator) -> None:
    least, most = limits(dtype)
    numbers = [least, most, 0, 1, most // 2, *rng.integers(least, most, 9, dtype.numpy, endpoint=True).tolist()]
    for given in (numbers, tuple(numbers), np.array(numbers, object), np.array(numbers, np.uint64 if least == 0 else np.int64)):
        made = converted("x", given, dtype)
        assert (made.dtype, made.tolist()) == (dtype.numpy, numbers)
    assert converted("x", [True, 2.0, Level.ONE, np.int8(3), Decimal(4), Fraction(5)], dtype).tolist() == [1, 2, 1, 3, 4, 5]
    assert converted("x", np.array([0.0, 7.0], np.float16), dtype).tolist() == [0, 7]
    wrong: Any
    for wrong in (least - 1, most + 1, 0.5, math.nan, math.inf, 1e30, 10**400, 1j, "1", None, {}, b"1"):
        for given in ([[1, 2], [3, wrong]], np.array([[1, 2], [3, wrong]], object)):
            with pytest.raises(InvalidArgumentError, match=r"x\[1, 1\] is ") as caught:
                converted("x", given, dtype, argument="x")
            assert caught.value.argument == "x"
    for wrong in (0.5, math.nan, -math.inf, float(most + 1), float(least) * 2 - 1):
        with pytest.raises(InvalidArgumentError, match=rf"(?s)x\[1\] is .*from {least} to {most}"):
            converted("x", np.array([0.0, wrong]), dtype)


def test_a_boolean_takes_zero_and_one() -> None:
    for given in ([True, 0, 1.0], np.array([1, 0, 1], np.uint8), np.array([1.0, 0.0, 1.0]), np.array([True, False, True])):
        assert converted("x", given, DType.BOOL).dtype == np.bool_
    for wrong in (2, -1, 0.5, math.nan, "true", None):
        with pytest.raises(InvalidArgumentError, match=r"x\[2\] is "):
            converted("x", [True, 0, wrong], DType.BOOL)
    for array in (np.array([0, 2]), np.array([0, -1]), np.array([0, 0.5]), np.array([0, np.nan])):
        with pytest.raises(InvalidArgumentError, match=r"x\[1\] is "):
            converted("x", array, DType.BOOL)


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda each: each.value)
def test_a_float_takes_the_nearest_that_it_has_and_nothing_beyond_its_range(dtype: DType) -> None:
    largest = float(ml_dtypes.finfo(dtype.numpy).max)  # type: ignore[no-untyped-call]
    good: list[Any] = [0, True, 0.5, -1.5, largest, -largest, np.float32(2), Fraction(1, 2)]
    made = converted("x", good, dtype)
    assert (made.dtype, made.astype(np.float64).tolist()) == (dtype.numpy, [float(each) for each in good])
    for wrong in (10**400, *((largest * 4, -largest * 4) if dtype is not DType.FLOAT64 else ())):
        with pytest.raises(InvalidArgumentError, match=r"x\[1\] is "):
            converted("x", [0.0, wrong], dtype)
        assert wrong == 10**400 or converted("x", [wrong], dtype, to_infinity=True).dtype == dtype.numpy
    if dtype is not DType.FLOAT64:
        with pytest.raises(InvalidArgumentError, match=r"x\[1\] is "):
            converted("x", np.array([0.0, largest * 4]), dtype)
    with pytest.raises(InvalidArgumentError, match="finite"):
        converted("x", np.array([0.0, math.nan]), DType.FLOAT64, finite=True)
    if dtype is not DType.FLOAT4_E2M1FN:
        assert np.isnan(converted("x", math.nan, dtype).astype(np.float64))
        with pytest.raises(InvalidArgumentError, match=r"(?s)x\[1\] is nan.*finite"):
            converted("x", [1, math.nan], dtype, finite=True)


def test_an_integer_beyond_64_bits_is_a_float_as_another_client_writes_it() -> None:
    # JavaScript writes 1e20 without an exponent.
    assert converted("x", [100000000000000000000, 1e20], DType.FLOAT32).tolist() == [np.float32(1e20)] * 2


class Scalar:
    """A tensor of one element: it has the methods of every number, and raises in those that it is not."""

    def __index__(self) -> int:
        raise TypeError

    def __float__(self) -> float:
        return 1.5


def test_a_scalar_of_another_library_is_not_cut_to_an_integer(rng: np.random.Generator) -> None:
    assert number("x", Scalar()) == 1.5
    assert number("x", torch.tensor(1.5)) == 1.5
    assert converted("x", [Scalar(), torch.tensor(2)], DType.FLOAT32).tolist() == [1.5, 2]
    array = rng.standard_normal((3, 4)).astype(np.float32)
    np.testing.assert_array_equal(converted("x", [list(row) for row in array], DType.FLOAT32), array)
    with pytest.raises(InvalidArgumentError, match=r"x\[1, 0\] is "):
        converted("x", [[np.int64(1)], [np.int64(300)]], DType.UINT8)


def test_complex_numbers_are_no_real_ones() -> None:
    assert converted("x", [1, 2.5, 1j], DType.COMPLEX64).tolist() == [1, 2.5, 1j]
    for wrong in ([1j], [1 + 0j], np.array([1j])):
        with pytest.raises(InvalidArgumentError):
            converted("x", wrong, DType.FLOAT32)


class Foreign:
    """An array of another library, which gives its own memory."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __array__(self, *_: Any, **__: Any) -> Any:
        if isinstance(self._array, Exception):
            raise self._array
        return self._array


def test_nested_lists_and_arrays_have_one_shape() -> None:
    rows: Any = [np.array([1, 2], np.int8), Foreign(np.array([3.0, 4.0])), range(5, 7)]
    assert converted("x", rows, DType.UINT8).tolist() == [[1, 2], [3, 4], [5, 6]]
    assert converted("x", [[1, 2], np.array([3, 4])], DType.INT8).tolist() == [[1, 2], [3, 4]]
    assert converted("x", [], DType.INT8).shape == (0,)
    assert converted("x", [[], []], DType.FLOAT32).shape == (2, 0)
    assert converted("x", memoryview(b"ab"), DType.INT64).tolist() == [97, 98]
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    for wrong, said in (
        ([[1], [1, 2]], r"x\[1\] is a list of 2, and x\[0\] is a list of 1"),
        ([1, [2]], r"x\[1\] is a list of 1, and x\[0\] is a int"),
        ([np.ones(2), np.ones(3)], "shape|list"),
        (Foreign(RuntimeError("on another device")), "on another device"),
        (np.ma.masked_array([1, 2], [True, False]), "masked"),
        (np.array(["1"]), "dtype"),
        (np.array(["2026-01-01"], "M8[D]"), "dtype"),
        (object(), "not a number"),
        (deep, "deep"),
    ):
        with pytest.raises(InvalidArgumentError, match=said):
            converted("x", wrong, DType.FLOAT32)
    while isinstance(deep, list):  # one by one: freed at once, it would be freed recursively
        deep = deep.pop()


async def _unawaited() -> None: ...


def test_a_forgotten_await_is_named() -> None:
    with pytest.raises(InvalidArgumentError, match="Await it first"):
        converted("x", _unawaited(), DType.FLOAT32)


@pytest.mark.parametrize("convert", [native, lambda value: converted("x", value, DType.FLOAT32)], ids=["put", "converted"])
def test_long_texts_cost_their_own_length(convert: Any) -> None:
    bomb = ["a" * 500_000] + [""] * 2000
    for value in (bomb, [bomb, bomb], [text.encode() for text in bomb]):
        tracemalloc.start()
        with pytest.raises(InvalidArgumentError) as caught:
            convert(value)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 4_000_000, "of one long text and many short ones numpy makes an array of long ones"
        assert len(str(caught.value)) < 500


def test_nothing_warns_and_a_copy_shares_no_memory(rng: np.random.Generator) -> None:
    array = rng.standard_normal(5).astype(np.float32)
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        assert converted("x", 1e300, DType.FLOAT16, to_infinity=True) == np.inf
        assert converted("x", array, DType.FLOAT32) is array
        for value in (array, Foreign(array), array[:], memoryview(array), array.astype(np.float64)):  # type: ignore[arg-type]
            made = converted("x", value, DType.FLOAT32, copy=True)
            np.testing.assert_array_equal(made, array)
            assert not np.may_share_memory(made, array)


@pytest.mark.parametrize(
    ("dtype", "pad"),
    [("int64", 0.5), ("int64", math.nan), ("uint8", -1), ("bool", 2), ("float16", 1e6), ("float32", None), ("float32", 1j), ("int8", "0")],
)
def test_padding_is_a_number_of_the_dtype(dtype: str, pad: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="pad"):
        accel.TensorSpec(("batch", "n"), dtype, pad=pad)
    minus: Any = np.int64(-1)
    assert math.isnan(accel.TensorSpec(("batch", "n"), "float32", pad=math.nan).pad)
    assert accel.TensorSpec(("batch", "n"), "int8", pad=minus).pad == -1


async def test_what_submit_took_may_be_changed(rng: np.random.Generator) -> None:
    inputs = {"ids": accel.TensorSpec(("batch", 3), "int64"), "mask": accel.TensorSpec(("batch", 3), "float32")}
    ids, mask = rng.integers(0, 99, 3), np.ones(3, np.float32)
    async with accel.System() as system:
        device = await system.open_device("cpu")
        model = await device.load_model(Mean, inputs=inputs, buckets={"batch": (1, 4)})
        async with accel.serve(model) as service:
            expected = ids.copy()
            task = asyncio.ensure_future(service.submit({"ids": ids, "mask": Foreign(mask)}))
            loop = asyncio.get_running_loop()
            # In this iteration of the loop, after the item is taken; its batch is launched in the next.
            loop.call_soon(ids.fill, 0)
            loop.call_soon(mask.fill, 0)
            mean, twice = await task
    assert mean == expected.mean()
    np.testing.assert_array_equal(twice, expected * 2)
