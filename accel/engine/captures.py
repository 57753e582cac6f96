"""The captures of graphs that are going on: during one, other libraries' work is not marked."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accel.engine.core import DeviceCore

__all__ = ["Captures", "captures_of"]


class WaitsForCaptures(Protocol):
    """A lane whose work cannot be marked during a capture."""

    def on_captures_ended(self) -> None:
        """Mark the work that could not be marked: no capture is going on any more."""


class Captures:
    """The captures of one device that are going on, and the lanes that wait for their end.

    A mark of other libraries' work is an event that all streams wait for; CUDA aborts a capture of
    one of them.

    Attributes
    ----------
    count : int
        How many captures are going on.
    """

    __slots__ = ("_lanes", "count")

    def __init__(self) -> None:
        self.count = 0
        self._lanes: weakref.WeakSet[WaitsForCaptures] = weakref.WeakSet()

    def add(self, lane: WaitsForCaptures) -> None:
        """Have ``lane.on_captures_ended()`` called when all captures have ended."""
        self._lanes.add(lane)

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Count a capture as going on inside the block: other libraries' work is not marked.

        Used on the loop's thread; other tasks run meanwhile.
        """
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1
            if not self.count:
                for lane in tuple(self._lanes):
                    lane.on_captures_ended()


def captures_of(core: DeviceCore) -> Captures:
    """Return the captures of a device: one object for all devices of its hardware in a system.

    Several opened devices, and several generations, may be one context of the driver.
    """
    captures: Captures = core.shared.setdefault((Captures, core.description.spec), Captures())
    return captures
