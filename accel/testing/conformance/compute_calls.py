"""The computing calls of a compute interface: what each argument means.

How well kernels compute is checked by the samples of ops.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.enums import EXTREMES, BinaryOp, Causal, ReduceOp, Transpose, UnaryOp, result_dtype
from accel.testing.conformance.harness import poison, sum_rounding, wide

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from accel.compute import ComputeBackend
    from accel.dtype import DType
    from accel.testing.conformance.harness import Array, Case, Harness

__all__ = ["check_attention", "check_batched_gemm", "check_binary", "check_conv2d", "check_gemm", "check_reduce", "check_unary"]

_NONE = Transpose.NONE
_CAUSAL: tuple[Causal, ...] = (False, True, "bottom_right")


def _sigmoid(x: Array) -> Array:
    result: Array = np.where(x < 0, np.exp(-np.abs(x)), 1) / (1 + np.exp(-np.abs(x)))
    return result


# Functions that numpy has by another name, or not at all.
_UNARY: dict[UnaryOp, Callable[[Array], Any]] = {
    UnaryOp.RELU: lambda x: np.maximum(x, 0),
    UnaryOp.SIGMOID: _sigmoid,
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
    BinaryOp.SUB: np.subtract,
    BinaryOp.MUL: np.multiply,
    BinaryOp.DIV: np.divide,
    BinaryOp.MAX: np.maximum,
    BinaryOp.MIN: np.minimum,
    BinaryOp.POW: np.power,
}


def _dtypes(compute: ComputeBackend, call: str) -> list[DType]:
    return sorted(compute.capabilities().get(call, ()), key=lambda dtype: dtype.value)


def _rounding(dtype: DType) -> float:
    return 0.0 if dtype.kind == "bool" else sum_rounding(dtype)


def _columns(harness: Harness, rows: int, columns: int, dtype: DType, count: int = 1) -> Array:
    """Return column-major matrices, ``[count, columns, ld]``; columns and matrices end in poison."""
    made = poison((count, columns + 1, rows + 2), dtype).copy()
    made[:, :columns, :rows] = harness.random((count, columns, rows), dtype)
    return made


def _applied(stored: Array, rows: int, columns: int, transpose: Transpose) -> Array:
    """Return ``op`` of what :func:`_columns` made, [count, rows, columns]."""
    if transpose is _NONE:
        return wide(stored[:, :columns, :rows]).swapaxes(1, 2)
    value = wide(stored[:, :rows, :columns])
    return value.conj() if transpose is Transpose.CONJUGATE else value


def _check_products(case: Case, call: Callable[..., None], given: tuple[Array, Array, Array], form: tuple[Any, ...], dtype: DType) -> None:
    """Have ``call`` compute, and compare everything that C's memory holds afterwards."""
    (a, b, c), (ta, tb, m, n, k, alpha, beta) = given, form
    at_a, at_b, at_c = case.put(a), case.put(b), case.put(c)
    call(ta, tb, m, n, k, alpha, at_a, at_b, beta, at_c)
    left, right = _applied(a, m, k, ta), _applied(b, k, n, tb)
    expected, unit = alpha * (left @ right), sum_rounding(dtype)
    error = (4 * k + 8) * unit * abs(alpha) * (np.abs(left) @ np.abs(right))
    if beta:
        old = _applied(c, m, n, _NONE)
        expected, error = expected + beta * old, error + 8 * unit * abs(beta) * np.abs(old)
    got, whole = case.get(at_c, c.shape, dtype), c.copy()
    computed = got[:, :n, :m]
    case.close_to(computed, np.broadcast_to(expected.swapaxes(1, 2), computed.shape), error.swapaxes(1, 2))
    whole[:, :n, :m] = got[:, :n, :m]
    case.same(got, whole, "the memory beside C")


async def check_gemm(harness: Harness) -> None:
    """Check dtypes, transposes, leading dimensions and factors; ``beta == 0`` reads no C."""
    with harness.open_compute() as compute:
        for dtype, ta, tb, (alpha, beta) in itertools.product(
            _dtypes(compute, "gemm"), Transpose, Transpose, ((1, 0), (-0.5, 2), (0, 0), (0, -1))
        ):
            for m, n, k in ((3, 5, 7), (1, 4, 1), (2, 3, 0)):
                if k == 0 and (ta, tb) != (_NONE, _NONE):
                    continue
                with harness.case(compute, f"gemm {dtype.value} {ta} {tb} {m}x{n}x{k} alpha={alpha} beta={beta}") as case:
                    a = _columns(harness, *((m, k) if ta is _NONE else (k, m)), dtype)
                    b = _columns(harness, *((k, n) if tb is _NONE else (n, k)), dtype)
                    c = _columns(harness, m, n, dtype) if beta else poison((1, n + 1, m + 2), dtype)
                    if not alpha:
                        a, b = np.zeros_like(a), np.zeros_like(b)

                    def call(*form: Any, a: Array = a, b: Array = b, c: Array = c, dtype: DType = dtype) -> None:
                        ta, tb, m, n, k, alpha, at_a, at_b, beta, at_c = form
                        compute.gemm(ta, tb, m, n, k, alpha, at_a, a.shape[2], at_b, b.shape[2], beta, at_c, c.shape[2], dtype=dtype)

                    _check_products(case, call, (a, b, c), (ta, tb, m, n, k, alpha, beta), dtype)


