"""Quarantine, on devices without processes: which item is blamed, what becomes of the others, and what is remembered.

Real deaths are in ``test_isolation_deaths.py``; any mixture of items is in ``test_isolation_properties.py``.
"""

from __future__ import annotations

import asyncio
import logging
import math
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

import accel
from accel.patterns import DynamicBatcher
from tests.batcher_support import settled, turns
from tests.device_support import bounded, cancelled, task, until
from tests.quarantine_support import Item, Serving, died

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

Batcher = DynamicBatcher[Item, int]

FINE: Item = ("fine", 1)
POISON: Item = ("poison", 2)


@asynccontextmanager
async def serving(device: Serving, **options: Any) -> AsyncIterator[Batcher]:
    chosen: Any = device
    async with Batcher(device.handler, **{"idempotent": True, "device": chosen, "quarantine": device.make} | options) as batcher:
        yield batcher
    assert settled(batcher.statistics())
    assert batcher.statistics().isolating == 0
    assert all(twin.state is accel.DeviceState.CLOSED for twin in device.twins)


async def answers(batcher: Batcher, items: list[Item]) -> list[Any]:
    return await bounded(asyncio.gather(*map(batcher.submit, items), return_exceptions=True))


def kinds(results: list[Any]) -> list[Any]:
    return [type(result) if isinstance(result, Exception) else result for result in results]


async def test_the_others_are_answered_before_an_item_that_faulted_runs_again(caplog: pytest.LogCaptureFixture) -> None:
    device = Serving()
    with caplog.at_level(logging.INFO, logger="accel"):
        async with serving(device) as batcher:
            results = await answers(batcher, [POISON, FINE, ("fine", 3)])
            statistics = batcher.statistics()
    assert kinds(results) == [accel.PoisonedInputError, 1, 3]
    assert device.tried == [POISON, FINE, ("fine", 3), POISON]
    assert device.served == [[POISON, FINE, ("fine", 3)]], "what may be poison does not come back to the device that serves"
    assert (device.deaths, len(device.twins)) == ({POISON: 2}, 1)
    assert (statistics.isolated, statistics.poisoned, statistics.answered, statistics.failed, statistics.retried) == (3, 1, 2, 1, 0)
    told = [getattr(record, "accel", {}) for record in caplog.records]
    assert [(each["trials"], each["poisoned"]) for each in told if each.get("event") == "isolation_ended"] == [(4, 1)]
    assert [(each["kind"], each["code"]) for each in told if each.get("event") == "poisoned_item"] == [("fault", 700)]


async def test_an_item_that_fails_alone_as_its_batch_did_need_not_run_again() -> None:
    device, same, other = Serving(), ("assert", 2), ("other", 3)
    async with serving(device) as batcher:
        results = await answers(batcher, [same, other, FINE, POISON])
        assert kinds(results) == [accel.PoisonedInputError, accel.PoisonedInputError, 1, accel.PoisonedInputError]
        assert (results[0].item, results[0].kind, results[0].__cause__.__cause__.code) == (same, "fault", 710)
    assert device.tried == [same, other, FINE, POISON, other, POISON]
    assert device.deaths == {same: 1, other: 2, POISON: 2}


async def test_a_status_that_something_else_may_cause_must_come_twice() -> None:
    device, item = Serving(), ("unknown", 2)
    async with serving(device) as batcher:
        assert kinds(await answers(batcher, [item])) == [accel.PoisonedInputError]
    assert device.deaths == {item: 2}


async def test_a_death_and_a_status_are_two_faults() -> None:
    device, item = Serving(faults=1), ("assert", 2)

    async def handler(items: list[Item]) -> Any:
        if device.faults:
            device.faults = 0
            raise died()
        return await device.handler(items)

    chosen: Any = device
    async with Batcher(handler, idempotent=True, device=chosen, quarantine=device.make) as batcher:
        assert kinds(await answers(batcher, [item])) == [accel.PoisonedInputError]
    assert device.deaths == {item: 2}


