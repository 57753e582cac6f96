"""The queue of a batcher: its order, its bound, and what leaves it early."""

from __future__ import annotations

import asyncio
import math
import tracemalloc
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from accel.patterns.requests import Request, RequestQueue
from accel.telemetry import Probes, Service

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SERVICE = Service("test", "", Probes(), lambda: None)


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


@pytest.fixture
def make(loop: asyncio.AbstractEventLoop) -> Callable[..., Request]:
    """Make a request with the next number, which is its item too, submitted at the time of that number."""
    return _maker(loop)


def _maker(loop: asyncio.AbstractEventLoop) -> Callable[..., Request]:
    made = 0

    def make(size: int = 1, *, home: str | None = None, deadline: float = math.inf) -> Request:
        nonlocal made
        made += 1
        request = Request(made, size, loop.create_future(), float(made), is_idempotent=True, service=_SERVICE, number=made)
        request.home, request.deadline = home, deadline
        return request

    return make


def _numbers(requests: list[Request]) -> list[int]:
    return [request.number for request in requests]


def test_a_taker_takes_its_own_requests_and_those_of_all_in_one_order(make: Callable[..., Request]) -> None:
    queue = RequestQueue(10, 0)
    for home in (None, "a", "b", None, "a"):
        assert queue.offer(make(home=home))
    assert _numbers(queue.take(10, "a")) == [1, 2, 4, 5]
    assert queue.queued == 1
    assert queue.take(10, "a") == []
    assert queue.take(10) == []
    assert _numbers(queue.take(10, "b")) == [3]


def test_what_is_put_back_comes_first_in_its_order_whatever_the_bound(make: Callable[..., Request]) -> None:
    queue = RequestQueue(3, 0)
    for _ in range(3):
        queue.offer(make())
    taken = queue.take(3)
    for _ in range(3):
        queue.offer(make())
    queue.put_back(taken[:2])
    assert queue.queued == 5
    assert not queue.offer(make())
    assert _numbers(queue.take(10)) == [1, 2, 4, 5, 6]


def test_a_request_that_is_larger_than_what_may_be_taken_is_taken_alone(make: Callable[..., Request]) -> None:
    queue = RequestQueue(10, 0)
    for size in (4, 1, 3):
        queue.offer(make(size))
    assert [_numbers(queue.take(2)) for _ in range(3)] == [[1], [2], [3]]


def test_requests_wait_for_room_in_order_also_for_that_which_a_cancellation_makes(make: Callable[..., Request]) -> None:
    queue = RequestQueue(2, 3)
    requests = [make() for _ in range(6)]
    assert [queue.offer(request) for request in requests] == [True] * 5 + [False]
    queue.discard(requests[3])
    queue.discard(requests[0])
    assert (queue.queued, queue.waiting) == (2, 1)
    assert _numbers(queue.take(1)) == [2]
    assert _numbers(queue.clear()) == [3, 5]
    assert (queue.queued, queue.waiting, queue.oldest()) == (0, 0, None)


def test_the_earliest_deadline_is_taken_first_behind_what_was_launched_before(make: Callable[..., Request]) -> None:
    queue = RequestQueue(10, 0, by_deadline=True)
    retried = make()
    retried.is_launched = True
    for deadline in (math.inf, 9.0, 3.0, 9.0, math.inf):
        queue.offer(make(deadline=deadline))
    assert queue.oldest() == 2.0
    queue.put_back([retried])
    assert queue.oldest() == 1.0
    assert _numbers(queue.take(10)) == [1, 4, 3, 5, 2, 6]


def test_requests_of_a_taker_that_went_are_given_to_others_in_their_order(make: Callable[..., Request]) -> None:
    queue = RequestQueue(4, 2)
    requests = [make(home="a") for _ in range(3)] + [make(home="b"), make(home="a")]
    for place, request in enumerate(requests):
        request.routing_key = place
        queue.offer(request)
    queue.rehome("a", lambda key: None if key == 1 else "b")
    assert (queue.queued, queue.waiting) == (4, 1)
    assert queue.take(10, "a") == requests[1:2]
    assert _numbers(queue.take(10, "b")) == [1, 3, 4, 5]


