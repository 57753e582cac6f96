"""Whether a device makes progress: what makes ``/readyz`` tell of a stall while the state is still READY."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from accel.completion.prediction import Predictor

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Hashable

__all__ = ["StallWatch"]

_LOOKS = 8
"""How often the watch checks within ``stall_after``: a stall is seen an eighth of it late at most."""

_KINDS = 256
"""How many kinds of slow work are remembered with how long they take."""


class _Submission(Protocol):
    """What the watch needs of a submission."""

    @property
    def work(self) -> Hashable: ...

    @property
    def name(self) -> str: ...

    @property
    def outstanding(self) -> int: ...


class StallWatch:
    """Knows whether the oldest op in flight has been so for longer than what its kind usually takes and ``stall_after`` seconds.

    An op waits for ops that were sent before it, and for no others. So the oldest of all in flight waits for nothing: if it does not end, the device is
    stalled, whatever goes on in other streams. The watch checks on a timer, and has none while nothing is in flight.

    The first op of a kind is never stalled: it loads, compiles and plans, and nothing is known of it. Only ops that take longer than an eighth of
    ``stall_after`` are remembered with how long they take. The watch keeps no ref and no result.

    Parameters
    ----------
    loop
        On which the watch checks.
    stall_after
        Seconds.
    first
        Returns the oldest submission in flight and when it was sent, or ``None``.
    busy_seconds
        Returns for how many seconds so far something was opened, loaded or compiled that ops may wait for: that does not count ...
    allowance
        ... up to this many seconds for each op that is the oldest.

    Attributes
    ----------
    ended : set
        Kinds of work that have ended at least once; see :attr:`Submission.work`.
    handle : TimerHandle or None
        Of the next check; ``None`` while nothing is in flight.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        stall_after: float,
        first: Callable[[], tuple[_Submission, float] | None],
        busy_seconds: Callable[[], float],
        allowance: float,
    ) -> None:
        self._loop = loop
        self._stall_after = stall_after
        self._period = stall_after / _LOOKS
        self._first = first
        self._busy_seconds = busy_seconds
        self._allowance = allowance
        self._usual = Predictor(_KINDS)
        self._seen: tuple[float, int] | None = None
        self._work: Hashable = None
        self._name = ""
        self._since = self._due = self._busy_before = self._took = self._takes = 0.0
        self.ended: set[Hashable] = set()
        self.handle: asyncio.TimerHandle | None = None

    def sent(self) -> None:
        """Take note that something is in flight."""
        if self.handle is None:
            self._begin()
            self._arm()

    def stop(self) -> None:
        """Check no more."""
        if self.handle is not None:
            self.handle.cancel()
            self.handle = None

    def reason(self) -> str:
        """Return what is stalled, or nothing. Any thread may ask."""
        if not self._seen or self._work not in self.ended:
            return ""
        seconds, usual = self._seconds(), self._takes
        if seconds <= self._stall_after + usual:
            return ""
        try:
            if self._oldest() != self._seen:
                return ""
        except (RuntimeError, KeyError):  # it ends at this moment, and this is another thread
            return ""
        return f"{self._name} has been the oldest op in flight for {seconds:.1f} s, and usually takes {usual:.1f} s"

    def _oldest(self) -> tuple[float, int] | None:
        """Return when the oldest was sent, and how many of its ops are left: a batch that goes on is not stalled."""
        first = self._first()
        return None if first is None else (first[1], first[0].outstanding)

    def _begin(self) -> None:
        """Take note of another oldest, and learn from the last one."""
        if self._took > self._period:
            self._usual.observe(self._work, self._took)
        first, self._took = self._first(), 0.0
        self._seen, self._since, self._busy_before = self._oldest(), self._loop.time(), self._busy_seconds()
        self._work, self._name = (None, "") if first is None else (first[0].work, first[0].name)
        known = self._usual.expect(self._work)
        self._takes = 0.0 if known is None else known.mean + known.deviation

    def _seconds(self) -> float:
        """Return for how long the oldest at the last check is the oldest, without what does not count."""
        return self._loop.time() - self._since - min(self._busy_seconds() - self._busy_before, self._allowance)

    def _arm(self) -> None:
        self._due = self._loop.time() + self._period
        self.handle = self._loop.call_at(self._due, self._check)

    def _check(self) -> None:
        self.handle = None
        if self._oldest() != self._seen:
            self._begin()
        elif (late := self._loop.time() - self._due) > max(0.1, 2 * self._period):  # the loop was stopped, and has read no answer
            self._since += late
        if self._seen:
            self._took = self._seconds()
            self._arm()
