"""The base of contexts, here and in a child: work in flight, its limit, its end by a fault."""

from __future__ import annotations

from abc import ABC, abstractmethod
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from accel.actors.turns import EVERY, Turn
from accel.engine.stall import StallWatch
from accel.engine.submission import BatchSubmission
from accel.errors import AccelError, ClosedError, ContextPoisonedError, DeviceLostError, FaultScope, LibraryError
from accel.telemetry.probe import Probe

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from accel.backend import WorkSpan
    from accel.engine.core import DeviceCore
    from accel.engine.submission import Submission

__all__ = ["MANY_FREES", "ContextBase", "ContextOwner"]

MANY_FREES = 1024
"""Dropped refs whose memory is given back in one turn of the loop; more take several."""


class ContextOwner(Protocol):
    """Owns the contexts of all generations: the host of a device, or the server of a child."""

    def on_published(self, context: Any) -> None:
        """Note the context of this generation once it is ready, and ``None`` after its end."""

    def on_fault(self, error: AccelError) -> bool:
        """End the context, whose fault has just surfaced; return whether another one follows."""


class ContextBase(ABC):
    """One generation of a device, as its device actor sees it.

    Parameters
    ----------
    core
        State of the device that outlives its contexts.
    owner
        Decides what follows a fault.

    Attributes
    ----------
    generation : int
    submissions : dict
        Dispatched and not ended, oldest first -> time of the dispatch (``perf_counter``).
    in_flight : int
        Their ops.
    commands : int
        Their commands in the device's queues, as the backend counts them: at most :attr:`limit`,
        and those of one op more.
    limit : int
        ``max_in_flight``, or less where the device's queues take less.
    fault : AccelError or None
        The fault that ended the context, which is never used again.
    after_retire : callable or None
        Called whenever ops are over.
    stalls : StallWatch or None
        Checks that work in flight makes progress.
    """

    def __init__(self, core: DeviceCore, owner: ContextOwner) -> None:
        self.core = core
        self._owner = owner
        self.generation = core.lifecycle.generation + 1
        self.submissions: dict[Submission, float] = {}
        self.in_flight = self.commands = 0
        self.limit = core.options.max_in_flight
        self.fault: AccelError | None = None
        self.after_retire: Callable[[], object] | None = None
        self._rooms: list[asyncio.Future[None]] = []
        after, allowance = core.options.limits.stall_after, core.options.limits.busy_timeout
        self.stalls = (
            None
            if after is None
            else StallWatch(core.loop, after, lambda: next(iter(self.submissions.items()), None), lambda: self.busy_seconds(), allowance)
        )

    def sent(self, submission: Submission, count: int, commands: int) -> None:
        """Note that ``count`` more ops of a submission are in flight, as ``commands`` commands."""
        self.in_flight += count
        self.commands += commands
        self.submissions[submission] = now = perf_counter()
        if self.stalls is not None and self.stalls.handle is None:
            self.stalls.sent()
        work = submission.observed
        if work is not None and not work.sent_at:
            work.device, work.generation, work.sent_at = self.core.name, self.generation, now
            if self.core.probes.all:
                self.core.probes.tell(Probe.op_sent, work)

    def stall(self) -> str:
        """Return why the device is taken to make no progress, or ``""``. Thread-safe."""
        return "" if self.stalls is None else self.stalls.reason()

    def busy_seconds(self) -> float:
        """Return the age of a load or a compilation that ops may wait for. Thread-safe."""
        return 0.0

    def charge(self, submission: Submission, span: WorkSpan) -> None:
        """Charge a submission the device time of a part of it that has ended."""
        try:
            self.charge_seconds(submission, span.seconds())
        except AccelError:  # a fault: what finds it next reports it
            return

    def charge_seconds(self, submission: Submission, seconds: float) -> None:
        """Charge a submission device time."""
        self.core.workload.device_seconds += seconds
        if submission.observed is not None:
            submission.observed.charge(seconds)

    def unfinished(self) -> list[int]:
        """Return the buffers with a launched write that has not retired."""
        return [buffer for submission in self.submissions for at, buffer, _ in submission.writes if at < submission.launched]

    def retire(self, submission: Submission, count: int, commands: int, *, is_last: bool) -> None:
        """Retire ``count`` ops of a submission, and end it if they were its last."""
        self.in_flight -= count
        self.commands -= commands
        self.core.workload.retired += count
        submission.outstanding -= count
        if is_last or not submission.outstanding:
            self.submissions.pop(submission, None)
        if is_last:
            # An op that is sent as several has its own name, but takes longer than it does as one.
            if self.stalls is not None and (submission.name not in self.stalls.ended or type(submission) is BatchSubmission):
                self.stalls.ended.add(submission.work)
            if submission.tears and not submission.is_settled:
                self.core.durable.on_rewritten(submission.writes, submission.tears)
            submission.succeed()
        elif not submission.outstanding:
            submission.over()
        if submission.observed is not None and not submission.outstanding and submission.is_settled:
            submission.end_observed(self.core.probes)
        if self.core.refs.is_closing:
            self.core.workload.settled()
        if self._rooms:
            self.wake()
        if self.after_retire is not None:
            self.after_retire()

    async def wait_for_room(self, commands: int) -> None:
        """Wait until ``commands`` more fit under the limit.

        Raises
        ------
        ContextPoisonedError
            If the context faults before.
        """
        limit = max(self.limit, commands)
        await self.until(lambda: self.commands + commands <= limit)

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait for a condition, checked when ops retire; raises as :meth:`wait_for_room`."""
        self.check_alive()  # after a fault nothing retires, so that the wait would not end
        while not is_so():
            room = self.core.loop.create_future()
            self._rooms.append(room)
            try:
                await room
            finally:
                self._rooms.remove(room)
            self.check_alive()

    def wake(self) -> None:
        """Have waiters of :meth:`until` check their conditions."""
        for room in self._rooms:
            if not room.done():
                room.set_result(None)

    @abstractmethod
    async def dispatch(self, submission: Submission) -> None:
        """Send the ops of a submission to the device."""

    @abstractmethod
    def apply_frees(self, most: int | None = None) -> None:
        """Free the memory of dropped refs, of ``most`` at most."""

    async def apply_many_frees(self) -> None:
        """Free the memory of dropped refs over several loop iterations, until few are left.

        Raises
        ------
        ContextPoisonedError
            If the context faults meanwhile.
        """
        turn = Turn()
        while len(self.core.refs.dropped) > MANY_FREES:
            self.apply_frees(EVERY)
            if turn.is_over:
                await turn.next()
                self.check_alive()

    def must_wait(self, submission: Submission) -> bool:
        """Whether a submission must wait, and later ones with other buffers may overtake it."""
        return False

    def report_fault(self, error: AccelError) -> None:
        """Have the owner decide what follows the first fault, and fail all work in flight by it.

        Later faults change nothing.
        """
        if self.fault is not None:
            return
        if not error.is_fault:
            error = LibraryError(error.message, code=error.code, library=error.library, scope=FaultScope.CONTEXT, op=error.op)
        # The error lives as long as the context. Frames of its traceback, and of the error that was
        # being handled, would keep submissions alive, and so their waiters' operands.
        self.fault = error.with_traceback(None)
        error.__context__ = None
        if self.core.probes.all:
            self.core.probes.tell(Probe.fault, self.core.name, self.generation, error)
        self.core.durable.on_fault(self.unfinished())
        self.core.lost_context(error, follows=self._owner.on_fault)
        self.fail_all(error)

    def fail_all(self, error: AccelError) -> None:
        """End every submission in flight with an error of its own."""
        submissions, self.submissions = self.submissions, {}
        if self.stalls is not None:
            self.stalls.stop()
        suspects = tuple([kind for sub in submissions for kind in sub.kinds[: sub.launched]])[:64]
        lifecycle = self.core.lifecycle
        # The fault that loses the device is reported to work in flight like any other: with the ops
        # that were running, and whether this one may have run.
        is_over = lifecycle.is_final and lifecycle.cause is not error
        for submission in submissions:
            submission.reject(lifecycle.final_error() if is_over else self.poisoned(error, submission, suspects))
            if submission.observed is not None:
                submission.end_observed(self.core.probes)
        self.wake()
        self.core.workload.settled()

    def poisoned(self, error: AccelError, submission: Submission | None = None, suspects: tuple[str, ...] = ()) -> AccelError:
        """Return a new error for a waiter: its work's fate, or that the context was closed."""
        is_lost = self.core.lifecycle.is_final
        if isinstance(error, ClosedError):
            return self.core.lifecycle.final_error() if is_lost else error.clone()
        name = submission.name if submission is not None else None
        result = ContextPoisonedError(
            f"the context of {self.core.name} faulted: {error.message}",
            executed="unknown" if submission is not None and submission.launched else "no",
            suspects=suspects,
            code=error.code,
            library=error.library,
            device=self.core.name,
            generation=self.generation,
            scope=error.scope,
            op=error.op or name,
            retryable=not is_lost,
            remedy=DeviceLostError.default_remedy if is_lost else None,
        )
        result.__cause__ = error.clone()
        return result

    def check_alive(self) -> None:
        """Raise if the context has faulted or was closed."""
        if self.fault is not None:
            raise self.poisoned(self.fault)
