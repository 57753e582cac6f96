"""Weights of models: what is in files, state dicts and mappings is on the device, bit for bit, also after a fault; a hostile file is an error."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import random
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import safetensors
import safetensors.torch
import torch

import accel
from accel.files import safetensors as safetensors_format
from accel.files.regular_file import RegularFile
from accel.models import weights
from accel.models.weights import load_weights
from accel.ops import Checksum
from accel.testing import FaultPlan
from tests.device_support import bounded, cancelled, failure, generation, opened, task, until, used
from tests.durable_support import wild_write

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("nothing_left")

Array = np.ndarray[Any, Any]

TORCH_DTYPES = {
    **{name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")},
    **{name: getattr(torch, name) for name in ("int8", "int16", "int32", "int64", "uint8", "bool", "complex64")},
}


async def load(device: Any, source: Any, **options: Any) -> dict[str, accel.AccelRef]:
    return await load_weights(device, source, system=device._core.system, **options)


def some_tensors(rng: np.random.Generator) -> dict[str, torch.Tensor]:
    """Return a tensor of random bits of each dtype, and a few of unusual shapes."""
    found = {}
    for name, dtype in TORCH_DTYPES.items():
        nbytes = 15 * dtype.itemsize
        bits = torch.from_numpy(rng.integers(0, 2 if name == "bool" else 256, nbytes, np.uint8))
        found[name] = bits.view(dtype).reshape(3, 5)
    found["scalar"] = torch.tensor(rng.standard_normal())
    found["empty"] = torch.zeros((3, 0, 2), dtype=torch.bfloat16)
    found["odd"] = torch.from_numpy(rng.integers(0, 256, 7, np.uint8))
    found["large"] = torch.from_numpy(rng.standard_normal((300, 301)).astype(np.float32))
    return found


def bits(array: Any) -> tuple[tuple[int, ...], str, bytes]:
    """Return what must be equal where two arrays have the same bits."""
    if isinstance(array, torch.Tensor):
        return (
            tuple(array.shape),
            str(array.dtype).removeprefix("torch."),
            array.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
    return array.shape, str(array.dtype), array.tobytes()


async def check(device: accel.Device, refs: dict[str, accel.AccelRef], expected: dict[str, Any]) -> None:
    assert refs.keys() == expected.keys()
    for name, ref in refs.items():
        assert ref.durable
        assert bits(await device.get(ref)) == bits(expected[name]), name


def saved(way: str, tensors: dict[str, torch.Tensor], folder: Path) -> Any:
    """Write tensors, and return the source to load them from."""
    names = list(tensors)
    halves = [{name: tensors[name] for name in part} for part in (names[::2], names[1::2])]
    if way == "mapping":
        return tensors
    if way == "list":
        safetensors.torch.save_file(halves[0], folder / "half.safetensors")
        return [str(folder / "half.safetensors"), halves[1]]
    if way == "state dict":
        torch.save(tensors, folder / "model.pt")
        return folder / "model.pt"
    if way == "file":
        safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder / "model.safetensors"
    for number, half in enumerate(halves):
        safetensors.torch.save_file(half, folder / f"model-{number}.safetensors")
    if way == "index":
        weight_map = {name: f"model-{number}.safetensors" for number, half in enumerate(halves) for name in half}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
        return folder / "model.safetensors.index.json"
    return folder


@pytest.mark.parametrize("way", ["file", "folder", "index", "state dict", "mapping", "list"])
async def test_every_source_has_the_same_bits_on_the_device(
    device: accel.Device, way: str, rng: np.random.Generator, tmp_path: Path
) -> None:
    tensors = some_tensors(rng)
    source = saved(way, tensors, tmp_path)
    refs = await load(device, source)
    await check(device, refs, tensors)


async def test_weights_outlive_a_fault_without_their_files(rng: np.random.Generator, tmp_path: Path) -> None:
    tensors = some_tensors(rng)
    source = saved("folder", tensors, tmp_path)
    async with opened(FaultPlan().poison_at(1, op="fill")) as device:
        refs = await load(device, source)
        for file in tmp_path.iterdir():
            file.unlink()
        await failure(device.zeros(3), accel.ContextPoisonedError)
        await generation(device, 2)
        await check(device, refs, tensors)


async def test_weights_have_checksums(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made once for each, when all of it is on the device."""
    arrays = {"a": rng.standard_normal(3), "b": rng.standard_normal(400)}
    monkeypatch.setattr(weights, "_CHUNK", 1000)
    plan, sources = Checksum.plan, list[accel.AccelRef]()

    def spied(op: Checksum) -> accel.ops.Plan:
        sources.append(op.source)
        return plan(op)

    monkeypatch.setattr(Checksum, "plan", spied)
    async with opened(FaultPlan().poison_at(1, op="fill")) as device:
        refs = await load(device, arrays)
        assert set(map(id, sources)) == set(map(id, refs.values()))
        assert len(sources) == 2 * len(refs), "each is checked, and then run"
        wild_write(arrays["b"])
        await failure(device.zeros(3), accel.ContextPoisonedError)
        await generation(device, 2)
        await check(device, {"a": refs["a"]}, {"a": arrays["a"]})
        assert (await failure(device.get(refs["b"]), accel.StaleRefError)).reason == "torn"


