"""Functions of one and two elements of a compute interface."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from accel.compute import BinaryOp, UnaryOp
from accel.dtype import DType
from accel.testing.conformance.harness import sum_rounding, wide

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from accel.compute import ComputeBackend
    from accel.testing.conformance.harness import Array, Case, Harness

__all__ = [
    "check_binary_in_place",
    "check_binary_of_one_operand",
    "check_binary_special_values",
    "check_binary_values",
    "check_unary_in_place",
    "check_unary_special_values",
    "check_unary_values",
]

_SIZES = (0, 1, 7, 1000, 70_001)
_LOGARITHMS = (UnaryOp.LOG, UnaryOp.SQRT)


def _sigmoid(x: Array) -> Array:
    # The two forms are equal; each is exact where the other would overflow.
    positive = 1 / (1 + np.exp(-np.abs(x)))
    return np.where(x < 0, np.exp(-np.abs(x)) * positive, positive)


_UNARY: dict[UnaryOp, Callable[[Array], Array]] = {
    UnaryOp.RELU: lambda x: np.where(x < 0, np.zeros_like(x), x),
    UnaryOp.SIGMOID: _sigmoid,
    UnaryOp.TANH: np.tanh,
    UnaryOp.EXP: np.exp,
    UnaryOp.LOG: np.log,
    UnaryOp.SQRT: np.sqrt,
    UnaryOp.ABS: np.abs,
    UnaryOp.NEG: np.negative,
}
_BINARY: dict[BinaryOp, Callable[[Array, Array], Any]] = {
    BinaryOp.ADD: np.add,
    BinaryOp.SUB: np.subtract,
    BinaryOp.MUL: np.multiply,
    BinaryOp.DIV: np.divide,
    BinaryOp.MAX: np.maximum,
    BinaryOp.MIN: np.minimum,
}


def _unary_pairs(compute: ComputeBackend) -> Iterator[tuple[UnaryOp, DType]]:
    for op in UnaryOp:
        for dtype in sorted(compute.capabilities().get(f"unary.{op.value}", ()), key=lambda dtype: dtype.value):
            yield op, dtype


def _binary_pairs(compute: ComputeBackend) -> Iterator[tuple[BinaryOp, DType]]:
    for op in BinaryOp:
        for dtype in sorted(compute.capabilities().get(f"binary.{op.value}", ()), key=lambda dtype: dtype.value):
            yield op, dtype


def _special(dtype: DType) -> Array:
    """Return values at which functions are easily wrong."""
    if dtype.is_integer:
        limits = np.iinfo(dtype.numpy)
        return np.array([limits.min, limits.min + 1, limits.max, limits.max - 1, 0, 1, 2], dtype.numpy)
    large = 60_000.0 if dtype is DType.FLOAT16 else 1e30
    values = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, large, -large, 0.5, -20.0, 20.0])
    if dtype.is_complex:
        # Infinities times complex numbers follow no one rule; NaN stays NaN.
        values = values[np.isfinite(values) & (np.abs(values) < 1e9)] + 0.25j
        values = np.append(values, complex(np.nan, np.nan))
    return values.astype(dtype.numpy)


def _unary_error(op: UnaryOp, x: Array, expected: Array, dtype: DType) -> Array | float:
    if op in (UnaryOp.RELU, UnaryOp.ABS, UnaryOp.NEG):
        return 0.0
    # A few units in the last place of the type that is computed in.
    return 8 * sum_rounding(dtype) * np.where(np.isfinite(expected), np.abs(expected), 0.0)


def _check_unary(case: Case, op: UnaryOp, x: Array, dtype: DType, *, in_place: bool) -> None:
    source = case.put(x)
    out = source if in_place else case.poisoned(x.shape, dtype)
    case.compute.unary(op, source, out, x.size, dtype=dtype)
    with np.errstate(all="ignore"):
        expected = _UNARY[op](wide(x))
        error = _unary_error(op, x, expected, dtype)
    case.close_to(case.get(out, x.shape, dtype), expected, error)
    if not in_place:
        case.same(case.get(source, x.shape, dtype), x, "the input")


async def check_unary_values(harness: Harness) -> None:
    """Check every function, dtype and size; the output is other memory."""
    with harness.open_compute() as compute:
        for op, dtype in _unary_pairs(compute):
            for n in _SIZES:
                with harness.case(compute, f"unary {op.value} {dtype.value} n={n}") as case:
                    x = harness.random(n, dtype)
                    if dtype.is_floating:
                        x = (x.astype(np.float64) * 4).clip(-10, 10).astype(dtype.numpy)
                        x = np.abs(x) + np.full((), 0.01, dtype.numpy) if op in _LOGARITHMS else x
                    _check_unary(case, op, x, dtype, in_place=False)


async def check_unary_in_place(harness: Harness) -> None:
    """Check that the output may be the input."""
    with harness.open_compute() as compute:
        for op, dtype in _unary_pairs(compute):
            for n in (5, 70_001):
                with harness.case(compute, f"unary {op.value} {dtype.value} in place n={n}") as case:
                    _check_unary(case, op, harness.random(n, dtype), dtype, in_place=True)


async def check_unary_special_values(harness: Harness) -> None:
    """Check NaN, infinities, large numbers and the ends of the integers, as in numpy."""
    with harness.open_compute() as compute:
        for op, dtype in _unary_pairs(compute):
            with harness.case(compute, f"unary {op.value} {dtype.value} of special values") as case:
                _check_unary(case, op, _special(dtype), dtype, in_place=False)


def _binary_error(op: BinaryOp, a: Array, b: Array, dtype: DType) -> Array | float:
    if op in (BinaryOp.MAX, BinaryOp.MIN):
        return 0.0
    scale = np.abs(a) + np.abs(b) if op in (BinaryOp.ADD, BinaryOp.SUB) else np.abs(a) * np.abs(b)
    if op is BinaryOp.DIV:
        scale = np.abs(a / b)
    return 8 * sum_rounding(dtype) * np.where(np.isfinite(scale), scale, 0.0)


def _check_binary(case: Case, op: BinaryOp, a: Array, b: Array, dtype: DType, *, target: str = "") -> None:
    """Check one call, whose result goes over operand ``target``, or into other memory."""
    operands = {"a": case.put(a), "b": case.put(b)}
    out = operands.get(target) or case.poisoned(a.shape, dtype)
    case.compute.binary(op, operands["a"], operands["b"], out, a.size, dtype=dtype)
    with np.errstate(all="ignore"):
        expected = np.asarray(_BINARY[op](wide(a), wide(b)))
        error = _binary_error(op, wide(a), wide(b), dtype) if not dtype.is_integer else 0.0
    case.close_to(case.get(out, a.shape, dtype), expected, error)
    for name, value in (("a", a), ("b", b)):
        if name != target:
            case.same(case.get(operands[name], value.shape, dtype), value, f"operand {name}")


async def check_binary_values(harness: Harness) -> None:
    """Check every function, dtype and size; integers wrap around."""
    with harness.open_compute() as compute:
        for op, dtype in _binary_pairs(compute):
            for n in _SIZES:
                with harness.case(compute, f"binary {op.value} {dtype.value} n={n}") as case:
                    _check_binary(case, op, harness.random(n, dtype), harness.random(n, dtype), dtype)


async def check_binary_in_place(harness: Harness) -> None:
    """Check that the output may be either operand."""
    with harness.open_compute() as compute:
        for op, dtype in _binary_pairs(compute):
            for target in ("a", "b"):
                with harness.case(compute, f"binary {op.value} {dtype.value} over {target}") as case:
                    _check_binary(case, op, harness.random(3001, dtype), harness.random(3001, dtype), dtype, target=target)


async def check_binary_of_one_operand(harness: Harness) -> None:
    """Check that both operands may be the same memory, and the output too."""
    with harness.open_compute() as compute:
        for op, dtype in _binary_pairs(compute):
            with harness.case(compute, f"binary {op.value} {dtype.value} of x and x over x") as case:
                x = harness.random(1001, dtype)
                pointer = case.put(x)
                compute.binary(op, pointer, pointer, pointer, x.size, dtype=dtype)
                with np.errstate(all="ignore"):
                    expected = np.asarray(_BINARY[op](wide(x), wide(x)))
                    error = _binary_error(op, wide(x), wide(x), dtype) if not dtype.is_integer else 0.0
                case.close_to(case.get(pointer, x.shape, dtype), expected, error)


async def check_binary_special_values(harness: Harness) -> None:
    """Check all pairs of NaN, infinities, zeros and the ends of the integers, as in numpy; max and min propagate NaN."""
    with harness.open_compute() as compute:
        for op, dtype in _binary_pairs(compute):
            if dtype.is_complex and op is BinaryOp.DIV:
                continue
            values = _special(dtype)
            a, b = np.repeat(values, values.size), np.tile(values, values.size)
            with harness.case(compute, f"binary {op.value} {dtype.value} of special values") as case:
                _check_binary(case, op, a, b, dtype)
