"""Models in ONNX files: what they compute, what they are made from after a fault, and what is refused."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import accel
from accel import DType, Operand
from accel.backend import DeviceDescription
from accel.files.onnx import session
from accel.models.adapters.base import source_of
from accel.models.adapters.onnx import OnnxAdapter
from accel.models.onnx_inputs import input_specs
from accel.models.tensor_spec import TensorSpec
from accel.ops import Spec
from tests.device_support import bounded, failure

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Array = np.ndarray[Any, Any]
CPU = DeviceDescription("cpu", 0, "processor", "")


def saved(path: Path, nodes: Any, inputs: Any, outputs: Any, weights: Mapping[str, Array]) -> Path:
    """Write a model. Inputs and outputs are names with ONNX's dtype and shape."""
    values = [[helper.make_tensor_value_info(name, *rest) for name, *rest in each] for each in (inputs, outputs)]
    initializers = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    made = [helper.make_node(*node[:3], **(node[3] if len(node) > 3 else {})) for node in nodes]
    graph = helper.make_graph(made, "test", values[0], values[1], initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString())
    return path


def classifier(path: Path, rng: np.random.Generator) -> tuple[Path, dict[str, Array]]:
    """Write a model of one input and one output."""
    weights = {"w": rng.standard_normal((6, 4)).astype(np.float32), "b": rng.standard_normal(4).astype(np.float32)}
    nodes = [("MatMul", ["x", "w"], ["xw"]), ("Add", ["xw", "b"], ["sum"]), ("Relu", ["sum"], ["y"])]
    return saved(path, nodes, [("x", TensorProto.FLOAT, ["batch", 6])], [("y", TensorProto.FLOAT, ["batch", 4])], weights), weights


def encoder(path: Path, rng: np.random.Generator) -> tuple[Path, Array]:
    """Write a model of two inputs and two outputs."""
    table = rng.standard_normal((50, 3))
    nodes = [
        ("Gather", ["table", "ids"], ["vectors"]),
        ("Mul", ["vectors", "scale"], ["scaled"]),
        ("ReduceSum", ["scaled", "axis"], ["sums"], {"keepdims": 0}),
    ]
    inputs = [("ids", TensorProto.INT64, ["batch size", "length"]), ("scale", TensorProto.DOUBLE, [None, None, 1])]
    outputs = [("scaled", TensorProto.DOUBLE, ["a", "b", 3]), ("sums", TensorProto.DOUBLE, ["a", 3])]
    return saved(path, nodes, inputs, outputs, {"table": table, "axis": np.array([1])}), table


def specs(path: Path) -> dict[str, TensorSpec]:
    """Return what a file says of its inputs."""
    return input_specs([(each.name, each.type, each.shape) for each in session(path.read_bytes(), path, 1, optimizes=False).get_inputs()])


def operand(array: Array, *, is_output: bool = False) -> Operand:
    return Operand(array.ctypes.data, array.shape, DType.of(array.dtype), is_output, "cpu")


def opened(path: Path, **options: Any) -> Any:
    """Open a model around the bytes of its file, which is gone then."""
    adapter: Any = source_of(path, options).adapter()
    memory = {name: np.array(array) for name, array in adapter.initial(()).items()}
    path.unlink()
    adapter.open({name: operand(array) for name, array in memory.items()}, CPU, None)
    vars(adapter)["kept"] = memory
    return adapter


def test_one_output_is_an_array(rng: np.random.Generator, tmp_path: Path) -> None:
    path, weights = classifier(tmp_path / "m.onnx", rng)
    adapter = opened(path)
    for rows in (1, 7):
        x = rng.standard_normal((rows, 6)).astype(np.float32)
        y = np.full((rows, 4), np.nan, np.float32)
        adapter.store(adapter.run({"x": operand(x)}), operand(y, is_output=True))
        expected = np.maximum(x.astype(np.float64) @ weights["w"] + weights["b"], 0)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(accel.InvalidArgumentError, match="a result is"):
        adapter.store(y[:3], operand(y, is_output=True))
    adapter.warm({"x": (Spec((8, 6), DType.FLOAT32), 0.0)})
    adapter.close()


