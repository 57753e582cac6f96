"""The compute level of the conformance suite fails for calls that are subtly wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from accel.compute import DeviceCompute
from accel.cpu.backend import CpuBackend
from accel.dtype import DType
from accel.enums import BinaryOp, ReduceOp, Transpose, UnaryOp
from accel.testing.conformance import LEVELS, Harness, checks


class WithoutConjugation(DeviceCompute):
    def gemm(self, transpose_a: Any, *rest: Any, **options: Any) -> None:
        super().gemm(Transpose.TRANSPOSE if transpose_a is Transpose.CONJUGATE else transpose_a, *rest, **options)


class ReadsC(DeviceCompute):
    def gemm(self, *arguments: Any, **options: Any) -> None:
        *others, beta, c, ldc = arguments
        call: Any = super().gemm
        call(*others, beta or 1e-30, c, ldc, **options)


class WritesPadding(DeviceCompute):
    def gemm(self, ta: Any, tb: Any, m: int, n: int, *rest: Any, dtype: DType = DType.FLOAT64) -> None:
        super().gemm(ta, tb, m, n, *rest, dtype=dtype)
        if rest[-1] > m:
            self.stream.fill(rest[-2] + m * dtype.itemsize, b"\0", dtype.itemsize)


class BatchOfTheFirst(DeviceCompute):
    def batched_gemm(self, *arguments: Any, **options: Any) -> None:
        call: Any = super().batched_gemm
        call(*arguments[:8], 0, *arguments[9:], **options)


class OneTooFar(DeviceCompute):
    def unary(self, op: UnaryOp, input: int, output: int, n: int, *, dtype: DType = DType.FLOAT32) -> None:
        super().unary(op, input, output, n + 1, dtype=dtype)


class OtherWayRound(DeviceCompute):
    def binary(self, op: BinaryOp, a: int, b: int, output: int, n: int, *, dtype: DType = DType.FLOAT32) -> None:
        super().binary(op, b, a, output, n, dtype=dtype)


class OtherAxis(DeviceCompute):
    def reduce(self, op: ReduceOp, input: int, output: int, shape: Any, axis: int, *, dtype: DType = DType.FLOAT32) -> None:
        if axis == 1 and len(shape) == 3:
            shape = shape[1], shape[0], shape[2]
        super().reduce(op, input, output, shape, axis, dtype=dtype)


class NothingOfNothing(DeviceCompute):
    def reduce(self, op: ReduceOp, input: int, output: int, shape: Any, axis: int, *, dtype: DType = DType.FLOAT32) -> None:
        if shape[axis]:
            super().reduce(op, input, output, shape, axis, dtype=dtype)


class LooksAhead(DeviceCompute):
    def attention(self, *arguments: Any, **options: Any) -> None:
        *others, causal = arguments
        call: Any = super().attention
        call(*others, "bottom_right" if causal else causal, **options)


class TakesEverything(DeviceCompute):
    def _require(self, call: str, dtype: DType) -> None:
        self._ready()


@dataclass(frozen=True)
class Defect:
    check: str
    compute: type[DeviceCompute]


DEFECTS = (
    Defect("gemm", WithoutConjugation),
    Defect("gemm", ReadsC),
    Defect("gemm", WritesPadding),
    Defect("batched_gemm", BatchOfTheFirst),
    Defect("unary", OneTooFar),
    Defect("binary", OtherWayRound),
    Defect("reduce", OtherAxis),
    Defect("reduce", NothingOfNothing),
    Defect("attention", LooksAhead),
    Defect("unsupported_dtypes_are_refused", TakesEverything),
)


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: f"{defect.check}-{defect.compute.__name__}")
async def test_a_defect_is_detected_and_the_seed_named(defect: Defect) -> None:
    (check,) = (check for check in checks("compute") if check.name == f"compute.{defect.check}")
    harness = Harness(CpuBackend(), compute=defect.compute)
    with pytest.raises(AssertionError, match=f"seed {harness.seed}"):
        await check.run(harness)


def test_checks_are_unique_and_each_level_has_some() -> None:
    names = [check.name for check in checks()]
    assert len(names) == len(set(names))
    assert all(checks(level) for level in LEVELS)
