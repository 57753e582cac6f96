"""Functions of elements in numpy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.enums import BinaryOp, UnaryOp

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.cpu.views import Array

__all__ = ["BINARY", "EXACT", "FUNCTIONS", "UFUNCS", "power"]


def _sigmoid(x: Array) -> Array:
    # 1 / (1 + exp(-x)) overflows for very negative x. In exp(min(x, 0)) / (1 + exp(-|x|)) nothing does, and no branch depends on the data.
    numerator = np.minimum(x, x.dtype.type(0))
    np.exp(numerator, out=numerator)
    denominator = np.absolute(x)
    np.negative(denominator, out=denominator)
    np.exp(denominator, out=denominator)
    np.add(denominator, x.dtype.type(1), out=denominator)
    quotient: Array = np.divide(numerator, denominator, out=numerator)
    return quotient


def _erfc(x: Array) -> Any:
    """Return ``1 - erf(x)``, with few digits lost where it is small: Chebyshev's polynomial in t of its logarithm without ``t * exp(-x ** 2)``."""
    kind = x.dtype.type
    z = np.absolute(x)
    t = kind(2) / (kind(2) + z)
    twice = kind(4) * t - kind(2)
    d, before = np.zeros_like(z), np.zeros_like(z)
    for coefficient in reversed(_ERFC[1:]):
        d, before = twice * d - before + kind(coefficient), d
    result = t * np.exp(-z * z + kind(0.5) * (kind(_ERFC[0]) + twice * d) - before)
    return np.where(x < 0, kind(2) - result, result)


_ERFC = (
    *(-1.3026537197817094, 0.6419697923564902, 0.019476473204185836, -0.009561514786808632, -0.0009465953444820369, 0.00036683949785276145),
    *(4.252332480690777e-05, -2.0278578112534242e-05, -1.6242900046470256e-06, 1.3036558355805232e-06, 1.5626441722066142e-08),
    *(-8.523809591492654e-08, 6.5290544390988515e-09, 5.059343495551469e-09, -9.91364156493033e-10, -2.273651222931836e-10),
    *(9.646791102015527e-11, 2.3940380830391146e-12, -6.886027526497553e-12, 8.944879273090725e-13, 3.130921399342958e-13),
    *(-1.1270822361367252e-13, 3.810905255189232e-16, 7.106097613609237e-15),
)


def _erf(x: Array) -> Any:
    # Below 1 the series, whose terms fall fast there; elsewhere 1 - erfc(x) loses no digits.
    kind = x.dtype.type
    near = np.clip(x, kind(-1), kind(1))
    square, total = near * near, np.zeros_like(near)
    for n in range(19, -1, -1):
        total = total * square + kind((-1) ** n / (math.factorial(n) * (2 * n + 1)))
    return np.where(np.absolute(x) < kind(1), near * total * kind(2 / math.sqrt(math.pi)), kind(1) - _erfc(x))


def _gelu(x: Array) -> Any:
    return x * x.dtype.type(0.5) * _erfc(x * x.dtype.type(-math.sqrt(0.5)))


def _gelu_tanh(x: Array) -> Any:
    # (1 + tanh(u)) / 2 is sigmoid(2 * u), which loses no digits where tanh is near -1.
    kind = x.dtype.type
    return x * _sigmoid(kind(2 * math.sqrt(2 / math.pi)) * (x + kind(0.044715) * x * x * x))


def _silu(x: Array) -> Any:
    return x * _sigmoid(x)


def _softplus(x: Array) -> Any:
    return np.maximum(x, x.dtype.type(0)) + np.log1p(np.exp(-np.absolute(x)))


def _leaky_relu(x: Array) -> Any:
    return np.where(x > 0, x, x * x.dtype.type(0.01))


def _elu(x: Array) -> Any:
    return np.where(x > 0, x, np.expm1(np.minimum(x, x.dtype.type(0))))


def _rsqrt(x: Array) -> Any:
    return x.dtype.type(1) / np.sqrt(x)


def power(a: Array, b: Array) -> Any:
    """Return ``a ** b`` of integers."""
    if a.dtype.kind == "u":
        return np.power(a, b)
    powers = np.power(a, np.maximum(b, b.dtype.type(0)))
    quotients = np.where(a == 1, a, np.where(a == -1, np.where(b & b.dtype.type(1), a, -a), a.dtype.type(0)))
    return np.where(b < 0, quotients, powers)


BINARY: dict[BinaryOp, np.ufunc] = {
    BinaryOp.ADD: np.add,
    BinaryOp.SUB: np.subtract,
    BinaryOp.MUL: np.multiply,
    BinaryOp.DIV: np.divide,
    BinaryOp.MAX: np.maximum,
    BinaryOp.MIN: np.minimum,
    BinaryOp.POW: np.power,
    BinaryOp.REMAINDER: np.remainder,
    BinaryOp.EQUAL: np.equal,
    BinaryOp.NOT_EQUAL: np.not_equal,
    BinaryOp.LESS: np.less,
    BinaryOp.LESS_EQUAL: np.less_equal,
    BinaryOp.GREATER: np.greater,
    BinaryOp.GREATER_EQUAL: np.greater_equal,
    BinaryOp.LOGICAL_AND: np.logical_and,
    BinaryOp.LOGICAL_OR: np.logical_or,
    BinaryOp.LOGICAL_XOR: np.logical_xor,
}
UFUNCS: dict[UnaryOp, np.ufunc] = {
    UnaryOp.TANH: np.tanh,
    UnaryOp.EXP: np.exp,
    UnaryOp.LOG: np.log,
    UnaryOp.SQRT: np.sqrt,
    UnaryOp.ABS: np.absolute,
    UnaryOp.NEG: np.negative,
    UnaryOp.SIN: np.sin,
    UnaryOp.COS: np.cos,
    UnaryOp.TAN: np.tan,
    UnaryOp.ASIN: np.arcsin,
    UnaryOp.ACOS: np.arccos,
    UnaryOp.ATAN: np.arctan,
    UnaryOp.SINH: np.sinh,
    UnaryOp.COSH: np.cosh,
    UnaryOp.LOG1P: np.log1p,
    UnaryOp.EXPM1: np.expm1,
    UnaryOp.LOG2: np.log2,
    UnaryOp.EXP2: np.exp2,
    UnaryOp.RECIPROCAL: np.reciprocal,
    UnaryOp.SIGN: np.sign,
    UnaryOp.FLOOR: np.floor,
    UnaryOp.CEIL: np.ceil,
    UnaryOp.ROUND: np.rint,
    UnaryOp.ISNAN: np.isnan,
    UnaryOp.ISINF: np.isinf,
    UnaryOp.ISFINITE: np.isfinite,
    UnaryOp.LOGICAL_NOT: np.logical_not,
}
FUNCTIONS: dict[UnaryOp, Callable[[Array], Array]] = {
    UnaryOp.SIGMOID: _sigmoid,
    UnaryOp.ERF: _erf,
    UnaryOp.GELU: _gelu,
    UnaryOp.GELU_TANH: _gelu_tanh,
    UnaryOp.SILU: _silu,
    UnaryOp.SOFTPLUS: _softplus,
    UnaryOp.LEAKY_RELU: _leaky_relu,
    UnaryOp.ELU: _elu,
    UnaryOp.RSQRT: _rsqrt,
}
# What only picks, signs or compares elements rounds nothing, and is faster without conversions.
EXACT = frozenset({np.maximum, np.minimum, np.absolute, np.negative, np.sign, np.floor, np.ceil, np.rint, np.isnan, np.isinf, np.isfinite})
