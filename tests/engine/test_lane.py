"""A lane, where the driver refuses to mark the end of work, or to wait for that of another stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel.cpu.stream import CpuStream
from accel.engine.stream_clock import EventPool
from accel.testing import FaultPlan
from tests.device_support import bounded, failure, generation, in_flight, opened, task, turns, until
from tests.op_bugs_support import Bug, Bugs

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

pytestmark = pytest.mark.usefixtures("nothing_left")


def refusing(monkeypatch: pytest.MonkeyPatch, method: str) -> list[Exception]:
    """Return a list: what is appended to it is raised by the next call of a method of a stream."""
    errors: list[Exception] = []
    call = getattr(CpuStream, method)

    def called(stream: CpuStream, *arguments: Any) -> Any:
        if errors:
            raise errors.pop()
        return call(stream, *arguments)

    monkeypatch.setattr(CpuStream, method, called)
    return errors


@pytest.mark.parametrize("count", [1, 3])
async def test_a_batch_whose_end_cannot_be_marked_is_answered_and_all_of_it_is_torn(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(libraries=["elementwise"]) as device:
        x = await device.put(np.ones(4))
        kept = [await device.put(np.zeros(4), durable=True) for _ in range(count)]
        refusing(monkeypatch, "record").append(ValueError("no mark"))
        with pytest.raises(accel.LibraryError, match="no mark"):
            async with device.batch() as batch:
                for ref in kept:
                    batch.elementwise.unary("neg", x, out=ref)
        for ref in kept:
            assert (await failure(device.get(ref), accel.StaleRefError)).reason == "torn"
            await device.put(np.ones(4), out=ref)
            np.testing.assert_array_equal(await device.get(ref), np.ones(4))
        assert (device.generation, device.info().in_flight) == (1, 0)


async def test_a_wait_that_could_not_be_made_is_owed_to_the_next_op_of_the_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = FaultPlan().hang_at(1, op="gemm")
    async with opened(plan) as device:
        x = await device.put(np.eye(4))
        reading = task(device.blas.gemm(x, x))
        await in_flight(device, 1)
        refusing(monkeypatch, "wait").append(ValueError("no wait"))
        await failure(device.put(np.zeros((4, 4)), out=x), accel.LibraryError)
        writing = task(device.put(np.full((4, 4), 2.0), out=x))  # comes after the put that failed, which knows of the read
        await turns()
        assert not writing.done()
        plan.release()
        np.testing.assert_array_equal(await device.get(await reading), np.eye(4))
        await writing
        np.testing.assert_array_equal(await device.get(x), np.full((4, 4), 2.0))


async def put_into(device: accel.Device, x: accel.AccelRef, value: float) -> None:
    await device.put(np.full((4, 4), value), out=x)


async def fill_by_op(device: accel.Device, x: accel.AccelRef, value: float) -> None:
    await device.elementwise.unary("neg", await device.full((4, 4), -value, "float64"), out=x)


async def fill_in_batch(device: accel.Device, x: accel.AccelRef, value: float) -> None:
    """The op before the one that writes goes into the lane at once."""
    y = await device.full((4, 4), -value, "float64")
    async with device.batch() as batch:
        batch.elementwise.unary("neg", y)
        batch.elementwise.unary("neg", y, out=x)


@pytest.mark.parametrize(
    ("rejected", "later"), [(put_into, fill_by_op), (put_into, fill_in_batch), (fill_in_batch, put_into), (fill_by_op, put_into)]
)
async def test_other_lanes_wait_for_what_a_rejected_op_could_not_wait_for(
    rejected: Callable[[accel.Device, accel.AccelRef, float], Awaitable[None]],
    later: Callable[[accel.Device, accel.AccelRef, float], Awaitable[None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rejected op is the last user of the memory: the next one depends on it alone, and not on the product that still reads."""
    plan = FaultPlan().hang_at(1, op="gemm")
    async with opened(plan, streams=8, libraries=["blas", "elementwise"]) as device:
        x = await device.put(np.eye(4))
        reading = task(device.blas.gemm(x, x))
        await in_flight(device, 1)
        refused = refusing(monkeypatch, "wait")
        refused.append(accel.OutOfMemoryError("no event"))
        await failure(rejected(device, x, 7.0), accel.OutOfMemoryError)
        assert not refused
        writing = task(later(device, x, 2.0))
        await turns(400)
        assert not writing.done()
        plan.release()
        np.testing.assert_array_equal(await device.get(await reading), np.eye(4))
        await bounded(writing)
        np.testing.assert_array_equal(await device.get(x), np.full((4, 4), 2.0))
        await until(lambda: device.info().in_flight == 0)
        assert device.generation == 1