async def check_batched_gemm(harness: Harness) -> None:
    """Check strides, and matrices that a whole batch shares."""
    with harness.open_compute() as compute:
        for dtype, turn, shared in itertools.product(_dtypes(compute, "batched_gemm"), Transpose, ("", "a", "b", "ab")):
            m, n, k, count = 3, 4, 5, 3
            with harness.case(compute, f"batched_gemm {dtype.value} {turn} shared={shared!r}") as case:
                a = _columns(harness, *((m, k) if turn is _NONE else (k, m)), dtype, 1 if "a" in shared else count)
                b = _columns(harness, *((k, n) if turn is _NONE else (n, k)), dtype, 1 if "b" in shared else count)
                c = poison((count, n + 1, m + 2), dtype)

                def call(*form: Any, a: Array = a, b: Array = b, c: Array = c, dtype: DType = dtype, count: int = count) -> None:
                    ta, tb, m, n, k, alpha, at_a, at_b, beta, at_c = form
                    stride_a, stride_b = (0 if len(each) == 1 else each[0].size for each in (a, b))
                    compute.batched_gemm(
                        ta, tb, m, n, k, alpha, at_a, a.shape[2], stride_a, at_b, b.shape[2], stride_b, beta, at_c, c.shape[2], c[0].size, count, dtype=dtype,
                    )  # fmt: skip

                _check_products(case, call, (a, b, c), (turn, turn, m, n, k, 1, 0), dtype)
                compute.batched_gemm(_NONE, _NONE, m, n, k, 1, 0, m, 0, 0, k, 0, 0, 0, m, m * n, 0, dtype=dtype)


def _cross_correlation(x: Array, w: Array, stride: Sequence[int], padding: Sequence[int]) -> Array:
    x = np.pad(x, ((0, 0), (0, 0), (padding[0],) * 2, (padding[1],) * 2))
    windows = np.lib.stride_tricks.sliding_window_view(x, w.shape[2:], (2, 3))[:, :, :: stride[0], :: stride[1]]
    result: Array = np.einsum("nchwrs,kcrs->nkhw", windows, w)
    return result


async def check_conv2d(harness: Harness) -> None:
    """Check strides and paddings that differ by direction; the filter is not flipped."""
    with harness.open_compute() as compute:
        for dtype in _dtypes(compute, "conv2d_forward"):
            for shape, filters, stride, padding in (
                ((2, 3, 8, 9), (4, 3, 3, 2), (2, 3), (1, 0)),
                ((1, 1, 3, 4), (2, 1, 5, 6), (1, 2), (2, 3)),
            ):
                with harness.case(compute, f"conv2d {dtype.value} {shape} {filters}") as case:
                    x, w = harness.random(shape, dtype), harness.random(filters, dtype)
                    expected = _cross_correlation(wide(x), wide(w), stride, padding)
                    error = (w[0].size + 8) * sum_rounding(dtype) * _cross_correlation(np.abs(wide(x)), np.abs(wide(w)), stride, padding)
                    out = case.poisoned(expected.shape, dtype)
                    compute.conv2d_forward(case.put(x), shape, case.put(w), filters, out, expected.shape, stride, padding, dtype=dtype)
                    case.close_to(case.get(out, expected.shape, dtype), expected, error)


async def check_attention(harness: Harness) -> None:
    """Check scale and causal forms, with fewer and more keys than queries, and with none."""
    with harness.open_compute() as compute:
        for dtype, causal, (seq_q, seq_kv) in itertools.product(_dtypes(compute, "attention"), _CAUSAL, ((7, 3), (3, 9), (2, 0))):
            with harness.case(compute, f"attention {dtype.value} causal={causal!r} {seq_q} of {seq_kv}") as case:
                q, k, v = (harness.random((2, 3, length, 16), dtype) for length in (seq_q, seq_kv, seq_kv))
                out = case.poisoned(q.shape, dtype)
                compute.attention(case.put(q), case.put(k), case.put(v), out, 2, 3, seq_q, seq_kv, 16, 0.3, causal, dtype=dtype)
                scores = 0.3 * wide(q) @ wide(k).swapaxes(2, 3)
                if causal:
                    ahead = seq_kv - seq_q if causal == "bottom_right" else 0
                    scores = np.where(np.tri(seq_q, seq_kv, ahead, dtype=bool), scores, -np.inf)
                most = scores.max(axis=3, keepdims=True, initial=-np.inf)
                weights = np.exp(scores - np.where(most == -np.inf, 0, most))
                expected = weights / np.maximum(weights.sum(axis=3, keepdims=True), 1e-300) @ wide(v)
                # Fused kernels round the weights to the operands' type.
                error = 64 * max(sum_rounding(dtype), 2.0**-12 if dtype.itemsize == 2 else 0.0) * np.abs(wide(v)).max(initial=0.0)
                case.close_to(case.get(out, q.shape, dtype), expected, error)


