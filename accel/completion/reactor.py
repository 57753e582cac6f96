"""The reactor: one per system, it looks at the oldest mark of every lane as seldom as it can and as soon as it should.

A look costs microseconds, a sleep costs the time by which it is too long. So the reactor looks once per turn of the loop ("spins") while the
predicted end of an op is near, sleeps on a precise timer while it is far, and when nothing is known, or the prediction was wrong, sleeps for a
fixed part of the time that has gone by: whatever an op takes, a bounded part of it is added. With nothing to watch there is no timer and no callback.
"""

from __future__ import annotations

import math
import time
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

from accel.completion.pacing import STAYS, pause
from accel.completion.prediction import Predictor
from accel.completion.strategy import Ended, look, put_in_line, take_ended
from accel.completion.timer import create_timer

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator

    from accel.completion.pacing import Pacing
    from accel.completion.strategy import Pending

__all__ = ["Reactor", "ReactorLane"]

_SELDOM = 5
"""Between two glances lies at least one part in so many of the time that an op has taken so far: a glance costs as much as the rest of a wake."""

_STEADY, _SEEN = 16, 4
"""Durations of a kind that differ from their mean by less than one part in so many are steady, once so many have been seen."""


class ReactorLane:
    """The marks of one lane, oldest first.

    Attributes
    ----------
    settle : callable
        What is told about marks that have ended.
    let_go : callable
        What is asked before a mark is given back to its waiter; returns whether it may be.
    began, ended, looked, due : float
        When the oldest mark's work began, the mark before it ended, the oldest was last looked at, and was to be looked at next.
    """

    __slots__ = ("began", "due", "ended", "let_go", "looked", "queue", "settle")

    def __init__(self, settle: Callable[[list[Ended]], None], let_go: Callable[[], bool]) -> None:
        self.settle = settle
        self.let_go = let_go
        self.queue: deque[Pending] = deque()
        self.began = self.ended = self.looked = self.due = 0.0


