"""The lane that stands for the work of everybody else in the process, which cannot be marked while a stream is captured into a graph."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

from accel.engine.lane import EventPool, Lane

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from accel.backend import AccelDevice, AccelStream
    from accel.engine.core import DeviceCore

__all__ = ["Captures", "OutsideLane", "captures_of"]


class Captures:
    """The captures that are going on in one device, and the lanes that wait for their end: a mark of all streams would break them off.

    Attributes
    ----------
    count : int
        How many there are.
    """

    __slots__ = ("_lanes", "count")

    def __init__(self) -> None:
        self.count = 0
        self._lanes: weakref.WeakSet[OutsideLane] = weakref.WeakSet()

    def add(self, lane: OutsideLane) -> None:
        """Let a lane know when all captures are over."""
        self._lanes.add(lane)

    @contextlib.contextmanager
    def one_more(self) -> Iterator[None]:
        """Have nobody's work marked inside the block. On the loop's thread, which may do other things meanwhile."""
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1
            if not self.count:
                for lane in tuple(self._lanes):
                    lane.go_on()


def captures_of(core: DeviceCore) -> Captures:
    """Return those of a device. All its contexts in a system have them in common: they may share what the driver calls a context."""
    found: Captures = core.shared.setdefault((Captures, core.name), Captures())
    return found


class OutsideLane(Lane):
    """A lane whose numbers are in its stream as soon as they are given out, but not while something is captured: whoever depends on one waits until then.

    Parameters
    ----------
    device, stream, events
        As of any lane; nothing is computed there.
    captures
        Those of the device.
    """

    __slots__ = ("__weakref__", "_captures", "_later", "_number")

    def __init__(self, device: AccelDevice, stream: AccelStream, events: EventPool, captures: Captures) -> None:
        self._captures = captures
        self._later: list[Callable[[], object]] = []
        compute: Any = None
        super().__init__("outside", device, stream, compute, events)
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
        """Call something once all captures are over."""
        if call not in self._later:
            self._later.append(call)

    def go_on(self) -> None:
        """Let those go on that wait."""
        self._wake()
        calls, self._later = self._later, []
        for call in calls:
            call()
