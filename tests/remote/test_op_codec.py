"""Ops travel to the child: refs as numbers, everything else as it is, and no array."""

from __future__ import annotations

import dataclasses
import enum
import marshal
import pickle
from collections import deque
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

from accel import ops
from accel.dtype import DType
from accel.enums import BinaryOp, ReduceOp, Transpose, UnaryOp
from accel.errors import UnsupportedError
from accel.ops import KernelOp, Plan, Spec
from accel.ref import AccelRef, RefView
from accel.remote.messages import ArenaSlice
from accel.remote.op_codec import OpReader, OpWriter


class Owner:
    """As much of a device as its refs ask for."""

    name, identity, is_closing, live_generation, device, sharing, durable = "cpu:0", "x", False, 3, None, None, None

    def __init__(self) -> None:
        self.dropped: deque[int] = deque()
        self.refs: dict[int, AccelRef] = {}

    def check_process(self) -> None: ...

    def register_token(self, ref: AccelRef) -> None:
        raise AssertionError("no token is made on the way")

    def ref(self, *shape: int, dtype: DType = DType.FLOAT32) -> AccelRef:
        ref = AccelRef(self, len(self.refs) + 1, shape, dtype, 3)
        self.refs[ref.buffer] = ref
        return ref

    def resolve(self, buffer: int, shape: tuple[int, ...], dtype: DType) -> AccelRef:
        base = self.refs[buffer]
        assert (shape, dtype) == (base.shape, base.dtype), "of the whole buffer, for views too"
        return base


OWNER = Owner()
A, B, C = OWNER.ref(8, 8), OWNER.ref(8, 8), OWNER.ref(8, 8)
IMAGE, KERNEL = OWNER.ref(1, 2, 8, 8), OWNER.ref(3, 2, 3, 3)
Q = OWNER.ref(1, 2, 4, 8, dtype=DType.BFLOAT16)
COMPILED = ops.CompiledKernel('extern "C" __global__ void f(float* x, float y) {}', "f", parameters=("float32*", "float32"))


@dataclass(frozen=True, eq=False)
class Mine(KernelOp):
    """An op of a user's: no slots, refs in a tuple, whatever else."""

    library: ClassVar[str] = "mine"
    kind: ClassVar[str] = "mine"

    refs: tuple[Any, ...]
    value: Any = None

    def plan(self) -> Plan:
        return Plan(tuple(ref for ref in self.refs if isinstance(ref, AccelRef)), (), ())


@dataclass(frozen=True, eq=False, slots=True)
class Knows(KernelOp):
    """An op that says itself how it is pickled: it travels by its fields all the same."""

    library: ClassVar[str] = "mine"
    kind: ClassVar[str] = "knows"

    value: Any

    def plan(self) -> Plan:
        return Plan((), (), ())

    def __reduce__(self) -> tuple[Any, ...]:
        return Knows, ((self.value, "reduced"),)


class Wire:
    """A writer, and a reader as another process has it: all that reaches it went through bytes."""

    def __init__(self) -> None:
        self.announced: list[object] = []
        self.arrays: dict[ArenaSlice, np.ndarray[Any, Any]] = {}
        self.reader = OpReader(OWNER.resolve, self.arrays.__getitem__, {})
        self._writer = OpWriter(self._announce)

    def _announce(self, number: int, named: object) -> None:
        data = pickle.dumps(named)
        self.announced.append(named)
        self.reader.define(number, pickle.loads(data))

    def write(self, op: KernelOp, place: ArenaSlice | None = None) -> bytes:
        return marshal.dumps(self._writer.write(op, place))

    def read(self, data: bytes) -> Any:
        return self.reader.read(marshal.loads(data))


def there_and_back(op: KernelOp) -> Any:
    wire = Wire()
    return wire.read(wire.write(op))


@pytest.mark.parametrize(
    "op",
    [
        ops.Gemm(A, B),
        ops.Gemm(A, B, out=C, alpha=2.0, beta=0.5, transpose_a=Transpose.TRANSPOSE, allow_tf32=True),
        ops.Copy(A, B),
        ops.Free(A),
        ops.Empty((2, 3), DType.FLOAT8_E4M3FN),
        ops.Fill((2, 3), DType.INT8, np.int8(-7)),
        ops.Reduce(ReduceOp.SUM, A, axis=1),
        ops.Unary(UnaryOp.RELU, A),
        ops.Binary(BinaryOp.ADD, A, B, out=C),
        ops.Conv2d(IMAGE, KERNEL),
        ops.Conv2d(IMAGE, KERNEL, padding=((0, 1), (2, 1)), dilation=(1, 2), activation="relu"),
        ops.Attention(Q, Q, Q),
        ops.Attention(Q, Q, Q, causal="bottom_right", window=3, scale=0.5),
        ops.Rfft(A),
        ops.Axpy(A, B, alpha=0.5),
    ],
    ids=lambda op: op.kind,
)
def test_ops_come_back_as_they_were(op: Any) -> None:
    back = there_and_back(op)
    assert type(back) is type(op)
    for each in dataclasses.fields(op):
        before, after = getattr(op, each.name), getattr(back, each.name)
        assert type(after) is type(before)
        assert after is before if isinstance(before, AccelRef) else after == before
    assert back.plan() == op.plan()


def test_views_travel_as_views_of_the_childs_own_buffer() -> None:
    back = there_and_back(ops.Gemm(A[2:4], B.reshape((8, 8)), out=C.view("int32").view("float32")[:2]))
    assert isinstance(back.a, RefView)
    assert back.a.base is A
    assert (back.a.offset, back.a.shape, back.a.dtype) == (64, (2, 8), DType.FLOAT32)
    assert isinstance(back.b, RefView)
    assert back.b.offset == 0
    assert (back.out.base, back.out.shape) == (C, (2, 8))


