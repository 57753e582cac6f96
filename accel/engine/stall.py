"""Whether a device makes progress: what makes ``/readyz`` tell of a stall while the state is still READY."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from accel.completion.prediction import Predictor
from accel.engine.oldest import OldestWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from accel.engine.core import DeviceCore
    from accel.engine.submission import Submission

__all__ = ["StallWatch"]

_LOOKS = 8
"""How often it is looked within the bound: a stall is seen an eighth of it late at most."""

_KINDS = 256
"""How many kinds of slow work are remembered with how long they take."""


class _WatchedContext(Protocol):
    """What is needed of the context: its submissions in flight, oldest first, with the time at which each was sent."""

    core: DeviceCore
    submissions: dict[Submission, float]


class StallWatch(OldestWatch):
    """Knows whether the oldest op in flight has been so for longer than what its kind usually takes and ``stall_after`` seconds.

    The first op of a kind is never stalled: it loads, compiles and plans, and nothing is known of it. Only ops that take longer than an eighth of
    ``stall_after`` are remembered with how long they take; all others take next to nothing. No ref and no result is kept for it.

    Parameters
    ----------
    context
        Whose ops.
    stall_after
        Seconds.
    busy_seconds, allowance
        See :class:`~accel.engine.oldest.OldestWatch`.
    """

    def __init__(self, context: _WatchedContext, stall_after: float, busy_seconds: Callable[[], float], allowance: float) -> None:
        super().__init__(context.core.loop, stall_after / _LOOKS, self._sent_first, busy_seconds, allowance)
        self._context = context
        self._stall_after = stall_after
        self._usual = Predictor(_KINDS)
        self._work: Hashable = None
        self._name = ""
        self._took = self._takes = 0.0
        self.ended: set[Hashable] = set()
        """What has ended at least once; see :attr:`Submission.work`."""

    def _first(self) -> Submission | None:
        return next(iter(self._context.submissions), None)

    def _sent_first(self) -> tuple[float, int] | None:
        """Return when the oldest was sent, and how many of its ops are left: a batch that goes on is not stalled."""
        first = self._first()
        return None if first is None else (self._context.submissions[first], first.outstanding)

    def begin(self, oldest: object) -> None:
        """Take note of another oldest, and learn from the last one."""
        if self._took > self._period:
            self._usual.observe(self._work, self._took)
        super().begin(oldest)
        first, self._took = self._first(), 0.0
        self._work, self._name = (None, "") if first is None else (first.work, first.name)
        known = self._usual.expect(self._work)
        self._takes = 0.0 if known is None else known.mean + known.deviation

    def judge(self, *, is_new: bool) -> float | None:
        """See :class:`~accel.engine.oldest.OldestWatch`."""
        self._took = self.seconds()
        return self._period

    def reason(self) -> str:
        """Return what is stalled, or nothing. Any thread may ask."""
        if not self._seen or self._work not in self.ended:
            return ""
        seconds, usual = self.seconds(), self._takes
        if seconds <= self._stall_after + usual:
            return ""
        try:
            if self._sent_first() != self._seen:
                return ""
        except (RuntimeError, KeyError):  # it ends at this moment, and this is another thread
            return ""
        return f"{self._name} has been the oldest op in flight for {seconds:.1f} s, and usually takes {usual:.1f} s"
