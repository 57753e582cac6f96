"""A thread per lane blocks until the lane's oldest mark is passed."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from accel.completion.strategy import CompletionStrategy, LaneWatcher, take_ended, thread_end
from accel.errors import OutOfMemoryError
from accel.shortage import no_thread

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Hashable

    from accel.backend import AccelDevice, AccelEvent
    from accel.completion.strategy import Mark

__all__ = ["SyncCompletion", "SyncWatcher"]

_POLL = 0.005
"""Seconds between two polls of a lane for which the operating system had no thread."""


@dataclass(frozen=True)
class SyncCompletion(CompletionStrategy):
    """Block a thread in ``event.synchronize()``: the simplest way, and the slowest with many short ops."""

    name: ClassVar[str] = "sync"

    def open(self, device: AccelDevice, loop: asyncio.AbstractEventLoop, shared: dict[Any, Any]) -> SyncWatcher:
        """Return a watcher that starts a thread for each lane it meets."""
        return SyncWatcher(loop, device.description.spec)


class _Blocker:
    """A thread that waits for one event at a time, and says so on the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str, passed: Callable[[], None], stopped: Callable[[], None]) -> None:
        self._loop = loop
        self._passed = passed
        self._stopped = stopped
        self._event: AccelEvent | None = None
        self._stopping = False
        self._go = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise no_thread(error, "nothing can wait for the device's work") from error

    def block_on(self, event: AccelEvent) -> None:
        """Wait for ``event``; called only after the last one was reported."""
        self._event = event
        self._go.release()

    def stop(self) -> None:
        """End the thread once it waits for nothing."""
        self._stopping = True
        self._go.release()

    async def join(self) -> None:
        """Wait for the thread, which has said that it stops."""
        await thread_end(self._thread)

    def _run(self) -> None:
        while True:
            self._go.acquire()
            event, self._event = self._event, None
            if event is None and self._stopping:
                self._call(self._stopped)
                return
            if event is not None:
                # Whatever this raises, the loop queries the event and sees it there.
                with contextlib.suppress(Exception):
                    event.synchronize()
                del event
                self._call(self._passed)

    def _call(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and no waiter is left
            self._loop.call_soon_threadsafe(callback)


class _Lane:
    __slots__ = ("blocker", "is_blocked", "marks", "name", "stopped")

    def __init__(self, name: str, stopped: asyncio.Future[None]) -> None:
        self.name = name
        self.marks: deque[Mark] = deque()
        self.is_blocked = False
        self.stopped = stopped
        self.blocker: _Blocker | None = None


class SyncWatcher(LaneWatcher):
    """Blocks one thread per lane; what it finds ready together ends together."""

    def __init__(self, loop: asyncio.AbstractEventLoop, device: str) -> None:
        super().__init__(loop)
        self._device = device
        self._lanes: dict[Hashable, _Lane] = {}

    def watch(self, mark: Mark) -> None:
        """Watch a mark until it ends; the lane's first mark starts its thread."""
        lane = self._lanes.get(mark.lane)
        if lane is None and not self._closing:
            name = f"accel-sync-{self._device}-lane-{len(self._lanes)}"
            lane = self._lanes[mark.lane] = _Lane(name, self._loop.create_future())
        self._admit()
        assert lane is not None, "a watcher that is closed admits nothing"
        lane.marks.append(mark)
        self._block(lane)

    def _block(self, lane: _Lane) -> None:
        # The thread gets the next event only when the loop has dealt with the last one: until then an event that the
        # thread has in hand cannot be recorded anew for something else.
        if lane.marks and not lane.is_blocked:
            lane.is_blocked = True
            if lane.blocker is None:
                try:
                    lane.blocker = _Blocker(self._loop, lane.name, lambda: self._passed(lane), lambda: _resolve(lane.stopped))
                except OutOfMemoryError:  # the work is in the stream already: poll until there is a thread
                    self._loop.call_later(_POLL, self._passed, lane)
                    return
            lane.blocker.block_on(lane.marks[0].event)

    def _passed(self, lane: _Lane) -> None:
        lane.is_blocked = False
        self._polls += 1
        ended = take_ended(lane.marks)
        self._block(lane)
        self._settle(ended)

    def _take_all(self) -> list[Mark]:
        taken = [mark for lane in self._lanes.values() for mark in lane.marks]
        for lane in self._lanes.values():
            lane.marks.clear()
        return taken

    async def _release(self, *, abandon: bool) -> None:
        # A thread that is blocked when the watcher is abandoned ends when its event does; it is not waited for.
        lanes, self._lanes = list(self._lanes.values()), {}
        started = [(lane, lane.blocker) for lane in lanes if lane.blocker is not None]
        for _, blocker in started:
            blocker.stop()
        if abandon:
            return
        for lane, blocker in started:
            await lane.stopped
            await blocker.join()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
