"""The poller: it queries the oldest mark of every lane, in each loop iteration or by a timer.

A query costs microseconds, and a sleep adds up to its length to an op. So a *pace* decides how long
the poller may sleep: not at all while an op is young or near its expected end. With no mark to
watch there is no timer and no callback.
"""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from accel.backend import QueriesInSection
from accel.completion.strategy import Ended, Lane, LaneWatcher, take_ended
from accel.completion.timer import create_timer

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Hashable
    from contextlib import AbstractContextManager

    from accel.backend import AccelDevice
    from accel.completion.strategy import Mark

__all__ = ["MarkPoller", "Pace", "PolledLane", "PollingWatcher"]


class Pace(Protocol):
    """Decides how long a poller sleeps. All times are in seconds."""

    def delay(self, kind: Hashable, elapsed: float) -> float:
        """Return the time until the next poll of an op that began ``elapsed`` seconds ago.

        0: it is polled in the next loop iteration.
        """

    def observe(self, kind: Hashable, seconds: float) -> None:
        """Record that an op took ``seconds``."""


class PolledLane(Lane):
    """A lane, and when it is polled.

    Attributes
    ----------
    settle : callable
        Completes or fails marks that have ended.
    began, polled, due : float
        When the oldest mark's work began, as far as is known, when it was last queried, and when it
        is to be queried next.
    """

    __slots__ = ("began", "due", "polled", "settle")

    def __init__(self, settle: Callable[[list[Ended]], None]) -> None:
        super().__init__()
        self.settle = settle
        self.began = self.polled = self.due = 0.0


class MarkPoller:
    """Polls the lanes of all devices that share it, on one loop.

    Parameters
    ----------
    loop
        The loop that it runs on.
    pace
        Decides when to poll.
    section
        Entered around the queries of one poll; see :class:`accel.backend.QueriesInSection`.

    Attributes
    ----------
    users : int
        Watchers that use it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, pace: Pace, section: AbstractContextManager[object] | None = None) -> None:
        self.users = 0
        self._loop = loop
        self._pace = pace
        self._section = section or nullcontext()
        self._lanes: dict[PolledLane, None] = {}  # those with marks
        self._next: asyncio.Handle | None = None  # the poll of the next loop iteration
        self._timer = create_timer(loop, self._on_timer)
        self._due = math.inf  # when the timer calls back

    def add(self, lane: PolledLane, mark: Mark) -> None:
        """Poll for ``mark``, the newest of ``lane``."""
        lane.marks.append(mark)
        if len(lane.marks) == 1:
            # The next loop iteration polls it for the first time: a short op has ended by then.
            lane.began = lane.polled = lane.due = mark.enqueued_at
            self._lanes[lane] = None
            if self._next is None:
                self._next = self._loop.call_soon(self._poll)

    def remove(self, lane: PolledLane) -> None:
        """Stop polling a lane."""
        self._lanes.pop(lane, None)
        if not self._lanes:
            self._unschedule()

    def close(self) -> None:
        """Release the timer. Idempotent."""
        self._unschedule()
        self._timer.close()

    def _reschedule(self, lane: PolledLane, now: float) -> float:
        """Set when a lane whose oldest mark has not ended is polled next.

        Return the seconds until then.
        """
        delay = self._pace.delay(lane.marks[0].kind, now - lane.began)
        lane.polled, lane.due = now, now + delay
        return delay

    def _schedule(self, now: float, delay: float) -> None:
        if self._next is not None:
            return
        if delay <= 0.0:
            self._next = self._loop.call_soon(self._poll)
        elif now + delay < self._due:
            self._due = now + delay
            self._timer.arm(delay)

    def _unschedule(self) -> None:
        """Schedule nothing any more."""
        if self._next is not None:
            self._next.cancel()
            self._next = None
        if self._due < math.inf:
            self._due = math.inf
            self._timer.disarm()

    def _on_timer(self) -> None:
        self._due = math.inf
        if self._next is None:
            # All lanes: a timer of its own for each would cost more than the queries.
            self._poll(math.inf)

    def _poll(self, horizon: float = 0.0) -> None:
        """Query the lanes that are due within ``horizon`` seconds, and schedule the next poll.

        Of each lane the oldest mark is queried; what has ended completes.
        """
        self._next = None
        now = time.perf_counter()
        found: list[tuple[PolledLane, list[Ended]]] = []
        soonest = math.inf
        with self._section:
            for lane in self._lanes:
                if lane.due > now + horizon:
                    soonest = min(soonest, lane.due - now)
                elif ended := take_ended(lane.marks):
                    found.append((lane, ended))
                else:
                    soonest = min(soonest, self._reschedule(lane, now))
        for lane, ended in found:
            oldest, error = ended[0]
            if error is None and lane.due > lane.began:
                # It ended between two polls, not before its first one: such ops need no estimate. A
                # poll that came late, because the loop was busy, says nothing about the op.
                self._pace.observe(oldest.kind, (lane.polled + min(lane.due, now)) / 2 - lane.began)
            if lane.marks:
                lane.began = now
                soonest = min(soonest, self._reschedule(lane, now))
            else:
                del self._lanes[lane]
        if not self._lanes:
            self._unschedule()
        # Before the next poll is scheduled: the loop runs the waiters first, and the poll finds
        # what has ended meanwhile.
        try:
            for lane, ended in found:
                lane.settle(ended)
        finally:
            if self._lanes:
                self._schedule(now, soonest)


class PollingWatcher(LaneWatcher[PolledLane]):
    """Has the marks of one device polled.

    Watchers of the same strategy on the same loop share a poller.

    Parameters
    ----------
    loop
        The loop on which marks end.
    shared
        Where pollers are kept.
    strategy
        The key there.
    create_pace
        Makes the pace of a new poller.
    device
        Whose marks are polled.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        shared: dict[Any, Any],
        strategy: Hashable,
        create_pace: Callable[[], Pace],
        device: AccelDevice,
    ) -> None:
        section = device.query_section if isinstance(device, QueriesInSection) else None
        self._shared, self._key = shared, (strategy, loop, section)
        if self._key not in shared:
            shared[self._key] = MarkPoller(loop, create_pace(), section)
        self._poller: MarkPoller = shared[self._key]
        self._poller.users += 1
        super().__init__(loop, lambda: PolledLane(self._settle), self._poller.add)

    def _abandon(self) -> None:
        for lane in self._lanes.values():
            self._poller.remove(lane)
        super()._abandon()

    async def _release(self, *, abandon: bool) -> None:
        self._poller.users -= 1
        if not self._poller.users:
            self._poller.close()
            self._shared.pop(self._key, None)
