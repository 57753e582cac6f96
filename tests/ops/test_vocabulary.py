"""The words that everything else is said with: errors, element types, arrays, tokens, backends, ops."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import sys
import types
import typing
from collections import deque
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import accel
from accel import enums, errors, ops
from accel.backend import DeviceDescription
from accel.dtype import DType, native
from accel.ops.families import FAMILIES, FamilyName
from accel.ref import AccelRef, AccelToken
from accel.registry import backend_names, find_device, load_backend

if typing.TYPE_CHECKING:
    from collections.abc import Iterable

ERRORS = [getattr(errors, name) for name in errors.__all__ if name.endswith("Error")]

FIELDS: dict[str, Any] = {
    "code": 700,
    "library": "driver",
    "device": "cuda:1",
    "generation": 3,
    "scope": errors.FaultScope.CONTEXT,
    "retryable": True,
    "op": "gemm",
    "op_index": 2,
    "remedy": "Do this.",
}
OWN: dict[str, dict[str, Any]] = {
    "ContextPoisonedError": {"executed": "no", "suspects": ("gemm", "put")},
    "OutOfMemoryError": {"requested": 1, "used": 2, "reserved": 3, "limit": 4},
    "StaleRefError": {"reason": "torn"},
    "LinAlgError": {"info": (0, 3)},
    "CompileError": {"log": "line 1: no"},
    "HostDiedError": {"exit_code": 1, "signal": 9, "hung": True},
    "PoisonedInputError": {"item": [1, 2], "kind": "hang", "remembered": True},
    "NonFiniteError": {"output": "scores"},
    "MailboxFullError": {"retry_after": 0.25},
}


@pytest.mark.parametrize(
    ("names", "values"),
    [
        (enums.TransposeName, [member.value for member in accel.Transpose]),
        (enums.ReduceName, [member.value for member in accel.ReduceOp]),
        (enums.UnaryName, [member.value for member in accel.UnaryOp]),
        (enums.BinaryName, [member.value for member in accel.BinaryOp]),
        (FamilyName, [family.name for family in FAMILIES]),
    ],
)
def test_a_type_checker_knows_the_names_that_are_taken(names: object, values: Iterable[str]) -> None:
    assert list(typing.get_args(names)) == list(values)


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
class TestErrors:
    def test_all_are_one_tree_and_public(self, kind: type[errors.AccelError]) -> None:
        assert issubclass(kind, errors.AccelError)
        assert getattr(accel, kind.__name__) is kind
        assert kind.__name__ in (errors.__doc__ or "")

    def test_pickling_keeps_every_field(self, kind: type[errors.AccelError]) -> None:
        fields = FIELDS | OWN.get(kind.__name__, {})
        error = kind("it happened", **fields)
        for back in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error), error.clone()):
            assert type(back) is kind
            assert back is not error
            assert {name: getattr(back, name) for name in fields} == fields
            assert (back.message, back.args, str(back)) == (error.message, error.args, str(error))

    def test_message_says_what_where_and_what_to_do(self, kind: type[errors.AccelError]) -> None:
        text = str(kind("it happened.", code=700, device="cuda:1", op="gemm"))
        assert text.startswith("it happened [op=gemm, code=700, device=cuda:1]. ")
        assert text.endswith(kind.default_remedy)
        assert kind.default_remedy.endswith(".")
        assert str(kind()).strip()
        assert "Do this." in str(kind("x", remedy="Do this."))

    def test_defaults_of_the_class(self, kind: type[errors.AccelError]) -> None:
        error = kind("x")
        assert (error.code, error.library, error.device, error.generation, error.op, error.op_index) == (None,) * 6
        assert error.scope is kind.default_scope
        assert error.retryable is kind.default_retryable
        assert error.is_fault == (error.scope > errors.FaultScope.OP)

    def test_clone_is_a_fresh_instance_with_the_same_cause(self, kind: type[errors.AccelError]) -> None:
        error = kind("x")
        error.__cause__ = ValueError("why")
        error.add_note("mine")
        try:
            raise error
        except errors.AccelError:
            other = error.clone(op="dot")
        assert (other.op, error.op) == ("dot", None)
        assert other.__cause__ is error.__cause__
        assert other.__traceback__ is None
        assert not hasattr(other, "__notes__")
        with pytest.raises(TypeError):
            error.clone(colour="red")


def test_errors_are_also_what_python_calls_them() -> None:
    assert issubclass(accel.OutOfMemoryError, MemoryError)
    assert issubclass(accel.DeadlineExceededError, TimeoutError)
    assert issubclass(accel.InvalidArgumentError, ValueError)


def test_scopes_are_ordered() -> None:
    scope = accel.FaultScope
    assert scope.OP < scope.CONTEXT < scope.PROCESS < scope.DEVICE
    assert accel.AccelError("x", scope=2).scope is scope.CONTEXT  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="9"):
        accel.AccelError("x", scope=9)  # type: ignore[arg-type]


def test_scope_of_each_class() -> None:
    scopes = {kind.__name__: kind.default_scope for kind in ERRORS if kind.default_scope is not errors.FaultScope.OP}
    assert scopes == {
        "ContextPoisonedError": errors.FaultScope.CONTEXT,
        "WorldChangedError": errors.FaultScope.CONTEXT,
        "DeviceLostError": errors.FaultScope.DEVICE,
        "HostDiedError": errors.FaultScope.PROCESS,
    }


@pytest.mark.parametrize("member", list(DType), ids=lambda member: member.value)
class TestDTypes:
    def test_names_are_those_of_numpy_and_ml_dtypes(self, member: DType) -> None:
        expected = np.dtype(getattr(ml_dtypes, member.value, member.value))
        assert (member.numpy, member.itemsize) == (expected, expected.itemsize)
        assert str(member.numpy) == member.value
        assert member.is_extended == hasattr(ml_dtypes, member.value)

    def test_every_spelling_is_understood(self, member: DType) -> None:
        for like in (member, member.value, member.numpy, member.numpy.type):
            assert DType.of(like) is member

    def test_it_is_of_one_kind(self, member: DType) -> None:
        assert sum((member.is_floating, member.is_complex, member.is_integer, member.kind == "bool")) == 1
        if not member.is_extended:
            assert member.kind[0] == {"f": "f", "i": "i", "u": "u", "b": "b", "c": "c"}[member.numpy.kind]

    def test_pickling(self, member: DType) -> None:
        assert pickle.loads(pickle.dumps(member)) is member


@pytest.mark.parametrize(
    ("like", "member"), [("f4", DType.FLOAT32), ("single", DType.FLOAT32), (float, DType.FLOAT64), ("d", DType.FLOAT64)]
)
def test_strings_mean_what_numpy_says(like: Any, member: DType) -> None:
    assert DType.of(like) is member


def test_dtypes_that_have_no_counterpart_are_refused() -> None:
    for like in ("object", "S4", "U1", "M8[s]", np.longdouble, ">f4", "nonsense", None, 3, [("a", "f4")], object()):
        with pytest.raises(accel.InvalidArgumentError):
            DType.of(like)
    assert {dtype.value for dtype in DType} >= {"float4_e2m1fn", "float8_e4m3fn", "float8_e5m2", "bfloat16", "complex128", "uint64"}


def test_native_copies_only_what_it_must() -> None:
    array = np.arange(6.0).reshape(2, 3)
    assert native(array) is array
    for changed in (array.T, array[:, ::2], array.astype(">f8")):
        result = native(changed)
        assert result.flags.c_contiguous
        assert result.dtype.isnative
        np.testing.assert_array_equal(result, changed)
    assert native(5.0).shape == ()
    assert native(np.zeros((0, 3)).T).shape == (3, 0)
    for wrong in (None, "text", [object()], [[1], [1, 2]], np.zeros(1, "M8[s]")):
        with pytest.raises(accel.InvalidArgumentError):
            native(wrong)


def test_token_is_plain_data() -> None:
    token = AccelToken("cpu:0/x", 3, 1)
    assert pickle.loads(pickle.dumps(token)) == token
    assert {token: 1}[AccelToken("cpu:0/x", 3, 1)] == 1
    with pytest.raises(AttributeError):
        token.buffer = 4  # type: ignore[misc]


class Owner:
    """What a ref sees of a device."""

    def __init__(self) -> None:
        self.name, self.identity, self.live_generation = "cpu:0", "cpu:0/x", 1
        self.is_closing = False
        self.dropped: deque[int] = deque()
        self.device: Any = self
        self.sharing: Any = None
        self.durable: Any = None
        self.is_closing = False
        self.registered: list[int] = []

    def register_token(self, ref: AccelRef) -> None:
        self.registered.append(ref.buffer)

    def check_process(self) -> None:
        pass


def test_ref_without_a_device() -> None:
    owner = Owner()
    ref = AccelRef(owner, 7, (2, 3), DType.FLOAT16, 1)
    assert pickle.loads(pickle.dumps(ref)) == AccelToken("cpu:0/x", 7, 1)
    assert owner.registered
    owner.live_generation = 0
    assert ref.is_stale
    with pytest.raises(accel.StaleRefError) as caught:
        ref.check()
    assert (caught.value.reason, caught.value.generation) == ("generation", None)
    del ref, caught
    assert list(owner.dropped) == [7]


def test_backends_are_found_by_name() -> None:
    assert {"cpu", "cuda"} <= set(backend_names())
    backend = load_backend("cpu")
    assert isinstance(backend, accel.AccelBackend)
    with pytest.raises(accel.BackendUnavailableError, match="abacus"):
        load_backend("abacus")


def test_devices_are_found_by_spec() -> None:
    backend, description = find_device("cpu")
    assert (backend.name, description.spec, description.index) == ("cpu", "cpu:0", 0)
    assert find_device(description.uuid)[1] == description
    assert pickle.loads(pickle.dumps(description)) == description
    for spec in ("cpu:x", "abacus", "", "cpu:-1"):
        with pytest.raises(accel.InvalidArgumentError):
            find_device(spec)
    with pytest.raises(accel.BackendUnavailableError):
        find_device("cpu:9")


def test_registered_backend_takes_part_in_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    class Better:
        name = "better"
        preference = 1000

        def devices(self) -> tuple[DeviceDescription, ...]:
            return (DeviceDescription("better", 0, "chip", "uuid-1"),)

        def open(self, index: int) -> Any:
            raise NotImplementedError

    class Point:
        name = "better"
        value = "better_backend:Better"

    module = types.ModuleType("better_backend")
    module.Better = Better  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "better_backend", module)
    monkeypatch.setattr(
        "importlib.metadata.entry_points",
        lambda group: [Point()] if group == "accel.backends" else [],
    )
    assert find_device("auto")[1].spec == "better:0"
    assert find_device("uuid-1")[0].name == "better"


def test_every_op_is_a_frozen_picklable_dataclass() -> None:
    owner = Owner()
    a, b = (AccelRef(owner, n, (2, 2), DType.FLOAT32, 1) for n in (1, 2))
    x = np.arange(4, dtype=np.float32).reshape(2, 2)
    made: list[ops.KernelOp] = [
        ops.Put(x),
        ops.Get(a, x),
        ops.Empty((2,), DType.INT8),
        ops.Fill((2,), DType.INT8, 3),
        ops.Copy(a, b),
        ops.Free(a),
        ops.Gemm(a, b, alpha=2.0),
        ops.Axpy(a, b),
        ops.Dot(a, b),
        ops.Nrm2(a),
        ops.Scal(a, 2.0),
        ops.Unary(accel.UnaryOp.NEG, a),
        ops.Binary(accel.BinaryOp.ADD, a, b),
        ops.Reduce(accel.ReduceOp.SUM, a, axis=1),
    ]
    for op in made:
        back = pickle.loads(pickle.dumps(op))
        assert type(back) is type(op)
        for name in (field.name for field in dataclasses.fields(op)):  # type: ignore[arg-type]
            before, after = getattr(op, name), getattr(back, name)
            if isinstance(before, AccelRef):
                assert after == before.token()
            elif isinstance(before, np.ndarray):
                np.testing.assert_array_equal(after, before)
            else:
                assert after == before
            with pytest.raises(AttributeError):
                setattr(op, name, None)
        assert op.plan().reads == tuple(ref for ref in op.plan().reads if isinstance(ref, AccelRef))
