"""Larger work: copies from and to the device, and products of growing size."""

from __future__ import annotations

import numpy as np

from accel import System
from accel.cli.bench.measure import awaited, called
from accel.cli.bench.suite import Bench, BenchCase

__all__ = ["CASES"]

_SIZES = {"4 KiB": 1 << 12, "64 KiB": 1 << 16, "1 MiB": 1 << 20, "16 MiB": 1 << 24, "64 MiB": 1 << 26}
_SIDES = (32, 64, 128, 256, 512, 1024)
# What a slow core does, to choose how often to repeat: bytes copied and multiply-adds, each per second.
_COPY, _MULTIPLY = 3e9, 1e10


def _count(bench: Bench, seconds: float) -> int:
    """Return how often to run what takes ``seconds``, so that a round takes a fraction of a second."""
    return int(min(bench.scale(200, 50), max(2, bench.scale(100, 30) * 1e-3 / seconds)))


async def _copies(bench: Bench) -> None:
    async with System("bench") as system:
        device = await system.open_device(bench.spec)
        for name, nbytes in _SIZES.items():
            source = bench.rng.integers(0, 256, nbytes, np.uint8)
            target = np.empty_like(source)
            ref = await device.put(source)
            count = _count(bench, nbytes / _COPY)
            subjects = {
                "accel put": awaited(lambda: device.put(source, out=ref), count),  # noqa: B023 - used before the next turn
                "accel get": awaited(lambda: device.get(ref, out=target), count),  # noqa: B023
                "numpy": called(lambda: np.copyto(target, source), count),  # noqa: B023
            }
            await bench.compare(f"copy {name}", subjects, rounds=bench.scale(5, 2))


async def _products(bench: Bench) -> None:
    async with System("bench") as system:
        device = await system.open_device(bench.spec)
        for n in _SIDES:
            a, b = bench.rng.standard_normal((2, n, n), dtype=np.float32)
            c = np.empty_like(a)
            x, y, z = await device.put(a), await device.put(b), await device.empty((n, n))
            count = _count(bench, n**3 / _MULTIPLY)
            subjects = {
                "accel": awaited(lambda: device.blas.gemm(x, y, out=z), count),  # noqa: B023
                "numpy": called(lambda: np.matmul(a, b, out=c), count),  # noqa: B023
            }
            await bench.compare(f"gemm {n}x{n} float32", subjects, rounds=bench.scale(5, 2))


CASES = (
    BenchCase("copy", "put and get against numpy's copy", _copies),
    BenchCase("gemm", "await products of 32 to 1024 against numpy", _products),
)
