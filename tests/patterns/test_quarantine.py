"""Quarantine, on devices without processes: which item is blamed, what becomes of the others, and what is remembered.

Real deaths are in ``test_quarantine_deaths.py``; any mixture of items is in ``test_quarantine_properties.py``.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
from functools import partial
from typing import Any

import pytest

import accel
from accel.engine.attribution import Attribution, attribute
from accel.patterns.isolation import Isolation
from accel.patterns.poison_memory import content_fingerprint
from accel.patterns.requests import Request
from accel.process.spawning import start_error
from tests.batcher_support import turns
from tests.device_support import bounded, cancelled, task, until
from tests.quarantine_support import FINE, KILLED, POISON, Batcher, Item, Serving, answers, crashed, hung, killed, kinds, serving


@pytest.fixture(autouse=True)
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split groups into single items, however long things take here."""
    monkeypatch.setattr(Isolation, "_parts", lambda self, count: count)


async def test_poison_is_found_by_one_death_more_and_the_others_are_answered(caplog: pytest.LogCaptureFixture) -> None:
    device = Serving()
    with caplog.at_level(logging.INFO, logger="accel"):
        async with serving(device) as batcher:
            results = await answers(batcher, [FINE, POISON, ("fine", 3)])
            statistics = batcher.statistics()
    assert kinds(results) == [1, accel.PoisonedInputError, 3]
    assert device.trials == [[FINE], [POISON], [("fine", 3)]]
    assert device.served == [[FINE, POISON, ("fine", 3)]], "what may be poison does not come back to the device that serves"
    assert (device.deaths, len(device.twins)) == ({POISON: 1}, 1)
    assert (statistics.isolated, statistics.poisoned, statistics.answered, statistics.failed, statistics.retried) == (3, 1, 2, 1, 0)
    told = [getattr(record, "accel", {}) for record in caplog.records]
    assert [(each["items"], each["pending"], each["requests"]) for each in told if each.get("event") == "isolation_began"] == [
        (3, 3, [1, 2, 3])
    ]
    assert [(each["trials"], each["poisoned"]) for each in told if each.get("event") == "isolation_ended"] == [(3, 1)]
    (found,) = [each for each in told if each.get("event") == "poisoned_item"]
    assert (found["kind"], found["code"], found["request"], found["model"]) == ("fault", 700, 2, "Serving.handler")
    assert found["fingerprint"] == (content_fingerprint(POISON) or b"").hex()


async def test_a_death_from_outside_is_no_proof_and_the_batch_runs_again_as_it_was() -> None:
    device = Serving(faults=1, fault=killed)
    items: list[Item] = [("fine", n) for n in range(8)]
    async with serving(device) as batcher:
        assert await answers(batcher, items) == list(range(8))
        assert device.served == [items, items]
        assert (device.twins, batcher.statistics().isolated) == ([], 0)


async def test_what_dies_again_as_if_from_outside_is_examined_and_found_by_two_deaths_alone() -> None:
    device = Serving()
    async with serving(device) as batcher:
        results = await answers(batcher, [KILLED, FINE, ("fine", 3)])
        assert kinds(results) == [accel.PoisonedInputError, 1, 3]
    assert device.served == [[KILLED, FINE, ("fine", 3)]] * 2
    assert device.trials == [[KILLED], [FINE], [("fine", 3)], [KILLED]], "the others are answered before it runs again"
    assert device.deaths == {KILLED: 2}


@pytest.mark.parametrize("place", range(8))
async def test_parts_that_pass_are_answered_at_once_and_those_that_fault_are_split(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Isolation, "_parts", lambda self, count: 2)
    device = Serving()
    items: list[Item] = [("fine", n) for n in range(8)]
    items[place] = POISON
    async with serving(device) as batcher:
        results = await answers(batcher, items)
        assert kinds(results) == [*range(place), accel.PoisonedInputError, *range(place + 1, 8)]
    assert sorted(map(len, device.trials)) == [1, 1, 2, 2, 4, 4]
    assert device.deaths == {POISON: 3}


