"""Quarantine and those that wait for it: what is remembered, equal items, and callers that leave."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import accel
from accel.patterns.isolation import Isolation
from tests.device_support import bounded, cancelled, task, until
from tests.quarantine_support import FINE, POISON, Item, Serving, answers, kinds, serving


@pytest.fixture(autouse=True)
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split groups into single items, however long things take here."""
    monkeypatch.setattr(Isolation, "_parts", lambda self, count: count)


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


async def test_an_item_that_equals_a_suspect_goes_straight_to_quarantine_and_gets_its_answer() -> None:
    device = Serving()
    async with serving(device) as batcher:
        device.gate.clear()
        first = task(batcher.submit(POISON))
        await until(lambda: batcher.statistics().isolating == 1)
        others = [task(batcher.submit(POISON)) for _ in range(3)]
        assert await bounded(batcher.submit(FINE)) == 1
        device.gate.set()
        results = await bounded(asyncio.gather(first, *others, return_exceptions=True))
        assert kinds(results) == [accel.PoisonedInputError] * 4
        assert [getattr(result, "remembered", None) for result in results] == [False, True, True, True]
        assert (device.served, device.trials) == ([[POISON], [FINE]], [[POISON]])
        assert (batcher.statistics().isolated, batcher.statistics().poisoned) == (4, 4)


async def test_those_that_wait_for_an_innocent_suspect_are_answered_together_behind_it() -> None:
    device = Serving(faults=1)
    async with serving(device, max_items=4) as batcher:
        device.gate.clear()
        first = task(batcher.submit(FINE))
        await bounded(device.waits.wait())
        others = [task(batcher.submit(FINE)) for _ in range(6)]
        await until(lambda: batcher.statistics().isolating == 7)
        device.gate.set()
        assert await bounded(asyncio.gather(first, *others)) == [1] * 7
        assert list(map(len, device.trials)) == [1, 4, 2], "no more than a batch holds"
        assert await answers(batcher, [FINE]) == [1]
        assert device.served == [[FINE]] * 2, "it is no suspect any more"


async def test_what_was_queued_when_its_item_became_a_suspect_is_not_served_either() -> None:
    device = Serving()
    async with serving(device, max_items=1, max_in_flight=1) as batcher:
        results = await answers(batcher, [POISON, POISON, FINE, POISON])
        assert kinds(results) == [accel.PoisonedInputError, accel.PoisonedInputError, 1, accel.PoisonedInputError]
        assert device.served == [[POISON], [FINE]]
        assert device.deaths == {POISON: 1}


async def test_an_item_that_must_not_run_twice_does_not_wait_for_an_equal_one() -> None:
    device = Serving(faults=1)
    async with serving(device) as batcher:
        device.gate.clear()
        first = task(batcher.submit(FINE))
        await bounded(device.waits.wait())
        assert await bounded(batcher.submit(FINE, idempotent=False)) == 1
        device.gate.set()
        assert await bounded(first) == 1


async def test_those_that_wait_for_a_suspect_are_bounded_too() -> None:
    device = Serving(faults=1)
    async with serving(device, max_items=2, max_pending=2) as batcher:
        device.gate.clear()
        asked = [task(batcher.submit(FINE))]
        await bounded(device.waits.wait())
        asked.append(task(batcher.submit(FINE)))
        await until(lambda: batcher.statistics().isolating == 2)
        with pytest.raises(accel.MailboxFullError):
            await batcher.submit(FINE)
        device.gate.set()
        assert await bounded(asyncio.gather(*asked)) == [1, 1]


# -- callers who leave


async def test_the_deadline_of_a_suspect_is_no_reason_to_send_it_again() -> None:
    device = Serving()
    async with serving(device) as batcher:
        device.gate.clear()
        asked = task(batcher.submit(POISON, timeout=0.05))
        await bounded(device.waits.wait())
        again = task(batcher.submit(POISON, timeout=0.01))
        for each in (asked, again):
            with pytest.raises(accel.DeadlineExceededError, match="in quarantine") as caught:
                await bounded(each)
            assert not caught.value.retryable
        device.gate.set()
        await until(lambda: not batcher.statistics().isolating)
        assert (batcher.statistics().expired, batcher.statistics().poisoned) == (2, 2)
        (error,) = await answers(batcher, [POISON])
        assert error.remembered


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
        assert device.deaths == {POISON: 1, ("poison", 3): 1}
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
        assert device.deaths == {POISON: 1}


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
        assert device.tried == [FINE, POISON]
        assert (batcher.statistics().abandoned, batcher.statistics().expired) == (1, 1)


async def test_a_trial_ends_with_its_caller_if_nothing_is_remembered() -> None:
    device = Serving(faults=1)
    async with serving(device, remember_poison=0) as batcher:
        device.gate.clear()
        asked = task(batcher.submit(FINE))
        await bounded(device.waits.wait())
        await cancelled(asked)
        await until(lambda: device.twins[0].state is accel.DeviceState.CLOSED)
        assert await answers(batcher, [("fine", 5)]) == [5]
