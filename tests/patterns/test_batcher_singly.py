"""A batch that raised is handed to the handler item by item: an exception is the answer of those items alone that raise it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

import accel
from accel.ops import Plan, Spec
from accel.patterns import DynamicBatcher
from tests.batcher_support import settled
from tests.device_support import bounded


class Picky:
    """Doubles ints; raises for a batch that has a negative one."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.batches: list[list[int]] = []

    async def __call__(self, items: list[int]) -> list[int | Exception]:
        self.batches.append(items)
        if min(items) < 0:
            raise self.error
        return [2 * item for item in items]


OF_AN_ITEM = [
    ValueError("no"),
    accel.LibraryError("no"),
    accel.LinAlgError("singular"),
    accel.NonFiniteError("nan", output="scores"),
    accel.OutOfMemoryError("too much at once"),
    accel.InvalidArgumentError("no"),
]
OF_NO_ITEM = [
    accel.MailboxFullError("full"),
    accel.ClosedError("closed"),
    accel.DeadlineExceededError("late"),
    TimeoutError("late"),
    accel.NotInitializedError("no"),
    accel.ActorStoppedError("stopped"),
    accel.BackendUnavailableError("gone"),
    accel.StaleRefError("freed", reason="freed"),
    accel.DeviceLostError("lost"),
    accel.DriverError("hopeless", scope=accel.FaultScope.CONTEXT),
]


def named(error: object) -> str:
    return type(error).__name__


async def answers(batcher: Any, items: list[int], **options: Any) -> list[Any]:
    return await bounded(asyncio.gather(*(batcher.submit(item, **options) for item in items), return_exceptions=True))


@pytest.mark.parametrize("error", OF_AN_ITEM, ids=named)
async def test_only_the_items_that_raise_alone_get_the_exception(error: Exception) -> None:
    handler = Picky(error)
    async with DynamicBatcher(handler, idempotent=True) as batcher:
        first, bad, last, worse = await answers(batcher, [1, -1, 3, -2])
        assert (first, last) == (2, 6)
        assert [type(each) for each in (bad, worse)] == [type(error)] * 2
        assert handler.batches == [[1, -1, 3, -2], [1], [-1], [3], [-2]]
        statistics = batcher.statistics()
        assert (statistics.answered, statistics.failed, statistics.retried, statistics.batches) == (2, 2, 4, 5)
        assert settled(statistics)


@pytest.mark.parametrize("error", OF_NO_ITEM, ids=named)
async def test_what_tells_of_the_device_or_the_time_fails_the_batch(error: Exception) -> None:
    handler = Picky(error)
    async with DynamicBatcher(handler, idempotent=True) as batcher:
        results = await answers(batcher, [1, -1])
        assert [type(each) for each in results] == [type(error)] * 2
    assert handler.batches == [[1, -1]]


async def test_items_that_are_not_idempotent_fail_with_their_batch() -> None:
    handler = Picky(ValueError("no"))
    async with DynamicBatcher(handler) as batcher:
        mine = batcher.submit(1, idempotent=True)
        results = await bounded(asyncio.gather(mine, batcher.submit(2), batcher.submit(-1), return_exceptions=True))
        assert results[0] == 2
        assert [type(each) for each in results[1:]] == [ValueError] * 2
        assert results[1] is not results[2]
        assert settled(batcher.statistics())
    assert handler.batches == [[1, 2, -1], [1]]


async def test_a_single_item_that_raised_is_not_tried_again() -> None:
    handler = Picky(ValueError("no"))
    async with DynamicBatcher(handler, idempotent=True) as batcher:
        assert [type(each) for each in await answers(batcher, [-1])] == [ValueError]
    assert handler.batches == [[-1]]


async def test_callers_who_left_meanwhile_are_left_out() -> None:
    class Slow(Picky):
        async def __call__(self, items: list[int]) -> list[int | Exception]:
            if items == [1]:
                gone.cancel()
                await asyncio.wait({gone})
            return await super().__call__(items)

    handler = Slow(ValueError("no"))
    async with DynamicBatcher(handler, idempotent=True) as batcher:
        kept, gone, bad = [asyncio.ensure_future(batcher.submit(item)) for item in (1, 2, -1)]
        assert await bounded(kept) == 2
        assert isinstance(await bounded(asyncio.gather(bad, return_exceptions=True)), list)
    assert handler.batches == [[1, 2, -1], [1], [-1]]
    assert settled(batcher.statistics())


async def test_a_fault_in_such_a_call_is_retried_after_the_rebuild() -> None:
    class Faulty(Picky):
        async def __call__(self, items: list[int]) -> list[int | Exception]:
            if items == [3] and [3] not in self.batches:
                self.batches.append(items)
                raise accel.ContextPoisonedError("faulted")
            return await super().__call__(items)

    handler = Faulty(ValueError("no"))
    async with DynamicBatcher(handler, idempotent=True) as batcher:
        first, bad, last = await answers(batcher, [1, -1, 3])
        assert (first, type(bad), last) == (2, ValueError, 6)
    assert handler.batches == [[1, -1, 3], [1], [-1], [3], [3]]
    assert batcher.statistics().retried == 4


@dataclass(frozen=True, eq=False, slots=True)
class Root(accel.KernelOp):
    """The square root."""

    library: ClassVar[str] = "roots"
    kind: ClassVar[str] = "root"

    x: accel.AccelRef

    def plan(self) -> Plan:
        return Plan((self.x,), (), (Spec(self.x.shape, self.x.dtype),))


class Roots(accel.KernelLibrary):
    """Raises for what has no root."""

    name = "roots"

    @accel.kernel(Root)
    def root(self, op: Root, stream: Any, inputs: list[accel.Operand], outputs: list[accel.Operand]) -> None:
        if (np.asarray(inputs[0]) < 0).any():
            raise ArithmeticError("no root")
        np.sqrt(np.asarray(inputs[0]), out=np.asarray(outputs[0]))


async def test_an_exception_of_a_kernel_method_costs_its_item_alone(device: accel.Device, rng: np.random.Generator) -> None:
    items = rng.uniform(1, 9, 16)
    items[5] = -1.0
    await device.register(Roots)

    async def handler(batch: list[float]) -> list[float]:
        x = await device.put(np.array(batch))
        return [float(each) for each in await device.get(await device.run(Root(x)))]

    async with DynamicBatcher(handler, idempotent=True, device=device) as batcher:
        results = await bounded(asyncio.gather(*map(batcher.submit, map(float, items)), return_exceptions=True))
    assert device.generation == 1
    assert isinstance(results[5], accel.LibraryError)
    assert isinstance(results[5].__cause__, ArithmeticError)
    np.testing.assert_allclose(np.delete(np.array(results, object), 5).astype(float), np.sqrt(np.delete(items, 5)))
