"""A thread per lane blocks until the lane's oldest mark is passed."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, ClassVar

from accel.completion.strategy import CompletionStrategy, LaneMarks, LaneWatcher, pop_ended
from accel.completion.threads import start_thread, wait_ended
from accel.errors import OutOfMemoryError

if TYPE_CHECKING:
    import asyncio
    import threading

    from accel.backend import AccelDevice, AccelEvent
    from accel.completion.strategy import Mark

__all__ = ["SyncCompletion", "SyncWatcher"]

_POLL = 0.005
"""Seconds between two polls of a lane for which the operating system had no thread."""


@dataclass(frozen=True)
class SyncCompletion(CompletionStrategy):
    """Block a thread in ``event.synchronize()``: simple, and slow with many short ops."""

    name: ClassVar[str] = "sync"

    def open(self, device: AccelDevice, loop: asyncio.AbstractEventLoop, shared: dict[Any, Any]) -> SyncWatcher:
        """Return a watcher that starts a thread for each lane it meets."""
        return SyncWatcher(loop, device.description.spec)


class _BlockedLane(LaneMarks):
    """A lane, and the thread that blocks until its oldest mark is passed.

    Attributes
    ----------
    is_blocked : bool
        Whether the thread has an event, or will get it.
    events : SimpleQueue
        Events for the thread; ``None`` ends it.
    thread : Thread or None
        Started at the lane's first mark.
    """

    __slots__ = ("events", "is_blocked", "thread")

    def __init__(self) -> None:
        super().__init__()
        self.is_blocked = False
        self.events: SimpleQueue[AccelEvent | None] = SimpleQueue()
        self.thread: threading.Thread | None = None


class SyncWatcher(LaneWatcher[_BlockedLane]):
    """Blocks one thread per lane; marks that are found passed together end together."""

    def __init__(self, loop: asyncio.AbstractEventLoop, device: str) -> None:
        super().__init__(loop, _BlockedLane, self._add_mark)
        self._device = device

    def _add_mark(self, lane: _BlockedLane, mark: Mark) -> None:
        """Append a mark to its lane, and have the lane's thread block if it does not."""
        lane.marks.append(mark)
        self._give_next_event(lane)

    def _give_next_event(self, lane: _BlockedLane) -> None:
        """Give the lane's thread the event of its oldest mark, unless it blocks already.

        Starts the thread at the lane's first mark. If the system has no thread, a timer stands for
        it: the lane counts as blocked until the timer queries the mark.
        """
        # The thread gets the next event only when the loop has ended the last mark: until then the
        # event that the thread waits for is not released, and so not recorded for something else.
        if lane.marks and not lane.is_blocked:
            lane.is_blocked = True
            if lane.thread is None:
                name = f"accel-sync-{self._device}-lane-{len(self._lanes)}"
                try:
                    lane.thread = start_thread(name, lambda: self._run(lane))
                except OutOfMemoryError:  # the work is enqueued all the same: poll, and try again
                    self._loop.call_later(_POLL, self._on_passed, lane)
                    return
            lane.events.put(lane.marks[0].event)

    def _run(self, lane: _BlockedLane) -> None:
        """Block in each event that the loop gives, then tell the loop: the body of the thread.

        ``None`` ends it.
        """
        while (event := lane.events.get()) is not None:
            with contextlib.suppress(Exception):  # the loop's query of the event raises it too
                event.synchronize()
            del event  # the thread keeps nothing while it waits for the next one
            with contextlib.suppress(RuntimeError):  # the loop is closed, and no waiter is left
                self._loop.call_soon_threadsafe(self._on_passed, lane)

    def _on_passed(self, lane: _BlockedLane) -> None:
        """End the marks that are passed, and have the thread block in the next one.

        The lane's thread has it called; or a timer, where the system had no thread.
        """
        lane.is_blocked = False
        ended = pop_ended(lane.marks)
        self._give_next_event(lane)  # first: the thread waits while the marks end here
        self._end_marks(ended)

    async def _release(self, *, abandon: bool) -> None:
        """End the threads, and wait for them, unless the watcher was abandoned."""
        lanes = list(self._lanes.values())
        for lane in lanes:
            lane.events.put(None)
        # A thread of an abandoned watcher may be blocked until its event is passed: it ends then.
        for thread in [lane.thread for lane in lanes if lane.thread is not None and not abandon]:
            await wait_ended(thread)
