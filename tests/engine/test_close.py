"""Closing takes no more work, waits for what was sent, is bounded, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import accel
from accel.cpu.backend import CpuDevice, CpuSlab
from accel.cpu.stream import CpuStream
from accel.engine.stream_clock import EventPool
from accel.storage.buffers import HeldResource
from accel.storage.durable_slabs import DurableSlabs
from accel.testing import FaultPlan
from tests.device_support import PATIENCE, bounded, failure, in_flight, opened, task, turns, until

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

pytestmark = pytest.mark.usefixtures("nothing_left")


async def test_close_drains_what_was_sent() -> None:
    plan = FaultPlan().hang_at(1)
    async with opened(plan, max_in_flight=2, pending_limit=2, streams=1) as device:
        calls = [task(device.full(2, float(number))) for number in range(8)]
        await in_flight(device, 2)
        closing = task(device.aclose())
        await turns()
        assert not device.health().is_ready
        for call in (device.zeros(1), _one_batch(device), device.put([1])):
            await failure(call, accel.ClosedError)
        assert not closing.done()
        plan.release()
        await bounded(closing)
        assert plan.count == 8
        assert [(await each).shape for each in calls] == [(2,)] * 8
        assert device.state is accel.DeviceState.CLOSED
        assert (await calls[0]).is_stale


async def _one_batch(device: accel.Device) -> None:
    async with device.batch() as batch:
        batch.zeros(1)


async def test_closed_device_refuses_everything_and_still_tells_about_itself() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu")
        ref = await device.zeros(2)
        token = ref.token()
        await device.aclose()
        for call in (device.get(ref), device.put([1]), device.free(ref), _one_batch(device), device.elementwise.unary("neg", ref)):
            await failure(call, accel.ClosedError)
        with pytest.raises(accel.ClosedError):
            device.resolve(token)
        info = device.info()
        assert (info.state, info.generation, info.queued, info.in_flight) == (accel.DeviceState.CLOSED, 1, 0, 0)
        assert info.memory == accel.MemoryInfo(0, 0, 0, None)
        assert not device.health().is_live
        assert system.devices == ()
        assert "closed" in repr(device)


async def test_close_is_idempotent_and_all_callers_wait_for_the_end() -> None:
    plan = FaultPlan().hang_at(1)
    async with opened(plan) as device:
        work = task(device.zeros(1))
        await in_flight(device, 1)
        closing = [task(device.aclose()) for _ in range(3)]
        await turns()
        assert not any(each.done() for each in closing)
        plan.release()
        await bounded(asyncio.gather(work, *closing))
        await bounded(device.aclose())
        assert device.state is accel.DeviceState.CLOSED
    await bounded(device.aclose())


@pytest.mark.parametrize("completion", ["adaptive", "polled", "sync", "host_fn"])
async def test_close_with_a_hung_kernel_is_bounded_and_everybody_is_told(completion: str, caplog: pytest.LogCaptureFixture) -> None:
    plan = FaultPlan().hang_at(2)
    async with opened(plan, max_in_flight=2, pending_limit=2, completion=completion, streams=1) as device:
        ref = await device.zeros(3)
        calls: list[asyncio.Future[Any]] = [task(device.elementwise.unary("neg", ref)) for _ in range(2)]
        await in_flight(device, 2)
        calls += [task(device.zeros(1)) for _ in range(5)]  # in hand, in the queue, waiting for room
        await turns()
        began = time.monotonic()
        await bounded(device.aclose(timeout=0.05))
        assert time.monotonic() - began < PATIENCE / 2
        for call in calls:
            await failure(call, accel.ClosedError)
        assert device.state is accel.DeviceState.CLOSED
        assert any("work_left" in record.getMessage() for record in caplog.records), caplog.text


async def test_close_while_rebuilding_ends_what_waits() -> None:
    plan = FaultPlan().poison_at(1).poison_at(2)
    async with opened(plan, restart=accel.RestartStrategy(backoff=(5.0, 5.0)), pending_limit=1) as device:
        for _ in range(2):
            await failure(device.zeros(1), accel.ContextPoisonedError)
        waiting: list[asyncio.Future[Any]] = [task(device.zeros(1)) for _ in range(4)]
        batch: asyncio.Future[Any] = task(_one_batch(device))
        following = task(_collect(device))
        await turns()
        began = time.monotonic()
        await bounded(device.aclose(timeout=0.05))
        assert time.monotonic() - began < 3
        for call in (*waiting, batch):
            await failure(call, accel.ClosedError)
        assert await bounded(following) == []


async def _collect(device: accel.Device) -> list[int]:
    return [number async for number in device.generations()]


async def test_batch_that_is_recorded_while_the_device_closes_is_void(device: accel.Device) -> None:
    with pytest.raises(accel.ClosedError):
        async with device.batch() as batch:
            ref = batch.zeros(1)
            await device.aclose()
    assert ref.is_stale


async def test_cancelling_a_close_ends_its_patience() -> None:
    plan = FaultPlan().hang_at(1)
    async with opened(plan) as device:
        work = task(device.zeros(1))
        await in_flight(device, 1)
        closing = task(device.aclose())
        await turns()
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await bounded(closing)
        await failure(work, accel.ClosedError)
        assert device.state is accel.DeviceState.CLOSED


async def test_closing_one_device_leaves_the_others() -> None:
    async with accel.System() as system:
        first, second = await system.open_device("cpu"), await system.open_device("cpu")
        ref = await second.full(1, 4.0)
        await failure(first.get(ref), accel.InvalidArgumentError)
        await first.aclose()
        assert (await second.get(ref)).tolist() == [4.0]
        assert system.devices == (second,)


async def test_an_error_of_one_resource_keeps_no_other_from_being_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {CpuStream, HeldResource, DurableSlabs, EventPool, CpuSlab, CpuDevice}
    closed = set()

    def closing(kind: type[Any]) -> Callable[..., None]:
        original = kind.close

        def close(resource: Any, **arguments: bool) -> None:
            closed.add(kind)
            original(resource, **arguments)
            raise RuntimeError(f"{kind.__name__} does not close")

        return close

    async with opened(streams=2) as device:
        x = await device.put([1.0] * 4, durable=True)
        async with device.graph() as graph:
            graph.elementwise.binary("add", x, x, out=x)
        await graph.replay()
        for kind in kinds:
            monkeypatch.setattr(kind, "close", closing(kind))
        await bounded(device.aclose())
    assert closed == kinds


def test_an_error_of_one_event_keeps_no_other_of_the_pool_open() -> None:
    closed: list[object] = []

    class Event:
        def close(self) -> None:
            closed.append(self)
            raise RuntimeError("the event does not close")

    device: Any = SimpleNamespace(create_event=Event)
    pool = EventPool(device)
    events = [pool.acquire() for _ in range(3)]
    with pytest.raises(RuntimeError):
        pool.close()
    assert closed == events
    pool.close()
    assert closed == events, "they are closed once"


async def test_an_error_of_one_slab_keeps_no_context_open_that_could_not_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[CpuDevice] = []
    close_device, close_slab = CpuDevice.close, CpuSlab.close
    has_failed = False

    class FailsOnce(accel.PolledCompletion):
        """Opens no watcher for the second context."""

        def open(self, device: Any, loop: Any, shared: Any) -> Any:
            nonlocal has_failed
            if closed and not has_failed:
                has_failed = True
                monkeypatch.setattr(CpuSlab, "close", raising)
                raise accel.DriverError("no watcher")
            return super().open(device, loop, shared)

    def counting(device: CpuDevice, *, abandon: bool = False) -> None:
        closed.append(device)
        close_device(device, abandon=abandon)

    def raising(slab: CpuSlab) -> None:
        monkeypatch.setattr(CpuSlab, "close", close_slab)
        close_slab(slab)
        raise RuntimeError("the slab does not close")

    monkeypatch.setattr(CpuDevice, "close", counting)
    async with opened(
        FaultPlan().poison_at(2, op="unary"), completion=FailsOnce(), restart=accel.RestartStrategy(backoff=(0.0, 0.0))
    ) as device:
        x = await device.put([1.0], durable=True)
        await device.elementwise.unary("neg", x)
        await failure(device.elementwise.unary("neg", x), accel.ContextPoisonedError)
        await bounded(device.get(x))
        assert has_failed
        assert len(closed) == 2, "the context that faulted, and the one that could not be made"


async def test_refs_dropped_after_the_end_do_no_harm() -> None:
    async with opened() as device:
        refs = [await device.zeros(1) for _ in range(3)]
    assert all(ref.is_stale for ref in refs)
    for ref in refs:
        with pytest.raises(accel.StaleRefError):
            ref.check()
    del ref, refs


async def test_other_loops_and_threads_are_refused(device: accel.Device) -> None:
    ref = await device.zeros(2)
    outcomes: list[object] = []

    async def trespass() -> None:
        for call in (device.zeros(1), device.get(ref), device.free(ref), _one_batch(device), device.aclose()):
            try:
                outcomes.append(await call)
            except accel.AccelError as error:
                outcomes.append(error)

    thread = threading.Thread(target=lambda: asyncio.run(trespass()))
    thread.start()
    thread.join(PATIENCE)
    assert [type(each) for each in outcomes] == [accel.ClosedError] * 5
    assert all("portal" in str(each) for each in outcomes)
    assert device.state is accel.DeviceState.READY
    assert not ref.is_stale
    assert (await device.get(ref)).shape == (2,)


def _refusal(call: Callable[[], Any]) -> bytes:
    try:
        call()
    except accel.ClosedError as error:
        return b"closed" if "fork" in str(error) else b"other"
    except BaseException as error:
        return repr(error).encode()
    return b"allowed"


async def test_pickling_a_device_or_its_system_says_what_to_send() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu")
        for thing in (device, system):
            with pytest.raises(TypeError, match=r"cannot be pickled.*send refs.*device\.resolve"):
                pickle.dumps(thing)


@pytest.mark.parametrize("is_busy", [False, True])
def test_device_whose_system_nobody_closed_is_closed_with_the_loop(is_busy: bool, caplog: pytest.LogCaptureFixture) -> None:
    plan = FaultPlan()

    async def main() -> accel.Device:
        system = await accel.System().__aenter__()
        device = await system.open_device("cpu", faults=plan)
        if is_busy:
            plan.hang_at(1)
            waiting.append(task(device.zeros(1)))
            await in_flight(device, 1)
        return device

    waiting: list[asyncio.Future[Any]] = []
    with caplog.at_level("WARNING", "accel"):
        device = asyncio.run(main())
    plan.release()
    assert device.state is accel.DeviceState.CLOSED
    assert all(call.cancelled() for call in waiting)
    assert "system_not_closed" in caplog.text
    for wrong in ("close_timeout", "device_lost"):
        assert wrong not in caplog.text


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_after_a_fork_the_child_is_refused() -> None:
    async def main() -> None:
        async with opened() as device:
            ref = await device.zeros(2)
            calls: list[Callable[[], Any]] = [
                lambda: device.zeros(1).send(None), device.info, device.health, ref.check, ref.token, lambda: pickle.dumps(ref)
            ]  # fmt: skip
            read, write = os.pipe()
            child = os.fork()
            if child == 0:  # pragma: no cover - the parent measures
                answer = b"?"
                try:
                    answer = b" ".join(_refusal(call) for call in calls)
                finally:
                    os.write(write, answer)
                    os._exit(0)
            os.close(write)
            with os.fdopen(read, "rb") as pipe:
                assert await asyncio.to_thread(pipe.read) == b" ".join([b"closed"] * len(calls))
            os.waitpid(child, 0)
            ref.check()
            assert device.health().is_ready
            await device.zeros(2)

    asyncio.run(main())


async def test_two_systems_on_two_loops_in_two_threads() -> None:
    results: list[float] = []

    async def main() -> None:
        async with opened() as device:
            refs = [await device.full((), float(number)) for number in range(20)]
            results.extend([float(await device.get(ref)) for ref in refs])

    threads = [threading.Thread(target=lambda: asyncio.run(main())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join, PATIENCE)
    assert sorted(results) == sorted([*map(float, range(20))] * 2)


def test_portal_runs_ops_from_another_thread() -> None:
    async def main() -> None:
        async with accel.System() as system:
            device = await system.open_device("cpu")

            async def double(value: float) -> float:
                return float(await device.get(await device.blas.scal(await device.full((), value), 2.0)))

            assert await asyncio.to_thread(system.portal.run, double, 4.0) == 8.0

    asyncio.run(main())


def test_close_on_every_loop(run_on_loop: Callable[[Callable[[], Coroutine[Any, Any, None]]], None]) -> None:
    async def main() -> None:
        plan = FaultPlan().hang_at(5)
        async with opened(plan, max_in_flight=2, pending_limit=2) as device:
            calls = [task(device.zeros(1)) for _ in range(12)]
            await until(lambda: plan.fired)
            await device.aclose(timeout=0.02)
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(each, (accel.AccelRef, accel.ClosedError)) for each in results), results
            assert any(isinstance(each, accel.ClosedError) for each in results)

    run_on_loop(main)
