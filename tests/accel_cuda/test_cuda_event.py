"""Marks of the CUDA backend on a driver that answers what it is told to: which are asked for, and what is known without asking."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from accel import AccelError, DriverError, FaultScope
from accel_cuda.core.event import CudaEvent
from accel_cuda.errors import NOT_READY

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
        self.driver = SimpleNamespace(
            query=self.query,
            hot=SimpleNamespace(event_create=lambda handle, flags: 0),
            CUevent_flags=SimpleNamespace(CU_EVENT_DISABLE_TIMING=2),
        )
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
        self.recorded = 0
        self.transfers = SimpleNamespace(finished=0, finish=self._finish)
        self.tickets: list[int] = []

    def _finish(self, ticket: int) -> None:
        self.tickets.append(ticket)
        self.transfers.finished = ticket


def recorded(context: Any, stream: Any, ticket: int = 0, event: CudaEvent | None = None) -> CudaEvent:
    event = event or CudaEvent(context)
    event.mark(stream.transfers, ticket)
    stream.recorded += 1
    context.numbers[id(event.handle)] = stream.recorded
    return event


def test_a_mark_that_is_passed_is_asked_for_once() -> None:
    context, stream = Context(), Stream()
    event = recorded(context, stream)
    assert not event.query()
    context.passed = 1
    assert event.query()
    assert event.query()
    assert context.asked == [1, 1]


def test_copies_land_with_their_own_mark_or_a_later_one() -> None:
    context, stream = Context(), Stream()
    events = [recorded(context, stream, ticket) for ticket in range(1, 5)]
    context.passed = 4
    assert events[0].query()
    assert events[3].query()
    assert events[1].query()
    assert stream.tickets == [1, 4]


def test_what_was_seen_to_be_passed_stays_so_after_a_fault() -> None:
    context, stream = Context(), Stream()
    first, second, late = (recorded(context, stream) for _ in range(3))
    context.passed = 2
    assert first.query()
    context.fails = True
    with pytest.raises(DriverError):
        late.query()
    assert first.query()
    with pytest.raises(DriverError):
        second.query()
    assert context.asked == [1, 3], "after the fault the driver knows nothing else"


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
            assert waiting[0].query() == (context.numbers[id(waiting[0].handle)] <= context.passed), f"{seed=}"
            if not waiting[0].has_passed:
                break
            free.append(waiting.pop(0))
