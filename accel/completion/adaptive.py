"""The default strategy: poll while an op is young or near its expected end, else sleep."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from accel.completion.pacing import AdaptivePace, Pacing
from accel.completion.poller import PollingWatcher
from accel.completion.signalled import NotifiedWatcher
from accel.completion.strategy import CompletionStrategy, check_seconds

if TYPE_CHECKING:
    import asyncio

    from accel.backend import AccelDevice
    from accel.completion.strategy import Watcher

__all__ = ["AdaptiveCompletion"]


@dataclass(frozen=True)
class AdaptiveCompletion(CompletionStrategy):
    """One poller for all devices of a system, paced by what ops of the same kind took before.

    Parameters
    ----------
    pacing
        When ops are polled; devices with equal strategies share a poller.
    watch_interval
        For devices that compute on this machine's own processors, where the worker thread wakes the
        loop: seconds between two queries of the oldest marks. They find faults, which no thread
        reports.
    """

    name: ClassVar[str] = "adaptive"
    pacing: Pacing = field(default_factory=Pacing)
    watch_interval: float = 0.01

    def __post_init__(self) -> None:
        check_seconds("watch_interval", self.watch_interval)

    def open(self, device: AccelDevice, loop: asyncio.AbstractEventLoop, shared: dict[Any, Any]) -> Watcher:
        """Return a watcher that uses the system's poller.

        For a device that computes on this machine's own processors it is a
        :class:`~accel.completion.signalled.NotifiedWatcher`: polling would take the processor from
        the work.
        """
        if device.shares_processor:
            return NotifiedWatcher(loop, self.watch_interval)
        return PollingWatcher(loop, shared, self, lambda: AdaptivePace(self.pacing), device)
