"""The device's actor: its mailbox is the queue of submissions to the present context."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from accel.actors import Actor, ActorContext
from accel.engine.in_flight import MANY_FREES
from accel.engine.launches import OpSubmission
from accel.engine.op_error import op_error
from accel.engine.program import Capture, GraphSubmission, Replay
from accel.engine.registration import Unregistration
from accel.engine.submission import BatchSubmission, Submission
from accel.errors import AccelError, StaleRefError
from accel.ops import Free

if TYPE_CHECKING:
    from collections.abc import Awaitable, Collection

    from accel.engine.core import DeviceCore
    from accel.engine.host import Host

__all__ = ["DeviceActor"]


class DeviceActor(Actor[Submission, None]):
    """Dispatches submissions in order; waits while there is no context, or no room on the device.

    Parameters
    ----------
    core
        State of the device that outlives its contexts.
    host
        Where its contexts live.
    """

    carries_context: ClassVar[bool] = False

    def __init__(self, core: DeviceCore, host: Host) -> None:
        self._core = core
        self._host = host
        # Submissions that have left the queue and wait for shared memory or for each other, while
        # later ones overtake them.
        self._delayed: dict[asyncio.Task[None], _Access] = {}

    async def started(self, context: ActorContext) -> None:
        """Bring up the first context, and have its actor watched."""
        await self._host.open(context)

    async def stopped(self, context: ActorContext) -> None:
        """Close the device, or declare it LOST, because its actor ends.

        LOST where neither the device nor its system is being closed: an error has ended the actor.
        Delayed submissions are refused first: nothing would dispatch them any more.
        """
        core, delayed = self._core, tuple(self._delayed)
        for task in delayed:
            task.cancel()
        if delayed:
            await asyncio.wait(delayed)
        await self._host.children.wait_ended()
        if core.is_closing or context.system.state != "open":
            core.close()
        else:
            core.give_up(None)

    def receive_now(self, message: Submission, context: ActorContext) -> bool:
        """Dispatch an op or a batch in the caller's call, if nothing has to be awaited.

        Returns ``True`` also if the dispatch raised, and the message was rejected. Else returns
        ``False``: the message is queued, and :meth:`receive` gets it.
        """
        core, current, kind = self._core, self._host.context, type(message)
        if (
            (kind is not OpSubmission and kind is not BatchSubmission)
            or message.generation != core.refs.live_generation
            or current is None
            or current.fault is not None
            or current.commands >= current.limit
            or message.future.done()
            or len(core.refs.dropped) > MANY_FREES
            or (self._delayed and self._conflicting(message))
        ):
            return False
        try:
            sent: bool = current.dispatch_now(message) if kind is OpSubmission else current.dispatch_batch_now(message)
        except BaseException as error:
            self._reject(message, error)
            return True
        return sent

    def refused(self, message: Submission) -> None:
        """Reject a submission that will not be dispatched, because the actor stops."""
        message.free_results_from(0)
        message.reject(self._core.lifecycle.final_error())

    async def receive(self, message: Submission, context: ActorContext) -> None:
        """Dispatch one submission, or end it with the error that prevents that.

        One whose array must wait for shared memory does not hold up the queue: later submissions
        overtake it, unless they use its buffers or a library that one of the two unregisters.
        """
        if self.receive_now(message, context):
            return
        current, predecessors = self._host.context, self._conflicting(message)
        if not predecessors and (current is None or not current.must_wait(message)):
            await self._dispatch(message)
            return
        # The delayed submissions are bounded too: without room among them, the queue waits.
        while len(self._delayed) >= self._core.options.max_in_flight:
            try:
                await self._wait_in_hand(asyncio.wait(self._delayed, return_when=asyncio.FIRST_COMPLETED))
            except asyncio.CancelledError:  # the actor stops
                self.refused(message)
                raise
        task = self._core.loop.create_task(self._dispatch(message, predecessors))
        self._delayed[task] = _access_of(message)
        task.add_done_callback(self._delayed.pop)

    def _conflicting(self, message: Submission) -> list[asyncio.Task[None]]:
        """Return the tasks of delayed submissions that this later one must not overtake."""
        if not self._delayed:
            return []
        access = _access_of(message)
        return [task for task, earlier in self._delayed.items() if access.conflicts_with(earlier)]

    async def _dispatch(self, message: Submission, predecessors: Collection[asyncio.Task[None]] = ()) -> None:
        """Dispatch a submission after its predecessors, or end it with the error that prevents it.

        Runs in the actor's task, or in a task of its own if the submission is delayed.
        """
        try:
            if predecessors:
                await self._wait_in_hand(asyncio.wait(predecessors))
            await self._dispatch_to_context(message)
        except (asyncio.CancelledError, GeneratorExit):  # the actor stops
            self.refused(message)
            raise
        except BaseException as error:
            self._reject(message, error)

    def _reject(self, submission: Submission, raised: BaseException) -> None:
        """End a submission with the error that was raised while it was dispatched.

        Ops of a batch before the one that failed still run.
        """
        core = self._core
        error = op_error(raised, f"sending {submission.name}", core.loop)
        # A clone: this error's traceback holds the submission, whose future would hold the error.
        submission.reject_from(error.op_index or 0, error.clone(op=error.op or submission.name, device=error.device or core.name))

    async def _dispatch_to_context(self, submission: Submission) -> None:
        """Dispatch to the present context, or to the next one if that faults before the launch.

        Waits while there is no context or no room in it, and returns when the submission is
        dispatched or its future has ended.
        """
        core, host = self._core, self._host
        while not submission.future.done():
            if not core.is_ready:
                await self._wait_in_hand(core.lifecycle.wait_ready())
                continue  # meanwhile the future may have ended
            if submission.generation != core.refs.live_generation:
                self._check_after_rebuild(submission)
            context = host.context
            try:
                if context.commands >= context.limit:
                    await self._wait_in_hand(context.wait_for_room(1))
                    continue  # meanwhile the future may have ended, or the context
                await context.dispatch(submission)
            except AccelError:
                if context.fault is None:  # an error of the submission itself
                    raise
                if submission.launched:
                    raise context.poisoned_error(context.fault, submission) from None
                continue  # the context died before the launch: the next one takes the submission
            return
        submission.free_results_from(0)  # its future ended before anything was launched

    async def _wait_in_hand(self, awaitable: Awaitable[object]) -> None:
        """Await something while the submission in hand still counts as queued.

        It has left the mailbox and is in no context yet: only ``workload.in_hand`` counts it, which
        is part of ``queued`` in the device's health.
        """
        self._core.workload.in_hand += 1
        try:
            await awaitable
        finally:
            self._core.workload.in_hand -= 1

    def _check_after_rebuild(self, submission: Submission) -> None:
        """Check a submission's operands again: the context was rebuilt while it was queued.

        If all are durable, the submission is moved to the present generation.

        Raises
        ------
        StaleRefError
            If an operand is not durable, or the submission is a batch or a graph, whose results are
            refs of the generation before.
        """
        core = self._core
        for plan in submission.plans:
            for ref in (*plan.reads, *plan.writes):
                if ref.generation != core.refs.live_generation:
                    core.refs.check(ref, None, plan)
        if core.durable.any_torn and isinstance(submission, OpSubmission) and submission.op.library in core.registrations:
            core.registrations[submission.op.library].check()
        if isinstance(submission, (BatchSubmission, GraphSubmission)):
            raise StaleRefError(
                f"the context was rebuilt while the {'batch' if isinstance(submission, BatchSubmission) else 'graph'} was recorded",
                reason="generation",
                device=core.name,
                generation=core.refs.live_generation,
            )
        submission.tears = core.durable.tears
        submission.generation = core.refs.live_generation


class _Access(NamedTuple):
    """The buffers and libraries that a submission uses: its read set and its write set.

    Attributes
    ----------
    reads, writes : frozenset of int
        The buffers that it reads, and those that it writes or frees.
    libraries : frozenset of str
        Libraries of its ops.
    unregistered : str or None
        The library that it unregisters.
    """

    reads: frozenset[int]
    writes: frozenset[int]
    libraries: frozenset[str]
    unregistered: str | None

    def conflicts_with(self, earlier: _Access) -> bool:
        """Return whether this submission must not overtake an earlier one.

        Asked when it leaves the queue, for each one that is delayed: only those in conflict with it
        are waited for.
        """
        if self.unregistered is not None:  # an earlier graph may call the library, unknown here
            return True
        # An op of the library, or a graph that may call it, comes after the unregistration.
        if earlier.unregistered is not None and not self.libraries.isdisjoint((earlier.unregistered, Replay.library, Capture.library)):
            return True
        return not (
            self.writes.isdisjoint(earlier.reads) and self.writes.isdisjoint(earlier.writes) and self.reads.isdisjoint(earlier.writes)
        )


def _access_of(submission: Submission) -> _Access:
    """Return the buffers and libraries of a submission that was not dispatched yet.

    From its plans, which are there until it is launched. Results are left out: no other
    submission can use them before.
    """
    reads = frozenset([ref.buffer for plan in submission.plans for ref in plan.reads])
    writes = frozenset([ref.buffer for plan in submission.plans for ref in plan.writes])
    if isinstance(submission, BatchSubmission):
        return _Access(reads, writes, frozenset(submission.libraries), None)
    assert isinstance(submission, OpSubmission), "there are two kinds"
    if type(submission.op) is Free:
        writes = frozenset([submission.op.ref.buffer])
    return _Access(reads, writes, frozenset([submission.library]), submission.library if isinstance(submission, Unregistration) else None)
