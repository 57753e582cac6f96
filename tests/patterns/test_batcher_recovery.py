"""A batcher over a rebuild: what is tried again, when, and how often."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel.patterns import DynamicBatcher
from accel.testing import FaultPlan
from tests.batcher_support import settled, turns
from tests.device_support import bounded, child_pid, failure, task
from tests.http_support import affine_service, row
from tests.model_support import affine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Recovering:
    """A device whose next generation comes when the test says so."""

    def __init__(self) -> None:
        self.ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.asked = asyncio.Event()
        self.closed = 0
        self.state = accel.DeviceState.READY

    async def generations(self) -> AsyncIterator[int]:
        self.asked.set()
        try:
            with contextlib.suppress(StopAsyncIteration):
                yield await self.ready
        finally:
            self.closed += 1


class Faulty:
    """Fails as often as it has errors, then answers."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.batches: list[list[int]] = []

    async def __call__(self, items: list[int]) -> list[int | Exception]:
        self.batches.append(items)
        if self.errors:
            raise self.errors.pop(0)
        return [2 * item for item in items]


POISONED = accel.ContextPoisonedError("poisoned")
RETRIED = [
    POISONED,
    accel.HostDiedError("died"),
    accel.StaleRefError("stale"),
    accel.DriverError("ecc", scope=accel.FaultScope.CONTEXT, retryable=True),
]
NOT_RETRIED = [
    accel.DeviceLostError("lost"),
    accel.OutOfMemoryError("full"),
    accel.StaleRefError("freed", reason="freed"),
    accel.StaleRefError("torn", reason="torn"),
    accel.LibraryError("no"),
    accel.DriverError("hopeless", scope=accel.FaultScope.CONTEXT),
    ValueError("no"),
]


@pytest.mark.parametrize("error", RETRIED, ids=str)
async def test_idempotent_items_are_retried_once_the_device_is_ready_again(error: Exception) -> None:
    handler, device = Faulty(error), Recovering()
    async with DynamicBatcher(handler, idempotent=True, device=device) as batcher:
        tasks = [asyncio.ensure_future(batcher.submit(n)) for n in (1, 2)]
        await device.asked.wait()
        await turns()
        assert handler.batches == [[1, 2]]
        device.ready.set_result(2)
        assert await asyncio.gather(*tasks) == [2, 4]
    assert handler.batches == [[1, 2], [1, 2]]
    assert batcher.statistics().retried == 2
    assert device.closed == 1
    assert settled(batcher.statistics())


@pytest.mark.parametrize("error", NOT_RETRIED, ids=str)
async def test_other_errors_are_not_retried(error: Exception) -> None:
    handler = Faulty(error)
    async with DynamicBatcher(handler, idempotent=True) as batcher:
        with pytest.raises(type(error)):
            await batcher.submit(1)
    assert handler.batches == [[1]]
    assert batcher.statistics().retried == 0


async def test_items_are_retried_only_once() -> None:
    handler = Faulty(POISONED.clone(), POISONED.clone())
    async with DynamicBatcher(handler, idempotent=True) as batcher:
        with pytest.raises(accel.ContextPoisonedError):
            await batcher.submit(1)
    assert handler.batches == [[1], [1]]


async def test_each_item_says_for_itself_whether_it_is_idempotent() -> None:
    handler = Faulty(POISONED.clone())
    async with DynamicBatcher(handler) as batcher:
        kept, failed = await asyncio.gather(batcher.submit(1, idempotent=True), batcher.submit(2), return_exceptions=True)
    assert kept == 2
    assert isinstance(failed, accel.ContextPoisonedError)
    assert handler.batches == [[1, 2], [1]]


async def test_an_item_that_expires_or_is_cancelled_during_the_rebuild_is_not_sent_again() -> None:
    handler, device = Faulty(POISONED.clone()), Recovering()
    async with DynamicBatcher(handler, idempotent=True, device=device) as batcher:
        kept, gone = asyncio.ensure_future(batcher.submit(1)), asyncio.ensure_future(batcher.submit(2))
        with pytest.raises(accel.DeadlineExceededError):
            await batcher.submit(3, timeout=0.01)
        gone.cancel()
        await turns()
        device.ready.set_result(2)
        assert await kept == 2
    assert handler.batches == [[3, 1, 2], [1]]
    assert (batcher.statistics().expired, batcher.statistics().abandoned) == (1, 1)
    assert settled(batcher.statistics())


