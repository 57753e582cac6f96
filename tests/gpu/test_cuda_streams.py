"""Streams of the CUDA backend as options ask for them: priorities, and what libraries take to work in."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel.testing import FaultPlan
from tests.own_library_support import Spread

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accel.engine.options import Library

pytestmark = pytest.mark.gpu

MIB = 1 << 20
LONG, SMALL = 1 << 29, 512  # elements: a kernel of about a millisecond that fills the device, and one of a few blocks


async def overtaking(priorities: Mapping[str, int]) -> float:
    """Return the median time of a small reduction beside a queue of long kernels, in seconds."""
    async with accel.System() as system:
        strategy = accel.StreamStrategy(priorities=priorities)
        device = await system.open_device(
            "cuda", streams=strategy, completion=accel.PolledCompletion(interval=0.0), libraries=("elementwise", "reduce")
        )
        large, small = await device.zeros((LONG,), "float32"), await device.put(np.ones(SMALL, np.float32))
        await device.elementwise.unary("sigmoid", large, out=large)
        for _ in range(20):
            await device.reduce("sum", small)
        queue = [asyncio.ensure_future(device.elementwise.unary("sigmoid", large, out=large)) for _ in range(100)]
        times: list[float] = []
        while not queue[0].done():
            await asyncio.sleep(0)
        while not queue[-5].done():
            began = time.perf_counter()
            assert float(await device.get(await device.reduce("sum", small))) == SMALL
            times.append(time.perf_counter() - began)
        await asyncio.gather(*queue)
        assert len(times) > 10, "the queue of long kernels was too short to be measured beside"
        return float(np.median(times))


async def test_small_kernels_of_high_priority_overtake_long_ones() -> None:
    equal = await overtaking({})
    first = await overtaking({"reduce": -5, "memory": -5})
    print(f"small op beside long kernels: {equal * 1e6:.0f} us with equal priority, {first * 1e6:.0f} us with a higher one")
    assert first < equal / 2


@pytest.mark.parametrize("priority", [-1000, 1000, 1])
async def test_a_priority_that_the_device_has_not_is_refused_with_the_range(priority: int) -> None:
    async with accel.System() as system:
        with pytest.raises(accel.InvalidArgumentError, match=f"priority {priority}") as caught:
            await system.open_device("cuda", streams=accel.StreamStrategy(priorities={"blas": priority}))
        assert "Use -5" in caught.value.remedy
        assert "to 0" in caught.value.remedy


async def test_libraries_take_workspace_only_where_they_are_used() -> None:
    async with accel.System() as system:
        device = await system.open_device("cuda")
        x = await device.put(np.eye(8, dtype=np.float32))
        await device.elementwise.unary("neg", x)
        assert device.info().memory.workspace == 0
        await device.blas.gemm(x, x)
        assert device.info().memory.workspace == 32 * MIB
        await device.blas.gemm(x, x)
        await device.elementwise.unary("neg", x)
        assert device.info().memory.workspace == 32 * MIB


@pytest.mark.parametrize("streams", ["single", "pooled(2)"])
async def test_libraries_that_share_a_stream_find_what_they_need(streams: str, rng: np.random.Generator) -> None:
    a = rng.standard_normal((300, 300))
    async with accel.System() as system:
        device = await system.open_device("cuda", streams=streams)
        x = await device.put(a)
        results = await asyncio.gather(
            device.elementwise.unary("abs", x), device.blas.gemm(x, x), device.reduce("sum", x, axis=0), device.reduce("max", x)
        )
        for result, expected in zip(results, (abs(a), a @ a, a.sum(axis=0), a.max()), strict=True):
            np.testing.assert_allclose(await device.get(result), expected, rtol=1e-9, atol=1e-9)
        async with device.batch() as batch:
            total = batch.reduce("sum", batch.blas.gemm(x, x))
        np.testing.assert_allclose(await device.get(total), (a @ a).sum(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("streams", ["per_actor", "single", "pooled(2)"])
async def test_every_library_that_was_named_is_warm(streams: str) -> None:
    """Also where it shares a stream with others: nothing that its ops need is made later, so none is enqueued beside the loop."""
    libraries: tuple[Library, ...] = ("elementwise", "reduce", "blas", "fft")
    async with accel.System() as system:
        device = await system.open_device("cuda", streams=streams, libraries=libraries)
        context = device._host.context
        computes = {library: context.ports[library].lane.compute for library in libraries}
        assert computes["blas"].has_blas
        assert computes["reduce"].has_workspace
        assert context.device.families.states["fft"].library is not None
        x = await device.put(np.ones((8, 8), np.float32))
        # cuBLAS loads a kernel with the first call that needs it.
        for library, op in (("elementwise", accel.ops.Unary(accel.UnaryOp.NEG, x)), ("reduce", accel.ops.Reduce(accel.ReduceOp.SUM, x))):
            assert not context.device.may_block(context.ports[library].lane, op), library


class Spreading(accel.KernelLibrary):
    """Copies in whichever stream it is given."""

    name = "spread"
    several_streams = True

    @accel.kernel(Spread)
    def spread(self, op: Spread, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        stream.copy(outputs[0].address, inputs[0].address, inputs[0].nbytes)


@pytest.mark.parametrize("host", ["inline", "process"])
async def test_a_library_of_the_users_that_takes_several_streams_does_not_wait_behind_a_long_op(host: Any) -> None:
    plan = FaultPlan().hang_at(2, op="spread")
    async with accel.System() as system:
        device = await system.open_device("cuda", host=host, faults=plan)
        try:
            await device.register(Spreading)
            x = await device.put(np.arange(1000.0))
            await device.run(Spread(x))
            slow = asyncio.ensure_future(device.run(Spread(x)))
            while device.info().in_flight < 1:
                await asyncio.sleep(0)
            for _ in range(5):
                np.testing.assert_array_equal(await device.get(await device.run(Spread(x), timeout=20)), np.arange(1000.0))
            assert not slow.done()
        finally:
            plan.release()
        await slow