async def test_others_that_come_meanwhile_run_before_it_too() -> None:
    device, gate = Serving(), asyncio.Event()

    async def make(twin: Any) -> Any:
        if device.deaths:
            await gate.wait()
        return await device.make(twin)

    other: Item = ("poison", 3)
    async with serving(device, quarantine=make) as batcher:
        asked = [task(batcher.submit(POISON))]
        await until(lambda: device.deaths)
        asked += [task(batcher.submit(item)) for item in (other, FINE)]
        await until(lambda: batcher.statistics().isolating == 3)
        gate.set()
        results = await bounded(asyncio.gather(*asked, return_exceptions=True))
        assert kinds(results) == [accel.PoisonedInputError, accel.PoisonedInputError, 1]
    assert device.tried == [POISON, other, FINE, POISON, other]


async def test_others_that_keep_coming_do_not_put_it_off_for_ever() -> None:
    device = Serving()
    asked: list[asyncio.Future[int]] = []

    async def make(twin: Any) -> Any:
        handler = await device.make(twin)

        async def answer(items: list[Item]) -> Any:
            if not asked[0].done():  # with each trial another suspect comes, and is there before the trial ends
                before = batcher.statistics().isolating
                asked.append(task(batcher.submit(("poison", len(asked) + 10))))
                await until(lambda: batcher.statistics().isolating > before)
            return await handler(items)

        return answer

    async with serving(device, quarantine=make) as batcher:
        asked.append(task(batcher.submit(POISON)))
        await bounded(asyncio.wait(asked[:1]))
        assert device.tried.index(POISON, 1) <= 3
        results = await bounded(asyncio.gather(*asked, return_exceptions=True))
    assert set(kinds(results)) == {accel.PoisonedInputError}


@pytest.mark.parametrize(("kind", "expected"), [("poison", "fault"), ("hang", "hang")])
async def test_the_error_says_what_the_item_does(kind: str, expected: str) -> None:
    async with serving(Serving()) as batcher:
        (error,) = await answers(batcher, [(kind, 7)])
    assert type(error) is accel.PoisonedInputError
    assert (error.item, error.kind, error.remembered, error.retryable, error.scope) == ((kind, 7), expected, False, False, 1)
    assert (error.code, error.device) == (700, "fake:0")
    assert isinstance(error.__cause__, accel.ContextPoisonedError)


async def test_a_fault_that_does_not_come_again_blames_nothing() -> None:
    device = Serving()
    async with serving(device) as batcher:
        assert await answers(batcher, [("once", 1), FINE]) == [1, 1]
        assert device.tried == [("once", 1), FINE, ("once", 1)]
        assert (batcher.statistics().poisoned, batcher.statistics().failed) == (0, 0)
        assert await answers(batcher, [("once", 1)]) == [1], "it is not remembered either"


async def test_a_fault_that_none_of_them_caused_costs_no_context() -> None:
    device = Serving(faults=1)
    items: list[Item] = [("fine", n) for n in range(64)]
    async with serving(device) as batcher:
        assert await answers(batcher, items) == list(range(64))
        assert device.tried == items
        assert (device.starts, batcher.statistics().isolated, batcher.statistics().poisoned) == (1, 64, 0)


async def test_a_fault_from_long_ago_is_not_held_against_an_item() -> None:
    device = Serving()
    async with serving(device) as batcher:
        assert await answers(batcher, [("once", 1)]) == [1]
        device.deaths.clear()
        assert await answers(batcher, [("once", 1)]) == [1]


async def test_equal_items_are_one_poison() -> None:
    device = Serving()
    async with serving(device) as batcher:
        results = await answers(batcher, [POISON] * 4)
        assert kinds(results) == [accel.PoisonedInputError] * 4
        assert sorted(result.remembered for result in results) == [False, True, True, True]
        assert len({id(result) for result in results}) == 4
        assert device.tried == [POISON] * 2
        assert (batcher.statistics().poisoned, batcher.statistics().failed, batcher.statistics().refused) == (4, 4, 0)


