"""Poison by real deaths: of the child that serves, and of those in quarantine."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel.patterns import DynamicBatcher
from accel.testing import FaultPlan
from tests.batcher_support import settled
from tests.poison_support import HANG, KILLED, POISON, Double, Fragile, Service

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

pytestmark = pytest.mark.usefixtures("nothing_left")

ONCE = accel.RestartStrategy(max_restarts=1)
PATIENCE = 60.0


@asynccontextmanager
async def serving(
    restart: accel.RestartStrategy = ONCE, *, faults: FaultPlan | None = None, hang_timeout: float | None = None, **options: Any
) -> AsyncIterator[tuple[Service, Any]]:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", restart=restart, faults=faults, hang_timeout=hang_timeout)
        await device.register(Fragile)
        service = Service(device)
        chosen: Any = {"idempotent": True, "device": device, "quarantine": service.quarantine} | options
        async with DynamicBatcher(service.handler, **chosen) as batcher:
            yield service, batcher
        assert settled(batcher.statistics())
        assert batcher.statistics().isolating == 0
        assert all(twin.state is accel.DeviceState.CLOSED for twin in service.twins)
        assert system.devices == (device,)


async def answers(batcher: Any, items: list[float]) -> list[Any]:
    async with asyncio.timeout(PATIENCE):
        return await asyncio.gather(*(batcher.submit(item) for item in items), return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.001)


def check(items: list[float], results: list[Any]) -> None:
    """See that what is poison was found to be, and everything else was answered."""
    for item, result in zip(items, results, strict=True):
        if item < 0:
            assert isinstance(result, accel.PoisonedInputError), result
            assert (result.item, result.kind, result.remembered) == (item, "fault", False)
            assert isinstance(result.__cause__, accel.ContextPoisonedError)
            assert isinstance(result.__cause__.__cause__, accel.HostDiedError)
            assert result.__cause__.__cause__.signal == (9 if item == KILLED else 11)
            assert not result.retryable
        else:
            assert result == 2 * item


async def test_poisonous_items_are_found_and_their_siblings_answered(rng: np.random.Generator) -> None:
    items = [float(each) for each in rng.uniform(1, 9, 64)]
    first, second = rng.choice(64, 2, replace=False)
    items[first], items[second] = POISON, POISON / 2
    async with serving() as (service, batcher):
        found = asyncio.ensure_future(answers(batcher, items))
        await until(lambda: bool(service.tried))
        others = 0
        while not found.done():  # the device serves others meanwhile
            assert await batcher.submit(0.5) == 1.0
            others += 1
        assert others
        check(items, await found)
        statistics = batcher.statistics()
        assert (statistics.isolated, statistics.poisoned, statistics.retried) == (64, 2, 0)
        assert (statistics.answered, statistics.failed) == (62 + others, 2)
        assert service.served == [items, *[[0.5]] * others], "what may be poison does not come back to the device that serves"
        deaths = sum(min(each) < 0 for each in service.tried)
        assert service.starts <= 1 + deaths, "one start, and one for each death"
        assert deaths <= 2 * 6 + 1
        assert len(service.twins) == 1
        assert {item for each in service.tried if len(each) == 1 for item in each} >= {POISON, POISON / 2}
        device = service.device
        assert (device.generation, device.info().restarts, device.state) == (2, 1, accel.DeviceState.READY)
        for item in (POISON, POISON / 2):
            with pytest.raises(accel.PoisonedInputError) as caught:
                await batcher.submit(item)
            assert (caught.value.item, caught.value.remembered, caught.value.kind) == (item, True, "fault")
        assert len(service.served) == 1 + others
        assert batcher.statistics().refused == 2


async def test_a_batch_that_was_killed_from_outside_runs_again_where_it_was(rng: np.random.Generator) -> None:
    items = [float(each) for each in rng.uniform(1, 9, 64)]
    async with serving(faults=FaultPlan().kill_host_at(2)) as (service, batcher):
        check(items, await answers(batcher, items))
        assert service.served == [items, items]
        assert (service.tried, batcher.statistics().isolated) == ([], 0)
        assert service.device.info().restarts == 1
        with pytest.raises(accel.ContextPoisonedError):  # by nothing of the batcher's: the death was charged, and this is one more
            await service.device.run(Double(await service.device.put(np.array([POISON]))))
        assert service.device.state is accel.DeviceState.LOST


async def test_poison_that_is_new_each_time_neither_spends_the_budget_nor_waits_for_a_back_off(rng: np.random.Generator) -> None:
    slow = accel.RestartStrategy(max_restarts=1, backoff=(60.0, 60.0))
    async with serving(slow) as (service, batcher):
        for n in range(1, 6):
            check([-float(n), 1.0], await answers(batcher, [-float(n), 1.0]))
        assert service.device.info().restarts == 5
        assert service.device.state is accel.DeviceState.READY


async def test_a_client_that_gives_up_early_and_repeats_costs_one_death() -> None:
    async with serving(accel.RestartStrategy(max_restarts=0)) as (service, batcher):
        errors: list[accel.AccelError] = []
        async with asyncio.timeout(PATIENCE):
            while not errors or not isinstance(errors[-1], accel.PoisonedInputError):
                with pytest.raises((accel.DeadlineExceededError, accel.PoisonedInputError)) as caught:
                    await batcher.submit(POISON, timeout=0.02)
                errors.append(caught.value)
        assert service.device.generation == 2
        assert not errors[-2].retryable, "it was a suspect by then"
        statistics = batcher.statistics()
        assert (statistics.expired, statistics.poisoned + statistics.refused > 0) == (len(errors) - 1, True)
        assert await batcher.submit(3.0) == 6.0


async def test_one_that_ends_as_if_it_was_killed_is_found_too_and_no_death_is_charged() -> None:
    async with serving() as (service, batcher):
        for n in range(3):
            results = await answers(batcher, [1.0 + n, KILLED])
            assert results[0] == 2.0 + 2 * n
            assert isinstance(results[1], accel.PoisonedInputError), results[1]
            batcher.forget_poison()
        assert service.device.info().restarts == 6, "the batch ran twice each time"
        assert service.device.state is accel.DeviceState.READY


async def test_an_item_that_hangs_is_told_apart() -> None:
    async with serving(hang_timeout=1.0) as (service, batcher):
        first, hung, last = await answers(batcher, [1.0, HANG, 3.0])
        assert (first, last) == (2.0, 6.0)
        assert isinstance(hung, accel.PoisonedInputError), hung
        assert (hung.item, hung.kind, hung.remembered) == (HANG, "hang", False)
        assert service.tried == [[1.0], [HANG], [3.0], [HANG]]


async def test_closing_ends_the_search_in_time(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(close_timeout=0.2) as (service, batcher):
        asked = asyncio.ensure_future(answers(batcher, [HANG, POISON]))
        async with asyncio.timeout(PATIENCE):
            await until(lambda: bool(service.tried))
            assert "SIGSEGV" in caplog.text, "the child that served died of the poison, before the hang"
            began = asyncio.get_running_loop().time()
            await batcher.aclose()
            assert asyncio.get_running_loop().time() - began < 10.0
            assert [type(each) for each in await asked] == [accel.ClosedError] * 2


async def test_a_quarantine_is_a_device_of_its_own() -> None:
    async with accel.System() as system:
        plan = FaultPlan().poison_at(100)
        device = await system.open_device("cpu", host="inline", faults=plan)
        await device.register(Fragile)
        async with device.quarantine() as other:
            assert other.info().host == "process"
            assert other.name == f"{device.name} quarantine", "so that its lines in the log say whose they are"
            x = await other.put(np.arange(3.0))
            np.testing.assert_array_equal(await other.get(await other.run(Double(x))), 2 * np.arange(3.0))
            for _ in range(5):  # more often than an ordinary budget allows
                with pytest.raises(accel.ContextPoisonedError):
                    await other.run(Double(await other.put(np.array([POISON]))))
                await other.put(np.ones(1))
            assert other.generation == 6
            assert system.devices == (device,)
            with pytest.raises(accel.InvalidArgumentError, match="is on cpu:0 quarantine, not cpu:0"):
                await device.run(Double(await other.put(np.ones(1))))
        assert other.state is accel.DeviceState.CLOSED
        assert (device.generation, plan.count) == (1, 0)
        with pytest.raises(RuntimeError, match="body"):
            async with device.quarantine() as other:
                raise RuntimeError("the body's own")
        assert other.state is accel.DeviceState.CLOSED
        with pytest.raises(accel.ClosedError):
            async with device.quarantine() as other:
                await system.aclose()
                await other.put(np.ones(1))


async def test_a_device_that_has_just_faulted_closes_at_once() -> None:
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process")
        await device.register(Fragile)
        with pytest.raises(accel.ContextPoisonedError):
            await device.run(Double(await device.put(np.array([POISON]))))
        began = asyncio.get_running_loop().time()
        await device.aclose()
        assert asyncio.get_running_loop().time() - began < 5.0, "it waited for what was on the dead context"


@pytest.mark.parametrize(("quarantine", "device"), [(1, "device"), ("make", None), ("make", "generations")], ids=str)
async def test_wrong_quarantines_are_refused(quarantine: object, device: str | None) -> None:
    class Recovering:
        def generations(self) -> None: ...

    async with accel.System() as system:
        chosen: Any = {"device": await system.open_device("cpu"), "generations": Recovering(), None: None}[device]
        service = Service(chosen)
        asked: Any = service.quarantine if quarantine == "make" else quarantine
        with pytest.raises(accel.InvalidArgumentError, match="quarantine"):
            DynamicBatcher(service.handler, device=chosen, quarantine=asked)