@pytest.mark.parametrize("host", ["inline", "process"])
@pytest.mark.parametrize("limit", [None, 1 << 16])
async def test_arrays_of_many_chunks_are_whole(
    host: Any, limit: int | None, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where there is hardly any pinned memory: fewer bytes than one of the arrays has."""
    monkeypatch.setattr(weights, "_CHUNK", 10_001)
    tensors = {f"t{n}": torch.from_numpy(rng.integers(0, 256, n, np.uint8)) for n in (0, 1, 10_000, 10_001, 10_002, 99_999, 300_000)}
    tensors["turned"] = torch.from_numpy(rng.standard_normal((170, 90))).T
    file = saved("file", {name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path)
    async with opened(host=host, pinned_limit=limit) as device:
        for source in (file, tensors):
            await check(device, await load(device, source), tensors)
            assert device.info().pinned.used == 0


@pytest.mark.parametrize("host", ["inline", "process"])
async def test_pinned_memory_that_others_hold_is_not_waited_for(host: Any, rng: np.random.Generator) -> None:
    arrays = {"a": rng.integers(0, 256, 3 << 20, np.uint8)}
    async with opened(host=host, pinned_limit=8 << 20) as device:
        held = await device.pinned(15 << 19, "uint8")
        await check(device, await bounded(load(device, arrays)), arrays)
        assert device.info().pinned.used == held.nbytes


async def test_tied_weights_are_one_buffer(device: accel.Device, rng: np.random.Generator, tmp_path: Path) -> None:
    table = torch.from_numpy(rng.standard_normal((40, 8)).astype(np.float32))
    array = rng.standard_normal(5)
    tied = {"embedding": table, "head": table.view(40, 8), "part": table[:10], "transposed": table.T, "x": array, "y": array}
    torch.save({"embedding": table, "head": table}, tmp_path / "tied.bin")
    before = used(device)
    refs = await load(device, tied)
    assert refs["embedding"] is refs["head"]
    assert refs["x"] is refs["y"]
    assert len({id(ref) for ref in refs.values()}) == 4
    assert used(device) - before < 4 * table.nbytes
    await check(device, refs, tied)
    refs = await load(device, tmp_path / "tied.bin")
    assert refs["embedding"] is refs["head"]


async def test_numpy_arrays_of_any_layout_and_lists_are_taken(device: accel.Device, rng: np.random.Generator) -> None:
    given = {
        "fortran": np.asfortranarray(rng.standard_normal((4, 3))),
        "swapped": rng.integers(0, 9, 5).astype(">i4"),
        "strided": rng.standard_normal(20)[::3],
        "bfloat16": rng.standard_normal(6).astype(ml_dtypes.bfloat16),
        "list": [1.0, 2.0],
        "number": 3,
    }
    refs = await load(device, given)
    for name, ref in refs.items():
        np.testing.assert_array_equal(await device.get(ref), np.asarray(given[name]), name)


async def test_progress_is_told_on_the_loop(device: accel.Device, rng: np.random.Generator, tmp_path: Path) -> None:
    tensors = some_tensors(rng)
    source = saved("folder", tensors, tmp_path)
    total = sum(tensor.nbytes for tensor in tensors.values())
    told: list[tuple[int, int]] = []

    def on_progress(done: int, of: int) -> None:
        asyncio.get_running_loop()
        told.append((done, of))

    await load(device, source, on_progress=on_progress)
    assert told[0] == (0, total)
    assert told[-1] == (total, total)
    assert told == sorted(told)
    assert len(told) == len(tensors) + 1


class Failing:
    """A device whose put of one number ends otherwise."""

    def __init__(self, device: accel.Device, at: int, end: Callable[[], Awaitable[Any]]) -> None:
        self._device = device
        self._left = at
        self._end = end

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    async def put(self, array: Any, **options: Any) -> Any:
        self._left -= 1
        return await (self._device.put(array, **options) if self._left else self._end())


class Watched(Failing):
    """A device that records the host's memory at every put."""

    def __init__(self, device: accel.Device) -> None:
        super().__init__(device, 0, asyncio.Event().wait)
        self.anonymous: list[int] = []
        self.pinned_bytes: list[int] = []

    async def put(self, array: Any, **options: Any) -> Any:
        with open("/proc/self/status") as status:
            self.anonymous += [int(line.split()[1]) for line in status if line.startswith("RssAnon")]
        self.pinned_bytes.append(self.info().pinned.reserved)
        return await super().put(array, **options)


async def test_the_memory_of_the_host_is_bounded(
    device: accel.Device, rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {f"t{n}": torch.from_numpy(rng.integers(0, 256, 64 << 20, np.uint8)) for n in range(3)}
    source = saved("file", tensors, tmp_path)
    monkeypatch.setattr(weights, "_CHUNK", 4 << 20)
    watched = Watched(device)
    refs = await load(watched, source)
    assert len(watched.anonymous) == 48
    assert max(watched.pinned_bytes) <= 8 * 4 << 20
    assert max(watched.anonymous) - min(watched.anonymous) < 8 << 10, "KiB that are neither pinned nor the device's"
    await check(device, refs, tensors)


async def test_a_file_that_is_truncated_while_it_is_read_is_an_error(
    device: accel.Device, rng: np.random.Generator, tmp_path: Path
) -> None:
    source = saved("file", {f"t{n}": torch.from_numpy(rng.standard_normal(1000)) for n in range(30)}, tmp_path)

    def truncate(done: int, total: int) -> None:
        if not done:
            os.truncate(source, total // 2)

    before = used(device)
    error = await failure(load(device, source, on_progress=truncate), accel.InvalidArgumentError)
    assert str(source) in str(error)
    await until(lambda: used(device) == before)


@pytest.mark.parametrize("host", ["inline", "process"])
async def test_after_a_fault_nothing_is_left(host: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_CHUNK", 100_000)
    async with opened(FaultPlan().poison_at(9, op="put"), host=host) as device:
        before = used(device)
        arrays = {str(n): rng.standard_normal(40_000) for n in range(5)}
        gc.disable()
        try:
            error = await failure(load(device, arrays), accel.ContextPoisonedError)
            await generation(device, 2)
            await until(lambda: used(device) == before and not device.info().pinned.used, "the memory is free with the error in hand")
            assert error.__traceback__ is not None
        finally:
            gc.enable()


async def test_after_an_error_or_a_cancellation_nothing_is_left(
    device: accel.Device, rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = saved("file", some_tensors(rng), tmp_path)
    reached = asyncio.Event()

    async def full() -> None:
        raise accel.OutOfMemoryError("no room")

    async def never() -> None:
        reached.set()
        await asyncio.Event().wait()

    def unhappy(done: int, total: int) -> None:
        if done:
            raise ArithmeticError

    before = used(device)
    monkeypatch.setattr(weights, "_CHUNK", 100_000)
    error = await failure(load(Failing(device, 7, full), source), accel.OutOfMemoryError)
    await until(lambda: used(device) == before, "the memory is free with the error in hand")
    assert error.__traceback__ is not None
    arithmetic = await failure(load(device, source, on_progress=unhappy), ArithmeticError)
    await until(lambda: used(device) == before)
    assert arithmetic.__traceback__ is not None
    loading = task(load(Failing(device, 7, never), source))
    await bounded(reached.wait())
    assert used(device) > before
    await cancelled(loading)
    await until(lambda: used(device) == before)


async def test_a_name_in_two_sources_is_refused(device: accel.Device, rng: np.random.Generator, tmp_path: Path) -> None:
    source = saved("file", {"a": torch.zeros(3)}, tmp_path)
    error = await failure(load(device, [source, {"a": np.zeros(3)}]), accel.InvalidArgumentError)
    assert "'a'" in str(error)


async def test_an_onnx_file_is_one_array_of_its_bytes(device: accel.Device, rng: np.random.Generator, tmp_path: Path) -> None:
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", int(rng.integers(1, 1000))])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "g", [value], [onnx.ValueInfoProto(name="y")])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    data = model.SerializeToString()
    (tmp_path / "m.onnx").write_bytes(data)
    refs = await load(device, tmp_path / "m.onnx")
    assert list(refs) == ["model.onnx"]
    assert (await device.get(refs["model.onnx"])).tobytes() == data


class Payload:
    """What runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("/nonexistent/of-a-pickle",)


async def test_what_cannot_be_loaded_is_refused_with_the_reason(device: accel.Device, tmp_path: Path) -> None:
    torch.save({"a": Payload()}, tmp_path / "code.pt")
    torch.save([torch.zeros(3)], tmp_path / "list.pt")
    torch.save({"state": {"a": torch.zeros(3)}}, tmp_path / "nested.pt")
    (tmp_path / "broken.bin").write_bytes(b"not a zip")
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.gguf").touch()
    cases: list[tuple[Any, str]] = [
        (tmp_path / "code.pt", "it names posix.mkdir"),
        (tmp_path / "list.pt", "state dict"),
        (tmp_path / "nested.pt", "weight 'state'"),
        (tmp_path / "broken.bin", "is not a state dict"),
        (tmp_path / "missing.pt", "missing.pt"),
        (tmp_path / "missing.safetensors", "cannot be read"),
        (tmp_path / "missing.onnx", "cannot be read"),
        (tmp_path / "empty", "has 0 files"),
        (tmp_path / "a.gguf", "format"),
        (3, "weights is a int"),
        ({3: np.zeros(3)}, "name 3"),
        ({"a": "text"}, "weight 'a'"),
        ({"a": np.zeros(3, "O")}, "weight 'a'"),
        ({"a": torch.zeros(3, device="meta")}, "meta"),
        ({"a": torch.zeros(3, 3).to_sparse()}, "layout"),
        ({"a": torch.zeros(3, dtype=torch.float8_e4m3fnuz)}, "weight 'a'"),
    ]
    before = used(device)
    for source, text in cases:
        error = await failure(load(device, source), accel.InvalidArgumentError)
        assert text in str(error), (source, str(error))
    assert used(device) == before


INDICES = ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "../b.safetensors"}}', "[" * 100_000]


@pytest.mark.parametrize("text", INDICES, ids=lambda text: text[:30])
async def test_an_invalid_index_is_refused(device: accel.Device, text: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    await failure(load(device, tmp_path), accel.InvalidArgumentError)


async def test_an_index_that_names_what_is_not_there_is_refused(device: accel.Device, tmp_path: Path) -> None:
    saved("index", {"a": torch.zeros(3), "b": torch.ones(3)}, tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"b"', '"c"'))
    error = await failure(load(device, tmp_path), accel.InvalidArgumentError)
    assert "'c'" in str(error)
    index.write_text(index.read_text().replace("model-1", "model-7"))
    await failure(load(device, tmp_path), accel.InvalidArgumentError)


# -- hostile files


def contents(path: Path) -> dict[str, tuple[tuple[int, ...], str, bytes]]:
    """Return what is in a file, as this process reads it."""
    file = RegularFile(path)
    found = safetensors_format.stored_in(file)
    return {name: (each.shape, each.dtype.value, bytes(file.read(each.start, each.end - each.start))) for name, each in found.items()}


def written(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HEADERS: list[Any] = [
    b"",
    b" {}",
    b"[]",
    b"{",
    b"\xff{}",
    b"{" * 100_000,
    b'{"a":' * 50_000,
    b'{"a": NaN}',
    json.dumps({"a": 1})[:-1].encode() + b', "a": 1}',
    {"a": 1},
    {"a": {}},
    {"a": [1, 2, 3]},
    {"\ud800": entry()},
    {"__metadata__": [], "a": entry()},
    {"__metadata__": {"x": 1}, "a": entry()},
    *({"a": entry(dtype)} for dtype in (None, 3, ["F32"])),
    *(
        {"a": entry(shape=shape)}
        for shape in (None, 2, [2.0], [True], [-2], [3], ["2"], [1 << 70], [2] * 100, [0, 1 << 58, 1 << 58], [1 << 58] * 1000)
    ),
    *(
        {"a": entry(offsets=offsets)}
        for offsets in (None, 8, [], [0], [0, 8, 8], [0.0, 8], [-8, 0], [8, 0], [0, 1 << 80], [0, 12], [1, 9], [0, 4])
    ),
    {"a": entry(), "b": entry()},
    {"a": entry(), "b": entry(offsets=(4, 12))},
    {"a": entry(), "b": entry(offsets=(16, 24))},
    {},
]


@pytest.mark.parametrize("header", HEADERS, ids=lambda header: str(header)[:60])
def test_an_invalid_header_is_refused(header: Any, tmp_path: Path) -> None:
    path = written(tmp_path / "a.safetensors", header, bytes(8))
    with pytest.raises(accel.InvalidArgumentError) as caught:
        contents(path)
    assert str(path) in str(caught.value)


def test_invalid_lengths_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    for data in (b"", b"\0" * 7, b"\xff" * 8, (100).to_bytes(8, "little") + b"{}", bytes(8)):
        path.write_bytes(data)
        with pytest.raises(accel.InvalidArgumentError):
            contents(path)


def test_elements_that_no_device_has_are_unsupported(tmp_path: Path) -> None:
    path = written(tmp_path / "a.safetensors", {"a": entry("F8_E8M0", (8,))}, bytes(8))
    with pytest.raises(accel.UnsupportedError, match="F8_E8M0"):
        contents(path)


def test_unaligned_tensors_are_read(rng: np.random.Generator, tmp_path: Path) -> None:
    values = rng.standard_normal(3)
    header = {"a": entry("U8", (1,), (0, 1)), "b": entry("F64", (3,), (1, 25))}
    path = written(tmp_path / "a.safetensors", header, b"\7" + values.tobytes())
    assert contents(path)["b"] == ((3,), "float64", values.tobytes())


def test_mutated_files_are_refused_or_read_like_the_package_does(rng: np.random.Generator, tmp_path: Path) -> None:
    seed = int(rng.integers(1 << 32))
    rolled = random.Random(seed)
    good = safetensors.torch.save({"ab": torch.arange(4.0), "c": torch.ones((2, 3), dtype=torch.bfloat16), "e": torch.zeros(0)}, {"k": "v"})
    length = 8 + int.from_bytes(good[:8], "little")
    path = tmp_path / "mutated.safetensors"
    read = 0
    for _ in range(500):
        data = bytearray(good)
        for _ in range(rolled.randint(1, 2)):
            place = rolled.randrange(len(data) if rolled.random() < 0.6 else length)
            way = rolled.random()
            if way < 0.6:
                data[place : place + 1] = rolled.choice(b'0123456789"{}[],:eE.-\\ \0\xffFI').to_bytes()
            elif way < 0.8:
                del data[place : place + rolled.randint(1, 4)]
            else:
                data[place:place] = data[rolled.randrange(len(data)) :][: rolled.randint(1, 4)]
        path.write_bytes(data)
        try:
            found = contents(path)
        except (accel.InvalidArgumentError, accel.UnsupportedError):
            continue
        expected = safetensors.torch.load(bytes(data))
        assert found == {name: bits(tensor) for name, tensor in expected.items()}, seed
        read += 1
    assert read > 5, "hardly a mutated file was valid: nothing was compared"


@contextlib.asynccontextmanager
async def child() -> AsyncIterator[accel.Device]:
    async with accel.System() as system:
        yield await system.open_device("cpu", host="process")


async def test_a_device_in_a_child_gets_them_too(rng: np.random.Generator, tmp_path: Path) -> None:
    tensors = some_tensors(rng)
    source = saved("file", tensors, tmp_path)
    async with child() as device:
        await check(device, await load(device, source), tensors)
