"""Files from outside: what they declare takes no memory of the service, they name no other file, and what parses them may die. Valid oddities are loaded."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pickle
import resource
import struct
import time
import zipfile
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import accel
from accel.actors import ActorSystem
from accel.files import description, state_dict, strided
from accel.files import onnx as onnx_format
from accel.files.description import describe
from accel.files.growth import limit_private_memory
from accel.files.messages import Kind
from accel.files.onnx import session
from accel.files.regular_file import RegularFile
from accel.files.stored_tensor import StoredTensor
from accel.models import versions
from accel.models.weights import load_weights
from accel.process.child import ChildProcess
from accel.process.protocol import ProtocolError
from tests.child_support import no_child_left, received, until_so
from tests.device_support import bounded, failure, opened, task, used

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["no_child_left"]

pytestmark = pytest.mark.usefixtures("nothing_left", "no_child_left")

PROGRAMS = "tests.describing_programs:"
FLOAT = TensorProto.FLOAT
value = helper.make_tensor_value_info
ADD = helper.make_node("Add", ["x", "w"], ["y"])


def model(*nodes: Any, shape: Any = ("batch", 4), initializers: Any = (), sparse: Any = (), functions: Any = ()) -> Any:
    """Return an ONNX model of one input and one output."""
    graph = helper.make_graph(
        list(nodes) or [helper.make_node("Identity", ["x"], ["y"])],
        "test",
        [value("x", FLOAT, list(shape))],
        [value("y", FLOAT, None)],
        list(initializers),
        sparse_initializer=list(sparse),
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8, functions=list(functions))


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def safetensors_file(path: Path, header: dict[str, Any], data: bytes = b"") -> Path:
    text = json.dumps(header).encode()
    return written(path, len(text).to_bytes(8, "little") + text + data)


class Peak:
    """How much more memory this process had at once, while the block ran, than before."""

    def __enter__(self) -> Self:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak begins anew
        self._before = self._read("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.nbytes = self._read("VmHWM") - self._before

    @staticmethod
    def _read(name: str) -> int:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))


def wide_input(folder: Path) -> Path:
    return written(folder / "wide.onnx", model(shape=["batch", 1 << 28]).SerializeToString())


def sparse_initializer(folder: Path) -> Path:
    parts = numpy_helper.from_array(np.ones(1, "f4"), "w"), numpy_helper.from_array(np.zeros(1, "i8"), "places")
    node = helper.make_node("Add", ["x", "w"], ["y"])
    return written(folder / "sparse.onnx", model(node, sparse=[helper.make_sparse_tensor(*parts, [1, 1 << 29])]).SerializeToString())


def expanded_tensor(folder: Path) -> Path:
    torch.save({"weight": torch.ones(1).expand(1 << 14, 1 << 14)}, folder / "expanded.pt")
    return folder / "expanded.pt"


def sparse_file(folder: Path) -> Path:
    """Write a file of 1 TiB that takes a few KiB of the disk."""
    path = safetensors_file(folder / "hole.safetensors", {"a": {"dtype": "U8", "shape": [1 << 40], "data_offsets": [0, 1 << 40]}})
    os.truncate(path, path.stat().st_size + (1 << 40))
    return path


def long_header(folder: Path) -> Path:
    """Write a header of 6 MB, which takes 20 times as much as objects of Python."""
    text = b'{"a":[' + b"[]," * 2_000_000 + b"[]]}"
    return written(folder / "long.safetensors", len(text).to_bytes(8, "little") + text)


def far_memo(folder: Path) -> Path:
    """Write a pickle of a few bytes for which Python's reader takes 16 GiB."""
    path = folder / "memo.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02Nr" + struct.pack("<I", 1 << 30) + b".")
    return path


DECLARED = [
    (wide_input, accel.OutOfMemoryError),
    (sparse_initializer, accel.InvalidArgumentError),
    (expanded_tensor, accel.OutOfMemoryError),
    (sparse_file, accel.OutOfMemoryError),
    (long_header, accel.OutOfMemoryError),
    (far_memo, accel.OutOfMemoryError),
]