async def test_there_are_as_many_parts_as_run_while_another_context_comes_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    device, loop = Serving(), asyncio.get_running_loop()
    for restart, forward, expected in ((0.0, 1.0, 2), (1.0, 0.25, 4), (100.0, 0.01, 64)):
        async with serving(device) as batcher:
            isolation = batcher._takers.first.isolation
            assert isolation is not None
            isolation._quarantine.seconds, isolation._counters.batch_seconds = restart, forward
            requests = [Request(("fine", n), 1, loop.create_future(), 0.0, True, batcher.service) for n in range(64)]
            groups = isolation._split(requests, 1)
            assert len(groups) == expected
            assert [each for group in groups for each in group.requests] == requests
            requests[0].fault = hung()
            assert len(isolation._split(requests, 1)) == 64, "a hang takes longer than any forward"


async def test_an_item_that_fails_alone_as_its_batch_did_need_not_run_again() -> None:
    device, same, other = Serving(), ("assert", 2), ("other", 3)
    async with serving(device) as batcher:
        results = await answers(batcher, [same, other, FINE, KILLED])
        assert kinds(results) == [accel.PoisonedInputError, accel.PoisonedInputError, 1, accel.PoisonedInputError]
        assert (results[0].item, results[0].kind, results[0].__cause__.__cause__.code) == (same, "fault", 710)
    assert device.tried == [same, other, FINE, KILLED, other, KILLED]
    assert device.deaths == {same: 1, other: 2, KILLED: 2}


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
            raise crashed()
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

    other: Item = ("killed", 3)
    async with serving(device, quarantine=make) as batcher:
        asked = [task(batcher.submit(KILLED))]
        await until(lambda: device.deaths)
        asked += [task(batcher.submit(item)) for item in (other, FINE)]
        await until(lambda: batcher.statistics().isolating == 3)
        gate.set()
        results = await bounded(asyncio.gather(*asked, return_exceptions=True))
        assert kinds(results) == [accel.PoisonedInputError, accel.PoisonedInputError, 1]
    assert device.tried == [KILLED, other, FINE, KILLED, other]


async def test_others_that_keep_coming_do_not_put_it_off_for_ever() -> None:
    device = Serving()
    asked: list[asyncio.Future[int]] = []

    async def make(twin: Any) -> Any:
        handler = await device.make(twin)

        async def answer(items: list[Item]) -> Any:
            if not asked[0].done():  # with each trial another suspect comes, and is there before the trial ends
                before = batcher.statistics().isolating
                asked.append(task(batcher.submit(("killed", len(asked) + 10))))
                await until(lambda: batcher.statistics().isolating > before)
            return await handler(items)

        return answer

    async with serving(device, quarantine=make) as batcher:
        asked.append(task(batcher.submit(KILLED)))
        await bounded(asyncio.wait(asked[:1]))
        assert device.tried.index(KILLED, 1) <= 3
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
        assert device.tried == [POISON]
        assert (batcher.statistics().poisoned, batcher.statistics().failed, batcher.statistics().refused) == (4, 4, 0)


async def test_items_without_a_fingerprint_are_found_too() -> None:
    device = Serving()
    async with serving(device, fingerprint=lambda item: None) as batcher:
        assert kinds(await answers(batcher, [POISON, FINE, POISON])) == [accel.PoisonedInputError, 1, accel.PoisonedInputError]
        assert device.deaths == {POISON: 2}
        assert kinds(await answers(batcher, [POISON])) == [accel.PoisonedInputError]
        assert (len(device.served), batcher.statistics().refused) == (2, 0)


async def test_items_that_are_not_idempotent_are_not_tried_again() -> None:
    device = Serving()
    async with serving(device) as batcher:
        asked = [batcher.submit(FINE, idempotent=False), batcher.submit(POISON)]
        results = await bounded(asyncio.gather(*asked, return_exceptions=True))
    assert kinds(results) == [accel.ContextPoisonedError, accel.PoisonedInputError]
    assert device.tried == [POISON]


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


# -- the quarantine