def test_refs_in_tuples_keep_their_places() -> None:
    op = Mine((1, A, None, B[0], "x", A, (C, 2)), value={"a": [DType.INT8, np.float32(0.5)]})
    object.__setattr__(op, "beside", 7)
    back = there_and_back(op)
    assert back.refs[:3] == (1, A, None)
    assert (back.refs[3].base, back.refs[3].shape) == (B, (8,))
    assert back.refs[4:] == ("x", A, (C, 2))
    assert back.value == op.value
    assert back.beside == 7
    assert op.refs[1] is A, "the op itself is as it was"


def test_a_launch_travels_with_its_kernel() -> None:
    op = ops.Launch(COMPILED, (4, 1, 1), (32, 1, 1), (A, np.float32(0.5)))
    op.plan()
    back = there_and_back(op)
    assert back.args == op.args
    assert back.kernel == COMPILED
    assert back.plan() == op.plan()


def test_an_op_travels_by_its_fields_however_it_is_pickled() -> None:
    assert there_and_back(Knows(5)).value == 5
    assert there_and_back(Knows(A)).value.buffer == A.buffer


def test_an_array_without_a_dimension_is_a_number() -> None:
    back = there_and_back(ops.Fill((2,), DType.FLOAT32, np.array(1.5)))
    assert isinstance(back.value, np.float64)
    assert back.value == 1.5


class Special(np.ndarray[Any, Any]):
    """An array of somebody's own kind."""


@pytest.mark.parametrize(
    "op",
    [
        ops.Put(np.zeros(3)),
        ops.Get(A, np.zeros((8, 8), np.float32)),
        Mine((A,), np.zeros(3).view(Special)),
        Mine((np.zeros(2),)),
        Mine((), [{"deep": np.zeros(1)}]),
        Knows(np.zeros(1)),
    ],
)
def test_arrays_are_refused(op: KernelOp) -> None:
    with pytest.raises(UnsupportedError, match="arrays inside ops") as caught:
        Wire().write(op)
    assert caught.value.op == op.kind


@pytest.mark.parametrize("op", [Mine((), [A]), Mine((), {1: B[0]})])
def test_refs_elsewhere_than_in_fields_are_refused(op: KernelOp) -> None:
    with pytest.raises(UnsupportedError, match="neither a field"):
        Wire().write(op)


def test_what_cannot_be_imported_is_refused_by_its_sender() -> None:
    @dataclass(frozen=True)
    class Local(Mine):
        pass

    for op in (Local(()), Mine((), lambda: None)):
        with pytest.raises(UnsupportedError, match="cannot be sent") as caught:
            Wire().write(op)
        assert caught.value.op == "mine"


@pytest.mark.parametrize("op", [Mine(()), Mine((), Knows(1))], ids=["its class", "a field"])
def test_what_cannot_be_loaded_is_an_error_of_the_op(op: KernelOp, monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire()
    data = wire.write(op)
    monkeypatch.delitem(globals(), "Knows")
    if type(op) is Mine and op.value is None:
        wire.reader.define(1, None)
    with pytest.raises(UnsupportedError, match="cannot be loaded"):
        wire.read(data)


class Unhashable(enum.Enum):
    ONE = 1

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = None  # type: ignore[assignment]


class First(enum.IntEnum):
    SAME = 1


class Second(enum.IntEnum):
    SAME = 1


class Flags(enum.Flag):
    A = 1
    B = 2


def test_members_are_the_same_each_time_they_are_sent() -> None:
    wire = Wire()
    for _ in range(2):
        for member in (Unhashable.ONE, First.SAME, Second.SAME, Flags.A, Flags.A | Flags.B, Flags(0), DType.FLOAT32):
            assert wire.read(wire.write(Mine((), member))).value is member, "of two classes that have equal members too"


def test_plain_values_and_tuples_of_them_are_equal() -> None:
    for value in (None, True, 3, 2.5, 1j, "text", b"bytes", (1, "two", 3.0), (1, (2, DType.INT8), np.float32(3.0))):
        back = there_and_back(Mine((), value)).value
        assert (back, type(back)) == (value, type(value))


def test_specs_travel_by_what_they_say_and_are_not_pickled() -> None:
    wire = Wire()
    specs = (Spec((2, 3), DType.FLOAT32), Spec((), DType.BOOL, durable=True), Spec((np.int64(4),), "float16"))  # type: ignore[arg-type]
    data = wire.write(Mine((), specs[:2]))
    assert b"Spec" not in data
    assert wire.read(data).value == specs[:2]
    back = there_and_back(Mine((), specs)).value
    assert back == specs
    assert {type(each) for each in back} == {Spec}
    assert back[0].dtype is DType.FLOAT32


@pytest.mark.parametrize("op", [ops.Put(np.zeros(3), A, durable=True), ops.Get(A, np.zeros((8, 8), np.float32))])
def test_the_array_of_a_transfer_is_a_place_in_shared_memory(op: Any) -> None:
    wire, shared = Wire(), np.ones(5)
    place = ArenaSlice(2, 64, (8, 8), DType.BFLOAT16)
    wire.arrays[place] = shared
    back = wire.read(wire.write(op, place))
    for each in dataclasses.fields(op):
        before, after = getattr(op, each.name), getattr(back, each.name)
        assert after is (shared if isinstance(before, np.ndarray) else before)