class Reactor:
    """Looks at the heads of all lanes of all devices of one system.

    Parameters
    ----------
    loop
        The loop that it runs on.
    pacing
        When it looks.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, pacing: Pacing) -> None:
        self.users = 0
        self.looks = 0
        self._loop = loop
        self._pacing = pacing
        self._predictor = Predictor(pacing.kinds)
        self._lanes: dict[ReactorLane, None] = {}  # those with marks
        self._next_turn: asyncio.Handle | None = None
        self._timer = create_timer(loop, self._on_timer)
        self._alarm: float | None = None
        self._rings = 0.0  # when the timer does: at the alarm, or before, for no more than a glance
        self._piece = math.inf  # sleeps are cut into pieces of at most so much, because somebody waits for an op that feels it
        self._every = 0.0  # how long they are, while the timer rings by itself after each
        self._quiet_until = 0.0  # until then its rings do no more than keep the processor from a deeper sleep
        self._stayed_for = self._stays_until = 0.0  # when the mark began whose waiter looks, or looked, itself, and until when it does
        self.napping: Pending | None = None  # whose waiter sleeps until the end is near
        self._nap: asyncio.Future[None] | None = None
        self._expected, self._expected_until = 0, 0.0

    def add(self, lane: ReactorLane, pending: Pending) -> None:
        """Watch ``pending`` as a mark of ``lane``."""
        queue = lane.queue
        put_in_line(queue, pending)
        if queue[0] is pending:
            now = time.perf_counter()
            lane.began = max(pending.enqueued_at, lane.ended)
            lane.looked = now
            self._quiet_until = 0.0
            self._lanes[lane] = None
            self._schedule(now, self._pause(lane, now))

    def meets(self, pending: Pending) -> bool:
        """Return whether a mark is found to be passed, now or within ``hold``; its waiter has let the loop take a turn since it was recorded."""
        answer, known, hold = look(pending), self._predictor.expect(pending.kind), self._pacing.hold
        is_long = known is not None and known.mean > hold
        if answer is not None and pending.enqueued_at != self._stayed_for:
            # Found by the first look, which may have come late: all that is known is how long it took at most.
            if is_long and known is not None and answer[1] is None and (most := time.perf_counter() - pending.enqueued_at) < known.mean:
                self._predictor.observe(pending.kind, most)
            return answer[1] is None  # a fault is told on the way that all marks go
        now = time.perf_counter()
        if answer is None and (known is None or abs(now - pending.enqueued_at - known.mean) < hold or not is_long):
            until = now + hold
            while answer is None and now < until:
                answer = look(pending)
                now = time.perf_counter()
        if answer is None or answer[1] is not None:
            return False
        has_stayed = pending.enqueued_at == self._stayed_for
        if has_stayed:
            self._stays_until = 0.0
        if known is None or is_long or has_stayed:
            self._predictor.observe(pending.kind, now - pending.enqueued_at)
        return True

    def meets_at_once(self, pending: Pending) -> bool:
        """Return whether a mark that was recorded just now is found to be passed in the time of a brief op, where its kind is not known to take longer."""
        known, brief = self._predictor.expect(pending.kind), self._pacing.brief
        if known is not None and known.mean > brief:
            return False
        until = pending.enqueued_at + brief
        while (answer := look(pending)) is None and time.perf_counter() < until:
            pass
        if answer is None or answer[1] is not None:
            self._stayed_for = pending.enqueued_at  # it was looked at: the next look tells how long it took
            return False
        if known is None:
            self._predictor.observe(pending.kind, time.perf_counter() - pending.enqueued_at)
        return True

    def is_near(self, pending: Pending) -> bool:
        """Return whether the waiter of a mark that is not passed had better look itself, in each turn of the loop, for as long as this is so.

        The reactor would look as often, and then the waiter would have to be woken. But several that look would look too often.
        """
        began, now = pending.enqueued_at, time.perf_counter()
        if self._lanes or self._another_stays(pending, now):
            return False
        known, pacing = self._predictor.expect(pending.kind), self._pacing
        if known is None or now > (until := began + known.mean + STAYS * pacing.window) or pause(now - began, known, pacing) > 0.0:
            return False
        self._stayed_for, self._stays_until = began, until
        self.looks += 1
        return True

    def is_far(self, pending: Pending) -> bool:
        """Return whether the end of a mark that was recorded just now is so surely far that not even a first look is worth it.

        So it is where the last of its kind have taken about as long, and where the first piece of the sleep is short: once one ends early, it is found after
        that.
        """
        known = self._predictor.expect(pending.kind)
        if known is None or known.seen < _SEEN or known.mean > self._pacing.trust or known.deviation > known.mean / _STEADY:
            return False
        return pause(0.0, known, self._pacing) > 0.0

    def overtaken(self, pending: Pending) -> None:
        """Take note that a mark is passed, as a later one has told: its waiter does not stay any more."""
        if pending.enqueued_at == self._stayed_for:
            self._stays_until = 0.0

    def _another_stays(self, pending: Pending, now: float) -> bool:
        return pending.enqueued_at != self._stayed_for and now < self._stays_until

    def nap(self, lane: ReactorLane, pending: Pending) -> asyncio.Future[None] | None:
        """Watch a mark whose end is far, if it is the only one, and return what tells its waiter that it had better look itself: it has the mark then.

        Several do not nap: who looks for all of them is the reactor.
        """
        known, now = self._predictor.expect(pending.kind), time.perf_counter()
        if self._lanes or known is None or now > pending.enqueued_at + known.mean or self._another_stays(pending, now):
            return None
        self.add(lane, pending)
        self.napping, self._nap = pending, self._loop.create_future()
        return self._nap

    def end_nap(self, lane: ReactorLane) -> bool:
        """Give the napping waiter's mark back to it, and wake it; return ``False``, with nothing done, if it is to stay here.

        It is where others have come to its lane since: those are looked for here.
        """
        if len(lane.queue) > 1 or not lane.let_go():
            return False
        self._stayed_for = lane.queue.popleft().enqueued_at
        self._lanes.pop(lane, None)
        if not self._lanes:
            self._rest()
        nap, self.napping, self._nap = self._nap, None, None
        if nap is not None and not nap.done():
            nap.set_result(None)
        return True

    def take(self, lane: ReactorLane) -> list[Pending]:
        """Stop watching a lane, and return its marks."""
        taken = list(lane.queue)
        if self.napping in taken:
            self.napping = self._nap = None
        lane.queue.clear()
        self._lanes.pop(lane, None)
        if not self._lanes:
            self._rest()
        return taken

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """Keep the processor awake for up to ``trust`` seconds, while something on another thread is about to end.

        Being woken takes a quarter of a millisecond otherwise, as after every wait that is longer than a millisecond.
        """
        self._expected += 1
        now = time.perf_counter()
        self._expected_until = now + self._pacing.trust
        self._schedule(now, self._pacing.alert)
        try:
            yield
        finally:
            self._expected -= 1

    def close(self) -> None:
        """Give the timer back. Idempotent."""
        self._expected_until = 0.0
        self._rest()
        self._timer.close()

    def _pause(self, lane: ReactorLane, now: float) -> float:
        known = self._predictor.expect(lane.queue[0].kind)
        delay = pause(now - lane.began, known, self._pacing)
        lane.due = now + delay
        if known is not None and max(known.mean, now - lane.began) <= self._pacing.trust:
            self._piece = max(self._pacing.fine, self._pacing.shortest)
        return delay

    def _schedule(self, now: float, delay: float) -> None:
        if self._next_turn is not None:
            return
        if delay <= 0.0:
            self._next_turn = self._loop.call_soon(self._turn)
        elif self._alarm is None or now + delay < self._alarm:
            self._alarm = now + delay
            self._sleep(now, delay)

    def _rest(self) -> None:
        if self._next_turn is not None:
            self._next_turn.cancel()
            self._next_turn = None
        self._piece = math.inf
        if self._alarm is not None:
            self._alarm = None
            self._disarm()
        now = time.perf_counter()
        if self._expected and now < self._expected_until:
            self._schedule(now, self._pacing.alert)

    def _on_timer(self) -> None:
        now = time.perf_counter()
        if now < self._quiet_until:
            self.looks += 1
            self._rings = now + self._every
            return
        if self._sleeps_on(now):
            return
        if self._every:
            self._disarm()
        self._alarm = None
        if self._next_turn is None and (self._lanes or self._expected):
            self._turn()

    def _sleeps_on(self, now: float) -> bool:
        """Glance at heads between two pieces of a sleep; return whether it goes on."""
        left = 0.0 if self._alarm is None else self._alarm - now
        if left < self._pacing.shortest / 2:
            return False
        glance = math.inf
        for lane in self._lanes:
            if now - lane.looked >= (now - lane.began) / _SELDOM:
                if look(lane.queue[0]) is not None:
                    lane.due = (lane.looked + min(lane.due, self._rings)) / 2  # it ended between two glances, which lie far apart
                    return False
                lane.looked = now
            glance = min(glance, (_SELDOM * lane.looked - lane.began) / (_SELDOM - 1))
        self.looks += 1
        if self._every and left > 1.5 * self._every:
            self._rings = now + self._every
            self._quiet_until = min(glance, now + left - 1.5 * self._every)
        else:
            self._rings, self._every, self._quiet_until = now + left, 0.0, 0.0
            self._timer.arm(left)
        return True

    def _sleep(self, now: float, delay: float) -> None:
        """Sleep for so long, or, where somebody waits for an op that feels it, for a piece of it; the timer goes on by itself to the last piece."""
        pieces = math.ceil(delay / self._piece) or 1
        piece = delay / pieces
        self._rings, self._every, self._quiet_until = now + piece, piece if pieces > 2 else 0.0, 0.0
        self._timer.arm(piece, self._every)

    def _disarm(self) -> None:
        self._every = self._quiet_until = 0.0
        self._timer.disarm()

    def _turn(self) -> None:
        """One pass over the heads: collect what has ended, say when to look again, and only then tell the marks."""
        self._next_turn = None
        self._piece, self._quiet_until = math.inf, 0.0
        self.looks += 1
        now = time.perf_counter()
        over: list[tuple[Callable[[list[Ended]], None], list[Ended]]] = []
        soonest = self._pacing.longest * 1e6
        for lane in list(self._lanes):
            ended = self._look_at(lane, now)
            if ended:
                over.append((lane.settle, ended))
            if not lane.queue:
                del self._lanes[lane]
            elif not ((delay := self._pause(lane, now)) <= 0.0 and self._is_alone(lane) and self.end_nap(lane)):
                soonest = min(soonest, delay)
        is_expecting = self._expected and now < self._expected_until
        if self._lanes or is_expecting:
            self._schedule(now, min(soonest, self._pacing.alert) if is_expecting else soonest)
        elif self._alarm is not None:
            self._rest()
        for settle, ended in over:
            settle(ended)

    def _is_alone(self, lane: ReactorLane) -> bool:
        """Return whether the mark whose waiter naps is all that a lane has, and that there is."""
        return self.napping is not None and len(self._lanes) == 1 and len(lane.queue) == 1 and lane.queue[0] is self.napping

    def _look_at(self, lane: ReactorLane, now: float) -> list[Ended]:
        queue = lane.queue
        ended: list[Ended] = []
        answer = look(queue[0])
        if answer is not None:
            # Only the first of several has a duration that was seen; the others ended some time between two looks.
            if answer[1] is None:
                self._learn(lane, answer[0], now)
            queue.popleft()
            ended.append(answer)
            take_ended(queue, ended)
            if self.napping is not None and any(each is self.napping for each, _ in ended):  # whoever hears of the end wakes it
                self.napping = self._nap = None
            lane.ended = now
            if queue:
                lane.began = max(queue[0].enqueued_at, now)
        lane.looked = now
        return ended

    def _learn(self, lane: ReactorLane, pending: Pending, now: float) -> None:
        # It ended between two looks. A look that came late says nothing about the op: were the delay taken for a part of it, the reactor would
        # sleep as long the next time, and be late again. Of a sleep that was meant, half is taken.
        due = min(max(lane.due, lane.looked), now)
        unseen = (now - due) + min((due - lane.looked) / 2, self._pacing.window)
        self._predictor.observe(pending.kind, max(now - unseen - lane.began, 0.0))