async def test_memory_is_not_reused_before_what_a_rejected_op_could_not_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = FaultPlan().hang_at(1, op="reduce")
    async with opened(plan, streams=8, memory_limit=2 << 20, libraries=["reduce", "elementwise"]) as device:
        x = await device.put(np.ones((400, 400)))
        reading = task(device.reduce("sum", x, axis=0))
        await in_flight(device, 1)
        del x
        # There is room for one such buffer only: each new one takes the memory of the old.
        refusing(monkeypatch, "wait").append(accel.OutOfMemoryError("no event"))
        assert "no event" in str(await failure(device.put(np.zeros((400, 400))), accel.OutOfMemoryError))
        writing = task(device.full((400, 400), 2.0, "float64"))
        await turns(400)
        assert not writing.done()
        plan.release()
        np.testing.assert_array_equal(await device.get(await reading), np.full(400, 400.0))
        np.testing.assert_array_equal(await device.get(await bounded(writing)), np.full((400, 400), 2.0))


async def test_a_context_ends_if_neither_the_stream_nor_the_host_can_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = FaultPlan().hang_at(1, op="gemm")
    async with opened(plan) as device:
        x = await device.put(np.eye(4))
        reading = task(device.blas.gemm(x, x))
        await in_flight(device, 1)
        refusing(monkeypatch, "wait").append(ValueError("no wait"))
        refusing(monkeypatch, "synchronize").append(ValueError("no end"))
        await failure(device.put(np.zeros((4, 4)), out=x), accel.LibraryError)
        assert "no end" in str(await failure(reading, accel.ContextPoisonedError))
        await generation(device, 2)


async def test_a_device_closes_while_the_host_waits_for_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = FaultPlan().hang_at(1, op="gemm")
    async with opened(plan, close_timeout=0.1) as device:
        x = await device.put(np.eye(4))
        reading = task(device.blas.gemm(x, x))
        await in_flight(device, 1)
        refusing(monkeypatch, "wait").append(ValueError("no wait"))
        await failure(device.put(np.zeros((4, 4)), out=x), accel.LibraryError)
        await turns()
        await bounded(device.aclose())
        await failure(reading, accel.ClosedError)


@pytest.mark.parametrize("error", [ValueError("no mark"), accel.OutOfMemoryError("no mark")])
async def test_a_library_is_unregistered_where_the_end_of_its_work_cannot_be_marked(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plan = FaultPlan().hang_at(1, op="gemm")
    async with opened(plan, host="inline") as device:
        await device.register(Bugs)
        x = await device.put(np.eye(3))
        busy = task(device.blas.gemm(x, x))
        await in_flight(device, 1)

        def acquire(pool: EventPool) -> Any:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(EventPool, "acquire", acquire)
            await bounded(device.unregister("bugs"))
        assert "library_not_closed" in caplog.text
        plan.release()
        np.testing.assert_array_equal(await device.get(await bounded(busy)), np.eye(3))
        await device.register(Bugs)
        np.testing.assert_array_equal(await device.get(await device.run(Bug(x))), np.eye(3) + 1)


def test_an_op_that_fails_before_its_call_on_a_worker_thread_keeps_no_later_one(
    run_on_loop: Callable[[Callable[[], Coroutine[Any, Any, None]]], None],
) -> None:
    async def main() -> None:
        plan = FaultPlan().fail_at(1, accel.LibraryError("planted", scope=accel.FaultScope.OP), op="gemm")
        async with opened(plan, debug=True, libraries=["blas"]) as device:  # each op is enqueued on a worker thread
            x = await device.put(np.eye(3))
            await failure(bounded(device.blas.gemm(x, x)), accel.LibraryError)
            np.testing.assert_array_equal(await device.get(await bounded(device.blas.gemm(x, x))), np.eye(3))

    run_on_loop(main)
