"""Functions of one and of two elements."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu import costs
from accel.cpu.families import fused, sampling
from accel.cpu.families.functions import BINARY, EXACT, FUNCTIONS, UFUNCS, power
from accel.cpu.families.precision import blocks, wider
from accel.cpu.views import Array, array, operand
from accel.dtype import DType, rounded
from accel.enums import CAPABILITIES, BinaryOp, UnaryOp, result_dtype
from accel.family import BackendPart, Sample
from accel.views import broadcast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from accel.backend import Kernel

__all__ = ["PART"]

# Temporaries of this size stay in the second-level cache.
_CACHE = 1 << 18


@np.errstate(all="ignore")
def _unary(op: UnaryOp, x: Array, out: Array) -> None:
    """Compute ``out[i] = op(x[i])``; the two may be the same memory."""
    if op is UnaryOp.RELU:
        _apply(np.maximum, (x, x.dtype.type(0)), out)
    elif (function := FUNCTIONS.get(op)) is None:
        _apply(UFUNCS[op], (x,), out)
    else:
        _in_blocks(function, x, out)


def _result(op: UnaryOp | BinaryOp, dtype: np.dtype[Any]) -> np.dtype[Any]:
    return result_dtype(op, DType.of(dtype)).numpy


def _binary(op: BinaryOp, operands: Sequence[Array], out: Array) -> None:
    """Compute a function of two arrays that are broadcast."""
    if op is BinaryOp.POW and out.dtype.kind == "i":
        out[...] = power(*operands)
    else:
        _apply(BINARY[op], operands, out)


def _apply(ufunc: np.ufunc, operands: Sequence[Any], out: Array) -> None:
    wide = wider(out.dtype)
    if wide is out.dtype or ufunc in EXACT:
        ufunc(*operands, out=out)
    else:
        # numpy converts in small pieces through its own buffers: no temporary, one rounding.
        ufunc(*operands, out=out, dtype=wide, casting="unsafe")


def _in_blocks(function: Callable[[Array], Array], x: Array, out: Array) -> None:
    wide = wider(x.dtype)
    for part in blocks(x.size, 4 * wide.itemsize, _CACHE):
        out[part] = function(x[part].astype(wide, copy=False))


def _operands(arguments: Sequence[Any], inputs: Sequence[int]) -> list[Array]:
    """Return the operands of an op as arrays; numbers are arrays already."""
    addresses = iter(inputs)
    return [each if isinstance(each, np.ndarray) else operand(next(addresses), each) for each in arguments]


def _kernel(compute: Callable[[Any, list[Array], Array], None], dtype_of: Callable[[Any, Any], np.dtype[Any]]) -> Kernel:
    """Return the kernel of an op whose operands are broadcast.

    Parameters
    ----------
    compute
        ``compute(op, operands, out)`` writes the result.
    dtype_of
        ``dtype_of(op, last)`` returns the type of its elements; ``last`` is the last operand.
    """

    def kernel(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        arguments = op.arguments()
        shape = broadcast(*[each.shape for each in arguments])
        if 0 not in shape:
            operands = _operands(arguments, inputs)
            out = array(outputs[0], shape, dtype_of(op, operands[-1])) if op.out is None else operand(outputs[0], op.out)
            lane.stream.submit(partial(_quietly, compute, op, operands, out), costs.elements((len(operands) + 1) * out.size, out.dtype))

    return kernel


@np.errstate(all="ignore")
def _quietly(compute: Callable[[Any, list[Array], Array], None], op: Any, operands: list[Array], out: Array) -> None:
    compute(op, operands, out)


def _broadcast_binary(op: Any, operands: list[Array], out: Array) -> None:
    _binary(op.op, operands, out)


# Results may overwrite any operand, so that steps before the last one write elsewhere.
def _where(op: Any, operands: list[Array], out: Array) -> None:
    out[...] = np.where(*operands)


def _clip(op: Any, operands: list[Array], out: Array) -> None:
    x, least, most = operands
    np.minimum(np.maximum(x, least), most, out=out)


def _cast(op: Any, operands: list[Array], out: Array) -> None:
    np.copyto(out, rounded(operands[0], out.dtype), casting="unsafe")


_binary_of_broadcast = _kernel(_broadcast_binary, lambda op, last: _result(op.op, last.dtype))


def _binary_kernel(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    if op.is_plain():
        n, dtype = op.x.size, op.x.dtype.numpy
        operands, out = [array(address, (n,), dtype) for address in inputs], array(outputs[0], (n,), _result(op.op, dtype))
        lane.stream.submit(partial(_quietly, _broadcast_binary, op, operands, out), costs.elements(3 * n, dtype))
    else:
        _binary_of_broadcast(lane, op, plan, inputs, outputs)


def _unary_kernel(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    x, dtype = op.x, op.x.dtype.numpy
    if op.is_plain():
        work = partial(_unary, op.op, array(inputs[0], (x.size,), dtype), array(outputs[0], (x.size,), _result(op.op, dtype)))
        lane.stream.submit(work, costs.unary(op.op, x.size, dtype))
    else:
        out = array(outputs[0], x.shape, _result(op.op, dtype)) if op.out is None else operand(outputs[0], op.out)
        lane.stream.submit(partial(_strided_unary, op.op, operand(inputs[0], x), out), costs.elements(4 * x.size, dtype))


def _strided_unary(op: UnaryOp, x: Array, out: Array) -> None:
    made = np.empty(x.size, out.dtype)
    _unary(op, x.ravel(), made)
    out[...] = made.reshape(out.shape)


_KERNELS: dict[str, Kernel] = {
    "unary": _unary_kernel,
    "binary": _binary_kernel,
    "where": _kernel(_where, lambda op, last: last.dtype),
    "clip": _kernel(_clip, lambda op, last: last.dtype),
    "cast": _kernel(_cast, lambda op, last: op.dtype.numpy),
    "fused": fused.kernel,
}


_NUMBERS = (*sampling.ALL_FLOATS, *sampling.COMPLEX, DType.INT32, DType.INT64, DType.UINT8)
_OFFERED = CAPABILITIES
_REFERENCES: dict[UnaryOp, Callable[[Array], Any]] = {
    **UFUNCS,
    UnaryOp.RELU: lambda x: np.where(x < 0, np.zeros_like(x), x),
    UnaryOp.SIGMOID: lambda x: 1 / (1 + np.exp(-x)),
    UnaryOp.ERF: np.vectorize(math.erf, otypes=[np.float64]),
    UnaryOp.GELU: lambda x: x * np.vectorize(math.erfc, otypes=[np.float64])(-x * math.sqrt(0.5)) / 2,
    UnaryOp.GELU_TANH: lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    UnaryOp.SILU: lambda x: x / (1 + np.exp(-x)),
    UnaryOp.SOFTPLUS: lambda x: np.log1p(np.exp(x)),
    UnaryOp.LEAKY_RELU: lambda x: np.where(x > 0, x, x * x.dtype.type(1) / 100),
    UnaryOp.ELU: lambda x: np.where(x > 0, x, np.expm1(x)),
    UnaryOp.RSQRT: lambda x: 1 / np.sqrt(x),
}
_POSITIVE = frozenset({UnaryOp.LOG, UnaryOp.LOG2, UnaryOp.SQRT, UnaryOp.RSQRT, UnaryOp.LOG1P})
_SIGNS = frozenset({UnaryOp.RELU, UnaryOp.ABS, UnaryOp.NEG, UnaryOp.SIGN, UnaryOp.FLOOR, UnaryOp.CEIL, UnaryOp.ROUND})
_PICKS = frozenset({BinaryOp.MAX, BinaryOp.MIN})


def _unary_of(op: UnaryOp, elementwise: Any, x: Any) -> Any:
    return elementwise.unary(op, x)


def _binary_of(op: BinaryOp, elementwise: Any, x: Any, y: Any) -> Any:
    return elementwise.binary(op, x, y)


def _operand(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> Array:
    if dtype is DType.BOOL:
        return rng.random(shape) < 0.5
    return np.asarray(sampling.random(rng, shape, dtype))


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    yield from _unary_samples(rng)
    yield from _binary_samples(rng)
    yield from _broadcast_samples(rng)
    yield from _cast_samples(rng)
    yield from fused.samples(rng)
    yield from _strided_samples(rng)


def _unary_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for op in UnaryOp:
        for dtype in (*_NUMBERS, DType.BOOL):
            if dtype not in _OFFERED[f"unary.{op.value}"]:
                continue
            for shape in ((), (0,), (1001,)):
                x = _operand(rng, shape, dtype)
                if op in _POSITIVE and not dtype.is_complex:
                    x = np.abs(x)
                elif op in (UnaryOp.ASIN, UnaryOp.ACOS):
                    x = np.clip(x, x.dtype.type(-1), x.dtype.type(1))
                expected = _unary_expected(op, x)
                name = f"unary {op.value} {dtype.value}{list(shape)}"
                # A product with x of a number that cancels, as of gelu, is as exact as x is large.
                largest = float(np.abs(x).max(initial=0))
                yield Sample(name, partial(_unary_of, op), (x,), expected, 0.0 if op in _SIGNS else _error(dtype), terms=largest)


def _binary_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for op in BinaryOp:
        for dtype in (*_NUMBERS, DType.BOOL):
            if dtype not in _OFFERED[f"binary.{op.value}"]:
                continue
            # Of equal lengths first; then operands of which one or both are repeated.
            for left, right in (
                ((3, 5), (3, 5)),
                ((1001,), (1001,)),
                ((7, 33), (33,)),
                ((4, 1, 3), (5, 1)),
                ((0, 3), (1, 3)),
                ((2, 9), ()),
            ):
                x, y = _operand(rng, left, dtype), _operand(rng, right, dtype)
                if op is BinaryOp.POW:
                    x, y = np.abs(x), (y % 4 if dtype.is_integer else y)
                elif op is BinaryOp.REMAINDER and dtype.is_floating:
                    # Halves and quarters have an exact remainder; of others it jumps.
                    x, y = np.round(x * 4).astype(x.dtype), (np.round(y * 4) / 2 + 8).astype(y.dtype)
                elif dtype.is_integer and op not in (BinaryOp.ADD, BinaryOp.SUB, BinaryOp.MUL):
                    x, y = x % 5, y % 5
                expected = np.asarray(_expected(op, x, y))
                name = f"binary {op.value} {dtype.value}{list(left)}{list(right)}"
                yield Sample(name, partial(_binary_of, op), (x, y), expected, 0.0 if op in _PICKS else _error(dtype))


@np.errstate(all="ignore")
def _unary_expected(op: UnaryOp, x: Array) -> Array:
    return np.asarray(_REFERENCES[op](x if x.dtype.kind == "b" else sampling.wide(x)))


@np.errstate(all="ignore")
def _expected(op: BinaryOp, x: Array, y: Array) -> Any:
    if x.dtype.kind == "b":
        return BINARY[op](x, y)
    if op is BinaryOp.REMAINDER and x.dtype.kind in "iu":
        return np.where(y == 0, 0, sampling.wide(x) % np.where(y == 0, 1, sampling.wide(y)))
    return BINARY[op](sampling.wide(x), sampling.wide(y))


def _error(dtype: DType) -> float:
    return 0.0 if dtype is DType.BOOL else sampling.sums(dtype, 2)


def _broadcast_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for dtype in (*_NUMBERS, DType.UINT16, DType.BOOL):
        for left, right in (((33,), (33,)), ((6, 1, 5), (4, 1))):
            x, y, condition = (
                _operand(rng, left, dtype),
                _operand(rng, right, dtype),
                _operand(rng, (4, 1) if len(left) > 1 else left, DType.BOOL),
            )
            what = f"{dtype.value}{list(left)}{list(right)}"
            expected = np.asarray(np.where(condition, x, y))
            yield Sample(f"where {what}", lambda elementwise, c, x, y: elementwise.where(c, x, y), (condition, x, y), expected)
            expected = np.asarray(np.where(condition, x, x.dtype.type(1)))
            yield Sample(f"where {what} number", lambda elementwise, c, x: elementwise.where(c, x, 1), (condition, x), expected)
    for dtype in (*sampling.ALL_FLOATS, DType.INT32, DType.INT64, DType.UINT8):
        x, y = _operand(rng, (5, 7), dtype), _operand(rng, (7,), dtype)
        one, half = x.dtype.type(1), x.dtype.type(2)
        what = f"{dtype.value}[5, 7]"
        yield Sample(f"clip {what}", lambda elementwise, x: elementwise.clip(x, 1, 2), (x,), np.minimum(np.maximum(x, one), half))
        yield Sample(f"clip {what} min", lambda elementwise, x, y: elementwise.clip(x, y), (x, y), np.maximum(x, y))
        yield Sample(f"clip {what} max", lambda elementwise, x, y: elementwise.clip(x, max=y), (x, y), np.minimum(x, y))
        what = f"{dtype.value}[5, 7] with a number"
        yield Sample(f"binary add {what}", lambda elementwise, x: elementwise.binary("add", x, 2), (x,), sampling.wide(x) + 2)
        yield Sample(f"binary sub {what}", lambda elementwise, x: elementwise.binary("sub", 100, x), (x,), 100 - sampling.wide(x))
        yield Sample(f"binary less {what}", lambda elementwise, x: elementwise.binary("less", x, 1), (x,), x < one)


def _strided_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for dtype in (*sampling.ALL_FLOATS, DType.INT32, DType.UINT8):
        x, y = _operand(rng, (6, 9), dtype), _operand(rng, (9, 6), dtype)
        what, wide, error = f"{dtype.value} strided", sampling.wide(x), _error(dtype)
        yield Sample(f"unary neg {what}", lambda elementwise, x: elementwise.unary("neg", x[::-2, 1:8:3]), (x,), -x[::-2, 1:8:3])
        yield Sample(
            f"binary add {what}", lambda elementwise, x, y: elementwise.binary("add", x, y.T), (x, y), wide + sampling.wide(y.T), error
        )
        yield Sample(f"binary mul {what}", lambda elementwise, x: elementwise.binary("mul", x[:, 4:], 2), (x,), wide[:, 4:] * 2, error)
        yield Sample(f"clip {what}", lambda elementwise, x: elementwise.clip(x[1], max=x[:, 2][:1]), (x,), np.minimum(x[1], x[0, 2]))
        yield Sample(f"cast {what}", lambda elementwise, x: elementwise.cast(x.T, "float64"), (x,), x.T.astype(np.float64))
        yield Sample(
            f"unary abs {what} out", lambda elementwise, x: elementwise.unary("abs", x[:, 1::2], out=x[:, :8:2]), (x,), np.abs(x[:, 1::2])
        )


def _cast_to(dtype: DType, elementwise: Any, x: Any) -> Any:
    return elementwise.cast(x, dtype)


@np.errstate(all="ignore")
def _converted(x: Array, dtype: DType) -> Array:
    return x.astype(dtype.numpy)


def _cast_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for source in _OFFERED["cast"]:
        for target in _OFFERED["cast"]:
            if source.is_complex and not target.is_complex and target is not DType.BOOL:
                continue
            x = np.abs(_operand(rng, (3, 67), source)) if target.kind == "unsigned" else _operand(rng, (3, 67), source)
            yield Sample(f"cast {source.value} {target.value}", partial(_cast_to, target), (x,), _converted(x, target))


PART = BackendPart(_KERNELS, samples=_samples)