def test_several_outputs_have_their_names(rng: np.random.Generator, tmp_path: Path) -> None:
    path, table = encoder(tmp_path / "m.onnx", rng)
    adapter = opened(path, threads=2)
    ids, scale = rng.integers(0, 50, (4, 5)), rng.standard_normal((4, 5, 1))
    found = adapter.run({"ids": operand(ids), "scale": operand(scale)})
    assert list(found) == ["scaled", "sums"]
    np.testing.assert_array_equal(found["scaled"], table[ids] * scale)
    np.testing.assert_allclose(found["sums"], (table[ids] * scale).sum(axis=1), rtol=1e-12, atol=1e-12)


def test_a_file_says_its_inputs(rng: np.random.Generator, tmp_path: Path) -> None:
    assert specs(classifier(tmp_path / "a.onnx", rng)[0]) == {"x": TensorSpec(("batch", 6), "float32")}
    cases: list[tuple[dict[str, list[Any]], dict[str, tuple[Any, ...]]]] = [
        ({"a": ["N", "sequence length"], "b": ["N", 3]}, {"a": ("batch", "sequence_length"), "b": ("batch", 3)}),
        ({"a": ["N", "N"]}, {"a": ("N", "N")}),
        ({"a": ["N"], "b": ["M"]}, {"a": ("N",), "b": ("M",)}),
        ({"a": ["N"], "b": []}, {"a": ("N",), "b": ()}),
        ({"a": ["length", "batch"]}, {"a": ("length", "batch")}),
        ({"a": ["seq", "Batch Size"], "b": ["batch_size", "seq"]}, {"a": ("seq", "batch"), "b": ("batch", "seq")}),
        ({"a": ["seq", "B"], "b": [3, "B"]}, {"a": ("seq", "batch"), "b": (3, "batch")}),
        ({"a": ["batch_size", 3], "b": ["N", 3], "c": [None, 2]}, {"a": ("batch", 3), "b": ("batch", 3), "c": ("batch", 2)}),
        ({"a": ["batch_size", "N"], "b": ["N", 3]}, {"a": ("batch", "N"), "b": ("N", 3)}),
        ({"a": ["N", 2], "b": ["B", 2]}, {"a": ("N", 2), "b": ("B", 2)}),
        ({"a": [None, 2], "b": [None, 2]}, {"a": ("a_0", 2), "b": ("b_0", 2)}),
        (
            {"a": ["b", "len.1"], "b": ["b", "len-1"], "c": ["b", "len_1"]},
            {"a": ("batch", "len_1"), "b": ("batch", "len_1_2"), "c": ("batch", "len_1_3")},
        ),
        ({"a": ["x", "batch", "batch_size"]}, {"a": ("x", "batch", "batch_size")}),
        ({"a": [4, None, "2d"]}, {"a": (4, "a_1", "dim_2d")}),
        ({"in.0": [None, 2]}, {"in.0": ("batch", 2)}),
    ]
    for given, expected in cases:
        inputs = [(name, TensorProto.INT32, shape) for name, shape in given.items()]
        path = saved(
            tmp_path / "b.onnx",
            [("Identity", [next(iter(given))], ["y"])],
            inputs,
            [("y", TensorProto.INT32, next(iter(given.values())))],
            {},
        )
        assert specs(path) == {name: TensorSpec(shape, "int32") for name, shape in expected.items()}


