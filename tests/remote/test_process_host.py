"""A device whose context lives in a child process: the same ops, and a service that outlives the child; however a wait for it ends, the op is retired."""

from __future__ import annotations

import asyncio
import gc
import io
import os
import random
import signal
import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel.remote.server import Server
from accel.testing import FaultPlan
from tests.device_support import bounded, child_pid, generation, task, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
async def device() -> AsyncIterator[accel.Device]:
    async with accel.System() as system:
        yield await system.open_device("cpu", host="process")


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_ops_of_a_batch_before_one_whose_operand_was_freed_are_done(device: accel.Device) -> None:
    x = await device.put(np.ones(8))
    for brings_arrays in (False, True):
        gone = await device.put(np.ones(8))
        with pytest.raises(accel.StaleRefError) as caught:
            async with device.batch() as batch:
                first = batch.put(np.ones(8)) if brings_arrays else batch.full(8, 1.0, "float64")
                second = batch.elementwise.binary("add", first, x)
                third = batch.elementwise.unary("neg", gone)
                fourth = batch.put(np.ones(8)) if brings_arrays else batch.full(8, 1.0)
                await device.free(gone)
        assert caught.value.op_index == 2
        assert [ref.is_stale for ref in (first, second, third, fourth)] == [False, False, True, True]
        np.testing.assert_array_equal(await device.get(second), np.full(8, 2.0))
        np.testing.assert_array_equal(await device.get(first), np.ones(8))
        assert device.info().in_flight == 0


@pytest.mark.parametrize("is_in_main", [False, True])
async def test_ops_of_a_batch_before_one_that_cannot_be_sent_are_done(
    device: accel.Device, is_in_main: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Local(accel.ops.Unary):
        """Cannot be imported by name, or only here."""

    if is_in_main:
        monkeypatch.setitem(sys.modules, "cloudpickle", None)
        Local.__module__, Local.__qualname__ = "__main__", "Local"
        monkeypatch.setattr(sys.modules["__main__"], "Local", Local, raising=False)
    x = await device.put(np.ones(8))
    for brings_arrays in (False, True):
        with pytest.raises(accel.UnsupportedError) as caught:
            async with device.batch() as batch:
                first = batch.put(np.ones(8)) if brings_arrays else batch.full(8, 1.0, "float64")
                second = batch.elementwise.binary("add", first, x)
                third = batch.run(Local(accel.UnaryOp.NEG, second))
                fourth = batch.put(np.ones(8)) if brings_arrays else batch.full(8, 1.0)
        assert caught.value.op_index == 2
        assert [ref.is_stale for ref in (first, second, third, fourth)] == [False, False, True, True]
        np.testing.assert_array_equal(await device.get(second), np.full(8, 2.0))
        assert device.info().in_flight == 0


async def test_graphs_run_in_the_child(device: accel.Device) -> None:
    x = await device.put(np.arange(6.0))
    async with device.graph() as graph:
        y = graph.elementwise.unary("neg", x)
        z = graph.elementwise.binary("add", x, y, out=x)
        total = graph.reduce("sum", y)
    await graph.replay()
    np.testing.assert_array_equal(await device.get(z), np.zeros(6))
    np.testing.assert_array_equal(await device.get(total), -15.0)
    await device.put(np.ones(6), out=x)
    await asyncio.gather(graph.replay(), graph.replay())
    np.testing.assert_array_equal(await device.get(total), 0.0)
    del graph, y, total
    gc.collect()
    assert device.info().memory.used == z.nbytes


async def test_every_graph_in_the_child_has_memory_of_its_own(device: accel.Device) -> None:
    async def use(n: int) -> None:
        x = await device.put(np.full(4, float(n)))
        async with device.graph() as graph:
            y = graph.elementwise.unary("neg", x)
        await graph.replay()
        np.testing.assert_array_equal(await device.get(y), np.full(4, -float(n)))

    for n in range(3):
        await use(n)
    await asyncio.gather(*map(use, range(3, 6)))


async def test_arrays_of_any_size_come_back_as_they_went(device: accel.Device) -> None:
    for nbytes in (0, 1, 4096, 1 << 20, 80 << 20):
        source = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)
        np.testing.assert_array_equal(await device.get(await device.put(source)), source)


async def test_pinned_arrays_are_not_copied_on_their_way(device: accel.Device) -> None:
    array = await device.pinned((1 << 20,), "uint8")
    array[:] = np.random.default_rng(2).integers(0, 256, array.size, np.uint8)
    used = device.info().pinned.used
    back = await device.pinned((1 << 20,), "uint8")
    ref = await device.put(array)
    assert await device.get(ref, out=back) is back
    np.testing.assert_array_equal(back, array)
    assert device.info().pinned.used == 2 * used, "no further shared memory was taken"


async def test_memory_is_accounted_for_and_comes_back(device: accel.Device) -> None:
    refs = [await device.zeros((1000,), "float64") for _ in range(5)]
    assert device.info().memory.used >= 40_000
    assert device.info().memory.reserved >= device.info().memory.used
    await device.free(refs.pop())
    refs.clear()
    assert device.info().memory.used == 0
    assert device.info().pinned.used == 0


async def test_a_planned_failure_comes_at_its_op_although_one_before_it_found_no_memory() -> None:
    async with accel.System() as system:
        plan = FaultPlan().fail_at(3, accel.LibraryError("broken", code=13))
        device = await system.open_device("cpu", host="process", memory_limit=1 << 20, faults=plan)
        x = await device.put(np.ones(4))
        with pytest.raises(accel.OutOfMemoryError):
            await device.empty((1 << 30,))
        with pytest.raises(accel.LibraryError):
            await device.elementwise.unary("neg", x)


