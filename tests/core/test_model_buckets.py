"""Inputs of a model: their specs, buckets, padding, and what is cut off the outputs again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import accel
from accel import InvalidArgumentError
from accel.models import Buckets, OutputSpecs, TensorSpec
from accel.models.outputs import encoded, flattened

TOKENS = {
    "ids": TensorSpec(("batch", "length"), "int64", pad=7),
    "mask": TensorSpec(("batch", "length"), "float32"),
    "scale": TensorSpec(("batch", 3), "float32"),
}


@pytest.mark.parametrize("shape", [("length", "batch"), (0,), (-1,), (True,), ("two words",), (1.5,), ("",)])
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
        {name: buckets.array(name, value, is_item=True) for name, value in item.items()}
        for item in ({"ids": list(range(n)), "mask": np.ones(n), "scale": rng.standard_normal(3)} for n in (5, 1, 6))
    ]
    stacked = buckets.stacked(items, {"batch": 4, "length": 6})
    np.testing.assert_array_equal(stacked["ids"], [[0, 1, 2, 3, 4, 7], [0] + [7] * 5, [0, 1, 2, 3, 4, 5], [7] * 6])
    np.testing.assert_array_equal(stacked["mask"].sum(1), [5, 1, 6, 0])
    assert (stacked["mask"].dtype, stacked["scale"].shape) == (np.float32, (4, 3))


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


def outputs(sizes: dict[str, int]) -> dict[str, np.ndarray[Any, Any]]:
    batch, length = sizes["batch"], sizes["length"]
    return {
        "vector": np.zeros((batch, 16), np.float32),
        "scores": np.zeros((batch, 2, length, length), np.float16),
        "twice": np.zeros((2 * length,)),
        "odd": np.zeros((length, batch), np.int8),
    }


@pytest.mark.parametrize("sizes", [{"batch": 4, "length": 8}, {"batch": 8, "length": 8}, {"batch": 16, "length": 2}])
def test_outputs_are_cut_along_the_dimensions_that_follow_the_inputs(sizes: dict[str, int], rng: np.random.Generator) -> None:
    found = OutputSpecs.decoded(encoded(outputs(sizes)))
    for dim in sizes:
        other = {**sizes, dim: sizes[dim] + 1}
        found = found.named(sizes, OutputSpecs.decoded(encoded(outputs(other))), other)
    assert found.shapes == (("batch", 16), ("batch", 2, "length", "length"), (2 * sizes["length"],), ("length", "batch"))
    assert [spec.dtype.value for spec in found.specs(sizes)] == ["float32", "float16", "float64", "int8"]
    arrays = [rng.standard_normal(spec.shape).astype(spec.dtype.numpy) for spec in found.specs({"batch": 5, "length": 9})]
    cut = found.joined(found.cut(arrays, {"batch": 3, "length": 7}))
    np.testing.assert_array_equal(cut["scores"], arrays[1][:3, :, :7, :7])
    np.testing.assert_array_equal(cut["odd"], arrays[3][:7, :3])
    row = found.rows(arrays, [{"length": 4}] * 3)[2]
    np.testing.assert_array_equal(row["scores"], arrays[1][2, :, :4, :4])
    np.testing.assert_array_equal(row["vector"], arrays[0][2])
    assert OutputSpecs("dict", (), (), ()).rows([], [{}] * 3) == [{}] * 3


def test_outputs_that_change_their_kind_are_refused() -> None:
    one = OutputSpecs.decoded(encoded((np.zeros(3), np.zeros(2))))
    for other in (np.zeros(3), (np.zeros(3),), (np.zeros(3), np.zeros((2, 1))), (np.zeros(3), np.zeros(2, np.int8))):
        with pytest.raises(InvalidArgumentError):
            one.named({"batch": 3}, OutputSpecs.decoded(encoded(other)), {"batch": 4})


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
    for wrong in ("text", {"a": 3.0}, (x, [y])):
        with pytest.raises(InvalidArgumentError):
            flattened(wrong)
    with pytest.raises(InvalidArgumentError):
        encoded([x] * 20_000)