def test_what_cannot_run_is_refused_with_the_reason(rng: np.random.Generator, tmp_path: Path) -> None:
    path, _ = classifier(tmp_path / "m.onnx", rng)
    data = np.frombuffer(path.read_bytes(), np.uint8)
    with pytest.raises(accel.UnsupportedError, match="CUDAExecutionProvider"):
        source_of(path, {"providers": ["CUDAExecutionProvider", "CPUExecutionProvider"]}).adapter()
    for threads in (0, 1.0):
        with pytest.raises(accel.InvalidArgumentError, match="threads"):
            source_of(path, {"threads": threads}).adapter()
    adapter = source_of(path).adapter()
    with pytest.raises(accel.UnsupportedError, match="cuda:0"):
        adapter.open({"model.onnx": operand(data)}, DeviceDescription("cuda", 0, "gpu", ""), None)
    with pytest.raises(accel.InvalidArgumentError, match="'w'"):
        adapter.open({"w": operand(data)}, CPU, None)
    for invalid in (rng.integers(0, 256, 100, np.uint8), data[:-20].copy(), np.zeros(0, np.uint8)):
        with pytest.raises(accel.InvalidArgumentError, match="ONNX Runtime does not take"):
            adapter.open({"model.onnx": operand(invalid)}, CPU, None)
    with pytest.raises(accel.InvalidArgumentError, match="cannot be read"):
        OnnxAdapter(tmp_path / "absent.onnx").initial(())


def test_inputs_that_numpy_does_not_know_are_refused_by_name(tmp_path: Path) -> None:
    for dtype, text in ((TensorProto.BFLOAT16, "tensor\\(bfloat16\\)"), (TensorProto.STRING, "tensor\\(string\\)")):
        path = saved(tmp_path / "m.onnx", [("Identity", ["x"], ["y"])], [("x", dtype, ["n"])], [("y", dtype, ["n"])], {})
        with pytest.raises(accel.UnsupportedError, match=text):
            specs(path)
        with pytest.raises(accel.UnsupportedError, match=text):
            opened(path)


async def test_a_device_serves_a_file_that_says_its_inputs(rng: np.random.Generator, tmp_path: Path) -> None:
    path, weights = classifier(tmp_path / "m.onnx", rng)
    x = rng.standard_normal((7, 6)).astype(np.float32)
    expected = np.maximum(x.astype(np.float64) @ weights["w"] + weights["b"], 0)
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process")
        model = await device.load_model(path, buckets={"batch": (2, 4)})
        path.unlink()
        assert model.inputs == {"x": accel.TensorSpec(("batch", 6), "float32")}
        for generation in (1, 2):
            np.testing.assert_allclose(await model.numpy(x), expected, rtol=1e-5, atol=1e-5)
            assert device.generation == generation
            pid = device.info().pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await bounded(until_generation(device, generation + 1))


async def until_generation(device: accel.Device, number: int) -> None:
    async for generation in device.generations():
        if generation >= number:
            return


def test_onnx_runtime_starts_nothing_that_reports_to_a_server() -> None:
    code = "import os, accel.files.onnx; print(len(os.listdir('/proc/self/task')))"
    env = {name: value for name, value in os.environ.items() if name not in ("ORT_DISABLE_TELEMETRY", "CI")}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**env, "OPENBLAS_NUM_THREADS": "1"}, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == 1, "a thread besides the main one"


