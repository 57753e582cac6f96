"""Graphs on a GPU: captured once, launched as one command."""

from __future__ import annotations

import asyncio
import gc
import time

import numpy as np
import pytest

import accel

pytestmark = pytest.mark.gpu


async def test_replay_follows_its_inputs() -> None:
    rng = np.random.default_rng(np.random.SeedSequence().entropy)
    async with accel.System() as system:
        device = await system.open_device("cuda")
        a, w = rng.standard_normal((2, 300, 300))
        x, weight = await device.put(a), await device.put(w)
        async with device.graph() as graph:
            h = graph.blas.gemm(x, weight)
            h = graph.elementwise.unary("relu", h, out=h)
            total = graph.reduce("sum", h, axis=0)
            filled = graph.full((300,), 2.0, "float64")
            doubled = graph.elementwise.binary("mul", total, filled)
            copied = graph.copy(doubled, filled)
        for _ in range(3):
            a = rng.standard_normal((300, 300))
            await device.put(a, out=x)
            await graph.replay()
            expected = np.maximum(a @ w, 0).sum(axis=0)
            np.testing.assert_allclose(await device.get(total), expected, rtol=1e-10, atol=1e-10)
            np.testing.assert_allclose(await device.get(copied), 2 * expected, rtol=1e-10, atol=1e-10)


async def test_replays_wait_for_other_streams_and_are_waited_for() -> None:
    async with accel.System() as system:
        device = await system.open_device("cuda")
        x = await device.zeros((1 << 20,), "float64")
        one = await device.full((1 << 20,), 1.0, "float64")
        async with device.graph() as graph:
            graph.elementwise.binary("add", x, one, out=x)
        waits: list[asyncio.Future[object]] = []
        for _ in range(50):
            waits.append(asyncio.ensure_future(graph.replay()))
            waits.append(asyncio.ensure_future(device.elementwise.binary("add", x, x, out=x)))
        await asyncio.gather(*waits)
        expected = 0.0
        for _ in range(50):
            expected = (expected + 1) * 2
        np.testing.assert_array_equal(await device.get(x), np.full(1 << 20, expected))


async def test_captures_beside_replays_and_ops_in_flight() -> None:
    async with accel.System() as system:
        device = await system.open_device("cuda", streams=2)
        x = await device.full((1 << 16,), 1.0, "float64")

        async def worker(number: int) -> None:
            for _ in range(5):
                async with device.graph() as graph:
                    y = x
                    for _ in range(number):
                        y = graph.elementwise.binary("add", y, x)
                await asyncio.gather(*(graph.replay() for _ in range(3)))
                np.testing.assert_array_equal(await device.get(y), np.full(1 << 16, 1.0 + number))

        await asyncio.gather(*(worker(number) for number in range(1, 9)))
        gc.collect()
        await device.get(x)
        assert device.info().memory.used == x.nbytes


async def test_a_replay_costs_little_more_than_its_launch() -> None:
    async with accel.System() as system:
        device = await system.open_device("cuda")
        x = await device.zeros((256,), "float32")
        async with device.graph() as graph:
            for _ in range(20):
                graph.elementwise.unary("neg", x, out=x)
        times = []
        for _ in range(500):
            began = time.perf_counter()
            await graph.replay()
            times.append(time.perf_counter() - began)
        median = sorted(times)[250]
        print(f"await graph.replay() of 20 kernels: p50 {median * 1e6:.1f} us")
        assert median < 1e-3
