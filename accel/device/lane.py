"""A lane: one stream with its compute interface, its clock, and the marks by which the loop learns how far it has come."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING

from accel.memory.usage import Timeline

if TYPE_CHECKING:
    from collections.abc import Hashable

    from accel.backend import AccelDevice, AccelEvent, AccelStream
    from accel.compute import ComputeBackend
    from accel.device.context import Context
    from accel.device.submission import Submission
    from accel.dtype import DType
    from accel.errors import AccelError

__all__ = ["EventPool", "Lane", "Mark", "prediction_key"]


class EventPool:
    """Events that wait to be recorded again: making one costs more than recording one."""

    __slots__ = ("_all", "_device", "_free")

    def __init__(self, device: AccelDevice) -> None:
        self._device = device
        self._free: list[AccelEvent] = []
        self._all: list[AccelEvent] = []

    def take(self) -> AccelEvent:
        """Return an event that nobody uses."""
        if self._free:
            return self._free.pop()
        event = self._device.create_event()
        self._all.append(event)
        return event

    def give(self, event: AccelEvent) -> None:
        """Take an event back that has been passed."""
        self._free.append(event)

    def close(self) -> None:
        """Close every event ever made."""
        for event in self._all:
            event.close()
        self._all.clear()
        self._free.clear()


class Mark:
    """A recorded event that the completion strategy watches, and what is to be retired when it is passed.

    Attributes
    ----------
    event, stream, lane, kind, enqueued_at
        What a :class:`~accel.completion.Watcher` needs to know.
    seq : int
        The lane's clock at the mark.
    retires : int
        How many ops are over with it.
    submission : Submission
        Whose ops they are.
    is_last : bool
        Whether the submission ends here.
    """

    __slots__ = ("_context", "enqueued_at", "event", "is_last", "kind", "lane", "retires", "seq", "stream", "submission")

    def __init__(
        self, context: Context, lane: Lane, event: AccelEvent, submission: Submission, kind: Hashable, retires: int, *, is_last: bool
    ) -> None:
        self._context = context
        self.lane = lane
        self.stream = lane.stream
        self.event = event
        self.submission = submission
        self.kind = kind
        self.seq = lane.enqueued
        self.retires = retires
        self.is_last = is_last
        self.enqueued_at = time.perf_counter()

    def complete(self) -> None:
        """Retire what the mark stands for; called by the watcher, once."""
        self.lane.complete(self.seq)
        self.lane.events.give(self.event)
        self._context.retire(self.submission, self.retires, is_last=self.is_last)

    def fail(self, error: AccelError) -> None:
        """Report that the mark will never be passed; called by the watcher, once."""
        self._context.report_fault(error)


class Lane(Timeline):
    """One stream and its clock.

    Sequence numbers are issued when an op is dispatched, in the device's order; the op's kernel actor brings the number to the stream with
    :meth:`advance`. Actors that share a lane take turns by :meth:`reached`, so that the numbers reach the stream in order whoever enqueues.
    """

    __slots__ = ("_waiters", "compute", "constants", "device", "events", "stream")

    def __init__(self, name: str, device: AccelDevice, stream: AccelStream, compute: ComputeBackend, events: EventPool) -> None:
        super().__init__(name)
        self.constants: dict[DType, int] = {}
        self.device = device
        self.stream = stream
        self.compute = compute
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

    async def reached(self, seq: int) -> None:
        """Wait until ``seq`` is in the stream."""
        while self.enqueued < seq:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append((seq, waiter))
            await waiter

    def wait_for(self, other: Timeline, seq: int) -> None:
        """Let later work of this lane wait for the other's ``seq``, which is in its stream already. The host does not wait."""
        if other.completed >= seq or self.waited.get(other, 0) >= seq or not isinstance(other, Lane):
            return
        # A new event marks all the other lane has so far: later than needed, never too early, and known to be so.
        event = self.events.take()
        if other.stream.record(event):
            other.complete(other.enqueued)
        else:
            self.stream.wait(event)
            self.waited[other] = other.enqueued
        # A recorded wait keeps the mark as it was; the event may be recorded anew.
        self.events.give(event)

    def close(self, *, abandon: bool) -> None:
        """Close the stream. May block unless ``abandon``."""
        self.stream.close(abandon=abandon)


def prediction_key(submission: Submission) -> Hashable:
    """Return what the duration of a submission is predicted by: its last op's kind, and how much it moves, to the nearest power of two."""
    nbytes = sum(ref.nbytes for plan in submission.plans for ref in plan.reads) + sum(
        spec.nbytes for plan in submission.plans for spec in plan.creates
    )
    return submission.kinds[-1], len(submission.kinds), nbytes.bit_length()
