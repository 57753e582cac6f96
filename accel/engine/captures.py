"""The captures into graphs of one device: during one, no stream of other work is marked."""

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

    def go_on(self) -> None:
        """Mark the work again: no capture is going on any more."""


class Captures:
    """The captures of one device, and the lanes that wait for their end.

    A mark that covers all streams would break a capture off.

    Attributes
    ----------
    count : int
        How many there are.
    """

    __slots__ = ("_lanes", "count")

    def __init__(self) -> None:
        self.count = 0
        self._lanes: weakref.WeakSet[WaitsForCaptures] = weakref.WeakSet()

    def add(self, lane: WaitsForCaptures) -> None:
        """Have ``lane.go_on()`` called when all captures are over."""
        self._lanes.add(lane)

    @contextlib.contextmanager
    def one_more(self) -> Iterator[None]:
        """Keep work of other libraries from being marked inside the block.

        For the loop's thread; other tasks run meanwhile.
        """
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1
            if not self.count:
                for lane in tuple(self._lanes):
                    lane.go_on()


def captures_of(core: DeviceCore) -> Captures:
    """Return the captures of a device.

    All its contexts in a system share them, because these may be one context of the driver.
    """
    found: Captures = core.shared.setdefault((Captures, core.name), Captures())
    return found