@pytest.mark.parametrize(("make", "kind"), DECLARED, ids=lambda each: each.__name__)
async def test_what_a_file_declares_takes_no_memory_of_the_service(
    make: Callable[[Path], Path], kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(description, "_TARGET", PROGRAMS + "has_little_room")
    path = make(tmp_path)
    async with opened(memory_limit=64 << 20) as device:
        with Peak() as peak:
            if path.suffix == ".onnx":
                await failure(device.load_model(path, buckets={"batch": (1, 4)}), kind)
            else:
                await failure(load_weights(device, path, system=device._core.system), kind)
        assert peak.nbytes < 48 << 20
        assert used(device) == 0


async def test_without_a_limit_the_memory_of_the_machine_bounds_what_a_file_declares(
    device: accel.Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "memory_size", lambda: 1 << 30)
    with Peak() as peak:
        error = await failure(device.load_model(wide_input(tmp_path)), accel.OutOfMemoryError)
    assert (error.limit, error.requested) == (1 << 28, 2 << 30)
    assert peak.nbytes < 48 << 20


@pytest.mark.parametrize("suffix", [".onnx", ".safetensors", ".pt", ".safetensors.index.json"])
async def test_a_file_that_is_none_is_refused_and_not_waited_for(suffix: str, tmp_path: Path) -> None:
    os.symlink("/dev/zero", tmp_path / f"endless{suffix}")
    os.mkfifo(tmp_path / f"pipe{suffix}")
    for name in ("endless", "pipe"):
        with pytest.raises(accel.InvalidArgumentError, match="no regular file"):
            RegularFile(tmp_path / f"{name}{suffix}")
    async with ActorSystem() as system:
        error = await failure(describe(system, [tmp_path / f"endless{suffix}"]), accel.InvalidArgumentError)
    assert "no regular file" in str(error)


def test_no_more_is_read_than_a_file_had(tmp_path: Path) -> None:
    path = written(tmp_path / "grows", b"abc")
    file = RegularFile(path)
    written(path, b"abcdef")
    assert (file.size, bytes(file.read(0, 3))) == (3, b"abc")
    os.truncate(path, 1)
    with pytest.raises(accel.InvalidArgumentError, match="truncated"):
        file.read(0, 3)


async def test_a_graph_that_computes_too_much_fails_in_the_child_and_costs_it_nothing(tmp_path: Path) -> None:
    """Neither the device nor the service notices: without a limit the kernel would have to end one of the two."""
    node = helper.make_node("ConstantOfShape", ["shape"], ["w"])
    large, small = [model(node, ADD, initializers=[numpy_helper.from_array(np.array([length, 4]), "shape")]) for length in (1 << 27, 1)]
    limited: dict[str, Any] = {"options": {"memory_limit": 256 << 20}}
    async with opened(host="process") as device:
        error = await failure(device.load_model(written(tmp_path / "l.onnx", large.SerializeToString()), **limited), accel.LibraryError)
        assert not error.is_fault
        found = await bounded(device.load_model(written(tmp_path / "s.onnx", small.SerializeToString()), **limited))
        np.testing.assert_array_equal(await found.numpy(np.ones((2, 4))), np.ones((2, 4)))
        assert device.generation == 1
    async with opened(host="inline") as device:
        await failure(device.load_model(tmp_path / "s.onnx", **limited), accel.UnsupportedError)


# -- data in other files


def outside(name: str, location: str, **entries: str) -> onnx.TensorProto:
    tensor = numpy_helper.from_array(np.zeros(4, "f4"), name)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, text in {"location": location, **entries}.items():
        tensor.external_data.add(key=key, value=text)
    return tensor


def in_a_branch() -> Any:
    branch = helper.make_graph([helper.make_node("Identity", ["w"], ["z"])], "b", [], [value("z", FLOAT, [4])], [outside("w", "data")])
    choice = numpy_helper.from_array(np.array(True), "choice")
    return model(helper.make_node("If", ["choice"], ["y"], then_branch=branch, else_branch=branch), initializers=[choice])


def in_a_function() -> Any:
    body = helper.make_node("Constant", [], ["f"], value=outside("w", "data"))
    function = helper.make_function("own", "F", [], ["f"], [body], [helper.make_opsetid("", 17)])
    made = model(helper.make_node("F", [], ["w"], domain="own"), helper.make_node("Add", ["x", "w"], ["y"]), functions=[function])
    made.opset_import.append(helper.make_opsetid("own", 1))
    return made


def only_located() -> Any:
    tensor = outside("w", "data")
    del tensor.external_data[:]
    return model(helper.make_node("Add", ["x", "w"], ["y"]), initializers=[tensor])


ELSEWHERE: dict[str, Callable[[], Any]] = {
    "initializer": lambda: model(ADD, initializers=[outside("w", "data")]),
    "absolute": lambda: model(ADD, initializers=[outside("w", "/etc/hostname", offset="0", length="16")]),
    "above": lambda: model(ADD, initializers=[outside("w", "../../data")]),
    "memory": lambda: model(ADD, initializers=[outside("w", "*/_ORT_MEM_ADDR_/*", offset="4096", length="16")]),
    "constant": lambda: model(helper.make_node("Constant", [], ["w"], value=outside("w", "data")), ADD),
    "branch": in_a_branch,
    "function": in_a_function,
    "located": only_located,
    "sparse": lambda: model(ADD, sparse=[helper.make_sparse_tensor(outside("w", "data"), numpy_helper.from_array(np.arange(4), "i"), [4])]),
}


@pytest.mark.parametrize("where", ELSEWHERE)
def test_data_in_other_files_is_refused_wherever_it_is_named(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "data", np.full(4, 100, "f4").tobytes())
    monkeypatch.chdir(tmp_path)
    with pytest.raises(accel.InvalidArgumentError, match="data in other files"):
        session(ELSEWHERE[where]().SerializeToString(), tmp_path / "m.onnx", 1)


def test_a_field_whose_number_is_written_with_bits_too_many_is_seen() -> None:
    """Some readers of protocol buffers cut the number of a field to 32 bits."""
    located = b"\xf0\x80\x80\x80\x10\x01"
    assert any(onnx_format._elsewhere(memoryview(located), "tensor", 0))
    assert not any(onnx_format._elsewhere(memoryview(located), "node", 0))


async def test_a_file_beside_is_not_read_whatever_the_working_directory(
    device: accel.Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = model(ADD, initializers=[numpy_helper.from_array(np.ones(4, "f4"), "w")])
    onnx.save(made, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=1)
    monkeypatch.chdir(tmp_path)
    assert "data in other files" in str(await failure(device.load_model("m.onnx"), accel.InvalidArgumentError))


def test_damaged_protocol_buffers_are_refused_or_taken(rng: np.random.Generator, tmp_path: Path) -> None:
    good = model(ADD, initializers=[numpy_helper.from_array(np.ones(4, "f4"), "w")]).SerializeToString()
    taken = 0
    for _ in range(200):
        data = bytearray(good)
        for place in rng.integers(len(data), size=2):
            data[place] = rng.integers(256)
        try:
            session(bytes(data[: rng.integers(len(data) // 2, 2 * len(data))]), tmp_path / "m.onnx", 1, optimizes=False)
            taken += 1
        except accel.InvalidArgumentError:
            continue
    print(f"{taken} of 200 were taken")


# -- valid oddities


async def test_valid_oddities_of_safetensors_are_loaded(device: accel.Device, rng: np.random.Generator, tmp_path: Path) -> None:
    values = rng.standard_normal(2).astype(np.float32)
    header = {
        "__metadata__": None,
        "deep": {"dtype": "F32", "shape": [1] * 32 + [2], "data_offsets": [0, 8]},
        "deepest": {"dtype": "U8", "shape": [1] * 64, "data_offsets": [8, 9]},
        "empty": {"dtype": "F64", "shape": [3, 0, 1 << 40], "data_offsets": [9, 9]},
        "none": {"dtype": "BOOL", "shape": [0], "data_offsets": [0, 0]},
    }
    path = safetensors_file(tmp_path / "odd.safetensors", header, values.tobytes() + b"\7")
    refs = await load_weights(device, path, system=device._core.system)
    found = {name: await device.get(ref) for name, ref in refs.items()}
    assert {name: (array.shape, str(array.dtype)) for name, array in found.items()} == {
        "deep": ((1,) * 32 + (2,), "float32"),
        "deepest": ((1,) * 64, "uint8"),
        "empty": ((3, 0, 1 << 40), "float64"),
        "none": ((0,), "bool"),
    }
    assert found["deep"].tobytes() == values.tobytes()


class Tagged(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(3, 4).t())
        self.tied = self.weight


async def test_state_dicts_of_any_layout_are_loaded(device: accel.Device, rng: np.random.Generator, tmp_path: Path) -> None:
    base = torch.from_numpy(rng.standard_normal((6, 5)))
    tagged = base[0].clone()
    tagged.note = "an attribute"  # type: ignore[attr-defined]
    tensors: dict[str, Any] = {
        **Tagged().state_dict(),
        "transposed": base.t(),
        "part": base[1:5:2, 2],
        "channels": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded": base[:1, :1].expand(3, 4),
        "empty": base[:0].t(),
        "tagged": tagged,
        "parameter": torch.nn.Parameter(base[2]),
        **{name: base.abs().to(getattr(torch, name)) for name in ("uint16", "uint32", "float8_e5m2", "complex128", "bool")},
        "step": 3,
        "rate": 0.5,
    }
    torch.save(tensors, tmp_path / "m.pt")
    refs = await load_weights(device, tmp_path / "m.pt", system=device._core.system)
    assert refs["weight"] is refs["tied"]
    for name, given in tensors.items():
        expected = given.detach().contiguous() if isinstance(given, torch.Tensor) else torch.tensor(given, dtype=torch.float64)
        found = await device.get(refs[name])
        assert found.shape == tuple(expected.shape), name
        assert found.astype(np.float64 if name in ("step", "rate") else found.dtype).tobytes() == bytes(
            expected.reshape(-1).view(torch.uint8).numpy()
        ), name


def test_parts_of_tensors_of_any_strides_are_gathered(rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strided, "_SMALL", 100)
    monkeypatch.setattr(strided, "_WINDOW", 1000)
    data = rng.integers(0, 256, 40_000, np.uint8)
    file = RegularFile(written(tmp_path / "data", data.tobytes()))
    for _ in range(200):
        shape = tuple(map(int, rng.integers(1, 9, rng.integers(1, 5))))
        order = rng.permutation(len(shape))
        strides, step = [0] * len(shape), int(rng.integers(1, 3))
        for axis in order:
            strides[axis] = int(step * rng.integers(0, 3)) if rng.random() < 0.3 else step
            step = max(step, strides[axis]) * shape[axis]
        begin = int(rng.integers(0, 8))
        stored = StoredTensor(shape, accel.DType.INT16, begin, tuple(strides))
        if stored.end > file.size:
            continue
        view = np.lib.stride_tricks.as_strided(
            data[begin : begin + (file.size - begin) // 2 * 2].view(np.int16), shape, [2 * each for each in strides]
        )
        expected = np.ascontiguousarray(view).tobytes()
        start, end = sorted(map(int, rng.integers(0, len(expected) + 1, 2)))
        out = bytearray(end - start)
        strided.gather(file, stored, start, memoryview(out))
        assert out == expected[start:end], (shape, strides, start, end)


def test_a_large_transposed_tensor_is_gathered_in_a_moment(rng: np.random.Generator, tmp_path: Path) -> None:
    values = rng.random((1500, 2000), np.float32)
    file = RegularFile(written(tmp_path / "data", values.tobytes()))
    out = bytearray(4 << 20)
    strided.gather(file, StoredTensor((2000, 1500), accel.DType.FLOAT32, 0, (1, 2000)), 1 << 20, memoryview(out))
    assert out == np.ascontiguousarray(values.T).tobytes()[1 << 20 : 5 << 20]
    os.truncate(tmp_path / "data", 100)  # a mapping of the file would end the process
    with pytest.raises(accel.InvalidArgumentError, match="truncated"):
        strided.gather(file, StoredTensor((2000, 1500), accel.DType.FLOAT32, 0, (1, 2000)), 1 << 20, memoryview(out))


# -- hostile pickles


class Codes:
    """Is pickled as what is called so, or as a call of it with arguments."""

    def __init__(self, name: str, *arguments: Any) -> None:
        self.name, self.arguments = name, arguments


class Storage:
    """Is pickled as a reference to the elements in the archive."""


# The one that is written in Python.
PythonPickler: Any = pickle._Pickler


class Pickler(PythonPickler):  # type: ignore[misc]
    def save(self, value: Any, save_persistent_id: bool = True) -> None:
        if isinstance(value, Codes):
            module, _, name = value.name.rpartition(".")
            self.write(f"c{module}\n{name}\n".encode())
            if value.arguments != (None,):
                super().save(value.arguments)
                self.write(b"R")
        elif isinstance(value, Storage):
            super().save(("storage", named("torch.FloatStorage"), "0", "cpu", 4))
            self.write(b"Q")
        else:
            super().save(value, save_persistent_id)


def named(name: str) -> Codes:
    return Codes(name, None)


STORAGE = Storage()
HOOKS: OrderedDict[str, Any] = OrderedDict()


def archive(path: Path, content: Any, *, compression: int = zipfile.ZIP_STORED, order: bytes = b"little") -> Path:
    buffer = io.BytesIO()
    Pickler(buffer, 2).dump(content)
    with zipfile.ZipFile(path, "w", compression) as made:
        made.writestr("m/data.pkl", buffer.getvalue())
        made.writestr("m/byteorder", order)
        made.writestr("m/data/0", np.arange(4, dtype="f4").tobytes())
    return path


def tensor(offset: Any = 0, shape: Any = (4,), strides: Any = (1,), storage: Any = STORAGE, *rest: Any) -> Codes:
    return Codes("torch._utils._rebuild_tensor_v2", storage, offset, shape, strides, False, HOOKS, *rest)


def test_the_archive_of_these_tests_is_valid(tmp_path: Path) -> None:
    found = state_dict.stored_in(RegularFile(archive(tmp_path / "a.pt", {"a": tensor(), "b": tensor(1, (3,), (1,))})))
    assert {name: (each.shape, each.end - each.start) for name, each in found.items()} == {"a": ((4,), 16), "b": ((3,), 12)}  # type: ignore[union-attr]


WRONG: dict[str, Any] = {
    "code": {"a": Codes("os.system", "true")},
    "eval": {"a": Codes("builtins.eval", "1")},
    "torch": {"a": Codes("torch.load", "x")},
    "nested": {"a": {"b": tensor()}},
    "list": [tensor()],
    "name": {3: tensor()},
    "beyond": {"a": tensor(1)},
    "long": {"a": tensor(0, (5,))},
    "stride": {"a": tensor(0, (2,), (4,))},
    "negative stride": {"a": tensor(3, (2,), (-1,))},
    "negative": {"a": tensor(0, (-4,))},
    "offset": {"a": tensor(-1)},
    "ranks": {"a": tensor(0, (2, 2), (1,))},
    "huge": {"a": tensor(0, (1 << 70,), (0,))},
    "dimensions": {"a": tensor(0, (1,) * 65, (1,) * 65)},
    "float": {"a": tensor(0, (4.0,))},
    "storage": {"a": tensor(0, (4,), (1,), 7)},
    "conjugate": {"a": tensor(0, (4,), (1,), STORAGE, {"conj": True})},
    "dtype": {"a": Codes("torch._utils._rebuild_tensor_v3", STORAGE, 0, (4,), (1,), False, HOOKS, named("torch.qint8"))},
    "class": {"a": named("torch.Tensor")},
}


@pytest.mark.parametrize("what", WRONG)
def test_a_hostile_state_dict_is_refused(what: str, tmp_path: Path) -> None:
    path = archive(tmp_path / "a.pt", WRONG[what])
    with pytest.raises(accel.InvalidArgumentError, match="is not a state dict of tensors"):
        state_dict.stored_in(RegularFile(path))


def test_a_compressed_or_foreign_archive_is_refused(tmp_path: Path) -> None:
    for options in ({"compression": zipfile.ZIP_DEFLATED}, {"order": b"big"}):
        with pytest.raises(accel.InvalidArgumentError, match="is not a state dict of tensors"):
            state_dict.stored_in(RegularFile(archive(tmp_path / "a.pt", {"a": tensor()}, **options)))


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Let this process take 64 MiB more at most, as the one that parses files has a limit."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    limit_private_memory(64 << 20)
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)


@pytest.mark.usefixtures("little_memory")
def test_damaged_state_dicts_are_refused_or_read_in_their_bounds(rng: np.random.Generator, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3, 4).t(), "b": torch.zeros(5)}, tmp_path / "m.pt")
    good = (tmp_path / "m.pt").read_bytes()
    for _ in range(300):
        data = bytearray(good)
        for place in rng.integers(len(data), size=3):
            data[place] = rng.integers(256)
        file = RegularFile(written(tmp_path / "d.pt", bytes(data)))
        try:
            found = state_dict.stored_in(file)
        except (accel.InvalidArgumentError, MemoryError):
            continue
        assert all(isinstance(each, (int, float, complex)) or each.end <= file.size for each in found.values())


# -- the process that parses


@pytest.mark.parametrize("program", ["dies", "babbles", "ends", "raises"])
async def test_a_file_that_ends_what_parses_it_is_refused(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(description, "_TARGET", PROGRAMS + program)
    async with ActorSystem() as system:
        with pytest.raises(accel.AccelError) as caught:
            await bounded(describe(system, [tmp_path / "a.pt"]))
    assert isinstance(caught.value, ProtocolError if program == "babbles" else accel.InvalidArgumentError)


async def test_a_file_that_is_parsed_without_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(description, "_TARGET", PROGRAMS + "hangs")
    monkeypatch.setattr(description, "_TIMEOUT", 0.5)
    async with ActorSystem() as system:
        assert "within 0.5 s" in str(await failure(describe(system, [tmp_path / "a.pt"]), accel.InvalidArgumentError))


async def test_a_child_may_have_files_described_too(tmp_path: Path) -> None:
    path = safetensors_file(tmp_path / "m.safetensors", {"within": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}}, b"abc")
    async with ActorSystem() as system:
        child = await ChildProcess.start(system, PROGRAMS + "describes", env={"ACCEL_TEST_MARK": str(path)})
        assert await bounded(received(child)) == b"within"
        await child.aclose(grace=5.0)


async def test_a_description_that_is_cancelled_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(description, "_TARGET", PROGRAMS + "hangs")
    mark = tmp_path / "hangs"
    monkeypatch.setenv("ACCEL_TEST_MARK", str(mark))
    async with ActorSystem() as system:
        describing = task(describe(system, [tmp_path / "a.pt"]))
        await until_so(mark.exists)
        describing.cancel()
        begun = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await bounded(describing)
        assert time.monotonic() - begun < 5


ANSWERS: list[tuple[Kind, Any]] = [
    (Kind.FILE, ["/etc/passwd", [1, 2, 3, 4]]),
    (Kind.FILE, ["PATH", [1, 2, 3]]),
    (Kind.FILE, ["PATH", [1, 2, -3, 4]]),
    (Kind.FILE, 3),
    (Kind.TENSOR, []),
    (Kind.TENSOR, [7, "a", "uint8", [1], 0, None]),
    (Kind.TENSOR, [-1, "a", "uint8", [1], 0, None]),
    (Kind.TENSOR, [0, 3, "uint8", [1], 0, None]),
    (Kind.TENSOR, [0, "a", "object", [1], 0, None]),
    (Kind.TENSOR, [0, "a", "uint8", [11], 0, None]),
    (Kind.TENSOR, [0, "a", "uint8", [1], 10, None]),
    (Kind.TENSOR, [0, "a", "uint8", [1], -1, None]),
    (Kind.TENSOR, [0, "a", "uint8", [True], 0, None]),
    (Kind.TENSOR, [0, "a", "uint8", [1] * 65, 0, None]),
    (Kind.TENSOR, [0, "a", "uint8", [1 << 40, 1 << 40], 0, [0, 0]]),
    (Kind.TENSOR, [0, "a", "uint8", [2], 0, [10]]),
    (Kind.TENSOR, [0, "a", "uint8", [2], 0, [-1]]),
    (Kind.TENSOR, [0, "a", "uint8", [2], 0, [1, 1]]),
    (Kind.NUMBER, [0, "a", "text"]),
    (Kind.NUMBER, [0, "a", [1]]),
    (Kind.INPUTS, [0, [["x", "tensor(float)", [[]]]]]),
    (Kind.INPUTS, [0, [["x", 3, [1]]]]),
    (Kind.INPUTS, [0, 3]),
    (Kind.DESCRIBE, [0, "a"]),
]


@pytest.mark.parametrize(("kind", "content"), ANSWERS, ids=str)
async def test_what_the_process_says_is_checked(kind: Kind, content: Any, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    answer = description._Answer([path])
    answer.received(Kind.FILE, json.dumps([str(path), [1, 2, 10, 4]]).encode(), [])
    answer.received(Kind.TENSOR, json.dumps([0, "good", "uint8", [10], 0, None]).encode(), [])
    text = json.dumps(content).replace("PATH", str(path))
    with pytest.raises(ProtocolError):
        answer.received(kind, text.encode(), [])


async def test_a_file_that_is_replaced_while_it_is_loaded_is_an_error(device: accel.Device, tmp_path: Path) -> None:
    header = {"a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}}
    path = safetensors_file(tmp_path / "m.safetensors", header, b"abc")

    def replace(done: int, total: int) -> None:
        if not done:
            safetensors_file(tmp_path / "other", header, b"xyz").replace(path)

    error = await failure(load_weights(device, path, system=device._core.system, on_progress=replace), accel.InvalidArgumentError)
    assert "was changed" in str(error)
    assert used(device) == 0