async def test_files_with_the_batch_in_the_middle_are_served(device: accel.Device, rng: np.random.Generator, tmp_path: Path) -> None:
    """As recurrent networks of torch are exported: the sequence comes first."""
    weights = {
        "w": rng.standard_normal((1, 9, 2)).astype(np.float32),
        "r": rng.standard_normal((1, 9, 3)).astype(np.float32),
        "b": rng.standard_normal((1, 18)).astype(np.float32),
    }
    path = saved(
        tmp_path / "gru.onnx",
        [("GRU", ["x", "w", "r", "b"], ["sequence", "state"], {"hidden_size": 3})],
        [("x", TensorProto.FLOAT, ["seq", "batch", 2])],
        [("sequence", TensorProto.FLOAT, ["seq", 1, "batch", 3]), ("state", TensorProto.FLOAT, [1, "batch", 3])],
        weights,
    )
    model = await device.load_model(path, options={"threads": 1})
    assert model.inputs["x"].shape == ("seq", "batch", 2)
    assert model.outputs.shapes == (("seq", 1, "batch", 3), (1, "batch", 3))
    items = [rng.standard_normal((5, 2)).astype(np.float32) for _ in range(3)]
    async with accel.serve(model, max_delay=0.2, max_items=3) as service:
        answers = await bounded(asyncio.gather(*map(service.submit, items)))
    for item, answer in zip(items, answers, strict=True):
        alone = await model.numpy(item[:, None])
        np.testing.assert_allclose(answer["sequence"], alone["sequence"][:, :, 0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(answer["state"], alone["state"][:, 0], rtol=1e-5, atol=1e-6)


async def test_names_of_dimensions_are_what_the_file_means(device: accel.Device, tmp_path: Path) -> None:
    """Two names for one batch, names that differ in punctuation only, and dimensions that are said to differ and do not."""
    float_ = TensorProto.FLOAT
    two = saved(
        tmp_path / "a.onnx",
        [("Add", ["x", "y"], ["z"])],
        [("x", float_, ["batch_size", 3]), ("y", float_, ["N", 3])],
        [("z", float_, ["batch_size", 3])],
        {},
    )
    model = await device.load_model(two)
    assert model.outputs.shapes == (("batch", 3),)
    apart = saved(
        tmp_path / "b.onnx",
        [("Relu", ["x"], ["u"]), ("Relu", ["y"], ["v"])],
        [("x", float_, ["b", "len.1"]), ("y", float_, ["b", "len-1"])],
        [("u", float_, ["b", "len.1"]), ("v", float_, ["b", "len-1"])],
        {},
    )
    model = await device.load_model(apart)
    found = await model.numpy(np.ones((2, 3), np.float32), np.ones((2, 5), np.float32))
    assert {name: each.shape for name, each in found.items()} == {"u": (2, 3), "v": (2, 5)}
    same = saved(
        tmp_path / "c.onnx",
        [("Add", ["x", "y"], ["z"])],
        [("x", float_, ["batch", "left"]), ("y", float_, ["batch", "right"])],
        [("z", float_, ["batch", "left"])],
        {},
    )
    error = await failure(device.load_model(same), accel.LibraryError)
    assert "one name to what has one length" in (error.remedy or "")
    spec = accel.TensorSpec(("batch", "length"), "float32")
    assert (await device.load_model(same, inputs={"x": spec, "y": spec})).outputs.shapes == (("batch", "length"),)
    wrong = await failure(device.load_model(same, inputs={"x": spec, "other": spec}), accel.InvalidArgumentError)
    assert "x, y" in wrong.message


async def test_divisors_shapes_and_axes_are_no_zeros_when_a_file_is_tried(device: accel.Device, tmp_path: Path) -> None:
    int_ = TensorProto.INT64
    path = saved(
        tmp_path / "m.onnx",
        [("Div", ["x", "by"], ["quotient"]), ("ReduceSum", ["quotient", "axes"], ["total"], {"keepdims": 0})],
        [("x", int_, ["batch", 3]), ("by", int_, ["batch", 3]), ("axes", int_, [1])],
        [("quotient", int_, ["batch", 3]), ("total", int_, ["batch"])],
        {},
    )
    reshaping = saved(
        tmp_path / "r.onnx",
        [("Reshape", ["x", "shape"], ["y"])],
        [("x", int_, ["batch", 6]), ("shape", int_, [3])],
        [("y", int_, ["batch", None, None])],
        {},
    )
    for buckets in (None, {"batch": (1, 4)}):
        model = await device.load_model(path, buckets=buckets)
        assert model.outputs.shapes == (("batch", 3), ("batch",))
        x = np.arange(12).reshape(4, 3)
        found = await model.numpy(x, np.full((4, 3), 2), [1])
        np.testing.assert_array_equal(found["total"], (x // 2).sum(1))
    inputs = {"x": accel.TensorSpec(("batch", 6), "int64"), "shape": accel.TensorSpec((3,), "int64", example=[-1, 2, 3])}
    model = await device.load_model(reshaping, inputs=inputs)
    assert model.outputs.shapes == (("batch", 2, 3),)
    np.testing.assert_array_equal(await model.numpy([[0, 1, 2, 3, 4, 5]], [-1, 2, 3]), [[[0, 1, 2], [3, 4, 5]]])
