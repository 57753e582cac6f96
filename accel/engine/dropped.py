"""The sequence numbers of dropped work: they end when the work before them has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.engine.marks import LaneMark
from accel.errors import AccelError

if TYPE_CHECKING:
    from accel.engine.launches import LaunchContext, Sendable

__all__ = ["pass_over"]


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
