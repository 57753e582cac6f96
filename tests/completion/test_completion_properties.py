"""Every mark ends exactly once, and rightly, whatever happens to it in whatever order, under every strategy."""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import TYPE_CHECKING, Any

import pytest
import uvloop
from hypothesis import given, note, settings
from hypothesis import strategies as st

from accel.backend import Injection
from accel.completion import AdaptiveCompletion, CompletionStrategy, HostFnCompletion, PolledCompletion, SyncCompletion
from accel.cpu.backend import CpuBackend
from accel.errors import AccelError, ClosedError, DriverError, FaultScope
from tests import completion_support
from tests.completion_support import PATIENCE, Device, Event

if TYPE_CHECKING:
    from collections.abc import Coroutine

STRATEGIES = [
    AdaptiveCompletion(),
    PolledCompletion(),
    PolledCompletion(interval=0),
    SyncCompletion(),
    HostFnCompletion(watch_interval=1e-3),
]
LANES = 3

# "watch": enqueue work in a lane; "pass": the lane's oldest unfinished work ends; "cancel", "expire": the waiter of a mark goes away;
# "turn": the loop runs.
steps = st.lists(
    st.tuples(st.sampled_from(["watch", "watch", "watch", "pass", "pass", "cancel", "expire", "turn", "turn"]), st.integers(0, LANES - 1)),
    max_size=40,
)
ending = st.sampled_from(["drain", "fault", "fault and abandon", "abandon"])


class Mark(completion_support.Mark):
    """A mark with a waiter that may be gone before it ends; writes down when it ended among the others."""

    def __init__(self, event: Any, lane: object, order: list[Mark], stream: Any = None) -> None:
        super().__init__(event, lane, lane, stream)
        self._order = order

    def _end(self, error: AccelError | None) -> None:
        super()._end(error)
        self._order.append(self)


class Run:
    """One device of manual lanes, whose work ends when a step says so; its watcher, and all marks ever watched."""

    def __init__(self, strategy: CompletionStrategy) -> None:
        self.device = Device()
        self.lanes: list[list[Event]] = [[] for _ in range(LANES)]
        self.watcher = completion_support.open_watcher(strategy, self.device)
        self.marks: list[Mark] = []
        self.order: list[Mark] = []

    def end_oldest(self, lane: int) -> None:
        """End the lane's oldest work that has not ended."""
        event = next((event for event in self.lanes[lane] if event.outcome is False), None)
        if event is not None:
            event.end()

    def poison(self) -> None:
        self.device.fault = DriverError("poisoned", code=700, scope=FaultScope.CONTEXT)
        for event in itertools.chain(*self.lanes):
            if event.outcome is False:
                event.end(self.device.fault)

    async def step(self, what: str, number: int) -> None:
        if what == "watch":
            self.lanes[number].append(Event())
            self.marks.append(Mark(self.lanes[number][-1], number, self.order))
            self.watcher.watch(self.marks[-1])
        elif what == "pass":
            self.end_oldest(number)
        elif what == "turn":
            await asyncio.sleep(0)
        elif self.marks:
            waiter = self.marks[number % len(self.marks)].ended
            if what == "cancel":
                waiter.cancel()
            elif not waiter.done():
                waiter.set_exception(TimeoutError())
                waiter.exception()

    async def finish(self, how: str) -> None:
        if how == "drain":
            closing = asyncio.ensure_future(self.watcher.aclose())
            for number in range(LANES):
                for _ in self.lanes[number]:
                    self.end_oldest(number)
                    await asyncio.sleep(0)
            await closing
        elif how == "abandon":
            await self.watcher.aclose(abandon=True)
            self.poison()  # ends the threads that still block
        else:
            self.poison()
            await self.watcher.aclose(abandon=how.endswith("abandon"))
        for _ in range(3):
            await asyncio.sleep(0)

    def check(self, how: str) -> None:
        for mark in self.marks:
            assert len(mark.ends) == 1, f"ended {len(mark.ends)} times"
            assert mark.ended.done()
            if mark.event.outcome is True:
                assert mark.ends == [None], "work that ended was failed"
            elif how == "abandon":
                assert isinstance(mark.ends[0], ClosedError)
            else:
                assert isinstance(mark.ends[0], DriverError)
                assert mark.ends[0].code == 700
        errors = [id(mark.ends[0]) for mark in self.marks if mark.ends[0] is not None]
        assert len(set(errors)) == len(errors), "two waiters share an error"
        for lane in range(LANES):
            assert [mark for mark in self.order if mark.lane == lane] == [mark for mark in self.marks if mark.lane == lane]


async def play(strategy: CompletionStrategy, plan: list[tuple[str, int]], how: str) -> None:
    run = Run(strategy)
    for what, number in plan:
        await run.step(what, number)
    await run.finish(how)
    run.check(how)


def on_a_loop(kind: str, main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(debug=kind == "debug", loop_factory=uvloop.new_event_loop if kind == "uvloop" else None) as runner:
        runner.run(main)


loops = st.sampled_from(["asyncio", "debug", "uvloop"])


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@settings(max_examples=40, deadline=None)
@given(plan=steps, how=ending, loop=loops)
def test_every_mark_ends_once_and_rightly(strategy: CompletionStrategy, plan: list[tuple[str, int]], how: str, loop: str) -> None:
    note(f"{strategy} on {loop}")
    on_a_loop(loop, play(strategy, plan, how))


async def play_on_cpu(strategy: CompletionStrategy, plan: list[tuple[int, bool]], fault_at: int | None, *, shares: bool) -> None:
    """Run work on two real streams, in lockstep with latches; poison the context while item ``fault_at`` runs."""
    device = CpuBackend().open(0)
    # Also watched as if it were a device of its own, by the poller.
    device.shares_processor = shares
    watcher = strategy.open(device, asyncio.get_running_loop(), {})
    streams = [device.create_stream(), device.create_stream()]
    marks: list[Mark] = []
    latches: list[threading.Event] = []
    for number, _ in plan:
        latch = threading.Event()
        streams[number].submit(lambda latch=latch: latch.wait(PATIENCE), 1.0)  # type: ignore[misc]
        mark = Mark(device.create_event(), number, [], streams[number])
        streams[number].record(mark.event)
        watcher.watch(mark)
        marks.append(mark)
        latches.append(latch)
    for position, (number, is_cancelled) in enumerate(plan):
        if position == fault_at:
            device.inject(Injection("poison"), device.create_stream())
            break
        if is_cancelled:
            marks[position].ended.cancel()
        latches[position].set()
        await asyncio.to_thread(marks[position].event.synchronize)
        assert marks[position].event.query(), number
    passed = len(plan) if fault_at is None else min(fault_at, len(plan))
    await watcher.aclose()
    for latch in latches:
        latch.set()
    await asyncio.to_thread(device.close)
    assert [mark.ends for mark in marks[:passed]] == [[None]] * passed
    for mark in marks[passed:]:
        assert [error.scope for error in mark.ends if error is not None] == [FaultScope.CONTEXT]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@settings(max_examples=10, deadline=None)
@given(
    plan=st.lists(st.tuples(st.integers(0, 1), st.booleans()), max_size=8),
    fault_at=st.none() | st.integers(0, 7),
    shares=st.booleans(),
    loop=loops,
)
def test_marks_of_real_streams_end_once_and_rightly(
    strategy: CompletionStrategy, plan: list[tuple[int, bool]], fault_at: int | None, shares: bool, loop: str
) -> None:
    on_a_loop(loop, play_on_cpu(strategy, plan, fault_at, shares=shares))