async def test_items_without_a_fingerprint_are_found_too() -> None:
    device = Serving()
    async with serving(device, fingerprint=lambda item: None) as batcher:
        assert kinds(await answers(batcher, [POISON, FINE, POISON])) == [accel.PoisonedInputError, 1, accel.PoisonedInputError]
        assert device.deaths == {POISON: 4}
        assert kinds(await answers(batcher, [POISON])) == [accel.PoisonedInputError]
        assert (len(device.served), batcher.statistics().refused) == (2, 0)


async def test_items_that_are_not_idempotent_are_not_tried_again() -> None:
    device = Serving()
    async with serving(device) as batcher:
        asked = [batcher.submit(FINE, idempotent=False), batcher.submit(POISON)]
        results = await bounded(asyncio.gather(*asked, return_exceptions=True))
    assert kinds(results) == [accel.ContextPoisonedError, accel.PoisonedInputError]
    assert device.tried == [POISON, POISON]


async def test_other_errors_of_the_twin_are_its_answers() -> None:
    device = Serving(faults=1)
    async with serving(device) as batcher:
        results = await answers(batcher, [FINE, ("error", 3)])
    assert kinds(results) == [1, ValueError]


async def test_a_trial_that_says_nothing_of_its_item_is_made_again() -> None:
    device = Serving()
    async with serving(device) as batcher:
        assert kinds(await answers(batcher, [("late", 1), ("stale", 2)])) == [1, accel.StaleRefError]
    assert device.tried == [("late", 1)] * 2 + [("stale", 2)] * 3


# -- what is remembered


async def test_a_poison_that_comes_again_is_refused() -> None:
    device = Serving()
    async with serving(device) as batcher:
        await answers(batcher, [POISON, FINE])
        first, second, fine = await answers(batcher, [POISON, POISON, FINE])
        assert fine == 1
        for error in (first, second):
            assert type(error) is accel.PoisonedInputError
            assert (error.item, error.kind, error.remembered, error.code) == (POISON, "fault", True, 700)
            assert error.__cause__ is None
        assert first is not second
        statistics = batcher.statistics()
        assert (statistics.refused, statistics.submitted, statistics.poisoned) == (2, 3, 1)
        assert device.served == [[POISON, FINE], [FINE]]
        batcher.forget_poison()
        assert kinds(await answers(batcher, [POISON])) == [accel.PoisonedInputError]
        assert len(device.served) == 3


async def test_the_one_that_was_seen_longest_ago_is_forgotten_first() -> None:
    device = Serving()
    a, b, c = [("poison", n) for n in range(3)]
    async with serving(device, remember_poison=2) as batcher:
        for items in ([a], [b], [a], [c], [a], [b]):
            assert kinds(await answers(batcher, items)) == [accel.PoisonedInputError]
    assert device.served == [[a], [b], [c], [b]]


async def test_nothing_is_remembered_if_so_chosen() -> None:
    device = Serving()
    async with serving(device, remember_poison=0) as batcher:
        for _ in range(2):
            (error,) = await answers(batcher, [POISON])
            assert not error.remembered
    assert len(device.served) == 2


async def test_while_nothing_is_remembered_no_fingerprint_is_made() -> None:
    asked: list[Item] = []

    def fingerprint(item: Item) -> int:
        asked.append(item)
        return item[1]

    async with serving(Serving(), fingerprint=fingerprint) as batcher:
        assert await answers(batcher, [FINE]) == [1]
        assert asked == []
        await answers(batcher, [POISON])
        assert await answers(batcher, [FINE]) == [1]
        assert asked[-1] == FINE
        assert kinds(await answers(batcher, [("fine", 2)])) == [accel.PoisonedInputError], "the function decides what is equal"


async def test_a_fingerprint_that_raises_fails_no_request(caplog: pytest.LogCaptureFixture) -> None:
    def fingerprint(item: Item) -> Any:
        if item == FINE:
            raise KeyError("no")
        return [item] if item[1] > 5 else item

    async with serving(Serving(), fingerprint=fingerprint) as batcher:
        results = await answers(batcher, [POISON, FINE, ("poison", 6)])
        assert kinds(results) == [accel.PoisonedInputError, 1, accel.PoisonedInputError]
        assert await answers(batcher, [FINE]) == [1]
    assert "fingerprint_failed" in caplog.text