async def test_it_stays_open_for_the_next_poison() -> None:
    device = Serving()
    async with serving(device) as batcher:
        for number in range(10):
            assert kinds(await answers(batcher, [("poison", number), FINE])) == [accel.PoisonedInputError, 1]
        assert len(device.twins) == 1
        assert device.twins[0].state is accel.DeviceState.READY
    assert device.deaths == {("poison", number): 1 for number in range(10)}


async def test_it_is_ready_before_the_next_poison_comes() -> None:
    device = Serving()
    async with serving(device) as batcher:
        assert kinds(await answers(batcher, [POISON])) == [accel.PoisonedInputError]
        await until(lambda: device.starts == 2)
        assert kinds(await answers(batcher, [("poison", 3)])) == [accel.PoisonedInputError]
        await until(lambda: device.starts == 3)
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


@pytest.mark.parametrize("made", [accel.OutOfMemoryError("no room"), "nothing", crashed()], ids=["raises", "is no function", "faults"])
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


async def test_the_quarantine_waits_for_the_end_of_a_shortage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel.patterns.quarantine._SHORT", 0.0)
    device, refused = Serving(faults=1), 0

    async def make(twin: Any) -> Any:
        nonlocal refused
        refused += 1
        if refused < 5:
            raise start_error(OSError(errno.EMFILE, "Too many open files"))
        return await device.make(twin)

    async with serving(device, quarantine=make) as batcher:
        assert await answers(batcher, [FINE]) == [1]
    assert refused == 5


async def test_work_that_had_not_run_is_retried_after_each_death_and_is_no_suspect() -> None:
    class Dying(Serving):
        def __init__(self) -> None:
            super().__init__()
            self.attributions: set[Attribution] = set()
            self.charged = 0

        def attribution(self) -> Attribution:
            return Attribution(self.attributions)

        def charge(self) -> None:
            self.charged += 1

        async def handler(self, items: list[Item]) -> list[int | Exception]:
            self.served.append(items)
            if len(self.served) <= 6:
                attribute(self.attributions, self.charge)
                raise accel.ContextPoisonedError("before it ran", executed="no") if len(self.served) % 2 else accel.StaleRefError("old")
            return [number for _, number in items]

    device = Dying()
    async with serving(device) as batcher:
        assert await answers(batcher, [FINE]) == [1]
        assert (len(device.served), batcher.statistics().isolated, device.attributions) == (7, 0, set())
        assert device.charged == 6, "nothing was found"


async def test_what_many_callers_wait_for_runs_before_what_is_most_likely_poison() -> None:
    device = Serving()
    async with serving(device) as batcher:
        device.gate.clear()
        alone = [("poison", n) for n in range(10, 13)]
        asked = []
        for n, item in enumerate(alone, 1):
            asked.append(task(batcher.submit(item)))
            await until(partial(lambda n: batcher.statistics().isolating == n, n))
        await bounded(device.waits.wait())
        asked += [task(batcher.submit(item)) for item in (POISON, *(("fine", n) for n in range(5)))]
        await until(lambda: batcher.statistics().isolating == 9)
        device.gate.set()
        results = await bounded(asyncio.gather(*asked, return_exceptions=True))
        assert kinds(results) == [accel.PoisonedInputError] * 4 + list(range(5))
        assert device.tried[0] == alone[0]
        assert set(device.tried[-2:]) == set(alone[1:])


async def test_while_contexts_die_again_and_again_batches_are_small() -> None:
    device = Serving()
    async with serving(device, max_items=16) as batcher:
        for n in range(6):
            assert kinds(await answers(batcher, [("poison", n)])) == [accel.PoisonedInputError]
        items: list[Item] = [("fine", n) for n in range(16)]
        assert await answers(batcher, items) == list(range(16))
        assert device.served[6:] == [items[n : n + 2] for n in range(0, 16, 2)]
        isolation = batcher._takers.first.isolation
        assert isolation is not None
        isolation.besieged_until -= 10.0
        assert await answers(batcher, items) == list(range(16))
        assert device.served[-1] == items


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