async def test_a_killed_child_is_replaced_and_everybody_is_told() -> None:
    async with accel.System() as system:
        plan = FaultPlan().hang_at(2)
        device = await system.open_device("cpu", host="process", faults=plan)
        x = await device.put(np.ones(4))
        hanging = asyncio.ensure_future(device.elementwise.unary("neg", x))
        async with asyncio.timeout(30):
            while device.info().in_flight != 1:
                await asyncio.sleep(0)
        pid = child_pid(device)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(accel.ContextPoisonedError) as caught:
            await asyncio.wait_for(hanging, 30)
        plan.release()
        assert caught.value.executed == "unknown"
        cause = caught.value.__cause__
        assert isinstance(cause, accel.HostDiedError)
        assert cause.signal == signal.SIGKILL
        with pytest.raises(accel.StaleRefError):
            await device.get(x)
        x = await asyncio.wait_for(device.put(np.ones(4)), 20)
        assert device.generation == 2
        assert device.info().pid not in (pid, os.getpid())
        np.testing.assert_array_equal(await device.get(x), np.ones(4))
        plan.release()


async def test_faults_of_every_scope_but_the_devices_are_survived() -> None:
    async with accel.System() as system:
        plan = FaultPlan().poison_at(2, accel.DriverError("illegal address", code=700, scope=accel.FaultScope.PROCESS)).kill_host_at(4)
        device = await system.open_device("cpu", host="process", faults=plan)
        x = await device.put(np.ones(4))
        with pytest.raises(accel.ContextPoisonedError) as caught:
            await asyncio.wait_for(device.elementwise.unary("neg", x), 30)
        assert (caught.value.code, caught.value.scope, caught.value.retryable) == (700, accel.FaultScope.PROCESS, True)
        x = await asyncio.wait_for(device.put(np.ones(4)), 20)
        with pytest.raises(accel.ContextPoisonedError):
            await asyncio.wait_for(device.elementwise.unary("neg", x), 30)
        await generation(device, 3)
        x = await device.put(np.ones(4))
        np.testing.assert_array_equal(await device.get(x), np.ones(4))
        assert device.info().restarts == 2


async def test_a_stopped_child_is_found_out() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host=accel.ProcessHost(heartbeat_interval=0.05, heartbeat_timeout=1.0))
        x = await device.put(np.ones(4))
        pid = child_pid(device)
        os.kill(pid, signal.SIGSTOP)
        began = time.perf_counter()
        with pytest.raises(accel.ContextPoisonedError) as caught:
            await asyncio.wait_for(device.get(x), 20)
        assert "not answered" in str(caught.value)
        assert time.perf_counter() - began < 10
        x = await asyncio.wait_for(device.put(np.ones(4)), 20)
        np.testing.assert_array_equal(await device.get(x), np.ones(4))
        assert is_gone(pid)


async def test_a_hanging_child_does_not_hold_up_close() -> None:
    plan = FaultPlan().hang_at(1)
    async with accel.System(close_timeout=0.5) as system:
        device = await system.open_device("cpu", host="process", faults=plan)
        hanging = asyncio.ensure_future(device.zeros(4))
        async with asyncio.timeout(30):
            while device.info().in_flight != 1:
                await asyncio.sleep(0)
        pid = child_pid(device)
    with pytest.raises(accel.AccelError):
        await hanging
    await until(lambda: is_gone(pid), "the end of the child")
    plan.release()


async def test_what_a_process_host_does_not_offer_is_said(device: accel.Device) -> None:
    with pytest.raises(accel.UnsupportedError):
        await device.wrap(np.ones(4))
    with pytest.raises(accel.UnsupportedError):
        await device.compiler.compile("extern void kernel();", "kernel")


async def test_cancelling_at_every_turn_leaves_nothing_in_flight(device: accel.Device) -> None:
    x = await device.put(np.ones(8))
    for turns in range(60):
        waiting = task(device.elementwise.unary("neg", x))
        for _ in range(turns):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        np.testing.assert_array_equal(await bounded(device.get(x)), np.ones(8))
    await until(lambda: device.info().in_flight == 0, "all answered")


async def test_many_at_once_are_all_answered_right(device: accel.Device) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    x = await device.put(np.ones(8))

    async def client() -> None:
        y = x
        for _ in range(rng.randrange(1, 20)):
            if rng.random() < 0.3:
                async with device.batch() as batch:
                    y = batch.elementwise.binary("add", y, x)
            else:
                y = await device.elementwise.binary("add", y, x)
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random() * 1e-3)
        got = await device.get(y)
        assert (got == got[0]).all(), f"{seed=}"
        assert got[0] >= 2.0, f"{seed=}"

    await bounded(asyncio.gather(*(client() for _ in range(20))))
    await until(lambda: device.info().in_flight == 0, "all answered")


async def test_closing_waits_for_the_answer() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process")
        x = await device.put(np.ones(8))
        waiting = task(device.elementwise.unary("neg", x))
        await asyncio.sleep(0)
        await device.aclose()
        (ended,) = await asyncio.gather(waiting, return_exceptions=True)
        assert isinstance(ended, accel.AccelRef)


async def test_an_error_of_accel_ends_the_child_also_if_it_cannot_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    class UnshowableError(Exception):
        def __repr__(self) -> str:
            raise ValueError("no text")

    reported: list[accel.AccelError] = []
    server: Any = SimpleNamespace(_config=SimpleNamespace(name="cpu:0"), on_fault=reported.append)
    on_broken: Any = Server.on_broken  # which does not return, where `on_fault` ends the process
    on_broken(server, UnshowableError())
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)  # as where the parent is gone
    on_broken(server, RuntimeError("full"))
    assert ["UnshowableError" in reported[0].message, "RuntimeError('full')" in reported[1].message] == [True, True]