# -- callers who leave


async def test_an_item_whose_caller_has_left_is_tried_to_be_remembered() -> None:
    device = Serving()
    async with serving(device) as batcher:
        device.gate.clear()
        asked = [task(batcher.submit(item)) for item in (FINE, POISON, ("poison", 3))]
        await bounded(device.waits.wait())
        for each in asked:
            await cancelled(each)
        device.gate.set()
        await until(lambda: not batcher.statistics().isolating)
        assert device.deaths == {POISON: 2, ("poison", 3): 2}
        results = await answers(batcher, [POISON, ("poison", 3), FINE])
        assert kinds(results) == [accel.PoisonedInputError, accel.PoisonedInputError, 1]
        assert results[0].remembered
        assert (batcher.statistics().abandoned, batcher.statistics().poisoned, batcher.statistics().failed) == (3, 2, 0)


async def test_it_is_tried_if_the_caller_left_before_the_fault() -> None:
    device = Serving()
    async with serving(device) as batcher:
        asked = task(batcher.submit(POISON))
        await until(lambda: device.served)
        await cancelled(asked)
        await until(lambda: batcher.statistics().poisoned == 1)
        assert device.deaths == {POISON: 2}


async def test_a_trial_without_a_caller_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel.patterns.isolation._UNWANTED", 0.01)
    device = Serving(faults=1)
    async with serving(device) as batcher:
        device.gate.clear()
        asked = task(batcher.submit(FINE))
        await bounded(device.waits.wait())
        await cancelled(asked)
        await until(lambda: not batcher.statistics().isolating)
        assert device.twins[0].state is accel.DeviceState.CLOSED, "it may hang"
        device.gate.set()
        assert kinds(await answers(batcher, [POISON, FINE])) == [accel.PoisonedInputError, 1]


async def test_callers_who_gave_up_are_left_out_if_nothing_is_remembered() -> None:
    device = Serving()
    async with serving(device, remember_poison=0) as batcher:
        device.gate.clear()
        first, gone, late, poison = [
            task(batcher.submit(item, timeout=timeout))
            for item, timeout in ((FINE, None), (("fine", 7), None), (("fine", 8), 0.001), (POISON, None))
        ]
        await bounded(device.waits.wait())
        await cancelled(gone)
        with pytest.raises(accel.DeadlineExceededError):
            await bounded(late)
        device.gate.set()
        assert await bounded(first) == 1
        with pytest.raises(accel.PoisonedInputError):
            await bounded(poison)
        assert device.tried == [FINE, POISON, POISON]
        assert batcher.statistics().abandoned == 2


async def test_a_trial_ends_with_its_caller_if_nothing_is_remembered() -> None:
    device = Serving(faults=1)
    async with serving(device, remember_poison=0) as batcher:
        device.gate.clear()
        asked = task(batcher.submit(FINE))
        await bounded(device.waits.wait())
        await cancelled(asked)
        await until(lambda: device.twins[0].state is accel.DeviceState.CLOSED)
        assert await answers(batcher, [("fine", 5)]) == [5]


# -- the quarantine


async def test_it_stays_open_for_the_next_poison() -> None:
    device = Serving()
    async with serving(device) as batcher:
        for number in range(10):
            assert kinds(await answers(batcher, [("poison", number), FINE])) == [accel.PoisonedInputError, 1]
        assert len(device.twins) == 1
        assert device.twins[0].state is accel.DeviceState.READY
    assert device.deaths == {("poison", number): 2 for number in range(10)}


async def test_it_is_ready_before_the_next_poison_comes() -> None:
    device = Serving()
    async with serving(device) as batcher:
        assert kinds(await answers(batcher, [POISON])) == [accel.PoisonedInputError]
        await until(lambda: device.starts == 3)
        assert kinds(await answers(batcher, [("poison", 3)])) == [accel.PoisonedInputError]
        await until(lambda: device.starts == 5)
        assert len(device.twins) == 1


