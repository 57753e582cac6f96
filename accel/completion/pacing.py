"""When the reactor looks at an op: what can be set, and how long a pause is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accel.completion.prediction import Estimate

__all__ = ["STAYS", "Pacing", "pause"]

_AFTER = 3
"""So many times as long as before a predicted end it is spun on after it."""

STAYS = 2
"""For the first so many of them the only waiter may do it itself."""


@dataclass(frozen=True, slots=True)
class Pacing:
    """When the reactor looks. Times in seconds.

    Parameters
    ----------
    window
        It spins from at most this long before a predicted end until three times as long after.
    unknown_spin
        It spins for this long on an op of a kind that it has not seen.
    hold
        For so long an op that is about to end is looked for without giving the loop back, once its caller has let it take a turn.
    brief
        An op that takes no longer, and of which nobody knows that it takes longer, is looked for in the turn of the loop in which it was sent, where its caller
        is the only one.
    throughout
        Ops that take no longer are spun on from beginning to end: after a sleep, however short, the way of the result is several microseconds longer.
    shortest, longest
        Bounds of the sleeps that are not to a predicted end. A sleep shorter than ``shortest`` is not worth a timer.
    fine
        The last sleep to a predicted end is at most so long, and a sleep for an op that takes no longer than ``trust`` is cut into pieces of at most so
        much, and ``shortest`` at least, between which there is a glance at the mark at most. A processor that idles longer is put to a deeper sleep, from
        which its timers are late, and the op's whole way is slow, for its caches are empty: see ``docs/hardware.md``. An op that takes longer does not
        feel that.
    alert
        So long it sleeps at most while something on another thread is about to end.
    trust
        The first sleep to a predicted end is at most this long, later ones at most as long as the op has run: what has become
        much faster than it was is seen to be.
    patience
        Such a sleep takes one part in ``patience`` of the time that has gone by.
    kinds
        How many kinds of op are remembered.
    """

    window: float = 60e-6
    unknown_spin: float = 75e-6
    hold: float = 10e-6
    brief: float = 20e-6
    throughout: float = 300e-6
    shortest: float = 50e-6
    longest: float = 2e-3
    fine: float = 0.2e-3
    alert: float = 0.2e-3
    trust: float = 10e-3
    patience: float = 8.0
    kinds: int = 512


def pause(elapsed: float, estimate: Estimate | None, pacing: Pacing) -> float:
    """Return for how long not to look at an op that has run for ``elapsed`` seconds; 0 means: look in the next turn.

    Parameters
    ----------
    elapsed
        Seconds since the op began.
    estimate
        What its kind took before, if known.
    pacing
        Bounds.
    """
    if estimate is None:
        return 0.0 if elapsed < pacing.unknown_spin else _step(elapsed, pacing)
    mean, deviation = estimate.mean, estimate.deviation
    late = elapsed - mean
    if late > _AFTER * pacing.window:
        return _step(max(late, elapsed / pacing.patience), pacing)
    if mean <= pacing.throughout:
        return 0.0
    # Long ops have room for a wide margin.
    margin = min(pacing.window, max(mean / 13, pacing.shortest))
    spread = 2 * deviation
    ahead = -late - margin - min(spread, margin)
    if ahead < pacing.shortest:
        return 0.0
    ahead = min(ahead, max(pacing.trust, elapsed))
    if spread > margin:
        # Durations of this kind scatter: it can end long before the mean, so the way there is cut into steps.
        certain = mean - 2 * spread - elapsed
        ahead = min(ahead, max(certain, _step(elapsed, pacing)))
    fine = pacing.fine
    return ahead - fine if ahead > 2 * fine and mean > pacing.trust else ahead


def _step(elapsed: float, pacing: Pacing) -> float:
    return min(max(elapsed / pacing.patience, pacing.shortest), pacing.longest)
