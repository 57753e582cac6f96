"""How long the next op of a kind will take, estimated from the durations of earlier ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Hashable

__all__ = ["Estimate", "Predictor"]


class Estimate(NamedTuple):
    """A predicted duration.

    Parameters
    ----------
    mean
        Seconds.
    deviation
        How far durations lie from the mean on average, in seconds.
    observations
        How many durations it is made of, up to 8.
    """

    mean: float
    deviation: float
    observations: int = 1


_OUTLIER = 4
"""A duration that differs by more than this many deviations counts as that many: a loop that was
blocked once must not spoil the estimate."""

_SMALLEST = 10e-6
"""Seconds. The least deviation that bounds an outlier: with none the estimate would never follow a
change."""


class Predictor:
    """Mean and deviation of durations by kind, estimated as TCP estimates round trips (RFC 6298).

    The gains are larger for the first observations, so that the estimate of a kind with steady
    durations is good after three of them.

    Parameters
    ----------
    capacity
        How many kinds are kept. The kind that was not observed for the longest time is forgotten
        first.
    """

    __slots__ = ("_capacity", "_estimates")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._estimates: dict[Hashable, Estimate] = {}

    def expect(self, kind: Hashable) -> Estimate | None:
        """Return the estimate for ``kind``, or ``None`` before its first observation."""
        return self._estimates.get(kind)

    def observe(self, kind: Hashable, seconds: float) -> None:
        """Record that an op of ``kind`` took ``seconds``; a new kind may replace the oldest one."""
        estimates = self._estimates
        known = estimates.pop(kind, None)  # put back at the end: the table is in order of last use
        if known is None or seconds < known.mean / 2:
            # Begin anew. A blocked loop makes an op seem longer, and nothing makes it seem shorter:
            # so less than half of the mean is a new duration, not an outlier.
            if len(estimates) >= self._capacity:  # never after a known kind, which was removed above
                del estimates[next(iter(estimates))]
            estimates[kind] = Estimate(seconds, seconds / 2)
            return
        mean, deviation, observations = known
        bound = _OUTLIER * max(deviation, _SMALLEST)
        error = min(max(seconds - mean, -bound), bound)
        parts = min(observations + 1, 8)  # the gains end as 1/8 and 1/4, as in the RFC
        estimates[kind] = Estimate(mean + error / parts, deviation + (abs(error) - deviation) / min(observations, 4), parts)
