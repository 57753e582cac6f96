"""Devices whose work ends later, some of it enqueued on other threads: whoever goes away meanwhile, nobody waits in vain and nothing is kept."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel import registry
from accel.completion import PolledCompletion
from accel.cpu.stream import CpuStream
from accel.testing import FaultPlan
from tests.device_support import bounded, failure, generation, task, until, used
from tests.late_backend import LateDevice

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(autouse=True)
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks are a millisecond late, and everything is enqueued on other threads."""
    monkeypatch.setitem(registry._BUILT_IN, "late", "tests.late_backend:LateBackend")
    monkeypatch.setattr(LateDevice, "delay", 1e-3)
    monkeypatch.setattr(LateDevice, "every", 1)


@pytest.fixture
async def device() -> AsyncIterator[accel.Device]:
    async with accel.System() as system:
        yield await system.open_device("late")


async def record(device: accel.Device, ref: accel.AccelRef, made: list[accel.AccelRef] | None = None) -> accel.Graph:
    async with device.graph() as graph:
        result = graph.elementwise.unary("neg", ref)
        if made is not None:
            made.append(result)
    return graph


async def test_cancelled_captures_end(device: accel.Device) -> None:
    x = await device.put(np.ones(64))
    before = used(device)
    for turns in range(0, 120, 5):
        recording = task(record(device, x))
        for _ in range(turns):
            await asyncio.sleep(0)
        recording.cancel()
        await asyncio.gather(recording, return_exceptions=True)
        await device.empty(3)  # what was dropped is given back now
    del recording
    await until(lambda: device.info().in_flight == 0, "nothing in flight")
    await until(lambda: used(device) == before, "the memory of the captures given back")


async def test_a_result_that_is_freed_during_the_capture_ends_the_graph(device: accel.Device) -> None:
    x = await device.put(np.ones(64))
    made: list[accel.AccelRef] = []
    recording = task(record(device, x, made))
    await until(lambda: made)
    await bounded(device.free(made[0]))
    graph = await bounded(recording)
    assert (await failure(graph.replay(), accel.StaleRefError)).reason == "freed"
    assert device.info().in_flight == 0


async def test_a_rebuild_while_a_graph_is_recorded_is_told() -> None:
    async with accel.System() as system:
        device = await system.open_device("late", faults=FaultPlan().poison_at(1, op="fill"))
        with pytest.raises(accel.StaleRefError) as caught:
            async with device.graph() as graph:
                graph.empty(4)
                await failure(device.zeros(4), accel.ContextPoisonedError)
                await generation(device, 2)
        assert caught.value.reason == "generation"
        assert "graph" in caught.value.message
        del graph
        np.testing.assert_array_equal(await device.get(await device.zeros(4)), np.zeros(4, np.float32))


async def test_ops_that_wait_their_turn_when_the_context_faults_harm_no_actor(caplog: pytest.LogCaptureFixture) -> None:
    plan = FaultPlan().hang_at(1).poison_at(2)
    async with accel.System() as system:
        device = await system.open_device("late", faults=plan)
        ops = [task(device.zeros(8)) for _ in range(6)]
        await until(lambda: device.info().in_flight == 6)
        plan.release()
        await bounded(asyncio.gather(*ops, return_exceptions=True))
        await generation(device, 2)
        np.testing.assert_array_equal(await bounded(device.get(await device.zeros(8))), np.zeros(8, np.float32))
    failed = [entry.message for entry in caplog.records if "actor_failed" in entry.message]
    assert all("/context'" in message for message in failed), failed


async def test_faults_keep_nothing_until_the_collector_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateDevice, "every", 3)
    monkeypatch.setattr(LateDevice, "delay", 4e-6)
    gc.collect()
    gc.disable()
    try:
        async with accel.System() as system:
            device = await system.open_device("late", faults=FaultPlan().poison_at(60).poison_at(200), max_in_flight=16)

            async def client() -> None:
                for _ in range(8):
                    while True:
                        try:
                            ref = await device.elementwise.unary("neg", await device.zeros(4))
                            await device.get(ref)
                            break
                        except (accel.ContextPoisonedError, accel.StaleRefError):
                            continue

            await bounded(asyncio.gather(*(client() for _ in range(24))))
            assert device.generation == 3
            await until(lambda: used(device) == 0, "all memory given back")
    finally:
        gc.enable()


@pytest.mark.parametrize("restarts", [0, 3])
async def test_a_fault_keeps_nothing_of_what_its_caller_was_handling(restarts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may surface in the turn of a caller who handles an error of its own just then."""
    gc.collect()
    gc.disable()
    try:
        async with accel.System() as system:
            device = await system.open_device("cpu", restart=accel.RestartStrategy(max_restarts=restarts))
            await device.zeros(4)

            def record(*_: object) -> bool:
                monkeypatch.undo()
                raise accel.DriverError("illegal address", scope=accel.FaultScope.CONTEXT)

            async def handler() -> weakref.ref[Any]:
                array = np.ones(8)
                try:
                    int("what the caller goes through")
                except ValueError:
                    try:
                        await bounded(device.zeros(4))
                    except accel.ContextPoisonedError:
                        return weakref.ref(array)
                pytest.fail("nothing has surfaced")

            monkeypatch.setattr(CpuStream, "record", record)
            kept = await handler()
            await until(lambda: kept() is None, "what the caller had in hand is gone")
    finally:
        gc.enable()


async def test_memory_of_others_is_kept_until_its_last_use_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mark of a last use is watched at once, and so may be before that of an op that came earlier: it must not count as passed with it."""
    monkeypatch.setattr(LateDevice, "every", 0)
    plan = FaultPlan().hang_at(1, op="gemm")
    async with accel.System() as system:
        try:
            device = await system.open_device("late", faults=plan, completion=PolledCompletion(interval=0.02), libraries=("blas",))
            array = np.ones((8, 8))
            is_there = weakref.ref(array)
            wrapped: list[accel.AccelRef] = [await device.wrap(array)]
            product = await device.empty((8, 8), "float64")
            running = task(device.blas.gemm(wrapped[0], wrapped[0], out=product))
            before = task(device.put(np.zeros(8)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            del array

            async def drop() -> None:
                wrapped.clear()
                await device.put(np.zeros(8))

            after: list[asyncio.Future[Any]] = [task(device.put(np.zeros(8))), task(drop()), task(device.put(np.zeros(8)))]
            await bounded(asyncio.gather(before, after[0]))
            assert device.info().in_flight == 4, "the product that hangs, the last use, which waits for it, and two ops that come after"
            assert is_there() is not None
        finally:
            plan.release()
        await bounded(asyncio.gather(running, *after))
        np.testing.assert_array_equal(await device.get(product), np.full((8, 8), 8.0))
        await until(lambda: is_there() is None)
