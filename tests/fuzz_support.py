"""Random calls of everything that a device offers: half of the arguments might do, the others are what nobody expects."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

import accel
from accel import ops
from accel.enums import BinaryOp, ReduceOp, UnaryOp
from accel.ops.families import FAMILIES
from accel.ops.namespace import ops_of

if TYPE_CHECKING:
    import random

__all__ = ["LIMIT", "Call", "Fuzzer", "expected", "shown"]

LIMIT = 8 << 20
"""Bytes that a device under test may take: what is larger is refused, and not tried out."""

DTYPES = [each.value for each in accel.DType]
NUMERIC = ["float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool", "complex64", "complex128"]
SHAPES: list[Any] = [
    (),
    (0,),
    (1,),
    (3,),
    (4,),
    (2, 3),
    (3, 4),
    (4, 3),
    (2, 2),
    (0, 3),
    (2, 3, 4),
    (1, 1, 4, 4),
    (2, 1, 3, 3),
    (64,),
    (33, 17),
]


class Liar:
    """A number that is none when it is asked."""

    def __index__(self) -> int:
        raise ValueError("not now")

    def __float__(self) -> float:
        raise ValueError("not now")

    def __repr__(self) -> str:
        return "Liar()"


class Endless:
    """Something without an end."""

    def __iter__(self) -> Endless:
        return self

    def __next__(self) -> int:
        raise RuntimeError("iterating has failed")

    def __repr__(self) -> str:
        return "Endless()"


WILD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, -7, 2**31, 2**40, 2**63 - 1, 2**63, -(2**63), 2**64, 2**64 - 1, 2**200, -(2**200), 10**400),
    *(0.0, -0.0, 0.5, 1.5, 1e308, 5e-324, math.nan, math.inf, -math.inf, 1j, complex(math.nan, math.inf)),
    *("", "x", "float32", "relu", "sum", "\0", "\ud800", "é" * 100, b"", b"x", (), [], {}, set(), (0,), (0, 1), (1, 0, 2), (-1,), (2**63, 2**63)),
    *((-1, 2), [2, 2], (2.5,), ("a",), (None,), [[1, 2], [3]], range(3), range(2**40, 2**40 + 2), (1,) * 100, (2**40, 2**40), (0, 2**62, 2**62)),
    *(np.float32(2), np.int64(3), np.bool_(True), np.float64("nan"), np.complex64(1j), np.array(2), np.array([1, 2]), np.array(["a"])),
    *(np.array([None]), np.array([1, 2], "M8[s]"), np.zeros((2, 2), ">f4"), np.zeros((4, 4))[::2, ::-1], np.array([(1, 2.0)], "i4,f8"), np.zeros(0)),
    *(np.ma.array([1.0], mask=[True]), np.array([1e400, 1]), ml_dtypes.bfloat16(1), Decimal("1e999"), Decimal("NaN"), Liar(), Endless(), object()),
    *(accel.DType.FLOAT32, np.dtype("f8"), np.dtype("V3"), float, int, object, slice(None), Ellipsis, accel.Transpose.CONJUGATE, UnaryOp.RELU),
]  # fmt: skip


@dataclass
class Call:
    """A method, and what it is called with."""

    name: str
    method: Callable[..., Any]
    arguments: dict[str, Any]
    refs: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    """What the refs among the arguments hold."""


def shown(call: Call) -> str:
    """Return the call as text."""
    texts = [f"{name}={value!r:.120}" for name, value in call.arguments.items()]
    return f"{call.name}({', '.join(texts)})"


class Fuzzer:
    """Makes calls for one device.

    Parameters
    ----------
    device
        What is called.
    rng
        Where everything random comes from: the same state, the same calls.
    strange
        Refs that this device must refuse.
    """

    def __init__(self, device: accel.Device, rng: random.Random, strange: list[Any]) -> None:
        self.device = device
        self.rng = rng
        self.strange = strange
        self.refs: list[tuple[accel.AccelRef, np.ndarray[Any, Any]]] = []
        self.methods = dict(_methods(device))

    async def fill(self) -> None:
        """Put operands on the device, with NaN, infinities and zeros among them."""
        numbers = np.random.default_rng(self.rng.getrandbits(32))
        for shape in SHAPES:
            for name in self.rng.sample(NUMERIC, 4):
                array = (4 * numbers.standard_normal(shape)).astype(np.complex128 if name.startswith("complex") else np.float64)
                special = numbers.random(shape) < 0.05
                if name.startswith(("int", "uint", "bool")):
                    array = np.abs(array) if name.startswith("u") else array
                else:
                    array = np.where(special, numbers.choice([np.nan, np.inf, -np.inf, 0.0, 1e30], shape), array)
                with np.errstate(all="ignore"):
                    array = np.asarray(array, accel.DType.of(name).numpy)
                self.refs.append((await self.device.put(array), array))

    def call(self) -> Call:
        """Return the next call."""
        rng = self.rng
        name = rng.choice(list(self.methods))
        method = self.methods[name]
        call = Call(name, method, {})
        kin: list[Any] = []
        for parameter in inspect.signature(method).parameters.values():
            is_optional = parameter.default is not inspect.Parameter.empty
            if is_optional and rng.random() < 0.6:
                continue
            call.arguments[parameter.name] = self.argument(call, parameter.name, kin)
        return call

    def argument(self, call: Call, name: str, kin: list[Any]) -> Any:
        """Return a value for a parameter of that name: mostly one that may fit those chosen before."""
        rng = self.rng
        if rng.random() < 0.12 and name != "durable":
            return rng.choice(WILD)
        if rng.random() < 0.04:
            return rng.choice(self.strange)
        choices = _PLAUSIBLE.get(name)
        if choices is not None:
            return rng.choice(choices)
        if name in _ARRAYS:
            return rng.choice(self.refs)[1]
        fitting = [pair for pair in self.refs if not kin or (pair[1].dtype == kin[0].dtype and pair[1].ndim == kin[0].ndim)]
        ref, array = rng.choice(fitting if rng.random() < 0.85 else self.refs)
        if kin and rng.random() < 0.5:
            same = [pair for pair in fitting if pair[1].shape == kin[0].shape]
            ref, array = rng.choice(same or self.refs)
        kin.append(array)
        if rng.random() < 0.1 and array.ndim and len(array) > 1:
            ref, array = ref[1:], array[1:]
        call.refs[name] = array
        return ref


_ARRAYS = {"array"}
_PLAUSIBLE: dict[str, list[Any]] = {
    "op": [each.value for each in UnaryOp] + [each.value for each in BinaryOp] + [each.value for each in ReduceOp],
    "shape": SHAPES,
    "dtype": [*DTYPES, *NUMERIC],
    "alpha": [1.0, 2, -0.5, 1j, 0, math.nan, math.inf, np.float32(3)],
    "beta": [0.0, 1, 0.5, math.nan],
    "value": [0, 1, -1, 2.5, math.nan, math.inf, 300, 1j, True],
    "axis": [None, 0, 1, -1, 2, -3, 5],
    "axes": [0, -1, (0,), (0, 1), (-1, -2), (0, 0), (2, 1, 0), (0, 1, 2, 3)],
    "type": [1, 2, 3, 4, 0],
    "norm": ["backward", "ortho", "forward"],
    "n": [1, 2, 3, 4, 5, 0, -1],
    "keepdims": [True, False],
    "transpose_a": [True, False, "none", "transpose", "conjugate", accel.Transpose.CONJUGATE],
    "transpose_b": [True, False, "none", "transpose", "conjugate", accel.Transpose.CONJUGATE],
    "allow_tf32": [True, False],
    "subscripts": ["ij->ji", "i->", "ii", "...i->...", "...ij->...ji", "ij,jk", "...", "->", "ij->ik", "i.j", "", "é"],
    "optimize": ["auto", "greedy", "best", (), ((0, 1),), ["einsum_path", (0, 1)], [2**70]],
    "stride": [1, 2, (1, 2), 0, -1, 2**40],
    "padding": [0, 1, (1, 0), -1, 2**40, 2**62],
    "scale": [None, 1.0, 0.0, -2, math.nan, math.inf],
    "causal": [True, False, "bottom_right"],
    "low": [0, 0.0, -5, 1, 2**62, math.nan],
    "high": [1, 1.0, 5, 100, 2**63, math.inf],
    "mean": [0.0, 1, math.nan],
    "std": [1.0, 0, -1, math.inf],
    "sigma": [1.0, 0, -1],
    "lam": [0.0, 1.0, 30, -1, math.nan, 2.0**60],
    "p": [0.5, 0, 1.0, -0.1, math.nan],
    "seed": [None, 0, 1, 2**64 - 1, -1],
    "offset": [0, 1, 2**64 - 1, 2**70, -1],
    "generator": ["philox", "curand_philox", "xorwow"],
    "durable": [False],
    "timeout": [None, 5.0],
    "source_text": ["", "int x;"],
    "name": ["kernel", ""],
    "options": [(), ("-O3",)],
    "grid": [1, (1, 1), (1, 1, 1), (0,), 2**40],
    "block": [1, (32, 2), 2**20],
    "args": [(), (1,)],
    "index": [0, 1, -1, slice(0, 2), slice(None, None, 2), (0, slice(1)), Ellipsis, (slice(2**70),), None, (Ellipsis, 0)],
}


def _methods(device: accel.Device) -> Any:
    for family in FAMILIES:
        namespace = device.family(family.namespace)
        for name in ops_of(family.namespace):
            if name == "einsum":  # its operands are no keywords: Einsum below is the same
                continue
            yield family.name if name == "__call__" else f"{family.name}.{name}", getattr(namespace, name)
    yield "compiler.compile", device.compiler.compile
    yield "compiler.launch", device.compiler.launch
    for name in ("put", "get", "empty", "zeros", "full", "copy", "free", "resolve", "run", "wrap", "managed", "prefetch", "advise"):
        yield name, getattr(device, name)
    yield "ref[]", _of_refs(lambda ref, index: ref[index], "index")
    yield "ref.reshape", _of_refs(lambda ref, shape: ref.reshape(shape), "shape")
    yield "ref.view", _of_refs(lambda ref, dtype: ref.view(dtype), "dtype")
    classes: list[Any] = [ops.Fill, ops.Copy, *(op for family in FAMILIES for op in family.ops)]
    for cls in classes:
        yield f"run {cls.__name__}", _running(device, cls)
    yield "batch", _in_a_batch(device)


def _of_refs(function: Callable[[accel.AccelRef, Any], Any], name: str) -> Any:
    """Return what calls ``function`` with refs only: other objects have methods of their own."""

    def call(ref: Any, **arguments: Any) -> Any:
        return function(ref, arguments[name]) if isinstance(ref, accel.AccelRef) else None

    parameters = [inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY) for each in ("ref", name)]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


def _running(device: accel.Device, cls: Any) -> Any:
    async def run(**arguments: Any) -> Any:
        return await device.run(cls(**arguments))

    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in inspect.signature(cls).parameters.values()]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _in_a_batch(device: accel.Device) -> Any:
    async def batch(array: Any, op: Any, x: Any, shape: Any, value: Any, dtype: Any) -> None:
        async with device.batch(timeout=5.0) as recorded:
            recorded.elementwise.unary(op, recorded.put(array))
            recorded.elementwise.binary("add", x, recorded.full(shape, value, dtype))

    return batch


def expected(call: Call) -> np.ndarray[Any, Any] | None:
    """Return what a call that was answered must have given, from numpy in higher precision; ``None`` where that is not worked out here."""
    given = call.arguments
    wide = {name: _wide(array) for name, array in call.refs.items()}
    if (
        "out" in given
        or isinstance(given.get("axis"), (bool, np.bool_))
        or not all(isinstance(given.get(name), accel.AccelRef) for name in wide)
    ):
        return None
    with np.errstate(all="ignore"):
        word = str(getattr(given.get("op"), "value", given.get("op")))
        if not any(map(np.iscomplexobj, wide.values())):
            if call.name == "elementwise.binary" and len(wide) == 2 and word in _BINARY:
                return np.asarray(_BINARY[word](wide["x"], wide["y"]))
            if call.name == "elementwise.unary" and word in _UNARY:
                return np.asarray(_UNARY[word](wide["x"]))
            if call.name == "reduce" and word in _REDUCE:
                return np.asarray(_REDUCE[word](wide["x"], axis=given.get("axis"), keepdims=bool(given.get("keepdims", False))))
        if call.name == "get":
            return wide["ref"]
    return None


_BINARY: dict[str, Any] = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "min": np.minimum}
_UNARY: dict[str, Any] = {"relu": lambda x: np.where(np.isnan(x), x, np.maximum(x, 0)), "neg": np.negative, "abs": np.abs, "sqrt": np.sqrt}
_REDUCE: dict[str, Any] = {"max": np.max, "min": np.min}


def _wide(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if array.dtype.kind in "iu":
        return array.astype(np.longdouble)  # which has room for 64 bits
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)
