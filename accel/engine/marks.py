"""A mark that no caller waits for: memory does, or :meth:`ContextBase.until`."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from accel.errors import AccelError

if TYPE_CHECKING:
    from accel.backend import AccelEvent
    from accel.engine.launches import LaunchContext, Sendable
    from accel.engine.stream_clock import StreamClock

__all__ = ["LaneMark", "pass_over"]


class LaneMark:
    """Moves a lane's clock when it is passed; see :class:`accel.completion.Mark`.

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
        """Move the clock; called by the watcher, once."""
        self.lane.complete(self._seq)
        self.lane.events.give(self.event)
        self._context.wake()

    def fail(self, error: AccelError) -> None:
        """Report that the mark will never be passed; called by the watcher, once."""
        self._context.report_fault(error)


def pass_over(context: LaunchContext, group: Sendable) -> None:
    """Move the lane's clock past the numbers of a dropped group, also if nothing comes after it.

    Its lane waits, in its stream, for what the group depends on: the recorded uses stand for that.
    """
    lane, launches = group.lane, group.launches
    if lane.completed >= launches[0].seq - 1 and all(other.completed >= seq for op in launches for other, seq in op.dependencies):
        lane.complete(launches[-1].seq)
        return
    event = lane.events.take()
    try:
        is_over = lane.stream.record(event)
    except AccelError as error:
        context.report_fault(error)
        return
    mark = LaneMark(context, lane, launches[-1].seq, event, "dropped")
    if is_over:
        mark.complete()
    else:
        context.watcher.watch(mark)
