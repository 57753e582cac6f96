"""Functions of one and two elements of a compute interface."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.dtype import DType
from accel.enums import BinaryOp, UnaryOp, result_dtype
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
_PRODUCTS = (UnaryOp.GELU, UnaryOp.GELU_TANH, UnaryOp.SILU)


def _sigmoid(x: Array) -> Array:
    # The two forms are equal; each is exact where the other would overflow.
    positive = 1 / (1 + np.exp(-np.abs(x)))
    return np.where(x < 0, np.exp(-np.abs(x)) * positive, positive)


_UNARY: dict[UnaryOp, Callable[[Array], Any]] = {
    UnaryOp.RELU: lambda x: np.where(x < 0, np.zeros_like(x), x),
    UnaryOp.SIGMOID: _sigmoid,
    UnaryOp.ABS: np.abs,
    UnaryOp.NEG: np.negative,
    UnaryOp.ERF: np.vectorize(math.erf, otypes=[np.float64]),
    UnaryOp.GELU: lambda x: x * np.vectorize(math.erfc, otypes=[np.float64])(-x * math.sqrt(0.5)) / 2,
    UnaryOp.GELU_TANH: lambda x: x * _sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)),
    UnaryOp.SILU: lambda x: x * _sigmoid(x),
    UnaryOp.SOFTPLUS: lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))),
    UnaryOp.LEAKY_RELU: lambda x: np.where(x > 0, x, x * 0.01),
    UnaryOp.ELU: lambda x: np.where(x > 0, x, np.expm1(x)),
    UnaryOp.ASIN: np.arcsin,
    UnaryOp.ACOS: np.arccos,
    UnaryOp.ATAN: np.arctan,
    UnaryOp.RSQRT: lambda x: 1 / np.sqrt(x),
    UnaryOp.ROUND: np.rint,
}
_BINARY: dict[BinaryOp, Callable[[Array, Array], Any]] = {
    BinaryOp.ADD: np.add,
    BinaryOp.SUB: np.subtract,
    BinaryOp.MUL: np.multiply,
    BinaryOp.DIV: np.divide,
    BinaryOp.MAX: np.maximum,
    BinaryOp.MIN: np.minimum,
    BinaryOp.POW: lambda a, b: np.power(a, b) if a.dtype.kind == "f" else _integer_powers(a, b),
    BinaryOp.REMAINDER: lambda a, b: np.remainder(a, b),
}


def _integer_powers(a: Array, b: Array) -> Array:
    """Return powers modulo 2**n, and quotients without their fractions where the exponent is negative."""
    modulus = 1 << a.dtype.itemsize * 8
    powers = [pow(int(x), int(y), modulus) if y >= 0 else (int(x) ** int(y % 2) if x in (1, -1) else 0) for x, y in zip(a, b, strict=True)]
    return np.array([power % modulus for power in powers], f"u{a.dtype.itemsize}").view(a.dtype)


def _function(op: UnaryOp | BinaryOp) -> Callable[..., Any]:
    """Return numpy's function: most have its name."""
    own = _UNARY.get(op) if isinstance(op, UnaryOp) else _BINARY.get(op)
    found: Callable[..., Any] = own or getattr(np, op.value)
    return found


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
    if dtype.kind == "bool":
        return np.array([False, True])
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
    if dtype.kind == "bool" or result_dtype(op, dtype) is not dtype:
        return 0.0
    # A few units in the last place of the type that is computed in; where results are products with a small factor, of x.
    scale = np.abs(expected) + (np.minimum(np.abs(x.astype(np.float64)), 1) if op in _PRODUCTS else 0)
    return 8 * sum_rounding(dtype) * np.where(np.isfinite(expected), scale, 0.0)


def _check_unary(case: Case, op: UnaryOp, x: Array, dtype: DType, *, in_place: bool) -> None:
    made = result_dtype(op, dtype)
    source = case.put(x)
    out = source if in_place else case.poisoned(x.shape, made)
    case.compute.unary(op, source, out, x.size, dtype=dtype)
    with np.errstate(all="ignore"):
        expected = _function(op)(wide(x))
        error = _unary_error(op, x, expected, dtype)
    case.close_to(case.get(out, x.shape, made), expected, error)
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
            for n in (5, 70_001) if result_dtype(op, dtype) is dtype else ():
                with harness.case(compute, f"unary {op.value} {dtype.value} in place n={n}") as case:
                    _check_unary(case, op, harness.random(n, dtype), dtype, in_place=True)


async def check_unary_special_values(harness: Harness) -> None:
    """Check NaN, infinities, large numbers and the ends of the integers, as in numpy."""
    with harness.open_compute() as compute:
        for op, dtype in _unary_pairs(compute):
            with harness.case(compute, f"unary {op.value} {dtype.value} of special values") as case:
                _check_unary(case, op, _special(dtype), dtype, in_place=False)


def _binary_error(op: BinaryOp, a: Array, b: Array, dtype: DType) -> Array | float:
    if op in (BinaryOp.MAX, BinaryOp.MIN) or result_dtype(op, dtype) is not dtype:
        return 0.0
    if op in (BinaryOp.POW, BinaryOp.REMAINDER):
        expected = np.abs(_function(op)(a, b))
        return 8 * sum_rounding(dtype) * np.where(np.isfinite(expected), expected, 0.0)
    scale = np.abs(a) + np.abs(b) if op in (BinaryOp.ADD, BinaryOp.SUB) else np.abs(a) * np.abs(b)
    if op is BinaryOp.DIV:
        scale = np.abs(a / b)
    return 8 * sum_rounding(dtype) * np.where(np.isfinite(scale), scale, 0.0)


def _check_binary(case: Case, op: BinaryOp, a: Array, b: Array, dtype: DType, *, target: str = "") -> None:
    """Check one call, whose result goes over operand ``target``, or into other memory."""
    made = result_dtype(op, dtype)
    operands = {"a": case.put(a), "b": case.put(b)}
    out = operands.get(target) or case.poisoned(a.shape, made)
    case.compute.binary(op, operands["a"], operands["b"], out, a.size, dtype=dtype)
    with np.errstate(all="ignore"):
        expected = np.asarray(_function(op)(wide(a), wide(b)))
        error = _binary_error(op, wide(a), wide(b), dtype) if dtype.is_floating or dtype.is_complex else 0.0
    case.close_to(case.get(out, a.shape, made), expected, error)
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
            for target in ("a", "b") if result_dtype(op, dtype) is dtype else ():
                with harness.case(compute, f"binary {op.value} {dtype.value} over {target}") as case:
                    _check_binary(case, op, harness.random(3001, dtype), harness.random(3001, dtype), dtype, target=target)


async def check_binary_of_one_operand(harness: Harness) -> None:
    """Check that both operands may be the same memory, and the output too."""
    with harness.open_compute() as compute:
        for op, dtype in _binary_pairs(compute):
            if result_dtype(op, dtype) is not dtype:
                continue
            with harness.case(compute, f"binary {op.value} {dtype.value} of x and x over x") as case:
                x = harness.random(1001, dtype)
                pointer = case.put(x)
                compute.binary(op, pointer, pointer, pointer, x.size, dtype=dtype)
                with np.errstate(all="ignore"):
                    expected = np.asarray(_function(op)(wide(x), wide(x)))
                    error = _binary_error(op, wide(x), wide(x), dtype) if dtype.is_floating or dtype.is_complex else 0.0
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
