"""The default strategy: spin while an end is near, sleep while it is far, do nothing when there is nothing to wait for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from accel.completion.pacing import Pacing
from accel.completion.reactor import Reactor, ReactorLane
from accel.completion.signalled import NotifiedWatcher, check_watch_interval
from accel.completion.strategy import CompletionStatistics, CompletionStrategy, LaneWatcher

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Hashable
    from contextlib import AbstractContextManager

    from accel.backend import AccelDevice
    from accel.completion.strategy import Attended, Pending

__all__ = ["AdaptiveCompletion", "AdaptiveWatcher"]


@dataclass(frozen=True)
class AdaptiveCompletion(CompletionStrategy):
    """One reactor for all devices of a system, paced by what ops of the same kind took before.

    Parameters
    ----------
    pacing
        When the reactor looks; devices with equal pacing share a reactor.
    watch_interval
        Where the device's work runs on this machine's processor, and its thread wakes the loop: seconds between two looks at the oldest marks, which find
        what no thread reports: a fault.
    """

    name: ClassVar[str] = "adaptive"
    pacing: Pacing = field(default_factory=Pacing)
    watch_interval: float = 0.01

    def __post_init__(self) -> None:
        check_watch_interval(self.watch_interval)

    def open(self, device: AccelDevice, loop: asyncio.AbstractEventLoop, shared: dict[Any, Any]) -> LaneWatcher:
        """Return a watcher that uses the system's reactor, which is made here if it is the first.

        Where the device's work runs on this machine's own processor, it is the work's thread that wakes the loop: see
        :class:`~accel.completion.signalled.NotifiedWatcher`.
        """
        if device.shares_processor:
            return NotifiedWatcher(loop, self.watch_interval)
        key = (Reactor, self.pacing, loop)
        reactor = shared.get(key)
        if reactor is None:
            reactor = shared[key] = Reactor(loop, self.pacing)
        return AdaptiveWatcher(loop, reactor, key, shared)


class AdaptiveWatcher(LaneWatcher):
    """Puts one device's marks before the system's reactor; the last watcher to close takes the reactor away."""

    def __init__(self, loop: asyncio.AbstractEventLoop, reactor: Reactor, key: Hashable, shared: dict[Any, Any]) -> None:
        super().__init__(loop)
        self._reactor = reactor
        self._key = key
        self._shared = shared
        self._lanes: dict[Hashable, ReactorLane] = {}
        reactor.users += 1

    def watch(self, pending: Pending) -> None:
        """Watch a mark until it ends."""
        self._admit()
        self._reactor.add(self._lane(pending), pending)

    def attend(self, pending: Pending) -> None:
        """Complete a mark at once if it is found to be passed, or is within microseconds; else watch it."""
        lane = self._lane(pending)
        if self._reactor.napping is pending and not self._reactor.end_nap(lane):
            return
        if not lane.queue and self._reactor.meets(pending):
            self._completed += 1
            pending.complete()
        else:
            self.watch(pending)

    def attend_once(self, pending: Attended) -> bool:
        """Complete a mark at once if it is found to be passed; return ``False`` if its waiter is to look itself, now or after a nap; else watch it."""
        lane, reactor = self._lanes.get(pending.lane) or self._lane(pending), self._reactor
        if reactor.napping is pending and not reactor.end_nap(lane):
            return True
        if not lane.queue:
            is_overtaken = pending.is_overtaken()
            if is_overtaken or reactor.meets(pending):
                if is_overtaken:
                    reactor.overtaken(pending)
                self._completed += 1
                pending.complete()
                return True
            if reactor.is_near(pending) or self._nap(lane, pending):
                return False
        self.watch(pending)
        return True

    def attend_at_once(self, pending: Attended) -> bool:
        """Complete a mark whose kind of op takes microseconds, or is not known, if it is seen to be passed within them; let its waiter nap if it is far."""
        lane, reactor = self._lanes.get(pending.lane) or self._lane(pending), self._reactor
        if lane.queue:
            return False
        if reactor.meets_at_once(pending):
            self._completed += 1
            pending.complete()
            return True
        if reactor.is_far(pending):
            self._nap(lane, pending)
        return False

    def _nap(self, lane: ReactorLane, pending: Attended) -> bool:
        """Let a mark's waiter nap, if it may."""
        nap = None if self._closing else self._reactor.nap(lane, pending)
        if nap is None:
            return False
        self._pending += 1
        pending.nap = nap
        return True

    def _lane(self, pending: Pending) -> ReactorLane:
        lane = self._lanes.get(pending.lane)
        if lane is None:
            lane = self._lanes[pending.lane] = ReactorLane(self._settle, self._let_go)
        return lane

    def _let_go(self) -> bool:
        if self._closing:  # then there is no coming back
            return False
        self._pending -= 1
        return True

    def expecting(self) -> AbstractContextManager[object]:
        """Return a block in which the loop's processor is kept awake."""
        return self._reactor.expecting()

    def statistics(self) -> CompletionStatistics:
        """Return counters; ``looks`` counts those of the reactor, for all devices together."""
        return CompletionStatistics(self._pending, self._completed, self._failed, self._reactor.looks)

    def _take_all(self) -> list[Pending]:
        return [pending for lane in self._lanes.values() for pending in self._reactor.take(lane)]

    async def _release(self, *, abandon: bool) -> None:
        self._lanes.clear()
        self._reactor.users -= 1
        if not self._reactor.users:
            self._reactor.close()
            self._shared.pop(self._key, None)
