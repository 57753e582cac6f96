"""Fused kernels on the GPU: every function they may call, operands that are broadcast, and programs that are compiled once."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from accel.cpu.families.fused import values_of
from accel.dtype import DType
from accel.ops.fused import FUNCTIONS, OPERANDS, types_of
from tests.accel_cuda.compute_support import unaligned

if TYPE_CHECKING:
    import accel

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nothing_left")]

WIDER = {DType.FLOAT16: DType.FLOAT64, DType.FLOAT32: DType.FLOAT64, DType.COMPLEX64: DType.COMPLEX128}
# Beside the largest element: of functions that lose digits, such as the power of a complex number.
ERROR = {DType.FLOAT16: 2e-3, DType.FLOAT32: 2e-6, DType.FLOAT64: 1e-13, DType.COMPLEX64: 1e-5, DType.COMPLEX128: 1e-13}


def operands_of(name: str, dtype: DType, rng: np.random.Generator) -> list[np.ndarray[Any, Any]]:
    values: list[np.ndarray[Any, Any]] = []
    for _ in range(FUNCTIONS[name].arity):
        made: Any
        if dtype is DType.BOOL:
            made = rng.random(1001) < 0.5
        elif dtype.is_integer:
            made = rng.integers(0 if dtype.kind == "unsigned" or name in ("pow", "left_shift", "right_shift") else -7, 7, 1001)
        else:
            made = rng.uniform(-2, 2, 1001) + (1j * rng.uniform(-2, 2, 1001) if dtype.is_complex else 0)
            if not dtype.is_complex and name in ("log", "log2", "log10", "sqrt", "rsqrt", "log1p", "pow"):
                made = np.abs(made)
            elif not dtype.is_complex and name in ("asin", "acos", "atanh"):
                made = made / 2
            elif not dtype.is_complex and name == "acosh":
                made = 1 + np.abs(made)
            elif dtype.is_complex and name == "log1p":
                made[:250] = made[:250] / 1000 - 1
        values.append(made.astype(dtype.numpy))
    if name == "where":
        values[0] = rng.random(1001) < 0.5
    if name in ("floor_divide", "remainder") and dtype.is_floating:
        values = [
            (np.round(each.astype(np.float64) * 4) / 4 + shift).astype(each.dtype) for each, shift in zip(values, (0, 4), strict=True)
        ]
    return values


@pytest.mark.parametrize(
    "dtype", [DType.FLOAT32, DType.FLOAT16, DType.COMPLEX64, DType.INT32, DType.UINT8, DType.BOOL], ids=lambda each: each.value
)
async def test_every_function(device: accel.Device, rng: np.random.Generator, dtype: DType) -> None:
    async def difference(name: str) -> str:
        operands = operands_of(name, dtype, rng)
        program = ((name, *range(len(operands))),)
        refs = [await device.put(each) for each in operands]
        got = await device.get(await device.elementwise.fused(program, refs))
        wide = [
            each if name == "nextafter" else each.astype(WIDER[kind].numpy) if (kind := DType.of(each.dtype)) in WIDER else each
            for each in operands
        ]
        with np.errstate(all="ignore"):
            expected = values_of(program, types_of(program, tuple(DType.of(each.dtype) for each in wide)), wide)
        if not np.issubdtype(expected.dtype, np.inexact):
            return "" if np.array_equal(got, expected) else f"{name}: {np.flatnonzero(got != expected)[:5]}"
        finite = np.isfinite(expected)
        if not np.array_equal(np.isfinite(got), finite):
            return f"{name}: not finite at {np.flatnonzero(np.isfinite(got) != finite)[:5]}"
        off = np.max(np.abs(got[finite] - expected[finite]), initial=0) / max(1, np.max(np.abs(expected)[finite], initial=0))
        return "" if off <= ERROR[dtype] else f"{name}: off by {off}"

    names = [name for name, function in FUNCTIONS.items() if dtype in function.dtypes]
    started = time.perf_counter()
    wrong = [each for each in await asyncio.gather(*map(difference, names)) if each]
    print(f"{len(names)} programs of {dtype.value} in {time.perf_counter() - started:.1f} s")
    assert not wrong


async def test_random_programs_on_operands_that_are_broadcast(device: accel.Device, rng: np.random.Generator) -> None:
    program = (("mul", 0, 1), ("add", 4, 2), ("less", 5, 3), ("where", 6, 3, 5), ("float16", 7), ("float32", 8))
    for _ in range(25):
        shape = tuple(int(n) for n in rng.choice([1, 2, 3, 4, 8, 33], int(rng.integers(1, 6))))
        shapes = [tuple(1 if rng.random() < 0.4 else n for n in shape[int(rng.integers(len(shape))) :]) for _ in range(3)]
        operands = [rng.integers(-8, 8, each).astype(np.float32) for each in shapes]
        refs = [await unaligned(device, each, int(rng.integers(0, 3))) for each in operands]
        got = await device.get(await device.elementwise.fused(program, (*refs, np.float32(-5))))
        value = operands[0] * operands[1] + operands[2]
        np.testing.assert_array_equal(got, np.where(value < -5, -5, value), err_msg=str(shapes))


async def test_specials_are_those_of_numpy(device: accel.Device) -> None:
    x = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 3.5], np.float32)
    a, b = np.repeat(x, 8), np.tile(x, 8)
    ra, rb = await device.put(a), await device.put(b)
    for name in ("floor_divide", "remainder", "atan2", "hypot", "logaddexp", "copysign", "nextafter", "max", "min", "pow"):
        got = await device.get(await device.elementwise.fused(((name, 0, 1),), (ra, rb)))
        program = ((name, 0, 1),)
        with np.errstate(all="ignore"):
            expected = values_of(program, types_of(program, (DType.FLOAT32,) * 2), [a, b])
        np.testing.assert_allclose(got, expected, rtol=1e-6, err_msg=name)


async def test_the_extreme_integers(device: accel.Device) -> None:
    a, b = np.repeat(np.array([-128, -1, 0, 1, 127], np.int8), 5), np.tile(np.array([-128, -1, 0, 1, 127], np.int8), 5)
    ra, rb = await device.put(a), await device.put(b)
    for name in ("floor_divide", "remainder", "left_shift", "right_shift", "mul", "sub"):
        program = ((name, 0, 1),)
        with np.errstate(all="ignore"):
            expected = values_of(program, types_of(program, (DType.INT8,) * 2), [a, b])
        got = await device.get(await device.elementwise.fused(program, (ra, rb)))
        np.testing.assert_array_equal(got, expected, err_msg=name)


async def test_as_many_operands_as_a_kernel_takes(device: accel.Device) -> None:
    refs = [await device.put(np.full(5, n, np.float32)) for n in range(OPERANDS)]
    program = (("add", 0, 1), *[("add", OPERANDS + n - 1, n + 1) for n in range(1, OPERANDS - 1)])
    np.testing.assert_array_equal(await device.get(await device.elementwise.fused(program, refs)), np.full(5, sum(range(OPERANDS))))


@pytest.mark.parametrize("numbers", [1, 2, 3, 4])
async def test_complex_numbers_among_any_count_of_operands(device: accel.Device, rng: np.random.Generator, numbers: int) -> None:
    x = rng.standard_normal(101) + 1j * rng.standard_normal(101)
    values = [np.complex128(complex(*rng.standard_normal(2))) for _ in range(numbers)]
    ref = await device.put(x)
    program = tuple(("mul" if place % 2 else "add", 0 if place == 1 else numbers + place - 1, place) for place in range(1, numbers + 1))
    found = await device.get(await device.elementwise.fused(program, (ref, *values)))
    expected = x
    for place, value in enumerate(values, 1):
        expected = expected * value if place % 2 else expected + value
    np.testing.assert_allclose(found, expected, rtol=1e-13)
