"""The search for the items that kill a context: by real deaths of the child that has it."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel.patterns import DynamicBatcher
from accel.testing import FaultPlan
from tests.batcher_support import settled
from tests.poison_support import HANG, POISON, Double, Fragile, Service, double

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
            await asyncio.sleep(0)


def check(items: list[float], results: list[Any]) -> None:
    """See that what is poison was found to be, and everything else was answered."""
    for item, result in zip(items, results, strict=True):
        if item < 0:
            assert isinstance(result, accel.PoisonedInputError), result
            assert (result.item, result.kind, result.remembered) == (item, "fault", False)
            assert isinstance(result.__cause__, accel.ContextPoisonedError)
            assert isinstance(result.__cause__.__cause__, accel.HostDiedError)
            assert result.__cause__.__cause__.signal == 9
            assert not result.retryable
        else:
            assert result == 2 * item


async def test_poisonous_items_are_found_by_two_deaths_each_and_their_siblings_answered(rng: np.random.Generator) -> None:
    items = [float(each) for each in rng.uniform(1, 9, 64)]
    first, second = rng.choice(64, 2, replace=False)
    items[first], items[second] = POISON, POISON / 2
    async with serving() as (service, batcher):
        results = await answers(batcher, items)
        check(items, results)
        statistics = batcher.statistics()
        assert (statistics.isolated, statistics.poisoned, statistics.retried) == (64, 2, 0)
        assert (statistics.answered, statistics.failed) == (62, 2)
        assert len(service.served) == 1, "what may be poison does not come back to the device that serves"
        assert service.starts == 4, "one start, and one for each death but the last"
        assert len(service.twins) == 1
        assert [len(each) for each in service.tried] == [1] * 66, "alone, and those that faulted once more"
        assert {item for (item,) in service.tried[64:]} == {POISON, POISON / 2}
        device = service.device
        assert (device.generation, device.info().restarts, device.state) == (2, 1, accel.DeviceState.READY)
        for item in (POISON, POISON / 2):
            with pytest.raises(accel.PoisonedInputError) as caught:
                await batcher.submit(item)
            assert (caught.value.item, caught.value.remembered, caught.value.kind) == (item, True, "fault")
        assert len(service.served) == 1
        assert batcher.statistics().refused == 2


async def test_equal_items_are_one_poison() -> None:
    async with serving() as (service, batcher):
        results = await answers(batcher, [POISON] * 4)
        check([POISON], [result for result in results if not result.remembered])
        assert [(type(result), result.item) for result in results] == [(accel.PoisonedInputError, POISON)] * 4
        assert len({id(result) for result in results}) == 4
        assert service.tried == [[POISON]] * 2
        assert batcher.statistics().poisoned == 4
        assert service.device.generation == 2


async def test_an_item_that_hangs_is_told_apart() -> None:
    async with serving(hang_timeout=1.0) as (service, batcher):
        first, hung, last = await answers(batcher, [1.0, HANG, 3.0])
        assert (first, last) == (2.0, 6.0)
        assert isinstance(hung, accel.PoisonedInputError), hung
        assert (hung.item, hung.kind, hung.remembered) == (HANG, "hang", False)
        assert service.tried == [[1.0], [HANG], [3.0], [HANG]]


async def test_when_nothing_faults_again_all_are_answered() -> None:
    plan = FaultPlan().kill_host_at(2)
    async with serving(faults=plan) as (service, batcher):
        items = [float(n) for n in range(64)]
        check(items, await answers(batcher, items))
        assert service.tried == [[item] for item in items]
        assert (batcher.statistics().isolated, batcher.statistics().poisoned) == (64, 0)
        assert service.starts == 1


async def test_the_quarantine_stays_open_for_the_next_poison() -> None:
    async with serving(accel.RestartStrategy(max_restarts=3)) as (service, batcher):
        for poison in (POISON, POISON / 2):
            items = [1.0, poison]
            check(items, await answers(batcher, items))
        assert len(service.twins) == 1
        assert service.twins[0].state is not accel.DeviceState.CLOSED
        assert service.starts == 4


async def test_the_quarantine_closes_when_it_was_idle() -> None:
    plan = FaultPlan().kill_host_at(2)
    async with serving(faults=plan, quarantine_idle=0.0) as (service, batcher):
        assert await answers(batcher, [1.0]) == [2.0]
        await until(lambda: service.twins[0].state is accel.DeviceState.CLOSED)


async def test_the_device_serves_others_meanwhile() -> None:
    async with serving(max_in_flight=1) as (service, batcher):
        found = asyncio.ensure_future(answers(batcher, [1.0, POISON, 3.0, 4.0]))
        async with asyncio.timeout(PATIENCE):
            await until(lambda: bool(service.tried))
            others = [float(n) for n in range(5, 13)]
            for item in others:
                assert await batcher.submit(item) == 2 * item
        assert not found.done()
        assert service.device.generation == 2
        check([1.0, POISON, 3.0, 4.0], await found)


async def test_all_batches_in_flight_are_suspects_and_one_after_another_is_searched() -> None:
    async with serving(max_items=4, max_in_flight=4) as (service, batcher):
        items = [float(n) for n in range(16)]
        items[9] = POISON
        check(items, await answers(batcher, items))
        assert len(service.twins) == 1, "one quarantine for all of them"
        assert batcher.statistics().poisoned == 1
        assert service.device.generation == 2


async def test_items_that_are_not_idempotent_are_not_tried_again() -> None:
    async with serving() as (service, batcher):
        async with asyncio.timeout(PATIENCE):
            single = [batcher.submit(1.0, idempotent=False), batcher.submit(POISON)]
            once, poison = await asyncio.gather(*single, return_exceptions=True)
        assert isinstance(once, accel.ContextPoisonedError)
        assert isinstance(poison, accel.PoisonedInputError)
        assert service.tried == [[POISON], [POISON]]


async def test_callers_who_gave_up_are_left_out_if_nothing_is_remembered() -> None:
    async with serving(remember_poison=0) as (service, batcher):
        # All in one turn, so in one batch.
        rest = [asyncio.ensure_future(batcher.submit(item)) for item in (1.0, POISON)]
        gone = asyncio.ensure_future(batcher.submit(7.0))
        expires = asyncio.ensure_future(batcher.submit(8.0, timeout=0.05))
        async with asyncio.timeout(PATIENCE):
            await until(lambda: bool(batcher.statistics().isolating))
            gone.cancel()
            with pytest.raises(accel.DeadlineExceededError):
                await expires
            check([1.0, POISON], await asyncio.gather(*rest, return_exceptions=True))
        assert not {7.0, 8.0} & {item for items in service.tried for item in items}
        assert batcher.statistics().abandoned == 2


async def test_a_trial_that_hangs_ends_with_its_caller() -> None:
    plan = FaultPlan().kill_host_at(2)
    async with serving(faults=plan, max_items=1, max_in_flight=2, remember_poison=0) as (service, batcher):
        hanging = asyncio.ensure_future(batcher.submit(HANG))
        async with asyncio.timeout(PATIENCE):
            await until(lambda: bool(service.tried))
            hanging.cancel()
            began = asyncio.get_running_loop().time()
            await until(lambda: service.twins[0].state is accel.DeviceState.CLOSED)
            assert asyncio.get_running_loop().time() - began < 4.0, "before the child is found not to answer"
            assert (await answers(batcher, [1.0])) == [2.0]


async def test_closing_ends_the_search_in_time() -> None:
    plan = FaultPlan().kill_host_at(2)
    async with serving(faults=plan, close_timeout=0.2) as (service, batcher):
        hanging = asyncio.ensure_future(batcher.submit(HANG))
        async with asyncio.timeout(PATIENCE):
            await until(lambda: bool(service.tried))
            began = asyncio.get_running_loop().time()
            await batcher.aclose()
            assert asyncio.get_running_loop().time() - began < 2.0
            with pytest.raises(accel.ClosedError):
                await hanging


async def test_closing_waits_for_a_search() -> None:
    async with serving(close_timeout=PATIENCE) as (_, batcher):
        found = asyncio.ensure_future(answers(batcher, [1.0, POISON, 3.0]))
        await until(lambda: bool(batcher.statistics().isolating))
        await batcher.aclose()
        check([1.0, POISON, 3.0], await found)


async def test_without_a_quarantine_that_works_items_fail_with_their_fault(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(device: accel.Device) -> Any:
        raise accel.OutOfMemoryError("no room for the weights")

    with caplog.at_level(logging.INFO, logger="accel"):
        async with serving(quarantine=broken) as (_, batcher):
            results = await answers(batcher, [1.0, POISON])
            assert (await answers(batcher, [5.0])) == [10.0]
    assert [type(result) for result in results] == [accel.ContextPoisonedError] * 2
    told = [getattr(record, "accel", {}) for record in caplog.records]
    assert [each["items"] for each in told if each.get("event") == "isolation_left_out"] == [2]
    assert results[0] is not results[1]
    assert all("no room for the weights" in note for result in results for note in result.__notes__)
    assert "isolation_left_out" in caplog.text


async def test_weights_that_kill_the_quarantine_are_given_up() -> None:
    async def poisonous(device: accel.Device) -> Any:
        await device.run(Double(await device.put(np.array([POISON]))))

    async with serving(quarantine=poisonous) as (_, batcher):
        results = await answers(batcher, [1.0, POISON])
        assert [type(result) for result in results] == [accel.ContextPoisonedError] * 2


async def test_too_many_suspects_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    both = asyncio.Event()

    async def together(self: Service, items: list[float]) -> list[float | Exception]:
        self.served.append(items)
        if len(self.served) == 2:
            both.set()
        await both.wait()
        return await double(self.device, items)

    monkeypatch.setattr(Service, "handler", together)
    async with serving(max_items=4, max_in_flight=4, max_pending=4) as (_, batcher):
        # Poison in both batches: whichever comes first kills the child while the other one is in flight.
        results = await answers(batcher, [1.0, 2.0, POISON, 4.0, 5.0, 6.0, POISON, 8.0])
        assert sum(isinstance(result, accel.PoisonedInputError) for result in results) == 1
        assert sum(isinstance(result, accel.ContextPoisonedError) for result in results) == 4
        assert batcher.statistics().isolated == 4


async def test_a_device_that_is_lost_ends_the_search() -> None:
    async with serving(accel.RestartStrategy(max_restarts=0)) as (service, batcher):
        results = await answers(batcher, [1.0, POISON])
        assert all(isinstance(result, accel.ContextPoisonedError) and not result.retryable for result in results)
        assert service.tried == []


async def test_other_errors_of_the_twin_are_its_answers() -> None:
    plan = FaultPlan().kill_host_at(2)

    async def make(device: accel.Device) -> Any:
        async def twin(items: list[float]) -> list[Any]:
            return [ValueError(f"no {item}") if item > 2 else 2 * item for item in items]

        return twin

    async with serving(faults=plan, quarantine=make) as (_, batcher):
        results = await answers(batcher, [1.0, 2.0, 3.0])
        assert results[:2] == [2.0, 4.0]
        assert isinstance(results[2], ValueError)


async def test_a_quarantine_is_a_device_of_its_own() -> None:
    async with accel.System() as system:
        plan = FaultPlan().poison_at(100)
        device = await system.open_device("cpu", host="inline", faults=plan)
        await device.register(Fragile)
        async with device.quarantine() as other:
            assert other.info().host == "process"
            assert other.name == device.name
            x = await other.put(np.arange(3.0))
            np.testing.assert_array_equal(await other.get(await other.run(Double(x))), 2 * np.arange(3.0))
            for _ in range(5):  # more often than an ordinary budget allows
                with pytest.raises(accel.ContextPoisonedError):
                    await other.run(Double(await other.put(np.array([POISON]))))
                await other.put(np.ones(1))
            assert other.generation == 6
            assert system.devices == (device,)
            with pytest.raises(accel.InvalidArgumentError, match="is on another device"):
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