async def test_it_may_be_ready_before_the_first() -> None:
    device = Serving()
    async with serving(device, quarantine_idle=math.inf) as batcher:
        await until(lambda: device.starts == 1)
        assert device.served == []
        assert kinds(await answers(batcher, [POISON, FINE])) == [accel.PoisonedInputError, 1]
    assert len(device.twins) == 1


async def test_one_that_is_not_ready_ahead_is_made_when_it_is_needed(caplog: pytest.LogCaptureFixture) -> None:
    device = Serving()

    async def make(twin: Any) -> Any:
        if len(device.twins) == 1:
            raise accel.OutOfMemoryError("no room yet")
        return await device.make(twin)

    async with serving(device, quarantine=make, quarantine_idle=math.inf) as batcher:
        await until(lambda: "quarantine_not_ready" in caplog.text)
        await until(lambda: device.twins[0].state is accel.DeviceState.CLOSED)
        assert kinds(await answers(batcher, [POISON, FINE])) == [accel.PoisonedInputError, 1]


async def test_suspects_wait_for_one_that_gets_ready() -> None:
    device, gate = Serving(), asyncio.Event()

    async def make(twin: Any) -> Any:
        await gate.wait()
        return await device.make(twin)

    async with serving(device, quarantine=make, quarantine_idle=math.inf) as batcher:
        await until(lambda: device.twins)
        asked = [task(batcher.submit(item)) for item in (FINE, POISON)]
        await until(lambda: batcher.statistics().isolating == 2)
        gate.set()
        assert kinds(await bounded(asyncio.gather(*asked, return_exceptions=True))) == [1, accel.PoisonedInputError]
        assert len(device.twins) == 1


async def test_closing_does_not_wait_for_one_that_gets_ready() -> None:
    device = Serving()

    async def make(twin: Any) -> Any:
        await asyncio.Event().wait()

    async with serving(device, quarantine=make, quarantine_idle=math.inf, close_timeout=3600.0) as batcher:
        await until(lambda: device.twins)
        await bounded(batcher.aclose())
        assert device.twins[0].state is accel.DeviceState.CLOSED


async def test_it_closes_when_it_was_idle_and_opens_again() -> None:
    device = Serving()
    async with serving(device, quarantine_idle=0.0) as batcher:
        for number in (1, 2):
            assert kinds(await answers(batcher, [("poison", number)])) == [accel.PoisonedInputError]
            await until(lambda: device.twins[-1].state is accel.DeviceState.CLOSED)
            assert len(device.twins) == number


async def test_one_that_was_lost_while_idle_is_replaced() -> None:
    device = Serving(faults=1)
    async with serving(device) as batcher:
        assert await answers(batcher, [FINE]) == [1]
        device.twins[0].state = accel.DeviceState.LOST
        device.faults = 1
        assert await answers(batcher, [FINE]) == [1]
        assert [twin.state for twin in device.twins] == [accel.DeviceState.CLOSED, accel.DeviceState.READY]


@pytest.mark.parametrize("made", [accel.OutOfMemoryError("no room"), "nothing", died()], ids=["raises", "is no function", "faults"])
async def test_without_one_that_works_items_fail_with_their_fault(made: Any, caplog: pytest.LogCaptureFixture) -> None:
    starts = 0

    async def make(device: Any) -> Any:
        nonlocal starts
        starts += 1
        if isinstance(made, Exception):
            raise made
        return made

    device = Serving(faults=1)
    with caplog.at_level(logging.INFO, logger="accel"):
        async with serving(device, quarantine=make) as batcher:
            first, second = await answers(batcher, [FINE, FINE])
            assert await answers(batcher, [("fine", 5)]) == [5]
    assert starts == (3 if isinstance(made, accel.ContextPoisonedError) else 1), "only what a fault interrupts is made again"
    assert kinds([first, second]) == [accel.ContextPoisonedError] * 2
    assert first is not second
    assert all("the quarantine could not be used" in error.__notes__[0] for error in (first, second))
    told = [getattr(record, "accel", {}) for record in caplog.records]
    assert [each["items"] for each in told if each.get("event") == "isolation_left_out"] == [2]


