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
from accel.completion.strategy import Ended, LaneMarks, LaneWatcher, pop_ended
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


class PolledLane(LaneMarks):
    """A lane, and when it is polled.

    Attributes
    ----------
    end_marks : callable
        Completes or fails marks that have ended.
    began_at, polled_at, due_at : float
        When the oldest mark's work began at the latest, when the mark was last queried, and when it
        is to be queried next; seconds of ``time.perf_counter()``.
    """

    __slots__ = ("began_at", "due_at", "end_marks", "polled_at")

    def __init__(self, end_marks: Callable[[list[Ended]], None]) -> None:
        super().__init__()
        self.end_marks = end_marks
        self.began_at = self.polled_at = self.due_at = 0.0


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
        self._next_poll: asyncio.Handle | None = None  # the poll of the next loop iteration
        self._timer = create_timer(loop, self._on_timer)
        self._timer_due = math.inf  # when the timer calls back

    def add(self, lane: PolledLane, mark: Mark) -> None:
        """Append ``mark`` to its lane, and poll the lane from the next loop iteration on."""
        lane.marks.append(mark)
        if len(lane.marks) == 1:
            # The next loop iteration polls it for the first time: a short op has ended by then.
            lane.began_at = lane.polled_at = lane.due_at = mark.enqueued_at
            self._lanes[lane] = None
            if self._next_poll is None:
                self._next_poll = self._loop.call_soon(self._poll)

    def remove(self, lane: PolledLane) -> None:
        """Stop polling a lane; its marks stay in it. Do nothing for a lane without marks."""
        self._lanes.pop(lane, None)
        if not self._lanes:
            self._unschedule()

    def close(self) -> None:
        """Release the timer. Idempotent."""
        self._unschedule()
        self._timer.close()

    def _reschedule(self, lane: PolledLane, now: float) -> float:
        """Set when a lane whose oldest mark has not ended is polled next; return the delay."""
        delay = self._pace.delay(lane.marks[0].kind, now - lane.began_at)
        lane.polled_at, lane.due_at = now, now + delay
        return delay

    def _schedule(self, now: float, delay: float) -> None:
        """Have the next poll ``delay`` seconds after ``now``, unless an earlier one is due."""
        if self._next_poll is not None:
            return
        if delay <= 0.0:
            self._next_poll = self._loop.call_soon(self._poll)
        elif now + delay < self._timer_due:
            self._timer_due = now + delay
            self._timer.arm(delay)

    def _unschedule(self) -> None:
        """Cancel the next poll and the timer: there are no marks."""
        if self._next_poll is not None:
            self._next_poll.cancel()
            self._next_poll = None
        if self._timer_due < math.inf:
            self._timer_due = math.inf
            self._timer.disarm()

    def _on_timer(self) -> None:
        """Poll, unless the next loop iteration does so anyway; called by the timer."""
        self._timer_due = math.inf
        if self._next_poll is None:
            # All lanes: a timer of its own for each would cost more than the queries.
            self._poll(math.inf)

    def _poll(self, horizon: float = 0.0) -> None:
        """Query the lanes that are due within ``horizon`` seconds, and schedule the next poll.

        Of each lane the oldest marks are queried. Those that have ended complete or fail here, and
        the pace learns their durations.
        """
        self._next_poll = None
        now = time.perf_counter()
        ended_by_lane: list[tuple[PolledLane, list[Ended]]] = []
        soonest = math.inf  # seconds until the next lane is due
        # 1. Query the lanes that are due. Nothing else is done inside the section.
        with self._section:
            for lane in self._lanes:
                if lane.due_at > now + horizon:
                    soonest = min(soonest, lane.due_at - now)
                elif ended := pop_ended(lane.marks):
                    ended_by_lane.append((lane, ended))
                else:
                    soonest = min(soonest, self._reschedule(lane, now))
        # 2. Learn the durations, and schedule the lanes that have more marks. The others leave.
        for lane, ended in ended_by_lane:
            oldest, error = ended[0]
            if error is None and lane.due_at > lane.began_at:
                # It ended between two polls, not before its first one: such ops need no estimate.
                # Take the middle; of a poll that is late, the time when it was due.
                self._pace.observe(oldest.kind, (lane.polled_at + min(lane.due_at, now)) / 2 - lane.began_at)
            if lane.marks:
                lane.began_at = now
                soonest = min(soonest, self._reschedule(lane, now))
            else:
                del self._lanes[lane]
        if not self._lanes:
            self._unschedule()
        # 3. Complete the marks before the next poll is scheduled: the loop then runs their waiters
        # first, and the poll finds what has ended meanwhile.
        try:
            for lane, ended in ended_by_lane:
                lane.end_marks(ended)
        finally:
            if self._lanes:
                self._schedule(now, soonest)


class PollingWatcher(LaneWatcher[PolledLane]):
    """Has the marks of one device polled.

    Watchers of the same strategy on the same loop share a poller: the first one adds it to
    ``shared``, and the last one that is closed removes it.

    Parameters
    ----------
    loop
        The loop on which marks end.
    shared
        A dictionary of the system's, in which pollers are kept.
    strategy
        The strategy, which is a part of the poller's key there.
    create_pace
        Makes the pace of a new poller.
    device
        The context whose marks are polled.
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
        super().__init__(loop, lambda: PolledLane(self._end_marks), self._poller.add)

    def _abandon(self) -> None:
        """Stop polling this device's lanes, then end all their marks.

        In this order: the poller has no lane without marks. See :class:`LaneWatcher`.
        """
        for lane in self._lanes.values():
            self._poller.remove(lane)
        super()._abandon()

    async def _release(self, *, abandon: bool) -> None:
        """Close the poller, if this was the last watcher that uses it."""
        self._poller.users -= 1
        if not self._poller.users:
            self._poller.close()
            self._shared.pop(self._key, None)
