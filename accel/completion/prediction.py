"""How long the next op of a kind will take, from what the last ones took."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Hashable

__all__ = ["Estimate", "Predictor"]

# Weights of the newest observation. A prediction that is too long makes the next op be seen late; one that is too short costs a few looks
# more. So one slow op moves the mean little, and one fast op much.
_SLOWER = 0.125
_FASTER = 0.5
_DEVIATION = 0.25
# Shares of the duration by which observations differ that are taken for different work, and by which those of the same work do.
_OTHER, _SAME = 0.25, 0.0625


class Estimate(NamedTuple):
    """A predicted duration.

    Parameters
    ----------
    mean
        Seconds.
    deviation
        How far observations lie from the mean on average, in seconds.
    last
        The last observation, in seconds.
    seen
        How many observations agree: all, or those since the kind took to doing other work.
    """

    mean: float
    deviation: float
    last: float = 0.0
    seen: int = 1


class Predictor:
    """Moving averages of durations by kind, of bounded size: the kind not seen for the longest time is forgotten.

    Parameters
    ----------
    capacity
        How many kinds are remembered.
    """

    __slots__ = ("_capacity", "_estimates", "_observed")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._estimates: dict[Hashable, Estimate] = {}
        self._observed: tuple[Hashable, float] | None = None

    def __len__(self) -> int:
        if self._observed is not None:
            self._learn(*self._observed)
        return len(self._estimates)

    def expect(self, kind: Hashable) -> Estimate | None:
        """Return what is known of ``kind``, or ``None``."""
        if self._observed is not None:
            self._learn(*self._observed)
        return self._estimates.get(kind)

    def observe(self, kind: Hashable, seconds: float) -> None:
        """Take note that an op of ``kind`` took ``seconds``.

        What follows from it is worked out when somebody asks, while the next op runs: the caller of this one has not been told of its end yet.
        """
        if self._observed is not None:
            self._learn(*self._observed)
        self._observed = kind, seconds

    def _learn(self, kind: Hashable, seconds: float) -> None:
        self._observed = None
        estimates = self._estimates
        known = estimates.pop(kind, None)  # put back at the end: the table is in order of last use
        if known is None:
            if len(estimates) >= self._capacity:
                del estimates[next(iter(estimates))]
            estimates[kind] = Estimate(seconds, 0.0, seconds)
            return
        error = seconds - known.mean
        step = abs(seconds - known.last)
        if abs(error) > _OTHER * known.mean and step < _SAME * seconds:
            # Twice in a row about the same, and nothing like before: another regime, from which the old mean only takes time to get away.
            estimates[kind] = Estimate((seconds + known.last) / 2, step, seconds)
            return
        weight = _SLOWER if error > 0 else _FASTER
        deviation = known.deviation + _DEVIATION * (abs(error) - known.deviation)
        estimates[kind] = Estimate(known.mean + weight * error, deviation, seconds, known.seen + 1)
