"""Look at the marks at a fixed interval."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from accel.completion.strategy import CompletionStrategy, Ended, LaneWatcher, put_in_line, take_ended
from accel.completion.timer import create_timer
from accel.errors import InvalidArgumentError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Hashable

    from accel.backend import AccelDevice
    from accel.completion.strategy import Pending

__all__ = ["PolledCompletion", "PolledWatcher"]


@dataclass(frozen=True)
class PolledCompletion(CompletionStrategy):
    """Poll the oldest mark of every lane while there is one.

    Parameters
    ----------
    interval
        Seconds between two looks; 0 looks once per turn of the loop.
    """

    name: ClassVar[str] = "polled"
    interval: float = 0.0005

    def __post_init__(self) -> None:
        if isinstance(self.interval, bool) or not isinstance(self.interval, (int, float)) or not 0 <= self.interval < float("inf"):
            raise InvalidArgumentError(f"interval={self.interval!r} is not a time to wait", remedy="Use 0 or more seconds.")

    def open(self, device: AccelDevice, loop: asyncio.AbstractEventLoop, shared: dict[Any, Any]) -> PolledWatcher:
        """Return a watcher with a timer of its own."""
        return PolledWatcher(loop, self.interval)


class PolledWatcher(LaneWatcher):
    """Polls one device's marks."""

    def __init__(self, loop: asyncio.AbstractEventLoop, interval: float) -> None:
        super().__init__(loop)
        self._interval = interval
        self._lanes: dict[Hashable, deque[Pending]] = {}
        self._timer = create_timer(loop, self._poll)
        self._next_turn: asyncio.Handle | None = None
        self._armed = False

    def watch(self, pending: Pending) -> None:
        """Watch a mark until it ends."""
        self._admit()
        put_in_line(self._lanes.setdefault(pending.lane, deque()), pending)
        self._arm()

    def _arm(self) -> None:
        if self._armed:
            return
        self._armed = True
        if self._interval > 0:
            self._timer.arm(self._interval)
        else:
            self._next_turn = self._loop.call_soon(self._poll)

    def _poll(self) -> None:
        self._armed = False
        self._looks += 1
        ended: list[Ended] = []
        for lane in list(self._lanes):
            queue = self._lanes[lane]
            take_ended(queue, ended)
            if not queue:
                del self._lanes[lane]
        if self._lanes:
            self._arm()
        self._settle(ended)

    def _take_all(self) -> list[Pending]:
        taken = [pending for queue in self._lanes.values() for pending in queue]
        self._lanes.clear()
        return taken

    async def _release(self, *, abandon: bool) -> None:
        if self._next_turn is not None:
            self._next_turn.cancel()
        self._timer.close()
