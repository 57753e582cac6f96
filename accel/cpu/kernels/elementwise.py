"""Functions of one and of two elements."""

from __future__ import annotations

from typing import Any

import numpy as np

from accel.compute import BinaryOp, UnaryOp
from accel.cpu.kernels.precision import blocks, wider
from accel.cpu.views import Array, array

__all__ = ["binary", "unary"]

_BINARY: dict[BinaryOp, np.ufunc] = {
    BinaryOp.ADD: np.add,
    BinaryOp.SUB: np.subtract,
    BinaryOp.MUL: np.multiply,
    BinaryOp.DIV: np.divide,
    BinaryOp.MAX: np.maximum,
    BinaryOp.MIN: np.minimum,
}
_UNARY: dict[UnaryOp, np.ufunc] = {
    UnaryOp.TANH: np.tanh,
    UnaryOp.EXP: np.exp,
    UnaryOp.LOG: np.log,
    UnaryOp.SQRT: np.sqrt,
    UnaryOp.ABS: np.absolute,
    UnaryOp.NEG: np.negative,
}
# What only picks or signs an element rounds nothing, and is faster without conversions.
_EXACT = frozenset({np.maximum, np.minimum, np.absolute, np.negative})
_RELU = UnaryOp.RELU
_SIGMOID = UnaryOp.SIGMOID

# Temporaries of this size stay in the second-level cache.
_CACHE = 1 << 18


@np.errstate(all="ignore")
def unary(op: UnaryOp, source: int, destination: int, n: int, dtype: np.dtype[Any]) -> None:
    """Compute ``destination[i] = op(source[i])``; the two may be the same memory."""
    x = array(source, (n,), dtype)
    y = x if destination == source else array(destination, (n,), dtype)
    if op is _SIGMOID:
        _sigmoid(x, y)
    elif op is _RELU:
        _apply(np.maximum, (x, dtype.type(0)), y)
    else:
        _apply(_UNARY[op], (x,), y)


@np.errstate(all="ignore")
def binary(op: BinaryOp, a: int, b: int, destination: int, n: int, dtype: np.dtype[Any]) -> None:
    """Compute ``destination[i] = op(a[i], b[i])``; the result may overwrite an operand."""
    _apply(_BINARY[op], (array(a, (n,), dtype), array(b, (n,), dtype)), array(destination, (n,), dtype))


def _apply(ufunc: np.ufunc, operands: tuple[Any, ...], out: Array) -> None:
    wide = wider(out.dtype)
    if wide is out.dtype or ufunc in _EXACT:
        ufunc(*operands, out=out)
    else:
        # numpy converts in small pieces through its own buffers: no temporary, one rounding.
        ufunc(*operands, out=out, dtype=wide, casting="unsafe")


def _sigmoid(x: Array, y: Array) -> None:
    # 1 / (1 + exp(-x)) overflows for very negative x. In exp(min(x, 0)) / (1 + exp(-|x|)) nothing does, and no branch depends on the data.
    wide = wider(x.dtype)
    one = wide.type(1)
    for part in blocks(x.size, 3 * wide.itemsize, _CACHE):
        value = x[part].astype(wide, copy=False)
        numerator = np.minimum(value, wide.type(0))
        np.exp(numerator, out=numerator)
        denominator = np.absolute(value)
        np.negative(denominator, out=denominator)
        np.exp(denominator, out=denominator)
        np.add(denominator, one, out=denominator)
        np.divide(numerator, denominator, out=numerator)
        y[part] = numerator
