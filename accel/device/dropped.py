"""The places in line of work that was dropped: nothing runs there, and they are over when what comes before them is."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

from accel.errors import AccelError

if TYPE_CHECKING:
    from collections.abc import Hashable

    from accel.backend import AccelEvent
    from accel.device.context import Context
    from accel.device.run import Sendable

__all__ = ["pass_over"]


class _Passed:
    """The end of what comes before; see :class:`accel.completion.Pending`."""

    __slots__ = ("_context", "_seq", "enqueued_at", "event", "kind", "lane", "stream")

    def __init__(self, context: Context, run: Sendable, event: AccelEvent) -> None:
        self._context = context
        self._seq = run.launches[-1].seq
        self.lane = run.lane
        self.stream = run.lane.stream
        self.event = event
        self.kind: Hashable = "dropped"
        self.enqueued_at = perf_counter()

    def complete(self) -> None:
        self.lane.complete(self._seq)
        self.lane.events.give(self.event)

    def fail(self, error: AccelError) -> None:
        self._context.report_fault(error)


def pass_over(context: Context, run: Sendable) -> None:
    """See that the lane's clock passes the numbers of a run that was dropped, also if nothing comes after it.

    Its lane waits, in its stream, for what the run depends on: the recorded uses stand for that.
    """
    lane, launches = run.lane, run.launches
    if lane.completed >= launches[0].seq - 1 and all(other.completed >= seq for op in launches for other, seq in op.dependencies):
        lane.complete(launches[-1].seq)
        return
    event = lane.events.take()
    try:
        is_over = lane.stream.record(event)
    except AccelError as error:
        context.report_fault(error)
        return
    mark = _Passed(context, run, event)
    if is_over:
        mark.complete()
    else:
        context.watcher.watch(mark)
