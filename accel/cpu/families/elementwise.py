"""Functions of one and of two elements."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.compute import BinaryOp, UnaryOp
from accel.cpu.families import sampling
from accel.cpu.families.precision import blocks, wider
from accel.cpu.views import Array, array
from accel.dtype import DType
from accel.family import BackendPart, Sample

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["PART", "binary", "unary"]

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


_INTEGERS = (DType.INT32, DType.INT64, DType.UINT8)
_POSITIVE = frozenset({UnaryOp.LOG, UnaryOp.SQRT})
_REAL = frozenset({UnaryOp.RELU, UnaryOp.SIGMOID})


def _unary_of(op: UnaryOp, elementwise: Any, x: Any) -> Any:
    return elementwise.unary(op, x)


def _binary_of(op: BinaryOp, elementwise: Any, x: Any, y: Any) -> Any:
    return elementwise.binary(op, x, y)


@np.errstate(all="ignore")
def _expected(op: UnaryOp, x: Array) -> Array:
    if op is UnaryOp.SIGMOID:
        result: Array = 1 / (1 + np.exp(-x))
    else:
        result = np.where(x < 0, np.zeros_like(x), x) if op is UnaryOp.RELU else _UNARY[op](x)
    return np.asarray(result)


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    for dtype in (*sampling.ALL_FLOATS, *sampling.COMPLEX):
        for op in UnaryOp:
            if dtype.is_complex and (op in _REAL or op is UnaryOp.ABS):
                continue
            for shape in ((), (0,), (1001,)):
                x = np.asarray(
                    sampling.random(rng, shape, dtype)
                    if op not in _POSITIVE or dtype.is_complex
                    else np.abs(sampling.random(rng, shape, dtype))
                )
                name = f"unary {op.value} {dtype.value}{list(shape)}"
                yield Sample(
                    name, partial(_unary_of, op), (x,), _expected(op, sampling.wide(x)), 0.0 if op in _SIGNS else sampling.sums(dtype, 2)
                )
    for dtype in (*sampling.ALL_FLOATS, *sampling.COMPLEX, *_INTEGERS):
        for function in BinaryOp:
            if (function is BinaryOp.DIV and dtype.is_integer) or (function in _PICKS and dtype.is_complex):
                continue
            for size in ((3, 5), (1001,)):
                x, y = sampling.random(rng, size, dtype), sampling.random(rng, size, dtype)
                with np.errstate(all="ignore"):
                    result = np.asarray(_BINARY[function](sampling.wide(x), sampling.wide(y)))
                name = f"binary {function.value} {dtype.value}{list(size)}"
                yield Sample(name, partial(_binary_of, function), (x, y), result, 0.0 if function in _PICKS else sampling.sums(dtype, 2))


_SIGNS = frozenset({UnaryOp.RELU, UnaryOp.ABS, UnaryOp.NEG})
_PICKS = frozenset({BinaryOp.MAX, BinaryOp.MIN})

PART = BackendPart({}, samples=_samples)
