"""Whatever is poison in whatever batches: exactly that is blamed, by few deaths, and everything else is answered."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

import accel
from accel.patterns import DynamicBatcher
from tests.batcher_support import settled
from tests.quarantine_support import FAULTS, Item, Serving

KINDS = st.sampled_from(["fine", "fine", "fine", "fine", "poison", "killed", "assert", "hang", "once", "error", "late"])
LEAST = {"poison": 1, "killed": 2, "assert": 1, "hang": 2, "once": 1}
"""Deaths before an item is blamed, or let go."""
POISON = ("poison", "killed", "assert", "hang")
MOST = 7
"""Deaths of an item in a batch of eight that is halved: four, and two alone; and one for a part in which it was not the first."""


def check(item: Item, result: Any, *, is_suspect: bool) -> None:
    kind, number = item
    if kind in POISON:
        assert isinstance(result, accel.PoisonedInputError), result
        assert (result.item, result.kind) == (item, "hang" if kind == "hang" else "fault")
    elif kind == "error" and is_suspect:
        assert isinstance(result, ValueError), result
    else:
        assert result == number


async def play(batches: list[list[str]], max_in_flight: int) -> None:
    device = Serving()
    chosen: Any = device
    options: dict[str, Any] = {"max_items": 8, "max_in_flight": max_in_flight, "max_pending": 256}
    async with DynamicBatcher[Item, int](device.handler, idempotent=True, device=chosen, quarantine=device.make, **options) as batcher:
        number = 0
        for kinds in batches:
            items = [(kind, number + n) for n, kind in enumerate(kinds)]
            number += len(items)
            results = await asyncio.wait_for(asyncio.gather(*map(batcher.submit, items), return_exceptions=True), 30)
            for item, result in zip(items, results, strict=True):
                check(item, result, is_suspect=item in device.tried)
        deaths = {item: count for item, count in device.deaths.items() if count}
        asked = [item for served in device.served for item in served]
        assert deaths.keys() == {item for item in asked if item[0] in LEAST}
        assert all(LEAST[item[0]] <= count <= MOST for item, count in deaths.items())
        assert device.starts <= 1 + sum(deaths.values())
        for served in device.served:
            times = device.served.count(served)
            if times > 1:
                assert times == 2, "what was on the device at a fault comes back at most once"
                assert {kind for kind, _ in served} & FAULTS <= {"killed", "once"}, "and only if the death may be from outside"
        assert len(set(asked)) == sum(map(len, {tuple(served) for served in device.served}))
        assert len(device.twins) <= 1

        poison = [item for item in dict.fromkeys(asked) if item[0] in POISON]
        again = await asyncio.gather(*map(batcher.submit, poison), return_exceptions=True)
        assert all(isinstance(error, accel.PoisonedInputError) and error.remembered for error in again)
        assert sum(map(len, device.served)) == len(asked)
        statistics = batcher.statistics()
        assert (statistics.poisoned, statistics.refused) == (len(poison), len(poison))
        assert settled(statistics)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.lists(KINDS, min_size=1, max_size=30), min_size=1, max_size=3), st.integers(1, 4))
def test_exactly_the_poison_is_blamed(batches: list[list[str]], max_in_flight: int) -> None:
    asyncio.run(play(batches, max_in_flight))
