"""The policy for an actor's failures: by the error's class and scope, within a budget.

A :class:`RestartStrategy` is the policy, which actors may share; a :class:`RestartBudget` counts
one actor's restarts under it.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accel.errors import AccelError, FaultScope, InvalidArgumentError
from accel.values import check_count, check_seconds

if TYPE_CHECKING:
    import random

__all__ = ["Directive", "RestartBudget", "RestartStrategy", "default_decision"]


class Directive(enum.Enum):
    """The supervisor's decision about an actor that failed."""

    RESUME = "resume"
    """Continue with the next message and the same state."""
    RESTART = "restart"
    """Replace the actor's state by a fresh instance; the mailbox survives."""
    RENEW = "renew"
    """As RESTART, without a charge to the budget: the failure is not the actor's own.

    The first attempt is immediate, and further ones are delayed.
    """
    STOP = "stop"
    """Stop the actor; waiting senders get :class:`~accel.errors.ActorStoppedError`."""
    ESCALATE = "escalate"
    """Stop the actor, and fail its parent with the same error.

    An actor without a parent is stopped, and the error is logged.
    """


def default_decision(error: BaseException, on_exception: Directive = Directive.RESTART) -> Directive:
    """Return the directive for an error, without a user's ``decide``.

    Parameters
    ----------
    error
        The failure.
    on_exception
        The directive for an exception that is no :class:`~accel.errors.AccelError`.

    Returns
    -------
    Directive
        An :class:`~accel.errors.AccelError` of scope OP resumes, CONTEXT and PROCESS restart,
        DEVICE stops. Any other exception: ``on_exception``.
    """
    if not isinstance(error, AccelError):
        return on_exception
    if error.scope >= FaultScope.DEVICE:
        return Directive.STOP
    return Directive.RESTART if error.is_fault else Directive.RESUME


@dataclass(frozen=True, slots=True)
class RestartStrategy:
    """How often, how fast and whether an actor is restarted.

    Parameters
    ----------
    max_restarts
        Restarts allowed in any window of ``within`` seconds. One more failure opens the circuit:
        the actor stops with that error, and every waiter gets
        :class:`~accel.errors.ActorStoppedError`, with the error as ``__cause__``.
    within
        Length of the window, in seconds.
    backoff
        Shortest and longest delay before a restart, in seconds. The first restart in a window is
        immediate; after that the delay is drawn at random from a range that doubles each time,
        never leaving these bounds.
    decide
        ``decide(error) -> Directive``, called on the loop for each failure; it must not block. If
        it raises, that is logged and :func:`default_decision` decides. ``None``:
        :func:`default_decision`.
    on_exception
        The directive for an exception that is no :class:`~accel.errors.AccelError`, such as a
        ``ValueError`` from ``receive``. ``Directive.RESTART``: a fresh instance replaces the
        actor's state, which costs one restart. ``Directive.RESUME``: the actor keeps its state, and
        only the message has failed. For actors only: a device accepts only RESTART.

    Raises
    ------
    InvalidArgumentError
        A number is out of its range.
    """

    max_restarts: int = 3
    within: float = 60.0
    backoff: tuple[float, float] = (0.05, 2.0)
    decide: Callable[[BaseException], Directive] | None = None
    on_exception: Directive = Directive.RESTART

    def __post_init__(self) -> None:
        check_count("max_restarts", self.max_restarts, 0)
        check_seconds("within", self.within, or_zero=False, or_endless=True)
        if not isinstance(self.backoff, (tuple, list)) or len(self.backoff) != 2:
            raise InvalidArgumentError(f"backoff is {self.backoff!r}", remedy="Give (shortest, longest) in seconds.")
        shortest, longest = self.backoff
        check_seconds("backoff[0]", shortest)
        check_seconds("backoff[1]", longest)
        if shortest > longest:
            raise InvalidArgumentError(f"backoff is {self.backoff!r}", remedy="Give (shortest, longest) in seconds, the shortest first.")
        if self.decide is not None and not callable(self.decide):
            raise InvalidArgumentError(f"decide is {self.decide!r}", remedy="Give a function of an exception, or None.")
        if not isinstance(self.on_exception, Directive):
            raise InvalidArgumentError(
                f"on_exception is {self.on_exception!r}", remedy="Give an accel.Directive, such as Directive.RESUME."
            )

    def delay(self, earlier: int, rng: random.Random) -> float:
        """Return the delay before a restart.

        Parameters
        ----------
        earlier
            Restarts already made in the window.
        rng
            Source of the jitter, so that actors that failed together do not restart together.

        Returns
        -------
        float
            Seconds: 0 for the first restart, else between the bounds of ``backoff``.
        """
        if earlier == 0:
            return 0.0
        shortest, longest = self.backoff
        first = shortest or longest / 64  # nothing, doubled, would stay nothing
        low = min(longest, math.ldexp(first, min(earlier - 1, 64)))
        return rng.uniform(low, min(longest, 2 * low))


class RestartBudget:
    """Counts one actor's restarts.

    Parameters
    ----------
    strategy
        The policy.
    clock
        Seconds, monotonic.
    rng
        Source of the jitter.

    Attributes
    ----------
    restarts
        Restarts granted since the start.
    """

    __slots__ = ("_clock", "_recent", "_rng", "restarts", "strategy")

    def __init__(self, strategy: RestartStrategy, clock: Callable[[], float], rng: random.Random) -> None:
        self.strategy = strategy
        self.restarts = 0
        self._clock = clock
        self._rng = rng
        self._recent: deque[float] = deque()

    def left(self) -> int:
        """Return how many restarts would be granted now."""
        recent, oldest = self._recent, self._clock() - self.strategy.within
        while recent and recent[0] <= oldest:
            recent.popleft()
        return self.strategy.max_restarts - len(recent)

    def charge(self) -> None:
        """Count a restart that was free when it was made."""
        self._recent.append(self._clock())

    def renew(self, failed: int) -> float:
        """Count a free restart, and return the seconds to wait before it.

        ``failed`` starts before it were in vain.
        """
        self.restarts += 1
        return self.strategy.delay(failed, self._rng)

    def request(self) -> float | None:
        """Request one more restart.

        Returns
        -------
        float or None
            Seconds to wait before it; ``None`` when the budget is spent and the circuit is open.
        """
        if self.left() <= 0:
            return None
        earlier = len(self._recent)
        self._recent.append(self._clock())
        self.restarts += 1
        return self.strategy.delay(earlier, self._rng)
