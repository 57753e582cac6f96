"""The clock of one stream: how far its work has come, and how other streams wait for it."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from accel.memory.usage import Timeline
from accel.storage.closing import close_all

if TYPE_CHECKING:
    from accel.backend import AccelDevice, AccelEvent, AccelStream

__all__ = ["EventPool", "StreamClock"]


class EventPool:
    """The events of a context, to be reused: creating one costs more than recording one."""

    __slots__ = ("_all", "_device", "_free")

    def __init__(self, device: AccelDevice) -> None:
        self._device = device
        self._free: list[AccelEvent] = []
        self._all: list[AccelEvent] = []

    def acquire(self) -> AccelEvent:
        """Return an event that is not in use, a new one if need be; :meth:`release` returns it."""
        if self._free:
            return self._free.pop()
        event = self._device.create_event()
        self._all.append(event)
        return event

    def release(self, event: AccelEvent) -> None:
        """Take an event back, which its stream has passed."""
        self._free.append(event)

    def close(self) -> None:
        """Close every event ever made."""
        events, self._all, self._free = self._all, [], []
        close_all(events)


class StreamClock(Timeline):
    """The numbered work of one stream.

    Sequence numbers are issued when an op is dispatched, in the device's order; :meth:`advance`
    says which have reached the stream.

    Parameters
    ----------
    name
        Shown in debugging.
    stream
        The stream.
    events
        The pool of the events that mark it.
    """

    __slots__ = ("_waiters", "events", "stream")

    def __init__(self, name: str, stream: AccelStream, events: EventPool) -> None:
        super().__init__(name)
        self.stream = stream
        self.events = events
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    def advance(self, seq: int) -> None:
        """Set that all ops up to ``seq`` are in the stream, or will never be enqueued.

        ``Lane._enqueue`` repeats this inline, for each op that it enqueues.
        """
        if seq > self.enqueued:
            self.enqueued = seq
        if self._waiters:
            self._wake()

    def _wake(self) -> None:
        """Wake the waiters of :meth:`wait_enqueued` whose numbers are in the stream."""
        still_waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        for seq, waiter in self._waiters:
            if waiter.done():  # its wait was cancelled
                continue
            if seq <= self.enqueued:
                waiter.set_result(None)
            else:
                still_waiting.append((seq, waiter))
        self._waiters = still_waiting

    async def wait_enqueued(self, seq: int) -> None:
        """Wait until ``seq`` is in the stream, or will never be: see :meth:`advance`."""
        while self.enqueued < seq:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append((seq, waiter))
            await waiter

    def wait_for(self, other: Timeline, seq: int) -> None:
        """Make later work of this stream wait on the device for the other's ``seq``.

        ``seq`` must be in the other stream already. The host does not wait. Enqueues nothing where
        ``seq`` has completed, or is waited for already. If the other stream is found idle, all of
        its work counts as completed.
        """
        if other.completed >= seq or self.waited.get(other, 0) >= seq:
            return
        assert isinstance(other, StreamClock), "a timeline without a stream completes what is enqueued"
        # The event marks everything that is in the other stream now: perhaps more than `seq`, so
        # that later waits for that are needless.
        event = self.events.acquire()
        try:
            if other.stream.record(event):  # passed at once: the other stream is idle
                other.complete(other.enqueued)
            else:
                self.stream.wait(event)
                self.waited[other] = other.enqueued
        finally:
            # The enqueued wait is for this recording: the event may be recorded for another.
            self.events.release(event)
