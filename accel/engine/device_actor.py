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
        self._moving: dict[asyncio.Task[None], _Uses] = {}  # dispatches that wait beside the queue

    async def started(self, context: ActorContext) -> None:
        """Bring up the first context, and have its actor watched."""
        await self._host.open(context)

    async def stopped(self, context: ActorContext) -> None:
        """End the device with its actor, so that no waiter is left."""
        core, moving = self._core, tuple(self._moving)
        for task in moving:
            task.cancel()
        if moving:
            await asyncio.wait(moving)
        await self._host.children.wait_ended()
        if core.refs.is_closing or context.system.state != "open":
            core.closed()
        else:
            core.lost(None)

    def receive_now(self, message: Submission, context: ActorContext) -> bool:
        """Dispatch an op or a batch in the caller's call, if nothing has to be awaited."""
        core, current, kind = self._core, self._host.context, type(message)
        if (
            (kind is not OpSubmission and kind is not BatchSubmission)
            or message.generation != core.refs.live_generation
            or current is None
            or current.fault is not None
            or current.commands >= current.limit
            or message.future.done()
            or len(core.refs.dropped) > MANY_FREES
            or (self._moving and self._in_the_way(message))
        ):
            return False
        try:
            sent: bool = current.dispatch_now(message) if kind is OpSubmission else current.batch_now(message)
        except BaseException as error:
            self._answer(message, error)
            return True
        return sent

    def refused(self, message: Submission) -> None:
        """End what was queued when the actor stopped."""
        message.void(0)
        message.reject(self._core.lifecycle.final_error())

    async def receive(self, message: Submission, context: ActorContext) -> None:
        """Dispatch one submission, or end it with the error that prevents that.

        One that waits for room for its array is overtaken by others, unless they conflict with it:
        they use its buffers, or a library that ends behind it.
        """
        if self.receive_now(message, context):
            return
        current, before = self._host.context, self._in_the_way(message)
        if not before and (current is None or not current.must_wait(message)):
            await self._send(message)
            return
        while len(self._moving) >= self._core.options.max_in_flight:
            try:
                await self._waiting(asyncio.wait(self._moving, return_when=asyncio.FIRST_COMPLETED))
            except asyncio.CancelledError:  # the actor stops
                self.refused(message)
                raise
        task = self._core.loop.create_task(self._send(message, before))
        self._moving[task] = _uses(message)
        task.add_done_callback(self._moving.pop)

    def _in_the_way(self, message: Submission) -> list[asyncio.Task[None]]:
        """Return the waiting dispatches that a later submission conflicts with."""
        if not self._moving:
            return []
        uses = _uses(message)
        return [task for task, earlier in self._moving.items() if uses.must_follow(earlier)]

    async def _send(self, message: Submission, before: Collection[asyncio.Task[None]] = ()) -> None:
        try:
            if before:
                await self._waiting(asyncio.wait(before))
            await self._forward(message)
        except (asyncio.CancelledError, GeneratorExit):  # the actor stops: code of users is called, and never awaited
            self.refused(message)
            raise
        except BaseException as error:
            self._answer(message, error)

    def _answer(self, submission: Submission, raised: BaseException) -> None:
        """End a submission with what was raised on its way."""
        core = self._core
        error = op_error(raised, f"sending {submission.name}", core.loop)
        # A clone: this error's traceback holds the submission, whose future would hold the error.
        submission.reject_from(error.op_index or 0, error.clone(op=error.op or submission.name, device=error.device or core.name))

    async def _forward(self, submission: Submission) -> None:
        core, host = self._core, self._host
        while not submission.future.done():
            if not core.is_ready:
                await self._waiting(core.lifecycle.wait_ready())
            if submission.generation != core.refs.live_generation:
                self._recheck(submission)
            context = host.context
            try:
                if context.commands >= context.limit:
                    await self._waiting(context.wait_for_room(1))
                    continue  # its caller may have gone in the meantime
                await context.dispatch(submission)
            except AccelError:
                # The context died before the submission was launched: the next context takes it.
                if context.fault is None:
                    raise
                if submission.launched:
                    raise context.poisoned(context.fault, submission) from None
                continue
            return
        submission.void(0)

    async def _waiting(self, what: Awaitable[object]) -> None:
        """Wait for something with a submission in hand, which counts as queued."""
        self._core.workload.in_hand += 1
        try:
            await what
        finally:
            self._core.workload.in_hand -= 1

    def _recheck(self, submission: Submission) -> None:
        """Check the operands again after a rebuild that came between the sending and the dispatch.

        Raises
        ------
        StaleRefError
            If an operand did not outlive it.
        """
        core = self._core
        for plan in submission.plans:
            for ref in (*plan.reads, *plan.writes):
                if ref.generation != core.refs.live_generation:
                    core.refs.check(ref, None, plan)
        if core.durable.any_torn and isinstance(submission, OpSubmission) and submission.op.library in core.own:
            core.own[submission.op.library].check()
        if isinstance(submission, (BatchSubmission, GraphSubmission)):
            raise StaleRefError(
                f"the context was rebuilt while the {'batch' if isinstance(submission, BatchSubmission) else 'graph'} was recorded",
                reason="generation",
                device=core.name,
                generation=core.refs.live_generation,
            )
        submission.tears = core.durable.tears
        submission.generation = core.refs.live_generation


class _Uses(NamedTuple):
    """The buffers and libraries that a submission uses.

    Attributes
    ----------
    reads, writes : frozenset of int
        The buffers that it reads, and those that it writes or frees.
    libraries : frozenset of str
        Libraries of its ops.
    ended : str or None
        The library that it unregisters.
    """

    reads: frozenset[int]
    writes: frozenset[int]
    libraries: frozenset[str]
    ended: str | None

    def must_follow(self, earlier: _Uses) -> bool:
        """Return whether the order of this submission and an earlier one matters."""
        if self.ended is not None:  # a graph may call the library, unseen from here
            return True
        if earlier.ended is not None and not self.libraries.isdisjoint((earlier.ended, Replay.library, Capture.library)):
            return True
        return not (
            self.writes.isdisjoint(earlier.reads) and self.writes.isdisjoint(earlier.writes) and self.reads.isdisjoint(earlier.writes)
        )


def _uses(submission: Submission) -> _Uses:
    """Return what a submission uses that is not launched yet."""
    reads = frozenset([ref.buffer for plan in submission.plans for ref in plan.reads])
    writes = frozenset([ref.buffer for plan in submission.plans for ref in plan.writes])
    if isinstance(submission, BatchSubmission):
        return _Uses(reads, writes, frozenset(submission.libraries), None)
    assert isinstance(submission, OpSubmission), "there are two kinds"
    if type(submission.op) is Free:
        writes = frozenset([submission.op.ref.buffer])
    return _Uses(reads, writes, frozenset([submission.library]), submission.library if isinstance(submission, Unregistration) else None)
