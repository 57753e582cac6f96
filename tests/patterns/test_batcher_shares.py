"""A batcher with shares of device time, and the receipts of answers."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import Counter
from typing import Any

import numpy as np
import pytest

import accel
from accel.patterns import DynamicBatcher, Receipt
from tests.batcher_support import Handler, settled, turns
from tests.model_support import Affine, affine

SHARES = {"gold": 3, "free": 1}


class _Named:
    """A handler that answers each item with itself, and holds each batch until it is told to go on."""

    def __init__(self) -> None:
        self.handler = Handler(is_open=False)
        self.batches: list[list[str]] = []

    async def __call__(self, items: list[str]) -> list[Any]:
        self.batches.append(items)
        await self.handler([0 for _ in items])
        return items


async def test_batches_mix_tenants_by_their_shares() -> None:
    handler = _Named()
    async with DynamicBatcher(handler, max_items=4, max_in_flight=1, shares=SHARES) as batcher, asyncio.TaskGroup() as group:
        for tenant in ("free", "gold"):
            for _ in range(12):
                group.create_task(batcher.submit(tenant, tenant=tenant))
        await handler.handler.until_called(1)
        handler.handler.release()
    assert [Counter(batch)["gold"] for batch in handler.batches[:4]] == [3, 3, 3, 3]
    first, second = batcher.statistics().tenants
    assert (first.tenant, first.weight, first.answered) == ("gold", 3, 12)
    assert (second.tenant, second.weight, second.answered) == ("free", 1, 12)
    assert first.device_seconds > 0  # of the wall: nothing is measured here


async def test_a_tenant_must_be_named_where_there_are_shares_and_only_there() -> None:
    async with DynamicBatcher(Handler(), shares=SHARES) as batcher:
        for name in (None, "platinum"):
            with pytest.raises(accel.UnknownTenantError, match="shares for gold, free"):
                await batcher.submit(1, tenant=name)
        assert await batcher.submit(1, tenant="free") == 2
        assert batcher.statistics().submitted == 1
    async with DynamicBatcher(Handler()) as plain:
        with pytest.raises(accel.InvalidArgumentError, match="no shares"):
            await plain.submit(1, tenant="gold")
        assert plain.statistics().tenants == ()
    with pytest.raises(accel.InvalidArgumentError, match="weight of tenant 'gold'"):
        DynamicBatcher(Handler(), shares={"gold": float("nan")})


async def test_a_tenant_fills_its_own_queue_alone() -> None:
    handler = Handler(is_open=False)
    async with (
        DynamicBatcher(handler, max_items=2, max_in_flight=1, max_pending=2, overload="reject", shares=SHARES) as batcher,
        asyncio.TaskGroup() as group,
    ):
        group.create_task(batcher.submit(0, tenant="free"))
        await handler.until_called(1)
        for n in range(2):
            group.create_task(batcher.submit(n, tenant="free"))
        await turns()
        with pytest.raises(accel.MailboxFullError, match="tenant 'free' has 2 items queued") as full:
            await batcher.submit(9, tenant="free")
        group.create_task(batcher.submit(1, tenant="gold"))
        await turns()
        await turns()
        gold, free = batcher.statistics().tenants
        assert (free.queued, free.rejected, gold.queued, gold.rejected) == (2, 1, 1, 0)
        assert full.value.retry_after == pytest.approx(4 * 1e-3)  # a fourth of the device is its share
        handler.release()


async def test_an_item_without_time_for_the_fastest_batch_fails_at_once_and_only_with_shares() -> None:
    async def slow(items: list[int]) -> list[int]:
        await asyncio.sleep(0.4)
        return items

    async with DynamicBatcher(slow, max_in_flight=1, shares=SHARES) as batcher:
        assert await batcher.submit(1, tenant="gold") == 1
        with pytest.raises(accel.DeadlineExceededError, match=r"the fastest recent batch took [0-9.]+ s; it will not be launched"):
            await batcher.submit(2, tenant="gold", timeout=0.2)
        assert batcher.statistics().batches == 1
        assert batcher.statistics().tenants[0].expired == 1
    assert settled(batcher.statistics())
    async with DynamicBatcher(slow, max_in_flight=1) as plain:
        await plain.submit(1)
        with pytest.raises(accel.DeadlineExceededError, match="it was launched"):
            await plain.submit(2, timeout=0.2)


async def test_each_outcome_is_counted_for_its_tenant() -> None:
    handler = Handler(is_open=False)

    async def some(items: list[int]) -> list[int | Exception]:
        await handler(items)
        return [ValueError() if item < 0 else item for item in items]

    async with DynamicBatcher(some, max_items=4, max_in_flight=1, shares=SHARES) as batcher:
        tasks = [asyncio.create_task(batcher.submit(item, tenant="gold")) for item in (1, -1, 2)]
        await handler.until_called(1)
        tasks[2].cancel()
        dropped = asyncio.create_task(batcher.submit(3, tenant="free"))
        late = asyncio.create_task(batcher.submit(4, tenant="free", timeout=0.001))
        await turns()
        dropped.cancel()
        with pytest.raises(accel.DeadlineExceededError):
            await late
        handler.release()
        await asyncio.gather(*tasks, dropped, return_exceptions=True)
        gold, free = batcher.statistics().tenants
        assert (gold.answered, gold.failed, gold.abandoned) == (1, 1, 1)
        assert (free.dropped, free.expired, free.device_seconds) == (1, 1, 0)


async def test_what_was_charged_ahead_is_taken_back_when_a_batch_is_not_run() -> None:
    handler = Handler(is_open=False)
    async with DynamicBatcher(handler, max_items=4, shares=SHARES) as batcher:
        tasks = [asyncio.create_task(batcher.submit(n, tenant="gold")) for n in range(3)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()  # after they were taken, before the handler is called
        await asyncio.gather(*tasks, return_exceptions=True)
        await turns()
        assert batcher._shares is not None
        assert batcher._shares._tenants["gold"].clock == 0


async def test_a_receipt_says_what_an_answer_took() -> None:
    handler = Handler(is_open=False)
    async with DynamicBatcher(handler, max_items=4, max_in_flight=1, shares=SHARES) as batcher:
        first = asyncio.create_task(batcher.timed(1, tenant="gold"))
        await handler.until_called(1)
        others = [asyncio.create_task(batcher.timed(n, tenant="free")) for n in (2, 3)]
        await asyncio.sleep(0.5)
        handler.release()
        answer, receipt = await first
        assert answer == 2
        assert receipt == Receipt(receipt.queued, None, 1, "", None, "gold")
        assert 0 <= receipt.queued < 0.5
        for other in others:
            _, receipt = await other
            assert (receipt.batch_items, receipt.tenant) == (2, "free")
            assert receipt.queued >= 0.5


async def test_a_receipt_names_device_and_version_and_has_the_device_time() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="inline")
        rng = np.random.default_rng()
        inputs = {"x": accel.TensorSpec(("batch", 5), "float32")}
        model = await device.load_model(Affine, weights=affine(rng), inputs=inputs, buckets={"batch": (2,)})
        item = {"x": rng.standard_normal(5, np.float32)}
        async with accel.serve(model, shares=SHARES) as service:
            (_, receipt), (_, other) = await asyncio.gather(*(service.timed(item, tenant="gold") for _ in range(2)))
            assert receipt == other
            assert (receipt.device, receipt.version, receipt.batch_items, receipt.tenant) == (device.name, 1, 2, "gold")
            assert receipt.device_seconds is not None
            assert 0 < receipt.device_seconds < 1
            gold, free = service.statistics().tenants
            assert gold.device_seconds == pytest.approx(receipt.device_seconds)
            assert free.device_seconds == 0
            await model.swap(affine(rng))
            assert (await service.timed(item, tenant="free"))[1].version == 2


async def test_an_item_that_was_retried_has_the_receipt_of_its_last_batch() -> None:
    calls: list[int] = []

    async def fails_first(items: list[int]) -> list[int]:
        calls.append(len(items))
        if len(calls) == 1:
            raise ValueError
        return items

    async with DynamicBatcher(fails_first, idempotent=True, shares=SHARES) as batcher:
        found = await asyncio.gather(*(batcher.timed(n, tenant="gold") for n in range(2)))
    assert calls == [2, 1, 1]
    assert [receipt.batch_items for _, receipt in found] == [1, 1]
    assert found[0][1].queued < found[1][1].queued


@pytest.mark.parametrize("is_timed", [True, False])
async def test_a_request_leaves_no_cycle_behind(is_timed: bool) -> None:
    class Item:
        pass

    async def fails(items: list[Item]) -> list[Any]:
        return [ValueError() for _ in items]

    async with DynamicBatcher(fails, shares=SHARES) as batcher:
        gc.disable()
        try:
            item = Item()
            gone = weakref.ref(item)
            call = batcher.timed if is_timed else batcher.submit
            with pytest.raises(ValueError):
                await call(item, tenant="gold")
            del item
            await turns()
            assert gone() is None
        finally:
            gc.enable()
