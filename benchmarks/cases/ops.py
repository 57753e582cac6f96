"""Tiny ops: many at once, and in a batch."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np

from accel import System
from accel.cli.bench.measure import awaited, called
from accel.cli.bench.suite import Bench, BenchCase
from benchmarks.measures import together

if TYPE_CHECKING:
    from accel import AccelRef

__all__ = ["CASES"]

_TINY = (8, 8)


def _tiny(bench: Bench) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    a, b = bench.rng.standard_normal((2, *_TINY), dtype=np.float32)
    return a, b


async def _batch(bench: Bench) -> None:
    ops, count = 64, bench.scale(40, 10)
    a, _ = _tiny(bench)
    out = np.empty_like(a)
    async with System("bench") as system:
        device = await system.open_device(bench.spec)
        x = await device.put(a)

        async def batched() -> None:
            async with device.batch() as batch:
                for _ in range(ops):
                    batch.elementwise.unary("relu", x)

        async def one_by_one() -> None:
            for _ in range(ops):
                await device.elementwise.unary("relu", x)

        def plain() -> None:
            for _ in range(ops):
                np.maximum(a, 0, out=out)

        subjects = {
            "batch()": awaited(batched, count, ops),
            "64 awaits": awaited(one_by_one, count, ops),
            "numpy": called(plain, count, ops),
        }
        await bench.compare("64 relu of 8x8", subjects)


async def _tasks(bench: Bench) -> None:
    tasks, count = 64, bench.scale(40, 10)
    a, b = _tiny(bench)
    c = np.empty(_TINY, np.float32)
    async with System("bench") as system:
        device = await system.open_device(bench.spec)
        x, y = await device.put(a), await device.put(b)

        async def bare() -> None:
            loop = asyncio.get_running_loop()
            future: asyncio.Future[None] = loop.create_future()
            loop.call_soon(future.set_result, None)
            np.matmul(a, b, out=c)
            await future

        async def gemm() -> AccelRef:
            return await device.blas.gemm(x, y)

        await bench.compare(
            "gemm 8x8 from 64 tasks", {"accel": together(gemm, tasks, count), "numpy + future": together(bare, tasks, count)}
        )


CASES = (
    BenchCase("batch", "a batch of 64 tiny ops against 64 awaits", _batch),
    BenchCase("tasks", "tiny ops from 64 tasks", _tasks),
)
