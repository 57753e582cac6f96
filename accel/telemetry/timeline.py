"""A timeline of a device's work, in the format of Chrome's traces, which Perfetto shows."""

from __future__ import annotations

import time
from collections import deque
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias

from accel.telemetry.probe import Probe

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from accel.errors import AccelError
    from accel.telemetry.probe import DeviceWork, ServedBatch

__all__ = ["Timeline", "trace_of"]

_Span: TypeAlias = "tuple[float, float, str, str, dict[str, Any]]"
"""Begin, end, group of rows, name, and what Perfetto shows besides."""

_GROUPS = ("batches", "queue", "launch", "device", "faults")
"""In the order in which they are shown."""


class Timeline(Probe):
    """Keeps the newest work of one device.

    Parameters
    ----------
    device
        Name of the device. Devices of one name have one timeline.
    limit
        How many ops, batches and faults are kept; earlier ones are dropped, and counted.
    """

    times_work = True

    def __init__(self, device: str, limit: int) -> None:
        self.device = device
        self.began_at = time.perf_counter()
        self._kept: deque[list[_Span]] = deque(maxlen=limit)
        self._count = 0

    def op_ended(self, work: DeviceWork) -> None:
        """See :class:`Probe`."""
        if work.device != self.device:
            return
        # What was not measured counts as on the device since it was sent.
        seconds = work.ended_at - work.sent_at if work.device_seconds is None else work.device_seconds
        on_device = max(work.sent_at, work.ended_at - seconds)
        said = {"ops": [".".join(op) for op in work.ops[:64]], "generation": work.generation, "device_seconds": work.device_seconds}
        if work.error:
            said["error"] = work.error
        self._keep(
            (work.queued_at, work.sent_at, "queue", work.name, {}),
            (work.sent_at, on_device, "launch", work.name, {}),
            (on_device, work.ended_at, "device", work.name, said),
        )

    def batch_ended(self, batch: ServedBatch) -> None:
        """See :class:`Probe`."""
        if batch.device == self.device:
            said = {"items": batch.items, "requests": [request.number for request in batch.requests], "error": batch.error}
            self._keep((batch.launched_at, batch.ended_at, "batches", batch.service.name, said))

    def fault(self, device: str, generation: int, error: AccelError) -> None:
        """See :class:`Probe`."""
        if device == self.device:
            now, said = time.perf_counter(), {"generation": generation, "code": error.code, "scope": error.scope.name}
            self._keep((now, now, "faults", type(error).__name__, said))

    def _keep(self, *spans: _Span) -> None:
        self._count += 1
        self._kept.append([span for span in spans if span[1] > span[0] or span[2] == "faults"])

    @property
    def dropped(self) -> int:
        """How many were not kept."""
        return self._count - len(self._kept)

    def events(self, number: int, began_at: float) -> list[dict[str, Any]]:
        """Return the events of Chrome's format. Spans that overlap are in rows of their own.

        Parameters
        ----------
        number
            Of the device in the file, where it is a process.
        began_at
            When the file's time begins.
        """
        events = [{**event, "pid": number} for event in self._events(began_at)]
        rows = {event["tid"]: f"{_GROUPS[event['tid'] // 1000]} {event['tid'] % 1000 + 1}" for event in events}
        named = [{"ph": "M", "name": "process_name", "pid": number, "args": {"name": self.device}}]
        named += [{"ph": "M", "name": "thread_name", "pid": number, "tid": tid, "args": {"name": row}} for tid, row in sorted(rows.items())]
        return [*named, *events]

    def _events(self, began_at: float) -> Iterator[dict[str, Any]]:
        free: dict[str, list[float]] = {group: [] for group in _GROUPS}  # of each row, when its last span ends
        for begin, end, group, name, said in sorted([span for spans in self._kept for span in spans], key=itemgetter(0)):
            ends = free[group]
            row = next((row for row, until in enumerate(ends) if until <= begin), len(ends))
            ends[row : row + 1] = [end]
            event = {
                "name": name,
                "cat": group,
                "tid": 1000 * _GROUPS.index(group) + row,
                "ts": round((begin - began_at) * 1e6, 3),
                "args": said,
            }
            yield event | ({"ph": "i", "s": "p"} if group == "faults" else {"ph": "X", "dur": round((end - begin) * 1e6, 3)})


def trace_of(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Return timelines of some devices as one file of Chrome's format."""
    began_at = min(timeline.began_at for timeline in timelines)
    events = [event for number, timeline in enumerate(timelines, 1) for event in timeline.events(number, began_at)]
    devices, dropped = ", ".join(timeline.device for timeline in timelines), sum(timeline.dropped for timeline in timelines)
    return {"traceEvents": events, "otherData": {"device": devices, "dropped": dropped}}
