"""Marks that belong to no submission: they move a lane's clock once the stream passes them."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from accel.errors import AccelError

if TYPE_CHECKING:
    from accel.backend import AccelEvent
    from accel.engine.launches import BoundGroup, LaunchContext
    from accel.engine.stream_clock import StreamClock

__all__ = ["LaneMark", "complete_dropped_group"]


class LaneMark:
    """A mark that moves its lane's clock when it is passed; see :class:`accel.completion.Mark`.

    Parameters
    ----------
    context
        Gets the fault that keeps the mark from being passed.
    lane
        The lane that is marked.
    seq
        The last sequence number before the mark.
    event
        The mark in the lane's stream.
    kind
        Key of the predicted duration.
    """

    __slots__ = ("_context", "_seq", "enqueued_at", "event", "kind", "lane", "stream")

    def __init__(self, context: LaunchContext, lane: StreamClock, seq: int, event: AccelEvent, kind: str) -> None:
        self._context = context
        self._seq = seq
        self.lane = lane
        self.stream = lane.stream
        self.event = event
        self.kind = kind
        self.enqueued_at = perf_counter()

    def complete(self) -> None:
        """Move the lane's clock, and wake what waits for it; called by the watcher, once."""
        self.lane.complete(self._seq)
        self.lane.events.release(self.event)
        self._context.wake()

    def fail(self, error: AccelError) -> None:
        """Report that the mark will never be passed; called by the watcher, once."""
        self._context.report_fault(error)


def complete_dropped_group(context: LaunchContext, group: BoundGroup) -> None:
    """Move the lane's clock past the numbers of a group of which nothing was launched.

    Without that the clock would stand still until a later op of the lane ends, and memory that the
    group was to use would stay in use.
    """
    lane, launches = group.lane, group.launches
    # At once, if all that comes before the group, and all that it depends on, has ended.
    if lane.completed >= launches[0].seq - 1 and all(other.completed >= seq for op in launches for other, seq in op.dependencies):
        lane.complete(launches[-1].seq)
        return
    # Else when the stream passes a mark: it waits for the group's dependencies.
    event = lane.events.acquire()
    try:
        is_passed = lane.stream.record(event)
    except AccelError as error:
        context.report_fault(error)
        return
    mark = LaneMark(context, lane, launches[-1].seq, event, "dropped")
    if is_passed:
        mark.complete()
    else:
        context.watcher.watch(mark)
