"""Kernel actors that must wait for each other before they enqueue: shared lanes, and batches behind an op that is being waited for."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import accel
from accel.testing import FaultPlan


@pytest.mark.parametrize("streams", [8, 1, 2])
async def test_a_batch_keeps_its_order_behind_an_actor_that_is_busy(streams: int) -> None:
    seed = int(np.random.default_rng().integers(1 << 32))
    a = np.random.default_rng(seed).standard_normal((16, 16))
    plan = FaultPlan().hang_at(1, op="gemm")
    async with accel.System() as system:
        # With debug=True the blas actor waits for each of its ops, so that the next one, on which the batch depends, stays in its mailbox.
        device = await system.open_device("cpu", streams=streams, debug=True, faults=plan, libraries=["blas", "elementwise", "reduce"])
        x, y = await device.put(a), await device.zeros(a.shape, "float64")
        first = asyncio.ensure_future(device.blas.gemm(x, x))
        while not plan.fired:
            await asyncio.sleep(0)
        second = asyncio.ensure_future(device.blas.gemm(x, x, out=y))
        refs = []

        async def batch() -> None:
            async with device.batch() as recorder:
                positive = recorder.elementwise.unary("relu", y)
                again = recorder.blas.gemm(positive, x)
                refs.append(recorder.reduce("sum", again, axis=0))

        third = asyncio.ensure_future(batch())
        while device.info().in_flight < 5:
            await asyncio.sleep(0)
        for _ in range(20):  # the batch's actor has had its turns
            await asyncio.sleep(0)
        assert not second.done()
        assert not third.done()
        plan.release()
        await asyncio.gather(first, second, third)
        expected = (np.maximum(a @ a, 0) @ a).sum(axis=0)
        np.testing.assert_allclose(await device.get(refs[0]), expected, err_msg=f"seed {seed}")
        assert device.info().in_flight == 0


async def test_a_fault_while_an_actor_waits_for_its_turn_ends_every_wait() -> None:
    plan = FaultPlan().hang_at(1, op="gemm").poison_at(2, op="gemm")
    async with accel.System() as system:
        device = await system.open_device("cpu", debug=True, faults=plan, libraries=["blas", "elementwise"])
        x = await device.put(np.ones((4, 4)))

        async def batch() -> None:
            async with device.batch() as recorder:
                recorder.elementwise.unary("relu", recorder.blas.gemm(x, x))

        first = asyncio.ensure_future(device.blas.gemm(x, x))
        while not plan.fired:
            await asyncio.sleep(0)
        second = asyncio.ensure_future(batch())
        while not device.info().in_flight > 1:
            await asyncio.sleep(0)
        plan.release()
        outcomes = await asyncio.gather(first, second, return_exceptions=True)
        assert isinstance(outcomes[1], accel.ContextPoisonedError), outcomes
        async for generation in device.generations():
            if generation == 2:
                break
        assert (await device.get(await device.put([1.0]))).tolist() == [1.0]
