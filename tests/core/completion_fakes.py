"""A device whose events end when the test says so, and marks that write down how they ended."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

from accel.backend import DeviceDescription
from accel.errors import AccelError

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE = 10.0


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

    description = DeviceDescription("fake", 0, "fake", "FAKE-0")

    def __init__(self) -> None:
        self.fault: AccelError | None = None
        self.streams: list[Stream] = []

    def create_stream(self, *, priority: int = 0) -> Stream:
        if self.fault is not None:
            raise self.fault.clone()
        self.streams.append(Stream(self))
        return self.streams[-1]


class Mark:
    """A watched mark that writes down how it ended."""

    stream = None

    def __init__(self, event: Any, lane: object = "lane", kind: object = "kind") -> None:
        self.event = event
        self.lane = lane
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
