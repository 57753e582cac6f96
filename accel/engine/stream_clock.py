"""The clock of one stream: how far its work has come, and how other streams wait for it."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from accel.memory.usage import Timeline

if TYPE_CHECKING:
    from accel.backend import AccelDevice, AccelEvent, AccelStream

__all__ = ["EventPool", "StreamClock"]


class EventPool:
    """Events that wait to be recorded again: making one costs more than recording one."""

    __slots__ = ("_all", "_device", "_free")

    def __init__(self, device: AccelDevice) -> None:
        self._device = device
        self._free: list[AccelEvent] = []
        self._all: list[AccelEvent] = []

    def take(self) -> AccelEvent:
        """Return an event that is not in use."""
        if self._free:
            return self._free.pop()
        event = self._device.create_event()
        self._all.append(event)
        return event

    def give(self, event: AccelEvent) -> None:
        """Take a passed event back."""
        self._free.append(event)

    def close(self) -> None:
        """Close every event ever made."""
        for event in self._all:
            event.close()
        self._all.clear()
        self._free.clear()


class StreamClock(Timeline):
    """The numbered work of one stream.

    Sequence numbers are issued when an op is dispatched, in the device's order; :meth:`advance`
    says which have reached the stream.

    Parameters
    ----------
    name
        For debugging.
    stream
        The stream.
    events
        Marks for it.
    """

    __slots__ = ("_waiters", "events", "stream")

    def __init__(self, name: str, stream: AccelStream, events: EventPool) -> None:
        super().__init__(name)
        self.stream = stream
        self.events = events
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    def advance(self, seq: int) -> None:
        """Say that everything up to ``seq`` is in the stream, or never will be."""
        if seq > self.enqueued:
            self.enqueued = seq
        if self._waiters:
            self._wake()

    def _wake(self) -> None:
        still: deque[tuple[int, asyncio.Future[None]]] = deque()
        for seq, waiter in self._waiters:
            if waiter.done():
                continue
            if seq <= self.enqueued:
                waiter.set_result(None)
            else:
                still.append((seq, waiter))
        self._waiters = still

    async def wait_enqueued(self, seq: int) -> None:
        """Wait until ``seq`` is in the stream."""
        while self.enqueued < seq:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append((seq, waiter))
            await waiter

    def wait_for(self, other: Timeline, seq: int) -> None:
        """Make later work of this stream wait for the other's ``seq``, which is in its stream.

        The host does not wait.
        """
        if other.completed >= seq or self.waited.get(other, 0) >= seq or not isinstance(other, StreamClock):
            return
        # A new event marks all the other stream has so far: later than needed, never too early, and
        # known to be so.
        event = self.events.take()
        try:
            if other.stream.record(event):
                other.complete(other.enqueued)
            else:
                self.stream.wait(event)
                self.waited[other] = other.enqueued
        finally:
            # A recorded wait keeps the mark as it was; the event may be recorded anew.
            self.events.give(event)