def test_a_storm_of_cancellations_leaves_nothing_behind(make: Callable[..., Request]) -> None:
    queue = RequestQueue(10, 10, by_deadline=True)
    kept = [make(deadline=1e9 + n) for n in range(3)]
    for request in kept:
        queue.offer(request)
    tracemalloc.start()
    try:
        for n in range(20_000):
            request = make(deadline=float(n % 97))
            queue.offer(request)
            queue.discard(request)
        del request
        assert tracemalloc.get_traced_memory()[0] < 100_000
    finally:
        tracemalloc.stop()
    assert queue.take(10) == kept


_HOMES = st.sampled_from([None, "a", "b"])
_LIMIT, _WAITING_LIMIT = 6, 4


class _Compared(RuleBasedStateMachine):
    """The queue beside lists that are sorted anew each time."""

    @initialize(by_deadline=st.booleans())
    def begin(self, by_deadline: bool) -> None:
        self.loop = asyncio.new_event_loop()
        self.make = _maker(self.loop)
        self.by_deadline = by_deadline
        self.queue = RequestQueue(_LIMIT, _WAITING_LIMIT, by_deadline=by_deadline)
        self.inside: list[Request] = []
        self.waiting: list[Request] = []
        self.taken: list[Request] = []

    @rule(home=_HOMES, items=st.integers(1, 3), deadline=st.sampled_from([1.0, 2.0, math.inf]))
    def offer(self, home: str | None, items: int, deadline: float) -> None:
        request = self.make(items, home=home, deadline=deadline)
        has_room = not self.waiting and _items(self.inside) + items <= _LIMIT
        may_wait = _items(self.waiting) + items <= _WAITING_LIMIT
        assert self.queue.offer(request) is (has_room or may_wait)
        if has_room:
            self.inside.append(request)
        elif may_wait:
            self.waiting.append(request)

    @rule(taker=_HOMES, left=st.integers(1, 5), most=st.integers(1, 5))
    def take(self, taker: str | None, left: int, most: int) -> None:
        found = self.queue.take(left, taker, most)
        expected: list[Request] = []
        for request in sorted((request for request in self.inside if request.home in (None, taker)), key=self.order):
            if len(expected) == most or (expected and request.size > left and not request.future.done()):
                break
            self.inside.remove(request)
            if not request.future.done():
                left -= request.size
                expected.append(request)
        self.admit()
        assert found == expected
        for request in expected:
            request.is_launched = True
        self.taken += expected

    @rule(place=st.integers(0, 30), is_told=st.booleans())
    def cancel(self, place: int, is_told: bool) -> None:
        known = [*self.inside, *self.waiting, *self.taken]
        if not known:
            return
        request = known[place % len(known)]
        request.future.cancel()
        if is_told:
            self.queue.discard(request)
            for requests in (self.inside, self.waiting):
                if request in requests:
                    requests.remove(request)
                    self.admit()

    @rule(count=st.integers(1, 3))
    def put_back(self, count: int) -> None:
        again, self.taken = self.taken[:count], self.taken[count:]
        self.inside += again
        self.queue.put_back(again)

    @rule(taker=st.sampled_from(["a", "b"]), other=_HOMES)
    def rehome(self, taker: str, other: str | None) -> None:
        self.queue.rehome(taker, lambda key: other)
        assert other == taker or not any(request.home == taker for request in self.inside + self.waiting)

    def order(self, request: Request) -> tuple[float, int]:
        if not self.by_deadline:
            return 0.0, request.number
        return -math.inf if request.is_launched else request.deadline, request.number

    def admit(self) -> None:
        while self.waiting and _items(self.inside) + self.waiting[0].size <= _LIMIT:
            self.inside.append(self.waiting.pop(0))

    @invariant()
    def has_the_same(self) -> None:
        assert (self.queue.queued, self.queue.waiting) == (_items(self.inside), _items(self.waiting))
        assert self.queue.oldest() == min([request.since for request in self.inside], default=None)

    def teardown(self) -> None:
        assert sorted(_numbers(self.queue.clear())) == sorted(_numbers(self.inside + self.waiting))
        self.loop.close()


def _items(requests: list[Request]) -> int:
    return sum(request.size for request in requests)


TestCompared = _Compared.TestCase
TestCompared.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
