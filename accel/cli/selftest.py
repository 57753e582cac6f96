"""A short trip through everything that must work: open, compute, check and, where a context can follow, fault and recover; with the time of each step."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from accel import ContextPoisonedError, System
from accel.testing import FaultPlan

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel import Device

__all__ = ["SelfTest", "self_test"]

_Matrix: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class SelfTest:
    """What the trip gave.

    Parameters
    ----------
    steps
        Step -> milliseconds, in order, as far as it came.
    failure
        What went wrong, or empty.
    """

    steps: dict[str, float]
    failure: str = ""

    @property
    def is_ok(self) -> bool:
        """Whether every step did what it should."""
        return not self.failure


async def self_test(spec: str = "cpu", *, with_fault: bool = True, limit: float = 20.0) -> SelfTest:
    """Run the trip on a device.

    Parameters
    ----------
    spec
        The device.
    with_fault
        Whether a fault is part of it. On a GPU it would end CUDA for the whole process.
    limit
        Seconds that it may take altogether.
    """
    steps: dict[str, float] = {}
    try:
        async with asyncio.timeout(limit):
            await _trip(spec, steps, with_fault)
    except Exception as error:
        return SelfTest(steps, f"after {', '.join(steps) or 'nothing'}: {type(error).__name__}: {error}")
    return SelfTest(steps)


async def _trip(spec: str, steps: dict[str, float], with_fault: bool) -> None:
    began = time.perf_counter()

    def done(step: str) -> None:
        nonlocal began
        now = time.perf_counter()
        steps[step] = round((now - began) * 1e3, 3)
        began = now

    rng = np.random.default_rng()
    a, b = rng.standard_normal((2, 64, 64)).astype(np.float32)
    async with System("doctor") as system:
        plan = FaultPlan().poison_at(2, op="gemm") if with_fault else None
        device = await system.open_device(spec, libraries=("blas",), faults=plan)
        done("open")
        x, y = await device.put(a), await device.put(b)
        product = await device.blas.gemm(x, y)
        done("gemm")
        _compare(await device.get(product), a, b)
        done("check")
        if with_fault:
            await _recover(device, a, b, done)
    done("close")


async def _recover(device: Device, a: _Matrix, b: _Matrix, done: Callable[[str], None]) -> None:
    x, y = await device.put(a), await device.put(b)
    try:
        await device.blas.gemm(x, y)
    except ContextPoisonedError:
        done("fault")
    else:
        raise AssertionError("the fault did not surface")
    x, y = await device.put(a), await device.put(b)
    _compare(await device.get(await device.blas.gemm(x, y)), a, b)
    if device.generation != 2:
        raise AssertionError(f"generation {device.generation} after one fault")
    done("recover")


def _compare(result: _Matrix, a: _Matrix, b: _Matrix) -> None:
    expected = a.astype(np.float64) @ b.astype(np.float64)
    if not np.allclose(result, expected, rtol=1e-4, atol=1e-3):
        raise AssertionError("the device computed a wrong product")
