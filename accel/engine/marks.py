"""The end of what a lane has so far, for which no caller waits: memory, or what comes after, does."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.backend import AccelEvent
    from accel.engine.lane import Lane
    from accel.errors import AccelError

__all__ = ["LaneMark"]


class LaneMark:
    """Moves a lane's clock when it is passed; see :class:`accel.completion.Mark`.

    Parameters
    ----------
    report_fault
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

    __slots__ = ("_report_fault", "_seq", "enqueued_at", "event", "kind", "lane", "stream")

    def __init__(self, report_fault: Callable[[AccelError], None], lane: Lane, seq: int, event: AccelEvent, kind: str) -> None:
        self._report_fault = report_fault
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

    def fail(self, error: AccelError) -> None:
        """Report that the mark will never be passed; called by the watcher, once."""
        self._report_fault(error)
