"""Events, streams and marks that end when a test says so, for tests of completion."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

from accel.backend import DeviceDescription
from accel.completion import (
    AdaptiveCompletion,
    CompletionStrategy,
    HostFnCompletion,
    PolledCompletion,
    SyncCompletion,
    Watcher,
)
from accel.errors import AccelError

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE = 10.0
STRATEGIES = [
    AdaptiveCompletion(),
    PolledCompletion(),
    PolledCompletion(interval=0),
    SyncCompletion(),
    HostFnCompletion(),
    HostFnCompletion(watch_interval=1e-4),
]


class Event:
    """An event that ends when the test says so."""

    def __init__(self) -> None:
        self.queries = 0
        self.outcome: BaseException | bool = False
        self._ended = threading.Event()
        self._listeners: list[Callable[[], None]] = []

    def end(self, outcome: BaseException | bool = True) -> None:
        self.outcome = outcome
        self._ended.set()
        if outcome is True:
            for listener in self._listeners:
                listener()

    def query(self) -> bool:
        self.queries += 1
        if isinstance(self.outcome, AccelError):
            raise self.outcome.clone()
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome

    def synchronize(self) -> None:
        assert self._ended.wait(PATIENCE)
        self.query()

    def notify(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)
        if self.outcome is True:
            listener()

    def close(self) -> None:
        pass


class Stream:
    """A stream that is only ever waited in."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._event = Event()
        self.closed: list[bool] = []

    def wait(self, event: Event) -> None:
        if self._device.fault is not None:
            raise self._device.fault.clone()
        self._event = event

    def launch_host_function(self, function: Callable[[], None]) -> None:
        self._event.notify(function)

    def close(self, *, abandon: bool = False) -> None:
        self.closed.append(abandon)


class Device:
    """As much of a device as completion uses."""

    description, shares_processor = DeviceDescription("fake", 0, "fake", "FAKE-0"), False

    def __init__(self) -> None:
        self.fault: AccelError | None = None
        self.streams: list[Stream] = []

    def create_stream(self, *, library: str = "") -> Stream:
        if self.fault is not None:
            raise self.fault.clone()
        self.streams.append(Stream(self))
        return self.streams[-1]


class Mark:
    """A watched mark that writes down how it ended."""

    def __init__(self, event: Any, lane: object = "lane", kind: object = "kind", stream: Any = None) -> None:
        self.event = event
        self.lane = lane
        self.stream = stream
        self.kind = kind
        self.enqueued_at = time.perf_counter()
        self.ends: list[AccelError | None] = []
        self.ended = asyncio.get_running_loop().create_future()
        self._thread = threading.current_thread()

    def complete(self) -> None:
        assert self.event.query() is True
        self._end(None)

    def fail(self, error: AccelError) -> None:
        self._end(error)

    def _end(self, error: AccelError | None) -> None:
        assert threading.current_thread() is self._thread
        self.ends.append(error)
        if not self.ended.done():
            self.ended.set_result(None)


def completion_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(("accel-sync", "accel-host-fn"))]


def open_watcher(strategy: CompletionStrategy, device: Device | None = None, *, shared: dict[Any, Any] | None = None) -> Watcher:
    return strategy.open(device or Device(), asyncio.get_running_loop(), {} if shared is None else shared)  # type: ignore[arg-type]


def watched(watcher: Watcher, lane: object = "lane") -> tuple[Event, Mark]:
    mark = Mark(Event(), lane)
    watcher.watch(mark)
    return mark.event, mark


async def threads_gone() -> None:
    """An abandoned watcher does not wait for its threads."""
    deadline = time.monotonic() + PATIENCE
    while completion_threads():
        assert time.monotonic() < deadline, completion_threads()
        await asyncio.sleep(0)


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)
