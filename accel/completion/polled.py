"""Poll the oldest mark of every lane at a fixed interval."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from accel.completion.poller import PollingWatcher
from accel.completion.strategy import CompletionStrategy
from accel.values import check_seconds

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Hashable

    from accel.backend import AccelDevice

__all__ = ["PolledCompletion"]


@dataclass(frozen=True)
class PolledCompletion(CompletionStrategy):
    """Poll the oldest mark of every lane while there is one.

    Parameters
    ----------
    interval
        Seconds between two polls; 0 polls once per loop iteration.
    """

    name: ClassVar[str] = "polled"
    interval: float = 0.0005

    def __post_init__(self) -> None:
        check_seconds("interval", self.interval)

    def open(self, device: AccelDevice, loop: asyncio.AbstractEventLoop, shared: dict[Any, Any]) -> PollingWatcher:
        """Return a watcher that uses the poller of all devices with this interval."""
        return PollingWatcher(loop, shared, self, lambda: _FixedPace(self.interval), device)


class _FixedPace:
    """Polls at an interval, whatever an op takes."""

    __slots__ = ("_interval",)

    def __init__(self, interval: float) -> None:
        self._interval = interval

    def delay(self, kind: Hashable, elapsed: float) -> float:
        """Return the interval."""
        return self._interval

    def observe(self, kind: Hashable, seconds: float) -> None:
        """Do nothing: a fixed interval learns nothing."""
