"""Adapters: modules of torch give the bits that they give without accel, in every generation, around weights that nothing copies."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import os
import pickle
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import accel
from accel import DType, Operand
from accel.backend import DeviceDescription
from accel.models.adapters.base import ModelSource, source_of
from accel.models.adapters.torch import TorchAdapter
from accel.models.adapters.torch_state import built
from accel.ops import Spec
from tests import model_zoo
from tests.model_zoo import WIDTH, ZOO, leaves, some_input

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

CPU = DeviceDescription("cpu", 0, "processor", "", 1 << 30)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Let torch use one thread: several that spin for each other take seconds on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Memory:
    """Tensors where a device would have them, and the operands over them."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        copies: dict[int, torch.Tensor] = {}
        self.tensors = {
            name: copies.setdefault(tensor.data_ptr() or id(tensor), tensor.detach().contiguous().clone())
            for name, tensor in tensors.items()
        }
        self.operands = {name: operand(tensor) for name, tensor in self.tensors.items()}


def operand(tensor: torch.Tensor, *, is_output: bool = False) -> Operand:
    dtype = DType.of(str(tensor.dtype).removeprefix("torch."))
    return Operand(tensor.data_ptr(), tuple(tensor.shape), dtype, is_output, "cpu")


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether two tensors have the same bits."""
    as_bytes = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (found, expected)]
    return found.shape == expected.shape and found.dtype == expected.dtype and torch.equal(*as_bytes)


def opened(builder: Any, memory: Memory, **options: Any) -> TorchAdapter:
    adapter = TorchAdapter(builder, **options)
    adapter.open(memory.operands, CPU, None)
    vars(adapter)["kept"] = memory
    return adapter


def outputs(adapter: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Run a model, and return what it stores."""
    found = {}
    for name, result in leaves(adapter.run({name: operand(tensor) for name, tensor in inputs.items()})).items():
        found[name] = torch.full(result.shape, 77).to(result.dtype)
        adapter.store(result, operand(found[name], is_output=True))
    return found


def check(adapter: Any, reference: torch.nn.Module, inputs: Mapping[str, torch.Tensor], name: str) -> None:
    found = outputs(adapter, inputs)
    with torch.inference_mode():
        expected = leaves(reference(**inputs))
    assert list(found) == list(expected)
    for key, tensor in expected.items():
        assert same(found[key], tensor), (name, key)


# -- modules of torch


@pytest.mark.parametrize("name", ZOO)
def test_every_generation_has_the_bits_of_the_first_build(name: str, rng: np.random.Generator) -> None:
    seed = int(rng.integers(1 << 31))
    torch.manual_seed(seed)
    memory = Memory(TorchAdapter(ZOO[name]).initial(()))
    torch.manual_seed(seed)
    reference = ZOO[name]().eval()
    for _ in range(2):  # torch's random numbers go on: a build of its own would have others
        adapter = opened(ZOO[name], memory)
        if name == "Measuring":  # a number is no tensor: each build computes its own
            vars(adapter._module)["factor"] = reference.factor
        check(adapter, copy.deepcopy(reference), some_input(name, rng), name)


@pytest.mark.parametrize("name", sorted(ZOO.keys() - {"Attributes", "Derived", "Measuring"}))  # what they keep is of their own random build
def test_weights_of_the_user_are_used_as_they_are(name: str, rng: np.random.Generator) -> None:
    torch.manual_seed(int(rng.integers(1 << 31)))
    reference = ZOO[name]().eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_((torch.randn(parameter.shape) * 0.5).to(parameter.dtype))
        for buffer in reference.buffers():
            if buffer.is_floating_point() and name == "Normalized":
                buffer.copy_(torch.rand(buffer.shape) + 0.5)
    given = dict(reference.state_dict())
    more = TorchAdapter(ZOO[name]).initial(given.keys())
    assert not more.keys() & given.keys()
    memory = Memory(given | more)
    adapter = opened(ZOO[name], memory)
    check(adapter, reference, some_input(name, rng), name)
    module = adapter._module
    assert module is not None
    assert not module.training
    for path, parameter in module.named_parameters():
        assert parameter.data_ptr() == memory.tensors[path].data_ptr(), f"{path} is a copy"
        assert not parameter.requires_grad
    addresses = {tensor.data_ptr() for tensor in memory.tensors.values() if tensor.numel()}
    for path, buffer in module.named_buffers():
        assert buffer.data_ptr() not in addresses, f"{path} is shared"


