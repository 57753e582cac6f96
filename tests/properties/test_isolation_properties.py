"""Whatever is poison in whatever batches: exactly that is blamed, by two deaths at most, and everything else is answered."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

import accel
from accel.patterns import DynamicBatcher
from tests.batcher_support import settled
from tests.quarantine_support import Item, Serving

KINDS = st.sampled_from(["fine", "fine", "fine", "poison", "assert", "hang", "once", "error", "late"])
DEATHS = {"poison": {2}, "assert": {1, 2}, "hang": {2}, "once": {1}}
POISON = ("poison", "assert", "hang")


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
            results = await asyncio.wait_for(asyncio.gather(*map(batcher.submit, items), return_exceptions=True), 10)
            for item, result in zip(items, results, strict=True):
                check(item, result, is_suspect=item in device.tried)
        deaths = {item: count for item, count in device.deaths.items() if count}
        asked = [item for served in device.served for item in served]
        assert deaths.keys() == {item for item in asked if item[0] in DEATHS}
        assert all(count in DEATHS[item[0]] for item, count in deaths.items())
        assert device.starts <= 1 + sum(deaths.values())
        assert len(asked) == len(set(asked)), "what was on the device at a fault does not come back to it"
        assert len(device.twins) <= 1

        poison = [item for item in asked if item[0] in POISON]
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