async def test_one_that_is_lost_during_a_trial_ends_all_trials() -> None:
    device = Serving()
    async with serving(device) as batcher:
        assert kinds(await answers(batcher, [("lost", 1), FINE])) == [accel.ContextPoisonedError] * 2
        assert device.twins[0].state is accel.DeviceState.CLOSED
        assert kinds(await answers(batcher, [POISON])) == [accel.PoisonedInputError]
        assert len(device.twins) == 2


async def test_too_many_suspects_are_not_tried() -> None:
    device = Serving(faults=2)
    async with serving(device, max_items=4, max_in_flight=4, max_pending=4) as batcher:
        device.gate.clear()
        tried = [task(batcher.submit(("fine", n))) for n in range(4)]
        await until(lambda: batcher.statistics().isolating == 4)
        others = await answers(batcher, [("fine", n) for n in range(4, 8)])
        assert kinds(others) == [accel.ContextPoisonedError] * 4
        assert all("4 items wait already" in error.__notes__[0] for error in others)
        device.gate.set()
        assert await bounded(asyncio.gather(*tried)) == [0, 1, 2, 3]
        assert batcher.statistics().isolated == 4


@pytest.mark.parametrize(
    ("end", "expected"), [(accel.DeviceLostError("lost"), accel.DeviceLostError), (StopAsyncIteration(), accel.ClosedError)], ids=repr
)
async def test_a_device_that_does_not_come_back_ends_the_trials(end: Exception, expected: type[Exception]) -> None:
    class Gone(Serving):
        def generations(self) -> Any:
            return self

        async def __anext__(self) -> int:
            raise end

    device = Gone()
    async with serving(device) as batcher:
        results = await answers(batcher, [FINE, POISON])
    assert kinds(results) == [expected] * 2
    assert all("not found out" in result.__notes__[0] for result in results)
    assert device.tried == []


async def test_a_fault_that_loses_the_device_is_everybodys_answer() -> None:
    async def handler(items: list[Item]) -> list[int]:
        raise accel.ContextPoisonedError("the last", retryable=False)

    device = Serving()
    chosen: Any = device
    async with Batcher(handler, idempotent=True, device=chosen, quarantine=device.make) as batcher:
        assert kinds(await answers(batcher, [FINE, POISON])) == [accel.ContextPoisonedError] * 2
    assert device.twins == []


# -- closing


async def test_closing_waits_for_the_trials_and_not_for_the_idle_quarantine() -> None:
    device = Serving()
    async with serving(device, quarantine_idle=3600.0) as batcher:
        device.gate.clear()
        asked = [task(batcher.submit(item)) for item in (FINE, POISON)]
        await bounded(device.waits.wait())
        closing = task(batcher.aclose())
        await turns()
        assert not closing.done()
        device.gate.set()
        await bounded(closing)
        assert kinds(await asyncio.gather(*asked, return_exceptions=True)) == [1, accel.PoisonedInputError]


async def test_an_idle_quarantine_is_closed_at_once() -> None:
    device = Serving()
    async with serving(device, quarantine_idle=3600.0) as batcher:
        await answers(batcher, [POISON])
        await bounded(batcher.aclose())
        assert device.twins[0].state is accel.DeviceState.CLOSED


async def test_closing_ends_a_trial_that_does_not_end() -> None:
    device = Serving()
    async with serving(device, close_timeout=0.01) as batcher:
        device.gate.clear()
        asked = [task(batcher.submit(item)) for item in (FINE, POISON)]
        await bounded(device.waits.wait())
        await bounded(batcher.aclose())
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert kinds(results) == [accel.ClosedError] * 2
        assert results[0] is not results[1]


async def test_closing_does_not_try_items_whose_callers_have_left() -> None:
    device = Serving()
    async with serving(device) as batcher:
        device.gate.clear()
        kept, gone = [task(batcher.submit(item)) for item in (FINE, POISON)]
        await bounded(device.waits.wait())
        await cancelled(gone)
        closing = task(batcher.aclose())
        await turns()
        device.gate.set()
        await bounded(closing)
        assert await kept == 1
        assert device.tried == [FINE]