class Minus(torch.nn.Module):
    """Its order matters."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x - y


def test_inputs_are_bound_by_all_of_their_names_or_by_position() -> None:
    one, three = torch.ones(2), torch.full((2,), 3.0)
    adapter = opened(Minus, Memory({}))
    for inputs, expected in (({"y": one, "x": three}, three - one), ({"a": one, "b": three}, one - three)):
        [found] = outputs(adapter, inputs).values()
        assert torch.equal(found, expected), inputs.keys()
    for partial in ({"y": one, "b": three}, {"a": one, "x": three}):
        with pytest.raises(accel.InvalidArgumentError, match="neither by name nor by position") as caught:
            outputs(adapter, partial)
        assert "x, y" in str(caught.value)


class Weighted(torch.nn.Module):
    """Its order matters, and it has a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.linear(x) - y


class Hiding(torch.nn.Module):
    """Takes anything, by position."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Weighted()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def _traced() -> Any:
    return torch.jit.trace(Weighted(), (torch.zeros(3, 2), torch.zeros(3, 2)))  # type: ignore[no-untyped-call]


HIDDEN: dict[str, tuple[Any, str]] = {
    "compiled": (lambda: torch.compile(Weighted(), backend="eager"), "_orig_mod."),
    "parallel": (lambda: torch.nn.DataParallel(Weighted()), "module."),
    "scripted": (lambda: torch.jit.script(Weighted()), ""),
    "traced": (_traced, ""),
    "hidden": (Hiding, "inner."),
}


@pytest.mark.filterwarnings("ignore")  # of torch.jit, which it calls deprecated
@pytest.mark.parametrize("name", HIDDEN)
def test_a_module_that_wraps_another_is_bound_as_that_one_or_by_position(name: str, rng: np.random.Generator) -> None:
    builder, prefix = HIDDEN[name]
    weight, bias = (torch.from_numpy(rng.standard_normal(shape).astype(np.float32)) for shape in ((2, 2), 2))
    x, y = (torch.from_numpy(rng.standard_normal((3, 2)).astype(np.float32)) for _ in range(2))
    memory = Memory({f"{prefix}linear.weight": weight, f"{prefix}linear.bias": bias})
    adapter = opened(builder, memory)
    module = adapter._module
    assert module is not None
    for path, parameter in module.named_parameters():
        assert parameter.data_ptr() == memory.tensors[path].data_ptr(), f"{path} is a copy"
    expected = torch.nn.functional.linear(x, weight, bias) - y
    by_name = {"a": x, "b": y} if name == "hidden" else {"y": y, "x": x}
    for inputs in ({"a": x, "b": y}, {"x": x, "y": y}, by_name):
        [found] = outputs(adapter, inputs).values()
        assert same(found, expected), inputs.keys()
    if name != "hidden":
        with pytest.raises(accel.InvalidArgumentError, match="neither by name nor by position"):
            outputs(adapter, {"y": y, "b": x})


def test_parameters_are_not_allocated_where_the_rest_is_taken() -> None:
    seen = []

    def builder() -> torch.nn.Module:
        module = model_zoo.Rotary()
        seen.append(module.proj.weight.device.type)
        return module

    assert list(TorchAdapter(builder).initial({"proj.weight"})) == ["leftover:inv_freq"]
    assert seen == ["meta"]
    torch.nn.Linear(2, 2)
    assert torch.nn.Linear(2, 2).weight.device.type == "cpu", "the hook is left"


def test_tensors_without_elements_are_not_filled() -> None:
    class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((str(function), args[0].device.type if args and isinstance(args[0], torch.Tensor) else ""))
            return function(*args, **(kwargs or {}))

    def builder() -> torch.nn.Module:
        module = torch.nn.Sequential(torch.nn.Embedding(9, 4, padding_idx=0), torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        weight: Any = module[1].weight
        torch.nn.init.trunc_normal_(weight, std=0.02)
        weight.data.mul_(0.5)
        table = torch.zeros(3).normal_()
        assert (table != 0).any(), "what has elements is filled"
        module.register_buffer("table", table.unsqueeze_(0))
        module.register_parameter("column", torch.nn.Parameter(torch.zeros(3, 1).t_()))
        return module

    seen: list[tuple[str, str]] = []
    with Recording():  # type: ignore[no-untyped-call]
        module = built(builder)
    assert module.column.shape == (1, 3)
    assert module.table.shape == (1, 3)
    assert [function for function, device in seen if device == "meta" and function.split(".")[1].endswith("_")] == []
    assert ("aten.normal_.default", "cpu") in seen
    assert all(parameter.is_meta for parameter in module.parameters())


def test_what_a_builder_computes_from_parameters_is_taken_from_a_whole_build() -> None:
    for builder in (model_zoo.Derived, model_zoo.Measuring):
        found = TorchAdapter(builder).initial(builder().state_dict().keys())
        assert list(found) == ["leftover:norms"]
        assert (found["leftover:norms"] > 0).all()


def test_a_tie_is_one_tensor_also_where_a_file_has_one_of_its_names(rng: np.random.Generator) -> None:
    reference = model_zoo.Tied().eval()
    for names in (["embedding.weight"], ["head.weight"], ["embedding.weight", "head.weight"]):
        memory = Memory({name: reference.state_dict()[name] for name in names})
        adapter = opened(model_zoo.Tied, memory)
        module: Any = adapter._module
        assert module.head.weight is module.embedding.weight
        check(adapter, reference, some_input("Tied", rng), "Tied")
    assert list(TorchAdapter(model_zoo.Tied).initial(())) == ["embedding.weight"]


def test_one_tensor_in_several_places_stays_one(rng: np.random.Generator) -> None:
    module: Any = opened(model_zoo.Attributes, Memory(TorchAdapter(model_zoo.Attributes).initial(())))._module
    assert module.random is module.tables[2] is module.named.sin
    assert module.same is module.linear.weight
    assert type(module.named) is model_zoo.Tables


def test_buffers_belong_to_a_generation(rng: np.random.Generator) -> None:
    torch.manual_seed(int(rng.integers(1 << 31)))
    memory = Memory(TorchAdapter(model_zoo.Normalized).initial(()))
    before = {name: tensor.clone() for name, tensor in memory.tensors.items()}
    for _ in range(2):
        reference = model_zoo.Normalized()
        reference.load_state_dict(before)
        reference.train()
        adapter = opened(model_zoo.Normalized, memory, train=True)
        for step in range(3):
            inputs = some_input("Normalized", rng)
            check(adapter, reference, inputs, f"step {step}")
        assert reference.calls == 3
        assert not torch.equal(reference.norm.state_dict()["running_mean"], before["norm.running_mean"])
        for name, tensor in memory.tensors.items():
            assert same(tensor, before[name]), f"{name} was written"


def test_a_model_that_writes_an_input_is_refused(rng: np.random.Generator) -> None:
    x = torch.randn(3, WIDTH)
    inputs = {"x": operand(x)}
    with pytest.raises(accel.UnsupportedError, match="input 'x' in place"):
        opened(model_zoo.WritesInput, Memory({})).run(inputs)


def test_warming_runs_the_model_on_padding() -> None:
    seen = []

    class Seeing(torch.nn.Module):
        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> Any:
            seen.append((x.clone(), ids.clone()))
            return x

    opened(Seeing, Memory({})).warm({"x": (Spec((2, 3), DType.BFLOAT16), 0.5), "ids": (Spec((4,), DType.INT64), 7)})
    (x, ids), *more = seen
    assert not more
    assert torch.equal(x, torch.full((2, 3), 0.5, dtype=torch.bfloat16))
    assert torch.equal(ids, torch.full((4,), 7))


def test_results_are_stored_whatever_their_strides_and_refused_if_they_do_not_fit(rng: np.random.Generator) -> None:
    adapter = opened(model_zoo.mlp, Memory(TorchAdapter(model_zoo.mlp).initial(())))
    data = torch.from_numpy(rng.standard_normal((4, 6)))
    for result in (data.T, data[::2, 1::3], data[:1].expand(3, 6), data[0, 0], data[:0], (data + 1j * data).conj()):
        target = torch.zeros(result.shape, dtype=result.dtype)
        adapter.store(result, operand(target, is_output=True))
        assert same(target, result.resolve_conj())
    encoded = np.frombuffer(b"description", np.uint8)
    target = torch.zeros(len(encoded), dtype=torch.uint8)
    adapter.store(encoded, operand(target))
    assert target.numpy().tobytes() == b"description"
    for result in (data[0], data.float()):
        with pytest.raises(accel.InvalidArgumentError, match="a result is"):
            adapter.store(result, operand(torch.zeros(4, 6, dtype=torch.float64)))
    with pytest.raises(accel.UnsupportedError, match="sparse"):
        adapter.store(data.to_sparse(), operand(torch.zeros(4, 6, dtype=torch.float64)))


def test_weights_that_do_not_fit_are_refused_by_name() -> None:
    state = dict(model_zoo.mlp().state_dict())
    cases = [
        ({name: tensor for name, tensor in state.items() if name != "last.bias"}, "the weights have no 'last.bias'"),
        (state | {"more": torch.zeros(2)}, "the module has no 'more'"),
        (state | {"last.bias": torch.zeros(9)}, "size mismatch for last.bias"),
        ({}, "'last.weight' and 1 more"),
    ]
    for weights, text in cases:
        with pytest.raises(accel.InvalidArgumentError) as caught:
            opened(model_zoo.mlp, Memory(weights))
        assert text in str(caught.value)


def test_a_leftover_that_is_not_given_is_that_of_the_build(rng: np.random.Generator) -> None:
    reference = model_zoo.Rotary().eval()
    check(opened(model_zoo.Rotary, Memory(reference.state_dict())), reference, some_input("Rotary", rng), "Rotary")
    derived = model_zoo.Derived()
    with pytest.raises(accel.UnsupportedError, match="'norms'"):
        opened(model_zoo.Derived, Memory(derived.state_dict()))


@pytest.mark.parametrize(
    ("builder", "error", "text"),
    [
        (model_zoo.raising, accel.LibraryError, "no such model"),
        (model_zoo.with_argument, accel.LibraryError, "width"),
        (model_zoo.nothing, accel.InvalidArgumentError, "NoneType"),
        (model_zoo.awaitable, accel.InvalidArgumentError, "coroutine"),
        (model_zoo.lazy, accel.UnsupportedError, "'weight'"),
    ],
)
def test_a_builder_that_builds_no_module_is_an_error(builder: Any, error: type[accel.AccelError], text: str) -> None:
    for call in (
        lambda: TorchAdapter(builder).initial(()),
        lambda: TorchAdapter(builder).initial({"a"}),
        lambda: opened(builder, Memory({})),
    ):
        with pytest.raises(error) as caught:
            call()
        assert text in str(caught.value)
        assert type(caught.value) is error


def test_state_that_is_no_tensor_is_refused() -> None:
    class Extra(torch.nn.Linear):
        def get_extra_state(self) -> Any:
            return {"version": 3}

    with pytest.raises(accel.UnsupportedError, match="_extra_state"):
        TorchAdapter(lambda: Extra(2, 2)).initial(())


def test_options_are_checked() -> None:
    for options in ({"train": 1}, {"threads": 0}, {"threads": 2.0}, {"graphs": "on"}):
        with pytest.raises(accel.InvalidArgumentError):
            TorchAdapter(model_zoo.mlp, **options)
    description = dataclasses.replace(CPU, backend="tpu")
    with pytest.raises(accel.UnsupportedError, match="tpu"):
        TorchAdapter(model_zoo.mlp).open({}, description, None)


def test_threads_are_those_that_were_asked_for() -> None:
    before = torch.get_num_threads()
    try:
        opened(model_zoo.mlp, Memory(model_zoo.mlp().state_dict()), threads=3)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    opened(model_zoo.mlp, Memory(model_zoo.mlp().state_dict()))
    assert torch.get_num_threads() == before


# -- sources


def test_names_are_resolved_where_the_model_lives(rng: np.random.Generator) -> None:
    for target in ("tests.model_zoo:mlp", model_zoo.mlp, model_zoo.partly, "tests.model_zoo:Rotary"):
        source = pickle.loads(pickle.dumps(source_of(target, {"threads": None})))
        adapter = source.adapter()
        assert type(adapter) is TorchAdapter
        memory = Memory(adapter.initial(()))
        adapter.open(memory.operands, CPU, None)
        name = "Rotary" if "Rotary" in str(target) else "mlp"
        inputs = some_input(name, rng)
        assert outputs(adapter, inputs)


def test_a_class_with_open_and_run_is_an_adapter(rng: np.random.Generator) -> None:
    bias, x = torch.randn(5), torch.randn(3, 5)
    for target in ("tests.model_zoo:Doubling", model_zoo.Doubling, model_zoo.Doubling(3.0)):
        is_instance = isinstance(target, model_zoo.Doubling)
        adapter = source_of(target, {} if is_instance else {"factor": 3.0}).adapter()
        assert adapter.initial({"bias"}) == {}
        memory = Memory({"bias": bias})
        adapter.open(memory.operands, CPU, None)
        adapter.warm({"x": (Spec((3, 5), DType.FLOAT32), 0.0)})
        target_tensor = torch.zeros(3, 5)
        adapter.store(adapter.run({"x": operand(x)}), operand(target_tensor, is_output=True))
        np.testing.assert_array_equal(target_tensor.numpy(), x.numpy() * np.float32(3) + bias.numpy())
        with pytest.raises(accel.InvalidArgumentError, match="a result is"):
            adapter.store(np.zeros(2), operand(target_tensor, is_output=True))
        on_gpu = dataclasses.replace(operand(target_tensor, is_output=True), backend="cuda")
        with pytest.raises(accel.UnsupportedError, match="store"):
            adapter.store(np.zeros((3, 5), np.float32), on_gpu)
        adapter.close()


def test_methods_of_an_adapter_of_the_users_own_win() -> None:
    called = []

    class Own(model_zoo.Doubling):
        def store(self, result: Any, output: Any) -> None:
            called.append("store")

        def warm(self, inputs: Any) -> None:
            called.append("warm")

        def initial(self, given: Any) -> Any:
            return {"bias": np.zeros(len(given))}

        def close(self) -> None:
            called.append("close")

    adapter = source_of(Own()).adapter()
    assert adapter.initial({"a", "b"})["bias"].shape == (2,)
    adapter.store(None, operand(torch.zeros(1)))
    adapter.warm({})
    adapter.close()
    assert called == ["store", "warm", "close"]


BAD_TARGETS: list[tuple[Any, type[accel.AccelError], str]] = [
    ("tests.model_zoo:absent", accel.InvalidArgumentError, "has no 'absent'"),
    ("tests.absent:mlp", accel.InvalidArgumentError, "no module 'tests.absent'"),
    ("absent_package.of_theirs:mlp", accel.InvalidArgumentError, "no module 'absent_package'"),
    ("tests.model_zoo:number", accel.InvalidArgumentError, "is a int"),
    ("model.gguf", accel.InvalidArgumentError, "names no model"),
    ("a:b:c", accel.InvalidArgumentError, "names no model"),
    (Path("model.pt"), accel.InvalidArgumentError, "names no model"),
    (3, accel.InvalidArgumentError, "is a int"),
    (model_zoo.mlp(), accel.InvalidArgumentError, "the function that builds it"),
]


@pytest.mark.parametrize(("target", "error", "text"), BAD_TARGETS, ids=lambda value: str(value)[:40].strip())
def test_what_is_no_model_is_refused(target: Any, error: type[accel.AccelError], text: str) -> None:
    with pytest.raises(error) as caught:
        source_of(target).adapter()
    assert type(caught.value) is error
    assert text in str(caught.value)


def test_options_that_are_not_known_are_refused() -> None:
    for target in (model_zoo.mlp, model_zoo.Doubling):
        with pytest.raises(accel.InvalidArgumentError, match="colour") as caught:
            source_of(target, {"colour": 3}).adapter()
        assert caught.value.argument == "options"
    with pytest.raises(accel.LibraryError, match="no factor"):
        source_of("tests.model_zoo:Doubling", {"factor": None}).adapter()
    with pytest.raises(accel.InvalidArgumentError, match="no options"):
        source_of(model_zoo.Doubling(), {"factor": 3}).adapter()


def test_imports_are_names_of_modules_that_are_there() -> None:
    for imports in ("numpy", [""], [3], None, (name for name in ["numpy"])):
        given: Any = imports
        with pytest.raises(accel.InvalidArgumentError, match="imports is") as caught:
            source_of("tests.model_zoo:Doubling", imports=given)
        assert caught.value.argument == "imports"
    with pytest.raises(accel.InvalidArgumentError, match="coroutine function"):
        source_of(model_zoo.awaitable, imports=["numpy"])
    with pytest.raises(accel.InvalidArgumentError, match=r"no module 'tests\.absent'"):
        source_of("tests.model_zoo:Doubling", imports=["numpy", "tests.absent"]).adapter()


def test_a_module_that_cannot_be_imported_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_of_theirs.py").write_text("import absent_dependency\n")
    (tmp_path / "raising_of_theirs.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name, cause in (("broken_of_theirs", "absent_dependency"), ("raising_of_theirs", "ZeroDivisionError")):
        with pytest.raises(accel.LibraryError, match=cause):
            ModelSource(f"{name}:build").adapter()


def test_a_framework_that_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "needs_torch.py").write_text("import torch\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.startswith("accel.models.adapters.torch")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    for target in (model_zoo.mlp, "needs_torch:build"):
        with pytest.raises(accel.BackendUnavailableError) as caught:
            source_of(target).adapter()
        assert ".[torch]" in str(caught.value)


@pytest.mark.timeout(120)
async def test_a_device_serves_a_module_with_the_bits_of_torch(rng: np.random.Generator) -> None:
    """In a child, from the weights of this process, and again after its death."""
    module = model_zoo.mlp().eval()
    x = rng.standard_normal((5, WIDTH)).astype(np.float32)
    with torch.inference_mode():
        expected = module(torch.from_numpy(np.concatenate([x, np.zeros((3, WIDTH), np.float32)])))[:5].numpy()
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process")
        model = await device.load_model(
            "tests.model_zoo:mlp",
            weights=module.state_dict(),
            inputs={"x": accel.TensorSpec(("batch", WIDTH), "float32")},
            buckets={"batch": (1, 8)},
            options={"threads": 1},
        )
        np.testing.assert_array_equal(await model.numpy(x), expected)
        pid = device.info().pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        async for generation in device.generations():
            if generation == 2:
                break
        np.testing.assert_array_equal(await model.numpy(x), expected)
        async with accel.serve(model) as service:
            answers = await asyncio.gather(*[service.submit(each) for each in x])
        np.testing.assert_allclose(answers, expected, rtol=1e-5, atol=1e-6)
