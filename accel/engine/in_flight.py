"""What contexts do alike, wherever they live: they know what is in flight, for how much there is room, and end everything at the first fault."""

from __future__ import annotations

from abc import ABC, abstractmethod
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from accel.actors.turns import EVERY, Turn
from accel.engine.stall import StallWatch
from accel.errors import AccelError, ClosedError, ContextPoisonedError, DeviceLostError, FaultScope, LibraryError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from accel.engine.core import DeviceCore
    from accel.engine.submission import Submission

__all__ = ["MANY_FREES", "ContextBase", "ContextOwner", "fault_behind"]

MANY_FREES = 1024
"""Dropped refs whose memory is given back in one turn of the loop; more take several."""


class ContextOwner(Protocol):
    """What keeps contexts over the generations: the host of a device, or the server of a child."""

    def published(self, context: Any) -> None:
        """Take note of the context of the present generation, once it is ready; ``None`` when there is none any more."""

    def faulted(self, error: AccelError) -> bool:
        """Decide whether another context follows a fault that has just surfaced."""


class ContextBase(ABC):
    """One generation of a device, as its device actor sees it.

    Parameters
    ----------
    core
        What the device keeps over all generations.
    owner
        Decides what follows a fault.

    Attributes
    ----------
    generation : int
    submissions : dict
        Those that were dispatched and have not ended, oldest first, with the time on the clock of ``perf_counter``.
    in_flight : int
        Their ops.
    commands : int
        What these put into the device's queues, as far as the backend tells: at most :attr:`limit`, and one op more.
    limit : int
        ``max_in_flight``, or less where the device's queues take less.
    fault : AccelError or None
        What ended the context. It is never used again.
    on_fault : callable
        Told of the fault, once.
    after_retire : callable or None
        Called whenever ops are over.
    stalls : StallWatch or None
        Sees whether it makes progress.
    """

    def __init__(self, core: DeviceCore, owner: ContextOwner) -> None:
        self.core = core
        self._owner = owner
        self.generation = core.lifecycle.generation + 1
        self.submissions: dict[Submission, float] = {}
        self.in_flight = self.commands = 0
        self.limit = core.options.max_in_flight
        self.fault: AccelError | None = None
        self.on_fault: Callable[[AccelError], object] = lambda _: None
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
        self.submissions[submission] = perf_counter()
        if self.stalls is not None and self.stalls.handle is None:
            self.stalls.sent()

    def stall(self) -> str:
        """Return what shows that the device makes no progress, or nothing. Any thread may ask."""
        return "" if self.stalls is None else self.stalls.reason()

    def busy_seconds(self) -> float:
        """Return for how many seconds so far something was loaded or compiled that ops may wait for. Any thread may ask."""
        return 0.0

    def unfinished(self) -> list[int]:
        """Return the buffers with a write that was sent to the device and is not known to have ended: a batch ends as a whole."""
        return [buffer for submission in self.submissions for at, buffer, _ in submission.writes if at < submission.launched]

    def retire(self, submission: Submission, count: int, commands: int, *, is_last: bool) -> None:
        """Note that ``count`` ops of a submission are over, which put ``commands`` into the device's queues; answer it if it ends here."""
        self.in_flight -= count
        self.commands -= commands
        self.core.workload.retired += count
        submission.outstanding -= count
        if is_last or not submission.outstanding:
            self.submissions.pop(submission, None)
        if is_last:
            if self.stalls is not None and submission.name not in self.stalls.ended:  # which no name of a batch is
                self.stalls.ended.add(submission.work)
            if submission.tears and not submission.is_settled:
                self.core.durable.on_rewritten(submission.writes, submission.tears)
            submission.succeed()
        elif not submission.outstanding:
            submission.over()
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
        """Wait until something is so that the end of ops brings about, or what calls :meth:`wake`. Raises as :meth:`wait_for_room` does."""
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
        """Have those that wait in :meth:`until` look again."""
        for room in self._rooms:
            if not room.done():
                room.set_result(None)

    @abstractmethod
    def apply_frees(self, most: int | None = None) -> None:
        """Give the memory of dropped refs back, of ``most`` at most."""

    async def apply_many_frees(self) -> None:
        """Do that in turns, until they are few."""
        turn = Turn()
        while len(self.core.refs.dropped) > MANY_FREES:
            self.apply_frees(EVERY)
            if turn.is_over:
                await turn.next()

    def must_wait(self, submission: Submission) -> bool:
        """Whether a submission must wait for something that other submissions need not wait for, unless they use the same buffers."""
        return False

    def report_fault(self, error: AccelError, *, is_survived: bool = False) -> None:
        """Take the first fault that surfaces: fail all that is in flight at once, and tell the supervisor. Later ones change nothing.

        With ``is_survived`` the supervisor has decided for another context already.
        """
        if self.fault is not None:
            return
        if not error.is_fault:
            error = LibraryError(error.message, code=error.code, library=error.library, scope=FaultScope.CONTEXT, op=error.op)
        # It stays as long as this does; a traceback's frames hold submissions, and so what their waiters had in hand. So does that of what a caller was
        # handling when it surfaced in its turn.
        self.fault = error.with_traceback(None)
        error.__context__ = None
        self.core.durable.on_fault(self.unfinished())
        self.core.lost_context(error, follows=(lambda _: True) if is_survived else self._owner.faulted)
        self.fail_all(error)
        self.on_fault(error)

    def fail_all(self, error: AccelError) -> None:
        """End every submission in flight with an error of its own."""
        submissions, self.submissions = self.submissions, {}
        if self.stalls is not None:
            self.stalls.stop()
        suspects = tuple(kind for sub in submissions if sub.launched for kind in sub.kinds[: sub.launched])[:64]
        lifecycle = self.core.lifecycle
        # Of the fault that lost the device, those in flight are told like of any other: what was running, and whether it may have run.
        is_over = lifecycle.is_final and lifecycle.cause is not error
        for submission in submissions:
            submission.reject(lifecycle.final_error() if is_over else self.poisoned(error, submission, suspects))
        self.wake()
        self.core.workload.settled()

    def poisoned(self, error: AccelError, submission: Submission | None = None, suspects: tuple[str, ...] = ()) -> AccelError:
        """Return a new error that tells a waiter what became of its work: of a context that was closed, no fault."""
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
        """Raise what tells that the context has faulted, or was closed, if it has."""
        if self.fault is not None:
            raise self.poisoned(self.fault)


def fault_behind(error: BaseException) -> AccelError:
    """Return the fault for which a context is given up: ``error`` itself, or that what kept the context has failed."""
    if isinstance(error, AccelError) and error.is_fault:
        return error
    return DeviceLostError("the context's actor failed", scope=FaultScope.CONTEXT)
