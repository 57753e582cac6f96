"""The watchdog of a child: time limits for its start, its answers and its silence."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from accel.engine.stall import LoopClock, OldestInFlight

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping

    from accel.engine.options import DeviceOptions

__all__ = ["Watchdog"]

_PERIOD = 0.5
"""Seconds between two ticks at most; a quarter of the shortest bound if that is below 2 s."""

_READ_TIME = 0.05
"""Seconds after which an expired limit is checked again: the loop reads messages meanwhile."""

_BUSY_FACTOR = 6
"""Multiple of ``heartbeat_timeout`` for which a child that loads or compiles may be silent.

One call may hold the GIL of the child all that time.
"""


class _Child(Protocol):
    """The members of a :class:`~accel.remote.link.Link` that the watchdog uses."""

    @property
    def is_stopped(self) -> bool: ...
    @property
    def is_busy(self) -> bool: ...

    def ping(self) -> None: ...


class Watchdog:
    """Bounds every step of one child: its start, its answer to the oldest request, and its silence.

    Only time counts in which this process could read answers; see
    :class:`~accel.engine.stall.LoopClock`. A bound that has expired is checked again after the loop
    has read what has arrived meanwhile.

    Parameters
    ----------
    loop
        On which the watchdog ticks.
    child
        Says whether it is busy, and is pinged each ``heartbeat_interval``.
    options
        Of the device. ``hang_timeout`` bounds the oldest op, without up to ``busy_timeout`` of
        loading and compiling; ``busy_timeout`` the oldest question; ``heartbeat_timeout`` the
        answer to a ping.
    on_expired
        Called once, with the text of the limit that has expired. The watchdog has stopped then.

    Attributes
    ----------
    is_heard : bool
        Whether the child has sent something since the last ping, or since the step in progress
        began. The link sets it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, child: _Child, options: DeviceOptions, on_expired: Callable[[str], object]) -> None:
        self._child = child
        limits, hang = options.limits, options.hang_timeout
        self._limits, self._hang_timeout = limits, hang
        self._on_expired = on_expired
        shortest = min(4 * limits.heartbeat_interval, limits.busy_timeout, hang or limits.busy_timeout)
        self._period = min(shortest / 4, _PERIOD)
        self._clock = LoopClock(loop)
        self._step: _Step | None = None
        self._oldest: list[tuple[OldestInFlight, float, str]] = []  # with its limit and its message
        self.is_heard = False
        self._ping_time: float | None = None  # when the oldest unanswered ping was sent
        self._next_ping = 0.0
        self._suspected = ""  # the limit that had expired at the last tick
        self._handle = self._clock.arm(self._period, self._tick)

    @property
    def is_starting(self) -> bool:
        """Whether a step is in progress in which the child may be silent."""
        return self._step is not None

    def begin_step(self, seconds: float, then: float | None = None) -> None:
        """Begin a step, such as the start of a context, in which the child need not answer pings.

        Parameters
        ----------
        seconds
            Bound of the step.
        then
            If given, ``seconds`` bounds the time until the child sends something, and this the
            step from there on.
        """
        self.is_heard = False
        self._step = _Step(seconds, then, self._clock.seconds)
        self._period = min(self._period, seconds / 4)  # also for the ticks after the step

    def end_step(self) -> None:
        """End the step: the child must answer pings from here on."""
        self._step = None

    def watch(self, ops: Mapping[int, object], questions: Mapping[int, object], busy_seconds: Callable[[], float]) -> None:
        """Bound the answers to ops and to questions from now on, in place of those given before.

        Both are by number, in the order of sending; the caller removes answered ones.
        ``busy_seconds`` returns the seconds so far in which ops may have waited for something that
        does not count.
        """
        allowance, hang = self._limits.busy_timeout, self._hang_timeout
        question = OldestInFlight(lambda: next(iter(questions), None), lambda: 0.0, 0.0)
        what = f"hung: it has not compiled or opened for {allowance:g} s what it was asked to"
        self._oldest = [(question, allowance, what)]
        if hang is not None:
            op = OldestInFlight(lambda: next(iter(ops), None), busy_seconds, allowance)
            what = f"hung: its oldest op has not ended for {hang:g} s"
            self._oldest.append((op, hang, what))

    def stop(self) -> None:
        """Stop ticking. Idempotent."""
        self._handle.cancel()

    def silence(self) -> str:
        """Return for how long the child has not answered pings, in words, for ``Device.health()``.

        ``""`` if that is less than a ``heartbeat_interval``, or while it starts or is busy. Whether
        it is given up :meth:`_check_silence` decides. Thread-safe.
        """
        ping_time = self._ping_time
        seconds = 0.0 if ping_time is None else self._clock.seconds - ping_time
        is_silent = seconds >= self._limits.heartbeat_interval and not self.is_heard and not (self.is_starting or self._child.is_busy)
        return f"the child has not answered for {seconds:.1f} s" if is_silent else ""

    # -- the tick

    def _tick(self) -> None:
        """Check all limits. The child is given up if the same one has expired at two ticks in a row.

        Between the two the loop has read what had arrived, if this process was held up. The next tick
        is scheduled, unless the child is given up.
        """
        self._clock.count()
        reasons = [self._check_step(), self._check_silence(), *(self._check_oldest(*watched) for watched in self._oldest)]
        reason = next(filter(None, reasons), "")
        if reason and reason == self._suspected:
            self._on_expired(reason)
            return
        self._suspected = reason
        self._ping()
        self._handle = self._clock.arm(_READ_TIME if reason else self._period, self._tick)

    def _check_oldest(self, oldest: OldestInFlight, limit: float, what: str) -> str:
        """Return ``what`` if the oldest request was not answered within ``limit``, or ``""``.

        Updates ``oldest``: the age begins anew if another request is the oldest now.
        """
        now = self._clock.seconds
        return what if not oldest.update(now) and oldest.age(now) >= limit else ""

    def _check_step(self) -> str:
        """Return that the step in progress takes too long, or ``""``.

        Once the child has sent something, the step goes on with its second limit, from now.
        """
        step = self._step
        if step is None:
            return ""
        if step.then is not None and self.is_heard:
            self._step = step = _Step(step.then, None, self._clock.seconds)
        return f"was not ready within {step.seconds:g} s" if self._clock.seconds - step.since >= step.seconds else ""

    def _check_silence(self) -> str:
        """Return that the child has not answered pings for too long, or ``""``.

        A starting child need not answer, and a busy one has more time, unless a signal has stopped
        it. Forgets the unanswered ping once the child has sent something.
        """
        may_be_silent = self.is_starting or self._child.is_busy
        is_stopped = may_be_silent and self._child.is_stopped
        if self.is_heard or (self.is_starting and not is_stopped):
            self._ping_time = None
        limit = self._limits.heartbeat_timeout * (_BUSY_FACTOR if self._child.is_busy and not is_stopped else 1)
        is_silent = self._ping_time is not None and self._clock.seconds - self._ping_time >= limit
        return f"has not answered for {limit:g} s" if is_silent else ""

    def _ping(self) -> None:
        """Send a ping if one is due, and record when the oldest unanswered one was sent."""
        if self._clock.seconds >= self._next_ping:
            self._next_ping = self._clock.seconds + self._limits.heartbeat_interval
            self.is_heard = False
            if self._ping_time is None:
                self._ping_time = self._clock.seconds
            self._child.ping()


class _Step(NamedTuple):
    """A step in progress: its limit, the one after the first message, and when it began."""

    seconds: float
    then: float | None
    since: float
