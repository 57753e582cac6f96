"""The compute level of the conformance suite fails for kernels that are subtly wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from accel.cpu.backend import CpuBackend
from accel.cpu.compute import CpuCompute
from accel.cpu.families import attention, blas, convolution, elementwise, reduce
from accel.cpu.views import array
from accel.enums import BinaryOp, ReduceOp, Transpose, UnaryOp
from accel.testing.conformance import LEVELS, Harness, checks, compute_gemm

# The right kernels; typed loosely, because the wrong ones pass most arguments on unread.
_gemm: Any = blas.gemm
_batched: Any = blas.batched_gemm
_unary, _binary, _reduce = elementwise.unary, elementwise.binary, reduce.reduce
_convolution: Any = convolution.convolution
_attention: Any = attention.attention


def gemm_without_conjugation(ta: Transpose, tb: Transpose, *rest: Any) -> None:
    _gemm(Transpose.TRANSPOSE if ta is Transpose.CONJUGATE else ta, tb, *rest)


def gemm_that_reads_c(ta: Transpose, tb: Transpose, m: int, n: int, k: int, *rest: Any) -> None:
    *_, c, ldc, dtype = rest
    view = array(c, (n, m), dtype, (ldc * dtype.itemsize, dtype.itemsize))
    before = view.copy()
    _gemm(ta, tb, m, n, k, *rest)
    with np.errstate(all="ignore"):
        view += before * dtype.type(0)


def gemm_over_padding(ta: Transpose, tb: Transpose, m: int, n: int, k: int, *rest: Any) -> None:
    *_, c, ldc, dtype = rest
    _gemm(ta, tb, m, n, k, *rest)
    if ldc > m:
        array(c + m * dtype.itemsize, (1,), dtype)[...] = 0


def gemm_of_rounded_operands(*arguments: Any) -> None:
    ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc, dtype = arguments
    if dtype != np.float32 or ta is not Transpose.NONE:
        _gemm(*arguments)
        return
    copy = array(a, ((k - 1) * lda + m,), dtype).astype(np.float16).astype(np.float32)
    _gemm(ta, tb, m, n, k, alpha, copy.ctypes.data, lda, b, ldb, beta, c, ldc, dtype)


def batched_gemm_of_the_first(*arguments: Any) -> None:
    _batched(*arguments[:8], 0, *arguments[9:])


def relu_that_drops_nan(op: UnaryOp, source: int, destination: int, n: int, dtype: np.dtype[Any]) -> None:
    _unary(op, source, destination, n, dtype)
    if op is UnaryOp.RELU and dtype.kind == "f":
        out = array(destination, (n,), dtype)
        out[np.isnan(out)] = 0


def unary_one_too_far(op: UnaryOp, source: int, destination: int, n: int, dtype: np.dtype[Any]) -> None:
    _unary(op, source, destination, n + 1, dtype)


def naive_sigmoid(op: UnaryOp, source: int, destination: int, n: int, dtype: np.dtype[Any]) -> None:
    _unary(op, source, destination, n, dtype)
    if op is UnaryOp.SIGMOID and n and dtype == np.float32:
        out = array(destination, (n,), dtype)
        out[...] = out.astype(np.float16)


def max_that_drops_nan(op: BinaryOp, a: int, b: int, destination: int, n: int, dtype: np.dtype[Any]) -> None:
    if op is BinaryOp.MAX and dtype.kind == "f":
        np.fmax(array(a, (n,), dtype), array(b, (n,), dtype), out=array(destination, (n,), dtype))
    else:
        _binary(op, a, b, destination, n, dtype)


def binary_that_spoils_an_operand(op: BinaryOp, a: int, b: int, destination: int, n: int, dtype: np.dtype[Any]) -> None:
    _binary(op, a, b, destination, n, dtype)
    array(b, (n,), dtype)[...] = array(destination, (n,), dtype)


def reduce_in_sixteen_bits(op: ReduceOp, source: int, destination: int, outer: int, length: int, inner: int, dtype: np.dtype[Any]) -> None:
    if op is ReduceOp.SUM and dtype == np.float16 and length:
        x = array(source, (outer, length, inner), dtype)
        total = np.zeros((outer, inner), dtype)
        for i in range(length):
            total += x[:, i]
        array(destination, (outer, inner), dtype)[...] = total
    else:
        _reduce(op, source, destination, outer, length, inner, dtype)


def sums_that_saturate(op: ReduceOp, source: int, destination: int, outer: int, length: int, inner: int, dtype: np.dtype[Any]) -> None:
    _reduce(op, source, destination, outer, length, inner, dtype)
    if op is ReduceOp.SUM and dtype == np.int8:
        total = np.clip(array(source, (outer, length, inner), dtype).sum(1, dtype=np.int64), -128, 127)
        array(destination, (outer, inner), dtype)[...] = total


def flipped_convolution(x: Any, w: Any, *rest: Any) -> None:
    _convolution(x, w[:, :, ::-1, ::-1], *rest)


def attention_that_looks_ahead(q: Any, k: Any, v: Any, out: Any, scale: float, first: int) -> None:
    _attention(q, k, v, out, scale, first + 1)


def attention_that_forgets_blind_queries(q: Any, k: Any, v: Any, out: Any, scale: float, first: int) -> None:
    _attention(q, k, v, out, scale, max(1, first))


@dataclass(frozen=True)
class Defect:
    check: str
    module: Any
    name: str
    kernel: Callable[..., None]


DEFECTS = (
    Defect("gemm_transposes", blas, "gemm", gemm_without_conjugation),
    Defect("gemm_transposes", blas, "gemm", gemm_that_reads_c),
    Defect("gemm_transposes", blas, "gemm", gemm_over_padding),
    Defect("gemm_transposes", blas, "gemm", gemm_of_rounded_operands),
    Defect("batched_gemm_transposes", blas, "batched_gemm", batched_gemm_of_the_first),
    Defect("unary_special_values", elementwise, "unary", relu_that_drops_nan),
    Defect("unary_values", elementwise, "unary", unary_one_too_far),
    Defect("unary_values", elementwise, "unary", naive_sigmoid),
    Defect("binary_special_values", elementwise, "binary", max_that_drops_nan),
    Defect("binary_values", elementwise, "binary", binary_that_spoils_an_operand),
    Defect("reduce_accumulates_in_float32", reduce, "reduce", reduce_in_sixteen_bits),
    Defect("integer_sums_wrap", reduce, "reduce", sums_that_saturate),
    Defect("conv2d_values", convolution, "convolution", flipped_convolution),
    Defect("attention_values", attention, "attention", attention_that_looks_ahead),
    Defect("attention_values", attention, "attention", attention_that_forgets_blind_queries),
    Defect("unsupported_dtypes_are_refused", CpuCompute, "_require", lambda *_: None),
)


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: f"{defect.check}-{defect.kernel.__name__}")
async def test_a_defect_is_detected_and_the_seed_named(defect: Defect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defect.module, defect.name, defect.kernel)
    (check,) = (check for check in checks("compute") if check.name == f"compute.{defect.check}")
    harness = Harness(CpuBackend())
    with pytest.raises(AssertionError, match=f"seed {harness.seed}"):
        await check.run(harness)


def test_checks_are_unique_and_each_level_has_some() -> None:
    names = [check.name for check in checks()]
    assert len(names) == len(set(names))
    assert all(checks(level) for level in LEVELS)
    assert [check.name for level in LEVELS for check in checks(level)] == names


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="no level 'gpu'"):
        checks("gpu")


def test_every_check_of_a_module_is_public() -> None:
    assert {name for name in vars(compute_gemm) if name.startswith("check_")} == set(compute_gemm.__all__)


def test_a_seed_repeats_the_inputs() -> None:
    first, second = (Harness(CpuBackend(), seed=7).rng.standard_normal(5).tolist() for _ in range(2))
    assert first == second
