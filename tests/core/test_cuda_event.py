"""Marks of the CUDA backend on a driver that answers what it is told to: which are asked for, and what is known without asking."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from accel import AccelError, DriverError, FaultScope
from accel_cuda.errors import NOT_READY
from accel_cuda.event import CudaEvent

_FAULT = 700


class Context:
    """A device on which as many marks are passed as the test says."""

    def __init__(self) -> None:
        self.passed = 0
        self.asked: list[int] = []
        self.fails = False
        self.fault: AccelError | None = None
        self.is_alive = False
        self.section = self
        self.driver = SimpleNamespace(query=self.query, hot=SimpleNamespace(event_create=lambda handle, flags: 0))
        self.numbers: dict[int, int] = {}

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def check(self, status: int, call: str) -> None:
        assert status == 0, call

    def query(self, handle: Any) -> int:
        number = self.numbers[id(handle)]
        self.asked.append(number)
        if self.fails:
            return _FAULT
        return 0 if number <= self.passed else NOT_READY

    def failure(self, status: int, call: str) -> AccelError:
        self.fault = DriverError("illegal address", code=status, scope=FaultScope.PROCESS)
        return self.fault


class Stream:
    def __init__(self) -> None:
        self.recorded = self.passed = self.asked = 0
        self.newest: CudaEvent | None = None
        self.transfers = SimpleNamespace(finished=0, finish=self._finish)
        self.tickets: list[int] = []

    def _finish(self, ticket: int) -> None:
        self.tickets.append(ticket)
        self.transfers.finished = ticket


def recorded(context: Any, stream: Any, ticket: int = 0, event: CudaEvent | None = None) -> CudaEvent:
    event = event or CudaEvent(context)
    event.mark(stream, ticket)
    context.numbers[id(event.handle)] = stream.recorded
    return event


def test_of_many_marks_that_are_passed_two_are_asked_for() -> None:
    context, stream = Context(), Stream()
    events = [recorded(context, stream, ticket) for ticket in range(1, 65)]
    context.passed = 64
    assert all(event.query() for event in events)
    assert context.asked == [1, 64]
    assert stream.tickets == list(range(1, 65)), "copies land with their own marks"


def test_where_the_last_is_not_passed_it_is_asked_for_once() -> None:
    context, stream = Context(), Stream()
    events = [recorded(context, stream) for _ in range(8)]
    context.passed = 7
    assert [event.query() for event in events] == [True] * 7 + [False]
    assert context.asked == [1, 8, 2, 3, 4, 5, 6, 7, 8]


def test_what_is_known_to_be_passed_stays_so_after_a_fault() -> None:
    context, stream = Context(), Stream()
    events = [recorded(context, stream) for _ in range(3)]
    context.passed = 3
    assert events[0].query()
    late = recorded(context, stream)
    context.fails = True
    with pytest.raises(DriverError):
        late.query()
    assert events[1].query()
    assert events[2].query()


def test_a_mark_that_is_recorded_in_another_stream_meanwhile_says_nothing_of_the_first() -> None:
    context, first, second = Context(), Stream(), Stream()
    oldest, last = recorded(context, first), recorded(context, first)
    recorded(context, second, event=last)
    context.passed = 1
    assert oldest.query()
    assert context.asked == [1]
    assert first.passed == 0


def test_marks_never_pass_before_their_stream() -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    context, stream = Context(), Stream()
    waiting: list[CudaEvent] = []
    free: list[CudaEvent] = []
    for _ in range(3000):
        if rng.random() < 0.5:
            waiting.append(recorded(context, stream, event=free.pop() if free and rng.random() < 0.7 else None))
        context.passed = min(stream.recorded, context.passed + rng.randrange(3))
        while waiting and rng.random() < 0.8:
            assert waiting[0].query() == (waiting[0].number <= context.passed), f"{seed=}"
            if not waiting[0].has_passed:
                break
            free.append(waiting.pop(0))
