"""The base of contexts, here and in a child: work in flight, its limit, its end by a fault."""

from __future__ import annotations

from abc import ABC, abstractmethod
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from accel._log import get_logger
from accel.actors.turns import CHECK_EVERY, Turn
from accel.engine.launches import OpSubmission
from accel.engine.stall import StallWatch
from accel.engine.submission import BatchSubmission
from accel.errors import AccelError, ClosedError, ContextPoisonedError, DeviceLostError, FaultScope, LibraryError
from accel.ops import Checksum

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from accel.backend import WorkSpan
    from accel.engine.core import DeviceCore
    from accel.engine.submission import Submission

__all__ = ["MANY_FREES", "ContextBase", "ContextOwner"]

logger = get_logger()

MANY_FREES = 1024
"""The most dropped refs whose memory is freed in one loop iteration; more take several."""


class ContextOwner(Protocol):
    """Owns the contexts of all generations: the host of a device, or the server of a child."""

    def on_published(self, context: Any) -> None:
        """Take the context of a new generation once it is ready, and ``None`` after its end."""

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
        Submission that is dispatched and has not ended -> time of the dispatch (``perf_counter``).
        Oldest first.
    in_flight : int
        Ops that are dispatched and have not retired.
    commands : int
        Their commands in the device's queues, as the backend counts them. An op is sent while they
        are fewer than :attr:`limit`, however many it adds.
    limit : int
        ``max_in_flight``, or less where the device's queues take less.
    fault : AccelError or None
        The fault that ended the context, which is never used again.
    after_retire : callable or None
        Called whenever ops have retired.
    stall_watch : StallWatch or None
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
        self._waiters: list[asyncio.Future[None]] = []
        after, allowance = core.options.limits.stall_after, core.options.limits.busy_timeout
        self.stall_watch = (
            None
            if after is None
            else StallWatch(core.loop, after, lambda: next(iter(self.submissions.items()), None), self.busy_seconds, allowance)
        )

    def on_dispatched(self, submission: Submission, count: int, commands: int) -> None:
        """Count ``count`` more ops of a submission as in flight, with their commands.

        Called before they are enqueued. Starts the stall watch if nothing was in flight, and
        notifies probes of the submission's first ops.
        """
        self.in_flight += count
        self.commands += commands
        self.submissions[submission] = now = perf_counter()
        if self.stall_watch is not None and self.stall_watch.handle is None:
            self.stall_watch.start()
        work = submission.observed
        if work is not None and not work.sent_at:
            work.device, work.generation, work.sent_at = self.core.name, self.generation, now
            if self.core.probes.op_sent:
                self.core.probes.tell(self.core.probes.op_sent, work)

    def stall_reason(self) -> str:
        """Return why ``Device.health()`` calls the device stalled, or ``""``. Thread-safe."""
        return "" if self.stall_watch is None else self.stall_watch.reason()

    def busy_seconds(self) -> float:
        """Return how many seconds so far ops may have waited for loading, compiling or a loan.

        The stall watch does not count them in the age of an op. Thread-safe.
        """
        return 0.0

    def charge(self, submission: Submission, span: WorkSpan) -> None:
        """Add the device time of a group to that of the device, and of its submission if that is observed.

        Called when its mark is passed, before it retires. Adds nothing if the time cannot be read.
        """
        try:
            seconds = span.seconds()
        except Exception as error:  # the ops have ended, and their callers wait
            if not isinstance(error, AccelError):  # a fault: the query of the next mark reports it
                logger.warning("device_time_not_read", device=self.core.name, error=error)
            return
        self.charge_seconds(submission, seconds)

    def charge_seconds(self, submission: Submission, seconds: float) -> None:
        """Add measured device time to that of the device, and of a submission that is observed."""
        self.core.workload.device_seconds += seconds
        if submission.observed is not None:
            submission.observed.charge(seconds)

    def retire(self, submission: Submission, count: int, commands: int, *, is_last: bool) -> None:
        """Retire ``count`` ops of a submission; with ``is_last`` end it with its result.

        Called when their mark is passed, and for ops that were dropped or could not be marked.
        Wakes what waits for room or for ops to end, and notifies probes. Torn buffers that a
        submission without error has rewritten are whole again.
        """
        self.in_flight -= count
        self.commands -= commands
        submission.outstanding -= count
        if is_last or not submission.outstanding:
            self.submissions.pop(submission, None)
        if is_last:
            # The key of an op is its name: a known name needs no look at the key. That of a batch
            # is made each time: an op that is sent as several is a batch with the name of the op.
            if self.stall_watch is not None and (submission.name not in self.stall_watch.known_keys or type(submission) is BatchSubmission):
                self.stall_watch.known_keys.add(submission.duration_key)
            if submission.tears and not submission.future.done():
                self.core.durable.on_rewritten(submission.writes, submission.tears)
            submission.succeed()
        elif not submission.outstanding:
            submission.on_drained()
        if submission.observed is not None and not submission.outstanding and submission.future.done():
            submission.end_observed(self.core.probes)
        if self.core.workload.changed is not None:
            self.core.workload.wake()
        if self._waiters:
            self.wake()
        if self.after_retire is not None:
            self.after_retire()

    def has_room(self, commands: int) -> bool:
        """Return whether ``commands`` more fit under the limit; more than that do when nothing is in flight."""
        return self.commands + commands <= max(self.limit, commands)

    async def wait_for_room(self, commands: int) -> None:
        """Wait until the context has room for ``commands`` more; see :meth:`has_room`.

        Raises
        ------
        ContextPoisonedError
            If the context faults before.
        """
        await self.wait_until(lambda: self.has_room(commands))

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds: it is checked whenever ops retire, and at :meth:`wake`.

        Raises as :meth:`wait_for_room` does.
        """
        self.check_alive()  # after a fault nothing retires, so that the wait would not end
        while not condition():
            waiter = self.core.loop.create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            finally:
                self._waiters.remove(waiter)
            self.check_alive()

    def wake(self) -> None:
        """Have the waiters in :meth:`wait_until` check their conditions again."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    @abstractmethod
    async def dispatch(self, submission: Submission) -> None:
        """Send the ops of a submission to the device."""

    @abstractmethod
    def apply_frees(self, max_count: int | None = None) -> None:
        """Free the memory of dropped refs, of ``max_count`` at most."""

    async def apply_many_frees(self) -> None:
        """Free the memory of dropped refs over several loop iterations, until few are left.

        Raises
        ------
        ContextPoisonedError
            If the context faults meanwhile.
        """
        turn = Turn()
        while len(self.core.refs.dropped) > MANY_FREES:
            self.apply_frees(CHECK_EVERY)
            if turn.is_over:
                await turn.next()
                self.check_alive()

    async def verify_checksums(self) -> None:
        """Compare the sealed buffers with their checksums; one that differs is torn from now on.

        Called once the context is made, before its generation begins.

        Raises
        ------
        AccelError
            A checksum cannot be made: the context is not usable.
        """
        core, book = self.core, self.core.durable
        for buffer, seal in tuple(book.sealed.items()):
            durable_buffer = book.buffers.get(buffer)  # None if freed meanwhile
            ref = None if durable_buffer is None else durable_buffer.ref()
            if ref is None or seal.checksum is None:
                continue
            op, future = Checksum(ref), core.loop.create_future()
            self.check_alive()  # a context that has faulted ends no submission
            await self.dispatch(OpSubmission(op, op.plan(), future, self.generation))
            # The seal may have ended with its buffer meanwhile.
            if int((await future)[0]) != seal.checksum and book.sealed.get(buffer) is seal:
                book.on_mismatch(ref)

    def must_wait(self, submission: Submission) -> bool:
        """Return whether a submission must wait for shared memory, so that others may overtake it.

        Never in this process: only a child's context shares memory.
        """
        return False

    def report_fault(self, error: AccelError) -> None:
        """End the context: the owner decides what follows, and all work in flight fails.

        Ordinary refs become stale, and durable buffers with unfinished writes torn. Only the first
        fault of a context has these effects; later ones change nothing.

        An error that is no fault, such as that of a mark that the driver refuses to record, becomes
        the cause of a :class:`LibraryError` of scope CONTEXT: where the work ends is not known.
        """
        if self.fault is not None:
            return
        if not error.is_fault:
            cause = error.clone()
            error = LibraryError(error.message, code=error.code, library=error.library, scope=FaultScope.CONTEXT, op=error.op)
            error.__cause__ = cause
        # The context keeps the error. The frames of its traceback, and of the error that was being
        # handled, would keep submissions alive, and with them their operands.
        self.fault = error.with_traceback(None)
        error.__context__ = None
        error.device = self.core.name  # a backend does not know which of several on its hardware it is
        if self.core.probes.fault:
            self.core.probes.tell(self.core.probes.fault, self.core.name, self.generation, error)
        unfinished_writes = [buffer for submission in self.submissions for at, buffer, _ in submission.writes if at < submission.launched]
        self.core.durable.on_fault(unfinished_writes)
        self.core.on_context_lost(error, decide_rebuild=self._owner.on_fault)
        self.fail_all(error)

    def fail_all(self, error: AccelError) -> None:
        """Reject every submission in flight, each with an error instance of its own.

        Called after a fault and when the context is closed. None is in flight afterwards, and all
        waiters are woken: their next check raises.
        """
        submissions, self.submissions = self.submissions, {}
        if self.stall_watch is not None:
            self.stall_watch.stop()
        suspects = tuple([kind for sub in submissions for kind in sub.kinds[: sub.launched]])[:64]
        lifecycle = self.core.lifecycle
        # The fault that loses the device is reported to work in flight like any other: with the ops
        # that were running, and whether this one may have run.
        was_final = lifecycle.is_final and lifecycle.cause is not error
        for submission in submissions:
            submission.reject(lifecycle.final_error() if was_final else self.poisoned_error(error, submission, suspects))
            if submission.observed is not None:
                submission.end_observed(self.core.probes)
        self.wake()
        self.core.workload.wake()

    def poisoned_error(self, error: AccelError, submission: Submission | None = None, suspects: tuple[str, ...] = ()) -> AccelError:
        """Return a new error for one waiter of a context that has faulted or was closed.

        It says whether the submission may have run, and names the ops that were in flight. If the
        context was closed, it is a :class:`ClosedError`, or says how the device has ended.
        """
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
            raise self.poisoned_error(self.fault)
