"""Whatever is submitted, cancelled, expired, refused, failed or closed: every request ends once, rightly, and the counters add up."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

import accel
from accel.patterns import BatcherStatistics, DynamicBatcher
from accel.patterns.shares import OUTCOMES
from tests.batcher_support import settled


@dataclass(frozen=True)
class Ask:
    """One request: when it comes and goes (in turns of the loop), how large it is, and what the handler does to it."""

    item: int
    size: int
    start: int
    cancel: int | None
    fails: bool
    idempotent: bool


@dataclass(frozen=True)
class Plan:
    max_items: int
    room: int
    max_in_flight: int
    rejects: bool
    asks: tuple[Ask, ...]
    turns: tuple[int, ...]
    faults: frozenset[int]
    close_after: int
    tenants: int


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    max_items = draw(st.integers(1, 6))
    turns = st.integers(0, 12)
    asks = draw(
        st.lists(
            st.tuples(st.integers(1, max_items), turns, st.none() | turns, st.sampled_from([False, False, True]), st.booleans()),
            min_size=1,
            max_size=30,
        )
    )
    return Plan(
        max_items,
        draw(st.integers(0, 6)),
        draw(st.integers(1, 3)),
        draw(st.booleans()),
        tuple(Ask(item, *ask) for item, ask in enumerate(asks)),
        tuple(draw(st.lists(st.integers(0, 4), min_size=1, max_size=5))),
        draw(st.frozensets(st.integers(0, 6), max_size=3)),
        draw(st.integers(0, 30)),
        draw(st.integers(0, 3)),
    )


class Service:
    """The handler: takes some turns, faults where the plan says, and remembers what it was given."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.calls: list[list[Ask]] = []
        self.running = 0
        self.most = 0

    async def __call__(self, asks: list[Ask]) -> list[int | Exception]:
        number = len(self.calls)
        self.calls.append(asks)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            for _ in range(self.plan.turns[number % len(self.plan.turns)]):
                await asyncio.sleep(0)
            if number in self.plan.faults:
                raise accel.ContextPoisonedError(f"call {number}")
            return [ValueError(str(ask.item)) if ask.fails else ask.item for ask in asks]
        finally:
            self.running -= 1


async def client(batcher: DynamicBatcher[Ask, int], ask: Ask, tenant: str | None) -> int:
    for _ in range(ask.start):
        await asyncio.sleep(0)
    return await batcher.submit(ask, timeout=60.0, idempotent=ask.idempotent, tenant=tenant)


async def cancel(task: asyncio.Task[int], after: int) -> None:
    for _ in range(after):
        await asyncio.sleep(0)
    task.cancel()


async def play(plan: Plan) -> tuple[Service, list[int | BaseException], BatcherStatistics]:
    service = Service(plan)
    batcher = DynamicBatcher(
        service,
        max_items=plan.max_items,
        max_pending=plan.max_items + plan.room,
        max_in_flight=plan.max_in_flight,
        max_delay=0.0 if plan.room % 2 else 0.0005,
        overload="reject" if plan.rejects else "wait",
        size=lambda ask: ask.size,
        shares={str(number): 1 + number for number in range(plan.tenants)} or None,
    )
    async with batcher:
        tasks = [asyncio.ensure_future(client(batcher, ask, str(ask.item % plan.tenants) if plan.tenants else None)) for ask in plan.asks]
        others = [
            asyncio.ensure_future(cancel(task, ask.cancel)) for task, ask in zip(tasks, plan.asks, strict=True) if ask.cancel is not None
        ]
        for _ in range(plan.close_after):
            await asyncio.sleep(0)
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
    await asyncio.gather(*others)
    return service, results, batcher.statistics()


def check(plan: Plan, service: Service, results: list[int | BaseException], statistics: BatcherStatistics) -> None:
    assert settled(statistics), statistics
    assert service.most <= plan.max_in_flight
    seen: dict[int, int] = {}
    for call in service.calls:
        assert 0 < sum(ask.size for ask in call) <= plan.max_items
        for ask in call:
            seen[ask.item] = seen.get(ask.item, 0) + 1
    for ask, result in zip(plan.asks, results, strict=True):
        times = seen.get(ask.item, 0)
        assert times <= (2 if ask.idempotent else 1)
        match result:
            case int():
                assert result == ask.item
                assert not ask.fails
                assert times >= 1
            case ValueError():
                assert ask.fails
                assert str(result) == str(ask.item)
            case accel.ContextPoisonedError():
                assert times == (2 if ask.idempotent else 1)
            case asyncio.CancelledError():
                assert ask.cancel is not None
            case accel.MailboxFullError():
                assert times == 0
                assert plan.rejects or statistics.rejected
            case _:
                assert isinstance(result, accel.ClosedError), result
                assert times == 0
    assert len({id(result) for result in results if isinstance(result, Exception)}) == sum(
        isinstance(result, Exception) for result in results
    )
    assert statistics.answered >= sum(isinstance(result, int) for result in results)
    assert statistics.batches == len(service.calls)
    assert len(statistics.tenants) == plan.tenants
    for outcome in OUTCOMES if plan.tenants else ():
        assert sum(getattr(tenant, outcome) for tenant in statistics.tenants) == getattr(statistics, outcome), outcome


@settings(max_examples=150, deadline=None)
@given(plans())
def test_every_request_ends_once_and_rightly(plan: Plan) -> None:
    check(plan, *asyncio.run(play(plan)))
