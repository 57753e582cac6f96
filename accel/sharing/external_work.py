"""The lane that stands for the work of other libraries in this process.

No mark can be recorded in it while any stream is captured into a graph: that would break the
capture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.engine.stream_clock import EventPool, StreamClock

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.backend import AccelStream
    from accel.engine.captures import Captures

__all__ = ["ExternalLane"]


class ExternalLane(StreamClock):
    """A lane whose numbers are in its stream as soon as they are issued, except during a capture.

    Ops that depend on a number wait until the capture has ended. Making the lane adds it to
    ``captures``, which call :meth:`on_captures_ended`.

    Parameters
    ----------
    stream, events
        As of any lane; nothing is computed there.
    captures
        Those of the device.
    """

    __slots__ = ("__weakref__", "_calls", "_captures", "_number")

    def __init__(self, stream: AccelStream, events: EventPool, captures: Captures) -> None:
        self._captures = captures
        self._calls: list[Callable[[], object]] = []
        super().__init__("outside", stream, events)
        captures.add(self)

    @property
    def is_held(self) -> bool:
        """Whether no mark can be recorded now, because a stream is captured."""
        return self._captures.count > 0

    @property
    def enqueued(self) -> int:
        """The last number that can be waited for now; 0, before all, while a stream is captured."""
        return 0 if self._captures.count else self._number

    @enqueued.setter
    def enqueued(self, seq: int) -> None:
        self._number = seq

    def call_after_captures(self, call: Callable[[], object]) -> None:
        """Have ``call`` called once all captures are over: once, also if it is given again."""
        if call not in self._calls:
            self._calls.append(call)

    def on_captures_ended(self) -> None:
        """Wake ops that wait for a number, and make the calls; called when captures are over."""
        self._wake()
        calls, self._calls = self._calls, []
        for call in calls:
            call()
