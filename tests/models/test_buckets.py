"""Inputs of a model: their specs, buckets, padding, and what is cut off the outputs again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import accel
from accel import InvalidArgumentError
from accel.models import Buckets, OutputSpecs, TensorSpec
from accel.models.examples import example_rows
from accel.models.outputs import Follows, encoded, flattened

TOKENS = {
    "ids": TensorSpec(("batch", "length"), "int64", pad=7),
    "mask": TensorSpec(("batch", "length"), "float32"),
    "scale": TensorSpec(("batch", 3), "float32"),
}


@pytest.mark.parametrize("shape", [("batch", 3, "batch"), (0,), (-1,), (True,), ("two words",), (1.5,), ("",)])
def test_a_spec_refuses_what_is_no_dimension(shape: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        TensorSpec(shape, "float32")


def test_a_spec_is_a_value() -> None:
    spec = TensorSpec(["batch", 3], "f4")
    assert spec == TensorSpec(("batch", 3), np.float32)
    assert (spec.shape, spec.dtype, spec.pad, spec.names) == (("batch", 3), accel.DType.FLOAT32, 0, ("batch",))
    assert spec.of_size({"batch": 5}) == (5, 3)


@pytest.mark.parametrize(
    "lengths", [{"width": (1,)}, {"batch": ()}, {"batch": (0,)}, {"batch": (1.0,)}, {"batch": (True,)}, {"length": ("8",)}]
)
def test_buckets_refuse_lengths_that_mean_nothing(lengths: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        Buckets(TOKENS, lengths)


@pytest.mark.parametrize("inputs", [{}, None, {"x": ("batch", 3)}])
def test_buckets_refuse_inputs_without_specs(inputs: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        Buckets(inputs)


def test_the_smallest_bucket_with_room_is_chosen() -> None:
    buckets = Buckets(TOKENS, {"batch": (8, 1, 64), "length": (32, 128)})
    assert buckets.bucket({"batch": 1, "length": 1}) == {"batch": 1, "length": 32}
    assert buckets.bucket({"batch": 2, "length": 32}) == {"batch": 8, "length": 32}
    assert buckets.bucket({"batch": 64, "length": 33}) == {"batch": 64, "length": 128}
    assert len(buckets.all()) == 6
    assert buckets.all()[0] == {"batch": 1, "length": 32}
    with pytest.raises(InvalidArgumentError) as caught:
        buckets.bucket({"batch": 1, "length": 129})
    assert caught.value.argument == "ids"
    free = Buckets(TOKENS, {"batch": (1, 8)})
    assert free.bucket({"batch": 3, "length": 77}) == {"batch": 8, "length": 77}
    assert free.all() == []


def test_inputs_are_padded_with_what_their_spec_says(rng: np.random.Generator) -> None:
    buckets = Buckets(TOKENS, {"batch": (4,), "length": (6,)})
    ids = rng.integers(0, 1000, (2, 5))
    padded = buckets.padded("ids", ids, {"batch": 4, "length": 6})
    expected = np.full((4, 6), 7)
    expected[:2, :5] = ids
    np.testing.assert_array_equal(padded, expected)
    assert padded.dtype == np.int64
    assert buckets.padded("ids", expected, {"batch": 4, "length": 6}) is expected


def test_items_of_several_lengths_are_stacked(rng: np.random.Generator) -> None:
    buckets = Buckets(TOKENS, {"batch": (4,), "length": (6,)})
    items = [
        {name: buckets.array(name, value) for name, value in item.items()}
        for item in ({"ids": list(range(n)), "mask": np.ones(n), "scale": rng.standard_normal(3)} for n in (5, 1, 6))
    ]
    sizes = {"batch": 4, "length": 6}
    ids, mask, scale = buckets.stacked(items, [spec.of_size(sizes) for spec in TOKENS.values()])
    np.testing.assert_array_equal(ids, [[0, 1, 2, 3, 4, 7], [0] + [7] * 5, [0, 1, 2, 3, 4, 5], [7] * 6])
    np.testing.assert_array_equal(mask.sum(1), [5, 1, 6, 0])
    assert (mask.dtype, scale.shape) == (np.float32, (4, 3))


@pytest.mark.parametrize(
    ("given", "argument"),
    [
        ({"ids": np.zeros((2, 5), int), "mask": np.zeros((2, 4)), "scale": np.zeros((2, 3))}, "mask"),
        ({"ids": np.zeros((2, 5), int), "mask": np.zeros((2, 5)), "scale": np.zeros((3, 3))}, "scale"),
        ({"ids": np.zeros((2, 5), int), "mask": np.zeros((2, 5)), "scale": np.zeros((2, 4))}, "scale"),
        ({"ids": np.zeros(5, int), "mask": np.zeros((2, 5)), "scale": np.zeros((2, 3))}, "ids"),
        ({"ids": np.zeros((0, 5), int), "mask": np.zeros((0, 5)), "scale": np.zeros((0, 3))}, "ids"),
    ],
)
def test_shapes_that_do_not_go_together_are_refused(given: dict[str, Any], argument: str) -> None:
    buckets = Buckets(TOKENS)
    with pytest.raises(InvalidArgumentError) as caught:
        buckets.sizes({name: value.shape for name, value in given.items()})
    assert caught.value.argument == argument


@pytest.mark.parametrize(
    "value", [[1.5], ["a"], [[1], [2, 3]], np.full(2, 1.5), None, [1 << 70], np.array([1, 1 << 40], np.uint64).astype(object), {}, [1 + 2j]]
)
def test_values_that_are_no_such_array_are_refused(value: Any) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Buckets({"x": TensorSpec(("batch",), "int32")}).array("x", value)
    assert caught.value.argument == "x"


def test_numbers_take_the_dtype_of_the_input() -> None:
    buckets = Buckets({"x": TensorSpec(("batch",), "int32"), "y": TensorSpec(("batch",), "float16"), "b": TensorSpec(("batch",), "bool")})
    assert buckets.array("x", [1, 2]).dtype == np.int32
    assert buckets.array("y", [1, 2]).dtype == np.float16
    assert buckets.array("y", np.ones(3)).dtype == np.float16
    assert buckets.array("b", [True]).dtype == np.bool_
    for value in ([1 << 31], np.array([-1], np.int64) << 33):
        with pytest.raises(InvalidArgumentError):
            buckets.array("x", value)
    with pytest.raises(InvalidArgumentError):
        buckets.check_names({"x": 1})
    with pytest.raises(InvalidArgumentError):
        buckets.check_names({"x": 1, "y": 2, "b": 3, "z": 4})


def test_a_batch_dimension_may_be_anywhere(rng: np.random.Generator) -> None:
    spec = TensorSpec(("length", "batch", 2), "float32", pad=9)
    buckets = Buckets({"x": spec})
    assert buckets.is_batched
    assert (spec.batch_axis, spec.item_shape) == (1, ("length", 2))
    items = [{"x": rng.standard_normal((n, 2)).astype(np.float32)} for n in (3, 1)]
    stacked = buckets.stacked(items, [(4, 3, 2)])[0]
    assert stacked.shape == (4, 3, 2)
    np.testing.assert_array_equal(stacked[:3, 0], items[0]["x"])
    np.testing.assert_array_equal(stacked[:1, 1], items[1]["x"])
    assert (stacked[3:, 0] == 9).all()
    assert (stacked[1:, 1] == 9).all()
    assert (stacked[:, 2] == 9).all()
    np.testing.assert_array_equal(buckets.part({"x": stacked}, 1, 3)["x"], stacked[:, 1:3])
    assert buckets.item(items[0]).sizes == {"length": 3}


@pytest.mark.parametrize(
    ("dtype", "good", "bad"),
    [
        ("int64", [0, -1, 2.0, np.int8(3), -(1 << 63)], [0.5, np.nan, np.inf, 1 << 63, None, "0", 1j, [1]]),
        ("uint8", [0, 255, True], [-1, 256, 0.5]),
        ("bool", [True, False, 0, 1], [2, 0.5, None]),
        ("float16", [0.1, np.nan, -np.inf, 65504], [1e6, None, 1j]),
        ("bfloat16", [3e38], [10**40, "x"]),
        ("float32", [1 << 70], [1e39, 1 << 200, 10**400]),
        ("complex64", [1j, 2], [1e39, "1"]),
    ],
)
def test_padding_is_checked_by_its_value(dtype: str, good: list[Any], bad: list[Any]) -> None:
    for pad in good:
        spec = TensorSpec(("batch",), dtype, pad=pad)
        padded = Buckets({"x": spec}).padded("x", np.zeros(1, spec.dtype.numpy), {"batch": 2})
        np.testing.assert_array_equal(padded[1], np.full((), pad, spec.dtype.numpy))
    for pad in bad:
        with pytest.raises(InvalidArgumentError, match="pad is"):
            TensorSpec(("batch",), dtype, pad=pad)


def test_an_example_has_the_form_of_an_item_or_of_several() -> None:
    shape = ("length", "batch", 2)
    for example in (3, [[1, 2], [3, 4]], np.ones((1, 4, 2)), np.ones((1, 2)), [[[5, 5]]]):
        spec = TensorSpec(shape, "float32", example=example)
        assert example_rows(spec, {"length": 3, "batch": 5}, 0).shape == (3, 5, 2)
    spec = TensorSpec(("batch", "n"), "int64", example=[[1, 2, 3], [4, 5, 6]])
    np.testing.assert_array_equal(example_rows(spec, {"batch": 3, "n": 4}, 0), [[1, 2, 3, 1], [4, 5, 6, 4], [1, 2, 3, 1]])
    np.testing.assert_array_equal(example_rows(spec, {"batch": 2, "n": 1}, 1), [[4], [1]])
    assert spec == TensorSpec(("batch", "n"), "int64")
    wrong: Any
    for wrong in (0.5, "x", [1, 2], np.ones((2, 3, 3), int), np.ones((0, 3), int), [[1 << 70]]):
        with pytest.raises(InvalidArgumentError):
            TensorSpec(("batch", "n", 2), "int64", example=wrong)


def test_examples_that_are_made_are_finite_and_no_row_is_that_of_the_seed_before() -> None:
    for dtype in accel.DType:
        spec = TensorSpec(("batch", 3), dtype)
        one, other = (np.asarray(example_rows(spec, {"batch": 4}, seed), complex) for seed in (0, 1))
        assert np.isfinite(one).all()
        assert (abs(one) <= 2.2).all()
        if not spec.dtype.is_floating or spec.dtype.itemsize > 1:
            assert (one != other).any(axis=1).all(), dtype
        if spec.dtype.is_integer:
            assert (example_rows(spec, {"batch": 4}, 0, is_varied=False) == 1).all()
            assert set(one.real.flat) == {0, 1}


def test_outputs_are_cut_along_the_dimensions_that_follow_the_inputs(rng: np.random.Generator) -> None:
    shapes: Any = (
        ("batch", 16),
        ("batch", 2, "length", "length"),
        ("length", "batch"),
        (Follows("batch", 3), Follows("length", 2)),
        (2, "batch", Follows("length", 1, 1, 2)),
        (4, Follows("length", 1, 1)),
    )
    specs = OutputSpecs("tuple", tuple("012345"), shapes, (accel.DType.FLOAT32,) * 6)
    assert specs.batch_axes == (0, 0, 1, 0, 1, None)
    assert [str(dim) for dim in shapes[3] + shapes[4]] == ["3*batch", "2*length", "2", "batch", "(length+1)//2"]
    wanted = ((16,), (2, "length", "length"), ("length",), (3, Follows("length", 2)), (2, Follows("length", 1, 1, 2)), shapes[5])
    assert specs.item_shapes == wanted
    assert specs.leading(2, {"batch": 5}) == [2, 2, None, 6, None, None]
    assert specs.leading(5, {"batch": 5}) == [None] * 6
    arrays = [rng.standard_normal(each.shape).astype(np.float32) for each in specs.specs({"batch": 5, "length": 9})]
    assert [each.shape for each in arrays] == [(5, 16), (5, 2, 9, 9), (9, 5), (15, 18), (2, 5, 5), (4, 10)]
    cut = specs.cut(arrays, {"batch": 3, "length": 6})
    index: Any
    for found, array, index in zip(
        cut, arrays, [np.s_[:3], np.s_[:3, :, :6, :6], np.s_[:6, :3], np.s_[:9, :12], np.s_[:, :3, :3], np.s_[:, :7]], strict=True
    ):
        np.testing.assert_array_equal(found, array[index])
    row = specs.rows(arrays, [{"length": 4}, {"length": 9}, {"length": 3}])[2]
    for found, array, index in zip(
        row, arrays, [np.s_[2], np.s_[2, :, :3, :3], np.s_[:3, 2], np.s_[6:9, :6], np.s_[:, 2, :2], np.s_[:, :4]], strict=True
    ):
        np.testing.assert_array_equal(found, array[index])
    with pytest.raises(ValueError, match="read-only"):
        row[5][0] = 0
    assert OutputSpecs("dict", (), (), ()).rows([], [{}] * 3) == [{}] * 3


def test_results_are_put_together_as_the_model_returns_them() -> None:
    x, y = np.zeros(2), np.ones(3)
    for result in (x, (x, y), {"a": x, "b": y}):
        structure, names, arrays = flattened(result)
        specs = OutputSpecs.decoded(encoded(result))
        assert specs.structure == structure
        assert repr(specs.joined(arrays)) == repr(result)
        assert len(names) == len(arrays)
    assert flattened([x, y])[0] == "tuple"
    assert flattened({"a": x, "none": None})[1] == ("a",)
    assert flattened({"a": x, "b": "text"}, ("a",)) == ("dict", ("a",), [x])
    assert flattened((x, [y], y), ("2", "0")) == ("tuple", ("2", "0"), [y, x])
    absent: list[Any] = [{"a": x}, (x,)]
    for result in absent:
        with pytest.raises(InvalidArgumentError, match="'b'"):
            flattened(result, ("b",))
    for wrong in ("text", {"a": 3.0}, (x, [y])):
        with pytest.raises(InvalidArgumentError):
            flattened(wrong)
    with pytest.raises(InvalidArgumentError):
        encoded([x] * 20_000)
