"""A mark that no caller waits for: memory does, or :meth:`ContextBase.until`."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accel.backend import AccelEvent
    from accel.engine.launches import LaunchContext
    from accel.engine.stream_clock import StreamClock
    from accel.errors import AccelError

__all__ = ["LaneMark"]


class LaneMark:
    """Moves a lane's clock when it is passed; see :class:`accel.completion.Mark`.

    Parameters
    ----------
    context
        Told of what keeps the mark from being passed.
    lane
        Whose end is marked.
    seq
        The number that is over then.
    event
        Recorded in the lane's stream.
    kind
        What the duration is predicted by.
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
