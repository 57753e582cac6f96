"""Shares of device time on a virtual clock: who is served when, and what it is charged."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.errors import ContextPoisonedError, DeadlineExceededError, InvalidArgumentError, UnknownTenantError
from accel.patterns.requests import Counters, Request, trial_of
from accel.patterns.shares import Shares
from accel.telemetry import Probes, ServedBatch, Service

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_SERVICE = Service("test", "", Probes(), lambda: None)


class Bench:
    """Shares in front of a device that runs one batch at a time, on a clock of its own."""

    def __init__(
        self, weights: Mapping[str, float], loop: asyncio.AbstractEventLoop, *, limit: int = 10_000, waiting: int = 0, most: int = 16
    ) -> None:
        self.now = 0.0
        self.counters = Counters()
        self.shares = Shares(weights, limit, waiting, self.counters, lambda: self.now)
        self.most = most
        self.seconds: dict[str, float] = dict.fromkeys(weights, 0.0)
        self.answered: list[Request] = []
        self._loop = loop
        self._made = 0

    def submit(self, tenant: str, size: int = 1, *, timeout: float = math.inf, home: str | None = None) -> Request:
        request = self.made(tenant, size, timeout=timeout, home=home)
        self.was_taken = self.shares.offer(request)
        return request

    def made(self, tenant: str, size: int = 1, *, timeout: float = math.inf, home: str | None = None) -> Request:
        self._made += 1
        request = Request(None, size, self._loop.create_future(), self.now, is_idempotent=True, service=_SERVICE, number=self._made)
        request.tenant, request.deadline, request.home = tenant, self.now + timeout, home
        return request

    def run(self, taken: list[Request] | None = None, *, cost: float = 0.001, is_measured: bool = True) -> list[Request]:
        """Run the next batch, each item of which takes ``cost`` seconds on the device, and answer it."""
        taken = self.shares.take(self.most) if taken is None else taken
        if not taken:
            return []
        batch = ServedBatch(_SERVICE, taken, sum(request.size for request in taken))
        self.now += batch.items * cost
        batch.device_seconds = batch.items * cost if is_measured else None
        batch.launched_at -= batch.items * cost
        for request in taken:
            self.seconds[request.tenant] += request.size * cost
        self.shares.charge(batch)
        for request in taken:
            if not request.future.done():
                request.future.set_result(None)
                self.answered.append(request)
        return taken


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


def _tenants(requests: list[Request]) -> Counter[str]:
    return Counter(request.tenant for request in requests)


@pytest.mark.parametrize("is_measured", [True, False])
def test_device_time_goes_by_the_weights_whatever_the_items_cost(loop: asyncio.AbstractEventLoop, is_measured: bool) -> None:
    bench = Bench({"gold": 3, "free": 1}, loop)
    while bench.now < 10:
        for tenant, size in (("gold", 10), ("free", 1)):
            while bench.shares._tenants[tenant].queue.queued < 40:
                bench.submit(tenant, size)
        bench.run(is_measured=is_measured)
    assert bench.seconds["gold"] / bench.seconds["free"] == pytest.approx(3, rel=0.01)


def test_each_batch_has_items_of_all_that_have_some(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench({"gold": 3, "free": 1}, loop)
    for _ in range(100):
        bench.submit("gold")
        bench.submit("free")
    bench.run()
    assert _tenants(bench.run()) == {"gold": 12, "free": 4}
    bench.most = 1000
    assert len(bench.run()) == 168


def test_a_tenant_that_was_away_has_saved_nothing_up(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench({"a": 1, "b": 1}, loop)
    for _ in range(1000):
        bench.submit("a")
    for _ in range(40):
        bench.run()
    for _ in range(100):
        bench.submit("b")
    taken = _tenants([request for _ in range(4) for request in bench.run()])
    assert taken["b"] == pytest.approx(32, abs=2)


def test_a_tenant_that_was_alone_owes_nothing_for_it(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench({"a": 1, "b": 1}, loop)
    for _ in range(1600):
        bench.submit("a")
    while bench.run():
        pass
    for tenant in ("b", "a"):
        for _ in range(100):
            bench.submit(tenant)
    taken = _tenants([request for _ in range(6) for request in bench.run()])
    assert taken["a"] == pytest.approx(48, abs=16)


def test_an_occasional_tenant_is_in_the_next_batch(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench({"busy": 1, "rare": 1}, loop)
    for _ in range(5000):
        bench.submit("busy")
    for _ in range(100):
        bench.run()
        bench.run()
        request = bench.submit("rare")
        assert request in bench.run()


def test_a_batch_that_fails_is_charged_and_what_was_not_run_is_not(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench({"a": 1, "b": 1}, loop)
    for tenant in ("a", "b"):
        for _ in range(100):
            bench.submit(tenant)
    bench.run()
    before = [tenant.clock for tenant in bench.shares._tenants.values()]
    taken = bench.shares.take(16)
    for request in taken:
        request.future.set_exception(RuntimeError())
    bench.shares.release(taken)
    assert [tenant.clock for tenant in bench.shares._tenants.values()] == pytest.approx(before)
    charged = sum(statistics.device_seconds for statistics in bench.shares.statistics())
    bench.run(is_measured=False, cost=1.0)  # on a device that does measure: it was interrupted, and waited for a rebuild
    assert sum(statistics.device_seconds for statistics in bench.shares.statistics()) == pytest.approx(charged + 0.016, rel=0.1)


def test_a_trial_in_quarantine_is_charged_also_if_it_faults(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench({"a": 1, "b": 1}, loop)
    counters = Counters(charge=bench.shares.charge)
    request = bench.submit("a")
    assert bench.shares.take(1) == [request]
    with contextlib.suppress(ContextPoisonedError), trial_of([request], counters, "cpu:0"):
        raise ContextPoisonedError("of the trial")
    first, second = bench.shares.statistics()
    assert first.device_seconds > 0 == second.device_seconds
    assert bench.shares._tenants["a"].clock == pytest.approx(first.device_seconds)
    assert (request.batch is not None, request.charged) == (True, 0)


def test_a_request_that_is_dropped_is_not_charged(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench({"a": 1, "b": 1}, loop)
    dropped = [bench.submit("a") for _ in range(50)]
    kept = [bench.submit("b") for _ in range(3)]
    for request in dropped:
        request.future.cancel()
        bench.shares.discard(request)
        bench.shares.count(request)
    assert bench.shares.queued == 3
    assert bench.run() == kept
    first, _ = bench.shares.statistics()
    assert (first.device_seconds, first.queued, first.dropped) == (0, 0, 50)


def test_the_queue_of_one_tenant_cannot_be_filled_by_another(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench({"a": 1, "b": 1}, loop, limit=4, waiting=2)
    for _ in range(10):
        bench.submit("a")
    assert not bench.was_taken
    assert bench.shares.offer(bench.made("b"))
    assert (bench.shares.queued, bench.shares.waiting) == (5, 2)
    assert len(bench.shares.clear()) == 7
    assert (bench.shares.queued, bench.shares.waiting, bench.shares.oldest()) == (0, 0, None)
    assert bench.shares.take(10) == []


def test_the_earliest_deadline_of_a_tenant_goes_first_but_not_before_other_tenants(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench({"a": 1, "b": 1}, loop, most=1)
    late, soon, other = bench.submit("a", timeout=100), bench.submit("a", timeout=10), bench.submit("b")
    assert [bench.run() for _ in range(3)] == [[soon], [other], [late]]


def test_an_item_that_has_no_time_for_the_fastest_recent_batch_fails_at_once(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench({"a": 1}, loop, most=4)
    bench.submit("a", timeout=0.001)  # nothing is known yet
    bench.run(cost=1.0)
    hopeless = bench.submit("a", timeout=0.5)
    assert bench.shares.queued == 0
    with pytest.raises(DeadlineExceededError, match=r"0\.5 s left, and the fastest recent batch took 1 s; it will not be launched"):
        hopeless.future.result()
    waited = bench.submit("a", timeout=1.5)
    bench.now += 1
    assert bench.run() == []
    assert isinstance(waited.future.exception(), DeadlineExceededError)
    assert bench.counters.expired == 2
    bench.now += 10  # a slow batch is not remembered for ever
    quick = bench.submit("a", timeout=0.5)
    assert bench.run() == [quick]


def test_after_one_slow_batch_others_may_show_that_they_are_faster(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench({"a": 1}, loop)
    bench.submit("a")
    bench.run(cost=0.5)
    assert bench.submit("a", timeout=0.1).future.exception() is not None
    bench.now += 0.51
    tried = bench.submit("a", timeout=0.1)
    assert bench.run(cost=0.01) == [tried]
    bench.now += 0.1
    assert bench.submit("a", timeout=0.1).future.done() is False


def test_a_batch_that_waited_for_others_is_as_fast_as_the_device_was(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench({"a": 1}, loop)
    batch = ServedBatch(_SERVICE, [bench.submit("a")], 1)
    batch.launched_at -= 1.0
    batch.device_seconds = 0.1
    bench.shares.charge(batch)
    assert not bench.submit("a", timeout=0.2).future.done()
    assert bench.submit("a", timeout=0.05).future.exception() is not None


def test_the_fastest_batch_is_that_of_the_last_seconds(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench({"a": 1}, loop, most=1)
    for cost in (0.1, 2.0, 2.0, 2.0):
        bench.submit("a")
        bench.run(cost=cost)
    hopeless = bench.submit("a", timeout=1.0)
    assert hopeless.future.exception() is not None


def test_items_of_other_takers_and_those_that_do_not_fit_are_passed_over(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench({"a": 1, "b": 1, "c": 1}, loop, most=8)
    kept = bench.submit("a", home="x")
    large = [bench.submit("b", 6) for _ in range(2)]
    small = [bench.submit("c") for _ in range(9)]
    assert bench.shares.take(8) == [large[0], *small[:2]]
    assert bench.shares.take(8, "x") == [kept, *small[2:]]
    for size in (1, 1, 9):
        bench.submit("c", size)
    assert [request.size for request in bench.shares.take(8)] == [6, 1, 1]
    assert [request.size for request in bench.shares.take(4)] == [9]


def test_who_has_small_items_gets_no_more_than_a_batch_by_filling_up(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench({"large": 1, "small": 1}, loop, most=16)
    for _ in range(200):
        while bench.shares._tenants["large"].queue.queued < 30:
            bench.submit("large", 10)
        while bench.shares._tenants["small"].queue.queued < 30:
            bench.submit("small")
        bench.run()
    assert abs(bench.seconds["small"] - bench.seconds["large"]) <= 0.016 + 0.006


def test_what_is_put_back_is_not_charged_and_comes_first(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench({"a": 1, "b": 1}, loop, most=2, limit=2)
    requests = [bench.submit("a") for _ in range(2)]
    taken = bench.shares.take(2)
    assert taken == requests
    for request in taken:
        request.is_launched = True
    bench.submit("a", timeout=5)
    bench.submit("b")
    bench.shares.put_back(taken)
    assert bench.shares._tenants["a"].clock == pytest.approx(0)
    assert bench.shares.queued == 4
    assert [request for _ in range(2) for request in bench.run() if request.tenant == "a"][:2] == requests


def test_keyed_items_find_another_taker(loop: asyncio.AbstractEventLoop) -> None:
    bench = Bench({"a": 1, "b": 1}, loop)
    requests = [bench.submit(tenant, home="x") for tenant in ("a", "b")]
    bench.shares.rehome("x", lambda key: "y")
    assert not bench.shares.has("x")
    assert bench.shares.has_own("y")
    assert bench.shares.take(8, "x") == []
    assert bench.shares.take(8, "y") == requests
    bench.submit("b")
    assert bench.shares.has("x")
    assert not bench.shares.has_own("x")


@pytest.mark.parametrize(
    "shares",
    [
        {},
        {"": 1},
        {"\ud800": 1},
        {"gold\n": 1},
        {"a": 0},
        {"a": -1},
        {"a": math.inf},
        {"a": math.nan},
        {"a": True},
        {"a": "3"},
        {1: 1},
        ["a"],
        None,
        dict.fromkeys(map(str, range(1001)), 1),
    ],
)
def test_shares_are_checked(shares: Mapping[str, float]) -> None:
    with pytest.raises(InvalidArgumentError):
        Shares(shares, 1, 0, Counters())


@pytest.mark.parametrize("name", [None, "platinum", "", ["gold"], 3])
def test_a_tenant_must_be_known(name: object) -> None:
    shares = Shares({"gold": 3, "free": 1}, 1, 0, Counters())
    shares.check("gold")
    with pytest.raises(UnknownTenantError, match="shares for gold, free"):
        shares.check(name)


def test_the_tenants_that_an_error_lists_are_bounded() -> None:
    with pytest.raises(UnknownTenantError, match="19, and 980 more"):
        Shares(dict.fromkeys(map(str, range(1000)), 1), 1, 0, Counters()).check("x")


_ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.sampled_from("abc"), st.integers(1, 4), st.sampled_from([0.002, 0.05, math.inf])),
        st.tuples(st.just("run"), st.sampled_from([0.0, 1e-4, 0.01]), st.booleans()),
        st.tuples(st.just("lose"), st.booleans()),
        st.tuples(st.just("cancel"), st.integers(0, 50), st.booleans()),
        st.tuples(st.just("wait"), st.sampled_from([0.01, 10.0])),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(_ACTIONS)
def test_no_request_is_lost_or_given_twice_whatever_happens(actions: list[tuple[object, ...]]) -> None:
    loop = asyncio.new_event_loop()
    try:
        _check_conservation(Bench({"a": 1, "b": 2, "c": 0.5}, loop, limit=8, waiting=6, most=5), actions)
    finally:
        loop.close()


def _check_conservation(bench: Bench, actions: list[tuple[object, ...]]) -> None:
    submitted: list[tuple[Request, float]] = []
    for action in actions:
        match action:
            case "submit", str(tenant), int(size), float(timeout):
                request = bench.submit(tenant, size, timeout=timeout)
                if bench.was_taken:
                    submitted.append((request, timeout))
            case "run", float(cost), bool(is_measured):
                bench.run(cost=cost, is_measured=is_measured)
            case "lose", bool(was_launched):
                taken = bench.shares.take(bench.most)
                for request in taken:
                    request.is_launched = was_launched
                bench.shares.put_back(taken)
            case "cancel", int(place), bool(is_told) if submitted:
                request, _ = submitted[place % len(submitted)]
                if request.future.cancel() and is_told:
                    bench.shares.discard(request)
            case "wait", float(seconds):
                bench.now += seconds
        queues = [tenant.queue for tenant in bench.shares._tenants.values()]
        assert bench.shares.queued == sum(queue.queued for queue in queues)
        assert bench.shares.waiting == sum(queue.waiting for queue in queues)
        assert {tenant.name for tenant in bench.shares._backlog.values.values()} == {
            tenant.name for tenant in bench.shares._tenants.values() if tenant.queue.queued
        }
    while bench.shares.queued:
        before = bench.shares.queued + bench.shares.waiting
        bench.run()
        assert bench.shares.queued + bench.shares.waiting < before
    assert all(request.future.cancelled() or request.future.exception() is None or timeout < math.inf for request, timeout in submitted)
    assert bench.shares.waiting == 0
    assert len(set(bench.answered)) == len(bench.answered)
    assert sum(tenant.device_seconds for tenant in bench.shares.statistics()) >= 0


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(0.1, 10), min_size=2, max_size=5),
    st.lists(st.sampled_from([1, 2, 5, 8]), min_size=5, max_size=5),
    st.integers(0, 2**32),
)
def test_no_tenant_falls_behind_its_share_while_all_have_work(weights: list[float], sizes: list[int], seed: int) -> None:
    loop = asyncio.new_event_loop()
    try:
        bench = Bench({str(number): weight for number, weight in enumerate(weights)}, loop, most=16)
        costs = random.Random(seed)
        for _ in range(300):
            for number in range(len(weights)):
                while bench.shares._tenants[str(number)].queue.queued < 32:
                    bench.submit(str(number), sizes[number])
            bench.run(cost=costs.choice([1e-4, 1e-3, 2e-3]))
        clocks = [bench.seconds[str(number)] / weight for number, weight in enumerate(weights)]
        # No more apart than what one batch, of 16 items at most, takes.
        assert max(clocks) - min(clocks) <= 2 * 16 * 2e-3 / min(weights)
    finally:
        loop.close()
