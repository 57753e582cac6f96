"""Several functions of elements as one op."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu import costs
from accel.cpu.families import sampling
from accel.cpu.families.functions import BINARY, FUNCTIONS, UFUNCS, power
from accel.cpu.families.precision import blocks, wider
from accel.cpu.views import Array, array, operand
from accel.dtype import DType, rounded
from accel.enums import BinaryOp, UnaryOp
from accel.family import Sample
from accel.views import broadcast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["kernel", "samples", "values_of"]

# Temporaries of this size stay in the second-level cache.
_CACHE = 1 << 18


def _clip(x: Array, least: Array, most: Array) -> Any:
    return np.minimum(np.maximum(x, least), most)


def _floor_divide(a: Array, b: Array) -> Any:
    made = np.floor_divide(a, b)
    if made.dtype.kind == "f":  # of infinities numpy has Python's results, and these are the array API standard's
        ends = np.isinf(a) | np.isinf(b)
        made = np.where(ends, np.floor(np.divide(a, b)), made) if ends.any() else made
    return made


def _expm1(x: Array) -> Any:
    made = np.asarray(np.expm1(x))
    if made.dtype.kind == "c":
        made.real += 0  # of -0 numpy gives -0, and the array API standard 0
    return made


def _tanh(x: Array) -> Any:
    made = np.asarray(np.tanh(x))
    if made.dtype.kind == "c":
        # For infinite real parts the imaginary zero is of the sign of x's in the array API standard; in C of that of sin(2 * x.imag).
        ends = np.isinf(x.real) & np.isfinite(x.imag)
        made.imag[ends] = np.copysign(made.imag.dtype.type(0), np.broadcast_to(x.imag, made.shape)[ends])
    return made


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{op.value: ufunc for op, ufunc in UFUNCS.items()},
    **{op.value: function for op, function in FUNCTIONS.items()},
    **{op.value: ufunc for op, ufunc in BINARY.items()},
    UnaryOp.EXPM1.value: _expm1,
    UnaryOp.TANH.value: _tanh,
    UnaryOp.RELU.value: lambda x: np.maximum(x, x.dtype.type(0)),
    BinaryOp.POW.value: lambda a, b: power(a, b) if a.dtype.kind in "iu" else np.power(a, b),
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "log10": np.log10,
    "trunc": np.trunc,
    "signbit": np.signbit,
    "conj": np.conjugate,
    "real": np.real,
    "imag": np.imag,
    "invert": np.invert,
    "atan2": np.arctan2,
    "copysign": np.copysign,
    "hypot": np.hypot,
    "logaddexp": np.logaddexp,
    "nextafter": np.nextafter,
    "floor_divide": _floor_divide,
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
    "left_shift": np.left_shift,
    "right_shift": np.right_shift,
    "where": np.where,
    "clip": _clip,
}


def kernel(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Compute a program, some rows at a time."""
    addresses = iter(inputs)
    shape = broadcast(*[each.shape for each in op.operands])
    types = op.types()
    if 0 in shape:
        return
    operands = [np.asarray(each) if isinstance(each, np.generic) else operand(next(addresses), each) for each in op.operands]
    out = array(outputs[0], shape, types[-1].numpy) if op.out is None else operand(outputs[0], op.out)
    cost = len(op.program) * costs.elements(2 * out.size, out.dtype)
    lane.stream.submit(partial(_run, op.program, types, operands, out), cost)


@np.errstate(all="ignore")
def _run(program: Sequence[Any], types: Sequence[DType], operands: list[Array], out: Array) -> None:
    if not out.ndim:
        out[...] = values_of(program, types, operands)
        return
    values = len(program) + len(operands)
    for rows in blocks(out.shape[0], values * 8 * math.prod(out.shape[1:]), _CACHE):
        parts = [each[rows] if each.ndim == out.ndim and each.shape[0] > 1 else each for each in operands]
        out[rows] = values_of(program, types, parts)


def values_of(program: Sequence[Any], types: Sequence[DType], operands: Sequence[Array]) -> Array:
    """Compute all values of a program, and return the last one, in the type that it is computed in.

    Parameters
    ----------
    program, types
        See :class:`accel.ops.Fused`; the dtypes are those of all values.
    operands
        Arrays and numbers.
    """
    # Of 0-d operands numpy's functions make scalars, which nothing can be written to.
    values: list[Any] = [np.atleast_1d(each).astype(wider(each.dtype), copy=False) for each in operands]
    for instruction, dtype in zip(program, types[len(operands) :], strict=True):
        name, arguments = instruction[0], [values[place] for place in instruction[1:]]
        function = _FUNCTIONS.get(name)
        result = rounded(arguments[0], dtype.numpy) if function is None else function(*arguments)
        values.append(result.astype(wider(dtype.numpy), copy=False))
    last: Array = values[-1]
    return last


def _call(program: Any, numbers: tuple[Any, ...], elementwise: Any, *refs: Any) -> Any:
    return elementwise.fused(program, (*refs, *numbers))


def samples(rng: np.random.Generator) -> Iterator[Sample]:
    """See :attr:`BackendPart.samples`."""
    wide = sampling.wide
    for dtype in (*sampling.ALL_FLOATS, DType.COMPLEX64):
        x, y = sampling.random(rng, (7, 33), dtype), sampling.random(rng, (33,), dtype)
        two = x.dtype.type(2)
        program: Any = (("mul", 0, 1), ("add", 3, 2), ("tanh", 4)) if not dtype.is_complex else (("mul", 0, 1), ("add", 3, 2), ("exp", 4))
        last = np.exp if dtype.is_complex else np.tanh
        expected = np.asarray(last(wide(x) * wide(y) + 2))
        yield Sample(f"fused {dtype.value}[7, 33][33]", partial(_call, program, (two,)), (x, y), expected, sampling.sums(dtype, 4))
    x, y = rng.standard_normal((4, 1, 3)).astype(np.float32), rng.standard_normal((5, 1)).astype(np.float32)
    program = (("float64", 0), ("float64", 1), ("hypot", 2, 3), ("less", 2, 3), ("where", 5, 4, 2))
    expected = np.where(wide(x) < wide(y), np.hypot(wide(x), wide(y)), wide(x))
    yield Sample("fused conversions and where", partial(_call, program, ()), (x, y), expected, 1e-14)
    n, m = rng.integers(-50, 50, 1001).astype(np.int32), rng.integers(1, 9, 1001).astype(np.int32)
    expected = (n // m) ^ (n & m)
    yield Sample(
        "fused int32", partial(_call, (("floor_divide", 0, 1), ("bitwise_and", 0, 1), ("bitwise_xor", 2, 3)), ()), (n, m), expected
    )
    for shape in ((), (0, 3)):
        x = rng.standard_normal(shape)
        yield Sample(f"fused {list(shape)}", partial(_call, (("abs", 0), ("mul", 2, 1)), (np.float64(3),)), (x,), np.asarray(np.abs(x) * 3))