@pytest.mark.parametrize(
    ("end", "expected"),
    [(accel.DeviceLostError("lost"), accel.DeviceLostError), (StopAsyncIteration(), accel.ClosedError)],
    ids=["lost", "closed"],
)
async def test_a_device_that_does_not_come_back_ends_the_wait(end: Exception, expected: type[Exception]) -> None:
    class Gone:
        def generations(self) -> AsyncIterator[int]:
            return self

        def __aiter__(self) -> AsyncIterator[int]:
            return self

        async def __anext__(self) -> int:
            raise end

    async with DynamicBatcher(Faulty(POISONED.clone()), idempotent=True, device=Gone()) as batcher:
        results = await asyncio.gather(batcher.submit(1), batcher.submit(2), return_exceptions=True)
    assert [type(result) for result in results] == [expected] * 2
    assert settled(batcher.statistics())


async def test_items_gather_while_the_device_is_rebuilt() -> None:
    handler, device = Faulty(), Recovering()
    device.state = accel.DeviceState.REBUILDING
    async with DynamicBatcher(handler, device=device) as batcher:
        tasks = []
        for n in range(5):
            tasks.append(asyncio.ensure_future(batcher.submit(n)))
            await turns()
        assert (handler.batches, batcher.statistics().queued) == ([], 5)
        device.state = accel.DeviceState.READY
        device.ready.set_result(2)
        assert await asyncio.gather(*tasks) == [0, 2, 4, 6, 8]
    assert handler.batches == [[0, 1, 2, 3, 4]]


async def test_what_keeps_a_device_from_coming_back_is_told_by_the_handler() -> None:
    handler, device = Faulty(accel.DeviceLostError("lost")), Recovering()
    device.state = accel.DeviceState.REBUILDING
    async with DynamicBatcher(handler, device=device) as batcher:
        asked = asyncio.ensure_future(batcher.submit(1))
        await device.asked.wait()
        device.state = accel.DeviceState.LOST
        device.ready.set_exception(accel.DeviceLostError("lost"))
        with pytest.raises(accel.DeviceLostError):
            await asked


async def test_a_poisoned_device_loses_no_request() -> None:
    plan = FaultPlan()
    async with accel.System() as system:
        device = await system.open_device("cpu", faults=plan)
        weights = np.random.default_rng(1).standard_normal((4, 4)).astype(np.float32)
        current = [await device.put(weights)]

        async def handler(rows: list[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
            if current[0].is_stale:
                current[0] = await device.put(weights)
            async with device.batch() as batch:
                product = batch.blas.gemm(batch.put(np.stack(rows)), current[0])
            return list(await device.get(product))

        async with DynamicBatcher(handler, max_items=4, max_in_flight=3, idempotent=True, device=device) as batcher:
            rows = np.random.default_rng(2).standard_normal((40, 4)).astype(np.float32)
            plan.poison_at(plan.count + 8)
            results = await asyncio.gather(*(batcher.submit(row) for row in rows))
        np.testing.assert_allclose(np.stack(results), rows @ weights, rtol=1e-4, atol=1e-5)
        assert device.generation == 2
        assert batcher.statistics().retried > 0
        assert settled(batcher.statistics())


async def test_two_services_of_one_device_are_charged_apart_recover_together_and_end_apart(rng: np.random.Generator) -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process")
        async with affine_service(affine(rng))(device) as one:
            async with affine_service(affine(rng), shares={"gold": 1})(device) as other:
                await bounded(other.submit({"x": row(rng)}, tenant="gold"))
                assert other.statistics().tenants[0].device_seconds == other.statistics().device_seconds > 0
                assert one.statistics().device_seconds == 0
                works = [task(one.submit({"x": row(rng)})) for _ in range(8)]
                works += [task(other.submit({"x": row(rng)}, tenant="gold")) for _ in range(4)]
                os.kill(child_pid(device), signal.SIGKILL)
                await bounded(asyncio.gather(*works))
                assert device.generation == 2
                assert (one.statistics().answered, other.statistics().answered) == (8, 5)
            await bounded(one.submit({"x": row(rng)}))
            await failure(other.submit({"x": row(rng)}, tenant="gold"), accel.ClosedError)
        assert (one.statistics().answered, other.statistics().answered) == (9, 5)
