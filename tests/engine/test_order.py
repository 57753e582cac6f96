"""Ops take effect in the order in which they were sent, whatever streams they run in."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from blockbuster import blockbuster_ctx

import accel
from accel.testing import FaultPlan
from tests.device_support import bounded, in_flight, opened, task, turns, until, used

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


pytestmark = pytest.mark.usefixtures("nothing_left")


STREAMS = (8, 2, 1)


MIB = 1 << 20


@pytest.mark.parametrize("streams", STREAMS)
async def test_read_after_write_across_libraries(rng: np.random.Generator, streams: int) -> None:
    x = rng.standard_normal((6, 6))
    plan = FaultPlan().hang_at(1, op="gemm")
    async with opened(plan, streams=streams, libraries=("blas", "elementwise", "reduce")) as device:
        a = await device.put(x)
        product = await device.zeros((6, 6), "float64")
        writing = task(device.blas.gemm(a, a, out=product))
        await asyncio.sleep(0)
        reading: list[asyncio.Future[Any]] = [
            task(device.elementwise.unary("neg", product)),
            task(device.reduce("sum", product)),
            task(device.get(product)),
        ]
        await in_flight(device, 4)
        assert not any(each.done() for each in reading)
        plan.release()
        await writing
        negative, total, got = [await each for each in reading]
        np.testing.assert_allclose(got, x @ x)
        np.testing.assert_allclose(await device.get(negative), -(x @ x))
        np.testing.assert_allclose(await device.get(total), (x @ x).sum())


@pytest.mark.parametrize("streams", STREAMS)
async def test_write_after_read_across_libraries(rng: np.random.Generator, streams: int) -> None:
    x = rng.standard_normal((6, 6))
    plan = FaultPlan().hang_at(1, op="gemm")
    async with opened(plan, streams=streams) as device:
        a = await device.put(x)
        reading = task(device.blas.gemm(a, a))
        await asyncio.sleep(0)
        writing = [task(device.elementwise.unary("neg", a, out=a)), task(device.put(np.zeros((6, 6)), out=a))]
        await in_flight(device, 3)
        assert not any(each.done() for each in writing)
        plan.release()
        np.testing.assert_allclose(await device.get(await reading), x @ x)
        for each in writing:
            await each
        np.testing.assert_array_equal(await device.get(a), np.zeros((6, 6)))


async def test_every_read_since_the_last_write_is_waited_for(rng: np.random.Generator) -> None:
    x = rng.standard_normal((5, 5))
    plan = FaultPlan().hang_at(1, op="gemm").hang_at(1, op="reduce")
    async with opened(plan) as device:
        a = await device.put(x)
        readers = [task(device.blas.gemm(a, a)), task(device.reduce("sum", a)), task(device.elementwise.unary("abs", a))]
        await until(readers[2].done)
        writer = task(device.put(np.zeros((5, 5)), out=a))
        await in_flight(device, 3)
        plan.release()
        await writer
        np.testing.assert_allclose(await device.get(await readers[0]), x @ x)
        np.testing.assert_allclose(await device.get(await readers[1]), x.sum())
        np.testing.assert_array_equal(await device.get(await readers[2]), abs(x))


async def test_work_that_shares_nothing_overtakes_a_stream_that_hangs(rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, 4))
    plan = FaultPlan().hang_at(1, op="gemm")
    async with opened(plan) as device:
        a, b = await device.put(x), await device.put(x)
        hanging = task(device.blas.gemm(a, a))
        await in_flight(device, 1)
        np.testing.assert_array_equal(await device.get(await device.elementwise.unary("neg", b)), -x)
        np.testing.assert_array_equal(await device.get(a), x)
        assert not hanging.done()
        plan.release()
        await hanging


async def test_memory_of_a_dropped_ref_is_not_reused_under_a_running_kernel(rng: np.random.Generator) -> None:
    n = 400
    x = rng.standard_normal((n, n))
    plan = FaultPlan().hang_at(1, op="reduce")
    async with opened(plan, memory_limit=2 * MIB, libraries=("reduce",)) as device:
        a = await device.put(x)
        reading = task(device.reduce("sum", a, axis=0))
        await in_flight(device, 1)
        del a
        # There is room for one such buffer only: the new one takes the memory of the old.
        writing = task(device.put(np.zeros((n, n))))
        await in_flight(device, 2)
        assert not writing.done()
        plan.release()
        await writing
        np.testing.assert_allclose(await device.get(await reading), x.sum(axis=0))


async def test_free_takes_effect_after_ops_sent_before_it(rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, 4))
    plan = FaultPlan().hang_at(2)
    async with opened(plan, max_in_flight=1) as device:
        a = await device.put(x)
        hanging = task(device.zeros(1))
        await in_flight(device, 1)
        using = task(device.elementwise.unary("neg", a))
        await asyncio.sleep(0)
        freeing = task(device.free(a))
        await turns()
        assert a.is_stale
        plan.release()
        await hanging
        await freeing
        np.testing.assert_array_equal(await device.get(await using), -x)
        del hanging, using
        await until(lambda: used(device) == 0)


async def test_free_that_was_cancelled_does_not_disturb_ops_sent_before_it(rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, 4))
    plan = FaultPlan().hang_at(2)
    async with opened(plan, max_in_flight=1) as device:
        a = await device.put(x)
        hanging = task(device.zeros(1))
        await in_flight(device, 1)
        using = [task(device.elementwise.unary("neg", a)) for _ in range(2)]
        await asyncio.sleep(0)
        freeing = task(device.free(a))
        await turns()
        freeing.cancel()
        await turns()
        plan.release()
        await hanging
        for each in using:
            np.testing.assert_array_equal(await device.get(await each), -x)
        del a, using, each, hanging, freeing
        await until(lambda: used(device) == 0)


async def test_op_is_sent_at_the_first_step_of_its_await_and_not_before() -> None:
    plan = FaultPlan()
    async with opened(plan) as device:
        x = await device.full((), 1.0)
        later = device.blas.scal(x, 10.0)
        await turns()
        assert plan.count == 1
        await device.elementwise.unary("neg", x, out=x)
        await later
        assert float(await device.get(x)) == -10.0
        never = device.blas.scal(x, 10.0)
        never.close()
        assert float(await device.get(x)) == -10.0


async def test_loop_goes_on_while_large_work_runs() -> None:
    gate = threading.Event()
    async with opened() as device:
        a = await device.zeros(8)
        # Large by its estimate, so that it runs beside the loop; it ends when this test, on the loop, says so.
        device._host.context.lanes.transfer_lanes["get"].stream.submit(lambda: gate.wait(10), 1.0)
        work = task(device.get(a))
        await turns()
        assert not work.done()
        gate.set()
        np.testing.assert_array_equal(await bounded(work), np.zeros(8))


@pytest.mark.parametrize("completion", ["adaptive", "polled", "sync", "host_fn"])
async def test_nothing_blocks_the_loop(completion: str, rng: np.random.Generator) -> None:
    x = rng.standard_normal((200, 200))
    async with opened(FaultPlan().poison_at(30), completion=completion) as device:
        with blockbuster_ctx("accel"):
            a = await device.put(x)
            async with device.batch() as batch:
                h = batch.reduce("sum", batch.elementwise.unary("neg", batch.blas.gemm(a, a)))
            np.testing.assert_allclose(await device.get(h), -(x @ x).sum())
            await asyncio.gather(*(device.elementwise.unary("neg", a) for _ in range(40)), return_exceptions=True)
            await device.zeros(100 * MIB, "uint8")
            assert device.generation == 2
            await device.aclose()


def test_results_are_the_same_on_every_loop(run_on_loop: Callable[[Callable[[], Coroutine[Any, Any, None]]], None]) -> None:
    async def main() -> None:
        plan = FaultPlan().poison_at(40)
        async with opened(plan) as device:
            x = np.arange(9.0).reshape(3, 3)
            a = await device.put(x)
            outs = await asyncio.gather(*(device.blas.gemm(a, a) for _ in range(20)))
            for out in outs[:10]:
                np.testing.assert_array_equal(await device.get(out), x @ x)
            results = await asyncio.gather(*(device.elementwise.unary("neg", a) for _ in range(20)), return_exceptions=True)
            kinds = {type(result) for result in results}
            assert accel.ContextPoisonedError in kinds, kinds
            del results, outs, a
            np.testing.assert_array_equal(await device.get(await device.put(x)), x)
            assert device.generation == 2

    run_on_loop(main)


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
