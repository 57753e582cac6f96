"""The lane that stands for the work of other libraries in the process.

It cannot be marked while a stream is captured into a graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.engine.stream_clock import EventPool, StreamClock

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.backend import AccelStream
    from accel.engine.captures import Captures

__all__ = ["OutsideLane"]


class OutsideLane(StreamClock):
    """A lane whose numbers are in its stream at once, except during a capture.

    Ops that depend on a number wait until the capture ends.

    Parameters
    ----------
    stream, events
        As of any lane; nothing is computed there.
    captures
        Those of the device.
    """

    __slots__ = ("__weakref__", "_captures", "_later", "_number")

    def __init__(self, stream: AccelStream, events: EventPool, captures: Captures) -> None:
        self._captures = captures
        self._later: list[Callable[[], object]] = []
        super().__init__("outside", stream, events)
        captures.add(self)

    @property
    def is_held(self) -> bool:
        """Whether nothing can be marked now."""
        return self._captures.count > 0

    @property
    def enqueued(self) -> int:
        """The last number that can be waited for now."""
        return 0 if self._captures.count else self._number

    @enqueued.setter
    def enqueued(self, seq: int) -> None:
        self._number = seq

    def later(self, call: Callable[[], object]) -> None:
        """Call ``call`` once all captures are over."""
        if call not in self._later:
            self._later.append(call)

    def on_captures_ended(self) -> None:
        """Wake what waits: the captures are over."""
        self._wake()
        calls, self._later = self._later, []
        for call in calls:
            call()
