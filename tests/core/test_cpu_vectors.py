"""The vector calls of the CPU's compute interface, against numpy in higher precision."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, TypeAlias

import ml_dtypes
import numpy as np
import pytest

from accel.cpu.compute import CpuCompute
from accel.dtype import DType
from accel.enums import Transpose
from accel.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

Array: TypeAlias = np.ndarray[Any, Any]

NONE, CONJUGATE = Transpose.NONE, Transpose.CONJUGATE
PRODUCTS = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64, DType.COMPLEX64, DType.COMPLEX128)
TOLERANCE = {2: 1.6e-2, 4: 3e-5, 8: 3e-5, 16: 1e-12}


class InlineStream:
    """A stream that runs its work at once, and counts it."""

    count = 0

    def submit(self, work: Callable[[], None], cost: float, keep: object = None) -> None:
        self.count += 1
        work()

    def synchronize(self) -> None:
        pass


@pytest.fixture
def compute() -> CpuCompute:
    compute = CpuCompute(InlineStream())
    compute.init()
    return compute


@pytest.fixture
def rng() -> np.random.Generator:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def at(x: Array) -> int:
    return int(x.ctypes.data)


def random(rng: np.random.Generator, shape: tuple[int, ...] | int, dtype: DType) -> Array:
    values: Array = rng.standard_normal(shape)
    if dtype.is_complex:
        values = values + 1j * rng.standard_normal(shape)
    return values.astype(dtype.numpy)


def high(x: Array) -> Array:
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


def assert_near(got: Array, expected: Array, scale: float = 1.0) -> None:
    tolerance = TOLERANCE[got.dtype.itemsize] if got.dtype != np.float64 else 1e-12
    np.testing.assert_allclose(high(got), expected, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("dtype", PRODUCTS, ids=lambda dtype: dtype.value)
def test_axpy_and_scal(compute: CpuCompute, rng: np.random.Generator, dtype: DType) -> None:
    n = 40_000
    alpha = 0.75 + 0.5j if dtype.is_complex else 0.75
    x, y = random(rng, 2 * n, dtype), random(rng, n, dtype)
    expected = high(y) + alpha * high(x)[::2][::-1]
    compute.axpy(n, alpha, at(x), 2, at(y), -1, dtype=dtype)
    compute.synchronize()
    assert_near(y, expected)
    before = high(x)
    compute.scal(n, alpha, at(x), 2, dtype=dtype)
    compute.axpy(n, 0, 0x1000, 1, at(y), 1, dtype=dtype)
    compute.synchronize()
    assert_near(x[::2], alpha * before[::2])
    np.testing.assert_array_equal(high(x)[1::2], before[1::2])


@pytest.mark.parametrize("dtype", PRODUCTS, ids=lambda dtype: dtype.value)
@pytest.mark.parametrize("n", [0, 1, 7, 70_001])
def test_dot_and_nrm2(compute: CpuCompute, rng: np.random.Generator, dtype: DType, n: int) -> None:
    x, y = random(rng, max(n, 1), dtype), random(rng, max(n, 1), dtype)
    result, norm = np.full(2, np.nan, dtype.numpy), np.full(2, np.nan, x.real.dtype)
    compute.dot(n, at(x), 1, at(y), -1, at(result), dtype=dtype)
    compute.nrm2(n, at(x), 1, at(norm), dtype=dtype)
    compute.synchronize()
    expected = high(x)[:n] @ high(y)[:n][::-1]
    assert_near(result[:1], np.array([expected]), scale=float(np.sqrt(n) + 1))
    assert_near(norm[:1], np.array([np.linalg.norm(high(x)[:n])]))
    assert np.isnan(result[1])
    assert np.isnan(norm[1])


@pytest.mark.parametrize("dtype", PRODUCTS, ids=lambda dtype: dtype.value)
def test_nrm2_neither_overflows_nor_vanishes(compute: CpuCompute, dtype: DType) -> None:
    real = np.zeros(1, dtype.numpy).real.dtype
    finfo: Any = ml_dtypes.finfo
    largest, smallest = float(finfo(real).max), float(finfo(real).smallest_normal)
    for value in (largest / 4, smallest, 0.0):
        x = np.full(4, value, dtype.numpy)
        norm = np.full(1, np.nan, real)
        compute.nrm2(4, at(x), 1, at(norm), dtype=dtype)
        compute.synchronize()
        assert float(norm[0]) == pytest.approx(2 * value, rel=1e-2 if dtype.itemsize == 2 else 1e-6, abs=0)
    for value in (np.nan, np.inf):
        x = np.array([1, value, 2], dtype.numpy)
        norm = np.zeros(1, real)
        compute.nrm2(3, at(x), 1, at(norm), dtype=dtype)
        compute.synchronize()
        assert str(float(norm[0])) == str(value)


def test_increments_of_zero_and_negative_lengths_are_refused() -> None:
    stream = InlineStream()
    compute = CpuCompute(stream)
    compute.init()
    before = stream.count  # the first product of matrices warms up
    x = at(np.zeros(8, np.float32))
    calls: list[Callable[[], None]] = [
        lambda: compute.axpy(2, 1, x, 0, x, 1),
        lambda: compute.dot(2, x, 1, x, 0, x),
        lambda: compute.nrm2(2, x, 0, x),
        lambda: compute.scal(2, 1, x, 0),
        lambda: compute.scal(-2, 1, x, 1),
        lambda: compute.scal(2, 1j, x, 1),
    ]
    for call in calls:
        with pytest.raises(InvalidArgumentError):
            call()
    assert stream.count == before
