"""Ops take effect in the order of sending; waiting ends; what is cancelled or late is not launched."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.dtype import DType
from accel.errors import ClosedError, DeadlineExceededError, InvalidArgumentError, LibraryError, MailboxFullError, StaleRefError
from accel.testing.conformance.device_harness import bounded, close_to, failure, in_flight, opened, task, until
from accel.testing.faults import FaultPlan

if TYPE_CHECKING:
    from accel.testing.conformance.harness import Harness

__all__ = [
    "check_batch_is_nothing_until_it_ends",
    "check_batch_that_fails_in_the_middle",
    "check_cancelled_and_late_ops_are_not_launched",
    "check_close_is_bounded",
    "check_dependencies_across_libraries",
    "check_full_queue_rejects",
    "check_running_op_meets_its_deadline",
    "check_tasks_share_one_queue",
]

_LIBRARIES = ("blas", "elementwise", "reduce")


async def check_dependencies_across_libraries(harness: Harness) -> None:
    """Check read-after-write, write-after-read and write-after-write with the first op's stream stopped."""
    x, y = harness.random((2, 8, 8), DType.FLOAT32)
    plan = FaultPlan().hang_at(1, op="gemm")
    async with opened(harness, plan, libraries=_LIBRARIES) as device:
        a, b, c = await device.put(x), await device.put(y), await device.zeros((8, 8))
        calls: list[Any] = [task(device.blas.gemm(a, b, out=c))]
        await in_flight(device, 1)
        for awaitable in (
            device.elementwise.unary("neg", c),  # reads what gemm writes
            device.elementwise.binary("sub", a, b, out=a),  # writes what gemm reads
            device.reduce("sum", c, axis=0),
            device.elementwise.binary("add", b, b, out=c),  # writes what gemm writes and reduce reads
        ):
            calls.append(task(awaitable))
            await asyncio.sleep(0)
        plan.release()
        _, negative, _, total, _ = await bounded(asyncio.gather(*calls))
        product = x.astype(np.float64) @ y
        close_to(harness, await device.get(negative), -product, "read after write")
        close_to(harness, await device.get(a), x - y, "write after read")
        close_to(harness, await device.get(total), product.sum(axis=0), "the second read after the write")
        close_to(harness, await device.get(c), 2 * y, "write after write")


async def check_tasks_share_one_queue(harness: Harness) -> None:
    """Check that ops of many tasks, some in batches, run in the order of sending through queues that are too short."""
    async with opened(harness, max_in_flight=4, pending_limit=8) as device:
        x, one = await device.full((), 1.0, "float64"), await device.full((), 1.0, "float64")
        expected = 1.0
        calls: list[asyncio.Future[Any]] = []

        async def add_twice() -> None:
            async with device.batch() as batch:
                batch.elementwise.binary("add", x, one, out=x)
                batch.elementwise.binary("add", x, one, out=x)

        for step in range(40):
            if step % 4 == 3:
                calls.append(task(device.blas.scal(x, 0.5)))
                expected *= 0.5
            else:
                calls.append(task(add_twice()))
                expected += 2.0
        await bounded(asyncio.gather(*calls))
        got = float(await device.get(x))
        assert abs(got - expected) < 1e-9, f"ops ran in another order: {got}, expected {expected}"


async def check_batch_that_fails_in_the_middle(harness: Harness) -> None:
    """Check that later ops are not launched, earlier results are good, and the error says where."""
    x = harness.random((6, 6), DType.FLOAT32)
    plan = FaultPlan().fail_at(2, LibraryError("as the fault plan asks"), op="unary")
    async with opened(harness, plan) as device:
        a, marker = await device.put(x), await device.zeros((6, 6))
        error = None
        try:
            async with device.batch() as batch:
                first = batch.elementwise.unary("neg", a)
                second = batch.blas.gemm(first, a)
                third = batch.elementwise.unary("abs", second)
                batch.blas.axpy(a, marker)
        except LibraryError as caught:
            error = caught
        assert error is not None, "a batch with a failed op succeeded"
        assert error.op_index == 2, f"the failed op is number 2, not {error.op_index}"
        close_to(harness, await device.get(second), -(x.astype(np.float64) @ x), "a result before the failed op")
        await failure(device.get(third), StaleRefError)
        close_to(harness, await device.get(marker), np.zeros((6, 6)), "what a later op would have changed")


