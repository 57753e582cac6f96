"""The default strategy: poll while an op is young or near its expected end, else sleep."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from accel.completion.poller import PollingWatcher
from accel.completion.prediction import Predictor
from accel.completion.signalled import NotifiedWatcher
from accel.completion.strategy import CompletionStrategy
from accel.values import check_seconds

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Hashable

    from accel.backend import AccelDevice
    from accel.completion.strategy import Watcher

__all__ = ["AdaptiveCompletion", "AdaptivePace", "Pacing"]

_LATE_WINDOWS = 3
"""An op is late this many windows after its expected end, besides the deviation. It may end one
window before."""

_POLLS_WHILE_EXPECTED = 8
"""While the end of an op whose duration varies is expected, it is polled this many times at least:
the next estimate is then better."""


@dataclass(frozen=True, slots=True)
class Pacing:
    """When an op is polled. Times in seconds.

    Parameters
    ----------
    young
        An op of unknown kind is polled in each loop iteration for this long.
    window
        An op is polled in each loop iteration from this long before its earliest expected end.
    spin
        An op whose expected ends are spread over more than this is not polled in each loop
        iteration, but at intervals.
    step
        Longest sleep before the earliest expected end, unless the interval is longer.
    shortest, longest
        Bounds of an interval. A time shorter than ``shortest`` is not worth a timer: the op is
        polled in each loop iteration.
    patience
        An interval is the time that the op has taken so far, divided by this.
    kinds
        For how many kinds of op durations are kept.
    """

    young: float = 100e-6
    window: float = 60e-6
    spin: float = 1e-3
    step: float = 0.5e-3
    shortest: float = 80e-6
    longest: float = 2e-3
    patience: float = 32.0
    kinds: int = 512


class AdaptivePace(Predictor):
    """Paces a poller by the durations of earlier ops of the same kind.

    Parameters
    ----------
    pacing
        The times that it keeps to.
    """

    __slots__ = ("_pacing",)

    def __init__(self, pacing: Pacing) -> None:
        super().__init__(pacing.kinds)
        self._pacing = pacing

    def delay(self, kind: Hashable, elapsed: float) -> float:
        """Return the seconds until the next poll of an op that began ``elapsed`` seconds ago.

        0 stands for the next loop iteration.
        """
        pacing, expected = self._pacing, self.expect(kind)
        interval = min(max(elapsed / pacing.patience, pacing.shortest), pacing.longest)
        if expected is None:  # nothing is known: poll often while it is young
            return 0.0 if elapsed < pacing.young else interval
        spread = 2 * expected.deviation  # mean deviations: few ends lie farther from the mean
        earliest = expected.mean - spread - pacing.window
        latest = expected.mean + spread + _LATE_WINDOWS * pacing.window
        if elapsed < earliest - 2 * pacing.shortest:
            # In steps, and half of the time that is left, which is `shortest` or more: timers are
            # late after a long sleep, and the op may have become shorter.
            return min((earliest - elapsed) / 2, max(interval, pacing.step))
        if elapsed > latest:  # it takes longer than expected: poll ever less often
            return interval
        # Its end is expected now: poll in each iteration, unless that may take too long.
        return 0.0 if latest - earliest <= pacing.spin else max(min(interval, spread / _POLLS_WHILE_EXPECTED), pacing.shortest)


@dataclass(frozen=True)
class AdaptiveCompletion(CompletionStrategy):
    """One poller for all devices of a system, paced by the durations of ops of the same kind.

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
        check_seconds("watch_interval", self.watch_interval, or_zero=False)

    def open(self, device: AccelDevice, loop: asyncio.AbstractEventLoop, shared: dict[Any, Any]) -> Watcher:
        """Return a watcher that uses the system's poller.

        For a device that computes on this machine's own processors it is a
        :class:`~accel.completion.signalled.NotifiedWatcher`: polling would take the processor from
        the work.
        """
        if device.shares_processor:
            return NotifiedWatcher(loop, self.watch_interval)
        return PollingWatcher(loop, shared, self, lambda: AdaptivePace(self.pacing), device)
