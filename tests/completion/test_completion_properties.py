"""Every mark ends exactly once, and rightly, whatever happens to it in whatever order, under every strategy."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
import uvloop
from hypothesis import given, note, settings
from hypothesis import strategies as st

from accel.backend import DeviceDescription, Injection
from accel.completion import AdaptiveCompletion, CompletionStrategy, HostFnCompletion, PolledCompletion, SyncCompletion
from accel.cpu.backend import CpuBackend
from accel.errors import AccelError, ClosedError, DriverError, FaultScope

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.completion import Watcher

STRATEGIES = [
    AdaptiveCompletion(),
    PolledCompletion(),
    PolledCompletion(interval=0),
    SyncCompletion(),
    HostFnCompletion(watch_interval=1e-3),
]
LANES = 3
PATIENCE = 10.0

# "watch": enqueue work in a lane; "pass": the lane's oldest unfinished work ends; "cancel", "expire": the waiter of a mark goes away;
# "turn": the loop runs.
steps = st.lists(
    st.tuples(st.sampled_from(["watch", "watch", "watch", "pass", "pass", "cancel", "expire", "turn", "turn"]), st.integers(0, LANES - 1)),
    max_size=40,
)
ending = st.sampled_from(["drain", "fault", "fault and abandon", "abandon"])


class Device:
    """A device of manual lanes: work ends when a step says so."""

    description = DeviceDescription("fake", 0, "fake", "FAKE-0")
    shares_processor = False

    def __init__(self) -> None:
        self.fault: AccelError | None = None
        self.changed = threading.Condition()
        self.lanes: list[list[Event]] = [[] for _ in range(LANES)]

    def create_stream(self, *, library: str = "") -> SideStream:
        if self.fault is not None:
            raise self.fault.clone()
        return SideStream()

    def finish(self, lane: int) -> None:
        """End the lane's oldest work that has not ended."""
        for event in self.lanes[lane]:
            if not event.passed:
                with self.changed:
                    event.passed = True
                    self.changed.notify_all()
                for function in event.functions:
                    function()
                return

    def poison(self) -> None:
        with self.changed:
            self.fault = DriverError("poisoned", code=700, scope=FaultScope.CONTEXT)
            self.changed.notify_all()


class Event:
    def __init__(self, device: Device, lane: int) -> None:
        self.device = device
        self.passed = False
        self.functions: list[Callable[[], None]] = []
        device.lanes[lane].append(self)

    def query(self) -> bool:
        if not self.passed and self.device.fault is not None:
            raise self.device.fault.clone()
        return self.passed

    def synchronize(self) -> None:
        with self.device.changed:
            self.device.changed.wait_for(lambda: self.passed or self.device.fault is not None, PATIENCE)
        self.query()


class SideStream:
    event: Event

    def wait(self, event: Event) -> None:
        self.event = event

    def launch_host_function(self, function: Callable[[], None]) -> None:
        self.event.functions.append(function)
        if self.event.passed:
            function()

    def close(self, *, abandon: bool = False) -> None:
        pass


class Mark:
    """A mark with a waiter that may be gone before it ends."""

    enqueued_at = 0.0

    def __init__(self, event: Any, lane: object, order: list[Mark], stream: Any = None) -> None:
        self.event = event
        self.stream = stream
        self.lane = lane
        self.kind = lane
        self.ends: list[AccelError | None] = []
        self.waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._order = order

    def complete(self) -> None:
        assert self.event.query() is True
        self.ends.append(None)
        self._order.append(self)
        if not self.waiter.done():
            self.waiter.set_result(None)

    def fail(self, error: AccelError) -> None:
        self.ends.append(error)
        self._order.append(self)
        if not self.waiter.done():
            self.waiter.set_exception(error)
            self.waiter.exception()


class Run:
    """One device, its watcher, and all marks ever watched."""

    def __init__(self, strategy: CompletionStrategy) -> None:
        self.device = Device()
        self.watcher: Watcher = strategy.open(self.device, asyncio.get_running_loop(), {})  # type: ignore[arg-type]
        self.marks: list[Mark] = []
        self.order: list[Mark] = []

    async def step(self, what: str, number: int) -> None:
        if what == "watch":
            mark = Mark(Event(self.device, number), number, self.order)
            self.marks.append(mark)
            self.watcher.watch(mark)
        elif what == "pass":
            self.device.finish(number)
        elif what == "turn":
            await asyncio.sleep(0)
        elif self.marks:
            waiter = self.marks[number % len(self.marks)].waiter
            if what == "cancel":
                waiter.cancel()
            elif not waiter.done():
                waiter.set_exception(TimeoutError())
                waiter.exception()

    async def finish(self, how: str) -> None:
        if how == "drain":
            closing = asyncio.ensure_future(self.watcher.aclose())
            for number in range(LANES):
                for _ in self.device.lanes[number]:
                    self.device.finish(number)
                    await asyncio.sleep(0)
            await closing
        elif how == "abandon":
            await self.watcher.aclose(abandon=True)
            self.device.poison()  # ends the threads that still block
        else:
            self.device.poison()
            await self.watcher.aclose(abandon=how.endswith("abandon"))
        for _ in range(3):
            await asyncio.sleep(0)

    def check(self, how: str) -> None:
        for mark in self.marks:
            assert len(mark.ends) == 1, f"ended {len(mark.ends)} times"
            assert mark.waiter.done()
            if mark.event.passed:
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


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@settings(max_examples=40, deadline=None)
@given(plan=steps, how=ending, loop=st.sampled_from(["asyncio", "debug", "uvloop"]))
def test_every_mark_ends_once_and_rightly(strategy: CompletionStrategy, plan: list[tuple[str, int]], how: str, loop: str) -> None:
    note(f"{strategy} on {loop}")
    with asyncio.Runner(debug=loop == "debug", loop_factory=uvloop.new_event_loop if loop == "uvloop" else None) as runner:
        runner.run(play(strategy, plan, how))


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
            marks[position].waiter.cancel()
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
@given(plan=st.lists(st.tuples(st.integers(0, 1), st.booleans()), max_size=8), fault_at=st.none() | st.integers(0, 7), shares=st.booleans())
def test_marks_of_real_streams_end_once_and_rightly(
    strategy: CompletionStrategy, plan: list[tuple[int, bool]], fault_at: int | None, shares: bool
) -> None:
    asyncio.run(play_on_cpu(strategy, plan, fault_at, shares=shares))