async def check_batch_is_nothing_until_it_ends(harness: Harness) -> None:
    """Check that refs cannot be used outside before the end, and that a body that raises sends nothing."""
    plan = FaultPlan()
    async with opened(harness, plan) as device:
        with contextlib.suppress(ZeroDivisionError):
            async with device.batch() as batch:
                ref = batch.zeros(3)
                await failure(device.get(ref), InvalidArgumentError)
                raise ZeroDivisionError
        assert plan.count == 0, "a batch whose body raised was sent"
        await failure(device.get(ref), StaleRefError)


async def check_cancelled_and_late_ops_are_not_launched(harness: Harness) -> None:
    """Check that a cancelled and an expired op that wait behind a full device are dropped, and a running one goes on."""
    plan = FaultPlan().hang_at(2)
    async with opened(harness, plan, max_in_flight=1, libraries=("blas",)) as device:
        x = await device.full((), 1.0)
        running = task(device.blas.scal(x, 2.0))
        await in_flight(device, 1)
        dropped, late = task(device.blas.scal(x, 3.0)), task(device.blas.scal(x, 5.0, timeout=0.05))
        await until("they are queued", lambda: device.info().queued == 2)
        for each in (dropped, running):
            each.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await bounded(each)
        assert (await failure(late, DeadlineExceededError)).op == "scal"
        plan.release()
        got = float(await bounded(device.get(x)))
        assert got == 2.0, f"x is {got}: only the first op was to run"
        assert plan.count == 3, f"{plan.count} ops were dispatched, not 3"


async def check_running_op_meets_its_deadline(harness: Harness) -> None:
    """Check that a wait for an op on the device ends by its deadline, and the op's memory is kept until it ends."""
    plan = FaultPlan().hang_at(3)
    async with opened(harness, plan, libraries=("blas",)) as device:
        x = await device.full(64, 1.0)
        await device.blas.scal(x, 2.0)  # the first one may take longer than the next may
        await failure(device.blas.scal(x, 2.0, timeout=0.05), DeadlineExceededError)
        del x
        filling = task(device.full(64, 9.0))
        await asyncio.sleep(0)
        plan.release()
        other = await bounded(filling)
        await in_flight(device, 0)
        assert np.array_equal(await device.get(other), np.full(64, 9.0)), "memory was used again under a running op"


async def check_full_queue_rejects(harness: Harness) -> None:
    """Check ``overload="reject"``: the error says when to come back, and what was accepted runs."""
    plan = FaultPlan().hang_at(1)
    async with opened(harness, plan, max_in_flight=1, pending_limit=1, overload="reject") as device:
        calls = [task(device.zeros(1))]
        await in_flight(device, 1)
        for waiting in (1, 2):
            calls.append(task(device.zeros(1)))
            await until("it is queued", lambda waiting=waiting: device.info().queued == waiting)  # type: ignore[misc]
        error = await failure(device.zeros(1), MailboxFullError)
        assert error.retry_after is not None, "the error does not say when to come back"
        assert error.retry_after > 0
        plan.release()
        await bounded(asyncio.gather(*calls))


async def check_close_is_bounded(harness: Harness) -> None:
    """Check that closing drains; and that with a hung op it ends in its time, with an error for every waiter."""
    async with opened(harness) as device:
        calls = [task(device.zeros(1)) for _ in range(5)]
        await asyncio.sleep(0)
        await bounded(device.aclose())
        assert len(await bounded(asyncio.gather(*calls))) == 5
        await failure(device.zeros(1), ClosedError)
    plan = FaultPlan().hang_at(1)
    async with opened(harness, plan, max_in_flight=1, pending_limit=1) as device:
        calls = [task(device.zeros(1)) for _ in range(5)]
        await in_flight(device, 1)
        await bounded(device.aclose(timeout=0.1))
        for call in calls:
            await failure(call, ClosedError)