async def check_reduce(harness: Harness) -> None:
    """Check every reduction along any axis; over no elements those that have a value."""
    with harness.open_compute() as compute:
        for op, (shape, axis) in itertools.product(ReduceOp, (((5, 3), 0), ((2, 3, 4), 1), ((2, 30), 1), ((2, 0, 3), 1))):
            for dtype in _dtypes(compute, f"reduce.{op.value}") if 0 not in shape or op not in EXTREMES else ():
                with harness.case(compute, f"{op.value} {dtype.value} {shape} along {axis}") as case:
                    x, made = harness.random(shape, dtype), result_dtype(op, dtype)
                    source, rest = case.put(x), shape[:axis] + shape[axis + 1 :]
                    out = case.poisoned(rest, made)
                    compute.reduce(op, source, out, shape, axis, dtype=dtype)
                    with np.errstate(all="ignore"):
                        expected = _reduced(op, x, axis)
                        size = (np.abs(wide(x)).sum(axis) + 1) ** 2 + (np.abs(expected) if op is ReduceOp.PROD else 0)
                        error = 4 * (shape[axis] + 8) * _rounding(dtype) * size
                    # The root of a variance has the root of its error.
                    case.close_to(case.get(out, rest, made), expected, np.sqrt(error) if op is ReduceOp.STD else error)
                    case.same(case.get(source, shape, dtype), x, "the input")


def _reduced(op: ReduceOp, x: Array, axis: int) -> Array:
    if op in (ReduceOp.SUM, ReduceOp.PROD) and x.dtype.kind in "iu":
        ufunc = np.add if op is ReduceOp.SUM else np.multiply
        return np.asarray(ufunc.reduce(x, axis, dtype=x.dtype))
    if op is ReduceOp.LOGSUMEXP:
        return np.asarray(np.log(np.exp(wide(x)).sum(axis)))
    if x.shape[axis] == 0 and op in (ReduceOp.MEAN, ReduceOp.VAR, ReduceOp.STD):
        return np.full(x.shape[:axis] + x.shape[axis + 1 :], np.nan)
    return np.asarray(getattr(np, op.value)(wide(x), axis))


async def check_unary(harness: Harness) -> None:
    """Check every function of one element; the result may be written over the elements."""
    with harness.open_compute() as compute:
        for op in UnaryOp:
            function = _UNARY.get(op) or getattr(np, op.value)
            for dtype, n in itertools.product(_dtypes(compute, f"unary.{op.value}"), (0, 7, 1001)):
                _check_elements(harness, compute, f"{op.value} {dtype.value} n={n}", function, op, dtype, n)


async def check_binary(harness: Harness) -> None:
    """Check every function of two elements; the result may be written over those of one operand."""
    with harness.open_compute() as compute:
        for op in BinaryOp:
            function = _BINARY.get(op) or getattr(np, op.value)
            for dtype, n in itertools.product(_dtypes(compute, f"binary.{op.value}"), (0, 7, 1001)):
                _check_elements(harness, compute, f"{op.value} {dtype.value} n={n}", function, op, dtype, n)


def _check_elements(
    harness: Harness, compute: ComputeBackend, what: str, function: Callable[..., Any], op: UnaryOp | BinaryOp, dtype: DType, n: int
) -> None:
    made = result_dtype(op, dtype)
    for in_place in (False, True) if made is dtype else (False,):
        with harness.case(compute, f"{what} in_place={in_place}") as case:
            operands = [_elements(harness, op, dtype, n) for _ in range(1 if isinstance(op, UnaryOp) else 2)]
            sources = [case.put(each) for each in operands]
            out = sources[0] if in_place else case.poisoned(n, made)
            if isinstance(op, UnaryOp):
                compute.unary(op, sources[0], out, n, dtype=dtype)
            else:
                compute.binary(op, sources[0], sources[1], out, n, dtype=dtype)
            with np.errstate(all="ignore"):
                expected = function(*[wide(each) for each in operands])
                scale = np.nan_to_num(np.abs(expected)) + 1 if made is dtype and dtype.kind != "bool" else 0
            case.close_to(case.get(out, n, made), np.asarray(expected), 16 * _rounding(dtype) * scale)


def _elements(harness: Harness, op: UnaryOp | BinaryOp, dtype: DType, n: int) -> Array:
    """Return random elements, small where results would leave the range of the dtype."""
    x = harness.random(n, dtype)
    if op is BinaryOp.POW:
        return np.abs(x % 4 if dtype.is_integer else x).astype(dtype.numpy)
    return np.maximum(x, 1) if op is BinaryOp.REMAINDER and dtype.is_integer else x
