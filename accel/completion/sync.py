"""A thread per lane blocks until the lane's oldest mark is passed."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, ClassVar

from accel.completion.strategy import CompletionStrategy, Lane, LaneWatcher, take_ended
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


class _BlockedLane(Lane):
    __slots__ = ("events", "is_blocked", "thread")

    def __init__(self) -> None:
        super().__init__()
        self.is_blocked = False
        self.events: SimpleQueue[AccelEvent | None] = SimpleQueue()
        self.thread: threading.Thread | None = None


class SyncWatcher(LaneWatcher[_BlockedLane]):
    """Blocks one thread per lane; what it finds ready together ends together."""

    def __init__(self, loop: asyncio.AbstractEventLoop, device: str) -> None:
        super().__init__(loop, _BlockedLane, self._add_mark)
        self._device = device

    def _add_mark(self, lane: _BlockedLane, mark: Mark) -> None:
        lane.marks.append(mark)
        self._block(lane)

    def _block(self, lane: _BlockedLane) -> None:
        # The thread gets the next event only when the loop has dealt with the last one: until then
        # an event that the thread has in hand cannot be recorded anew for something else.
        if lane.marks and not lane.is_blocked:
            lane.is_blocked = True
            if lane.thread is None:
                name = f"accel-sync-{self._device}-lane-{len(self._lanes)}"
                try:
                    lane.thread = start_thread(name, lambda: self._run(lane))
                except OutOfMemoryError:  # the work is enqueued: poll until there is a thread
                    self._loop.call_later(_POLL, self._on_passed, lane)
                    return
            lane.events.put(lane.marks[0].event)

    def _run(self, lane: _BlockedLane) -> None:
        while (event := lane.events.get()) is not None:
            with contextlib.suppress(Exception):  # the loop's query of the event raises it too
                event.synchronize()
            del event
            with contextlib.suppress(RuntimeError):  # the loop is closed, and no waiter is left
                self._loop.call_soon_threadsafe(self._on_passed, lane)

    def _on_passed(self, lane: _BlockedLane) -> None:
        lane.is_blocked = False
        ended = take_ended(lane.marks)
        self._block(lane)
        self._settle(ended)

    async def _release(self, *, abandon: bool) -> None:
        lanes = list(self._lanes.values())
        for lane in lanes:
            lane.events.put(None)
        # Of an abandoned watcher, a thread that is blocked ends when its event does: it is not
        # waited for.
        for thread in [lane.thread for lane in lanes if lane.thread is not None and not abandon]:
            await wait_ended(thread)
