"""The kernel actor: owns one library's kernels and one lane, and enqueues that library's ops in the device's order."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, ClassVar

from accel._log import get_logger
from accel.actors import Actor, ActorContext, Directive, RestartStrategy
from accel.backend import Injection
from accel.engine.captures import captures_of
from accel.engine.dropped import pass_over
from accel.engine.launches import OpSubmission
from accel.engine.op_error import op_error
from accel.engine.program import Capture
from accel.errors import AccelError, ClosedError, CompileError, InvalidArgumentError, OutOfMemoryError, StaleRefError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from accel.engine.context import Context
    from accel.engine.lane import Lane
    from accel.engine.launches import Bound, LaunchGroup, Sendable
    from accel.engine.submission import Submission
    from accel.memory import Dependency, Timeline

__all__ = ["NEVER_ENDS", "KernelActor"]

logger = get_logger()

_NO_CAPTURE = contextlib.nullcontext()

_REFUSALS = (InvalidArgumentError, UnsupportedError, CompileError, StaleRefError, ClosedError)
"""What a kernel raises before it enqueues anything."""


NEVER_ENDS = RestartStrategy(decide=lambda _: Directive.RESUME)
"""For the actors on an op's way: they answer an op with what goes wrong in it, and go on, whatever that is."""


class KernelActor(Actor["Sendable", None]):
    """Enqueues groups of launches into a lane, and marks their ends.

    What goes wrong with an op is its caller's business and is answered there; the actor goes on with the next group. A fault is the context's
    business and is reported there.

    Parameters
    ----------
    context
        The context that it belongs to; it ends with it.
    """

    carries_context: ClassVar[bool] = False

    def __init__(self, context: Context) -> None:
        self._context = context
        self._debug = context.core.options.debug

    def receive_now(self, message: Sendable, context: ActorContext) -> bool:
        """Enqueue a group in the sender's call, if all that comes before it is in the streams already.

        One op is what comes most, so its way is written out here: no call that can be spared.
        """
        if not isinstance(message, OpSubmission):
            return self._take_group(message)
        op, lane, dependencies, today = message, message.lane, message.dependencies, self._context
        if self._debug or lane.enqueued < op.seq - 1 or (dependencies and not _is_due(op)) or self._is_offloaded(op, lane):
            return False
        try:
            try:
                if dependencies or lane.owed or op.action is not None or op.future.done() or today.fault is not None:
                    self._enqueue(op, op)
                else:
                    try:
                        op.kernel(lane, op.op, op.plan, op.inputs, op.outputs)
                        op.launched += 1
                    except BaseException as error:
                        self._raised(error, op, op)
            finally:
                lane.advance(op.seq)
            if today.fault is None:
                self._mark(op, op)
        except BaseException as error:
            self._unmarked(error, op)
        return True

    def _take_group(self, message: LaunchGroup) -> bool:
        """Do for a part of a batch what :meth:`receive_now` does for one op."""
        if self._debug or not _is_due(message):
            return False
        lane, launches, submission, today = message.lane, message.launches, message.submission, self._context
        for launch in launches:
            if self._is_offloaded(launch, lane):
                return False
        try:
            try:
                for launch in launches:
                    lane.enqueued = launch.seq - 1  # what the stream's work is known by, if it fails
                    if launch.dependencies or lane.owed or launch.action is not None or submission.future.done() or today.fault is not None:
                        self._enqueue(launch, message)
                    else:
                        try:
                            launch.kernel(lane, launch.op, launch.plan, launch.inputs, launch.outputs)
                            submission.launched += 1
                        except BaseException as error:
                            self._raised(error, launch, message)
            finally:
                lane.advance(launches[-1].seq)
            self._finish(message)
        except BaseException as error:
            self._unmarked(error, message)
        return True

    async def receive(self, message: Sendable, context: ActorContext) -> None:
        """Enqueue one group."""
        try:
            await self._receive(message)
        except asyncio.CancelledError:  # the actor stops, and its context answers what is in flight: no kernel is awaited
            raise
        except Exception as error:
            self._unmarked(error, message)

    async def _receive(self, message: Sendable) -> None:
        await _until_due(message)
        for launch in message.launches:
            try:
                await _until_met(launch)
                if self._is_offloaded(launch, message.lane):
                    await self._enqueue_offloaded(launch, message)
                else:
                    self._enqueue(launch, message)
                if self._debug:
                    await self._synchronize(launch, message)
            finally:
                # Enqueued or dropped: its place in line is taken. Not before it was waited for, where that is asked for: the next op comes after.
                message.lane.advance(launch.seq)
        self._finish(message)

    def _is_offloaded(self, launch: Bound, lane: Lane) -> bool:
        """Return whether an op is enqueued on another thread; the backend is asked once. What a fault has answered has let go of its op."""
        if launch.is_offloaded is None:
            try:
                launch.is_offloaded = self._context.fault is None and self._context.may_block(lane, launch.op)
            except Exception:  # the backend's bug must not keep the op from being answered
                logger.exception("may_block_failed", device=self._context.core.name, op=None if launch.op is None else launch.op.kind)
                launch.is_offloaded = True
        return launch.is_offloaded

    def _enqueue(self, launch: Bound, group: Sendable) -> None:
        """Bring one op to the lane, or drop it."""
        # Also for an op that is dropped: later ops of this lane rely on the waits of its sequence number.
        try:
            self._depend_on_all(group.lane, launch.dependencies)
        except BaseException as error:
            self._raised(error, launch, group, is_begun=False)
        else:
            self._launch(launch, group)

    async def _enqueue_offloaded(self, launch: Bound, group: Sendable) -> None:
        """Do what :meth:`_enqueue` does, with the kernel called on another thread."""
        submission, lane = group.submission, group.lane
        call = self._context.offloaded.run
        try:
            self._depend_on_all(lane, launch.dependencies)
            if self._is_wanted(launch, group):
                if launch.action is not None:
                    self._act(launch.action, lane)
                run_blocking = self._context.core.system.run_blocking
                # Counted before: from here on it may be on the device, also if the wait is cancelled.
                submission.launched += 1
                try:
                    is_capture = type(launch.op) is Capture
                    with captures_of(self._context.core).one_more() if is_capture else _NO_CAPTURE:
                        raised = await run_blocking(
                            _raised_by, call, launch.kernel, lane, launch.op, launch.plan, launch.inputs, launch.outputs
                        )
                except Exception:
                    submission.launched -= 1  # it never began
                    raise
                if raised is not None:
                    submission.launched -= 1
                    self._raised(raised, launch, group)
        except Exception as error:
            self._raised(error, launch, group, is_begun=False)
        finally:
            raised = None
            del submission, group

    def _is_wanted(self, launch: Bound, group: Sendable) -> bool:
        """Return whether an op is still wanted, in a context that works; else its results are void."""
        if group.submission.is_dropped(launch.index) or self._context.fault is not None:
            group.lane.drop(launch.seq)
            self._context.failures.dropped(group.lane, launch.seq)
            group.submission.void(launch.index)
            return False
        return True

    def _finish(self, group: Sendable) -> None:
        """Mark the end of a group."""
        if self._context.fault is None:
            self._mark(group, group.submission)

    def _launch(self, launch: Bound, group: Sendable) -> None:
        """Bring one op to the stream, unless it is not wanted any more."""
        submission = group.submission
        if (submission.future.done() or self._context.fault is not None) and not self._is_wanted(launch, group):
            return
        is_begun = False
        try:
            if launch.action is not None:
                self._act(launch.action, group.lane)
            is_begun = True
            launch.kernel(group.lane, launch.op, launch.plan, launch.inputs, launch.outputs)
            submission.launched += 1
        except BaseException as error:
            self._raised(error, launch, group, is_begun=is_begun)
        finally:
            # The traceback of a kernel's bug holds this frame, and the submission's future would hold the bug.
            del submission, group

    def _raised(self, raised: BaseException, launch: Bound, group: Sendable, *, is_begun: bool = True) -> None:
        """Answer an op whose kernel raised, or, unless it ``is_begun``, that could not be begun. What the device's fault made it raise is the fault."""
        library = None if launch.op is None else launch.op.library
        what = f"the {_kind(launch, group)} kernel" if library is None else f"the {_kind(launch, group)} kernel of library {library!r}"
        context = self._context
        error = op_error(raised, what, context.core.loop, is_out_of_memory=context.is_out_of_memory(raised), library=library)
        if isinstance(error, OutOfMemoryError):
            context.buffers.release_idle()
        if not error.is_fault:
            error = context.fault_of(group.lane.stream, error) or error
        if not error.is_fault:
            group.submission.launched += 1  # how far it came is not known: what it may have enqueued has to end, and may have faulted
            if is_begun and not isinstance(error, _REFUSALS):
                self._context.tear(group.lane, launch.seq, launch.seq, f"the {_kind(launch, group)} op that wrote it failed")
                self._context.failures.failed(group.lane, launch.seq, error)
            else:
                self._context.failures.dropped(group.lane, launch.seq)
        self._failed(error, launch, group)

    def _unmarked(self, raised: BaseException, group: Sendable) -> None:
        """Answer a group that is in its stream as far as it came, and whose end cannot be seen: a later mark of the lane stands for it."""
        context, submission = self._context, group.submission
        lane, last = group.lane, group.launches[-1]
        lane.advance(last.seq)
        error = op_error(raised, f"marking the end of {submission.name}", context.core.loop)
        if error.is_fault or context.fault is not None:
            context.report_fault(error)
            return
        if submission in context.submissions:
            context.tear(lane, group.launches[0].seq, last.seq, f"the end of the {submission.name} op that wrote it could not be seen")
            self._failed(error, group.launches[0], group)
            for launch in group.launches:
                context.failures.failed(lane, launch.seq, error)
            context.failures.settle(group)
            context.retire(submission, len(group.launches), group.commands, is_last=group.is_last)

    async def _synchronize(self, launch: Bound, group: Sendable) -> None:
        """Wait until an op has ended, so that its error bears its name."""
        try:
            await self._context.core.system.run_blocking(group.lane.stream.synchronize)
        except Exception as error:
            what = f"waiting for the end of {_kind(launch, group)}"
            self._failed(op_error(error, what, self._context.core.loop), launch, group)

    def _failed(self, error: AccelError, launch: Bound, group: Sendable) -> None:
        submission, core = group.submission, self._context.core
        if error.is_fault:
            submission.launched += 1  # it may have reached the device
            self._context.report_fault(error.clone(op=error.op or _kind(launch, group)))
            return
        own = error.clone(
            op=error.op or _kind(launch, group),
            device=core.name,
            generation=self._context.generation,
            op_index=None if isinstance(group, OpSubmission) else launch.index,
        )
        submission.reject_from(launch.index, own)

    @staticmethod
    def _act(action: Injection | AccelError, lane: Lane) -> None:
        """Bring about what a fault plan asks for."""
        if isinstance(action, Injection):
            if action.kind == "kill":
                raise UnsupportedError("the host to be killed is this process", remedy="Open the device with host='process'.")
            lane.device.inject(action, lane.stream)
        else:
            raise action.clone()

    def _depend_on_all(self, lane: Lane, dependencies: Iterable[Dependency]) -> None:
        """Let the lane wait for all of it, whatever fails; then raise the first failure. The op's recorded uses stand for all that it depends on."""
        failed: Exception | None = None
        if lane.owed:
            dependencies, lane.owed = [*lane.owed, *dependencies], []
        for other, seq in dependencies:
            try:
                self._depend(lane, other, seq)
            except Exception as error:
                failed = failed or error
        if failed is not None:
            try:
                raise failed
            finally:
                del failed  # its traceback holds this frame

    def _depend(self, lane: Lane, other: Timeline, seq: int) -> None:
        """Let the lane wait for what another one, which has it in its stream already, has to do first.

        Raises
        ------
        Exception
            What keeps it from waiting: then the op is not launched. The lane owes that wait, if it is for another lane, to whatever comes next.
        """
        try:
            lane.wait_for(other, seq)
        except Exception as error:
            if isinstance(error, AccelError) and error.is_fault:
                self._context.report_fault(error)
                return
            if other in self._context.lanes:
                lane.owed.append((other, seq))
            raise

    def _mark(self, group: Sendable, submission: Submission) -> None:
        """Record the end of a group and have it watched; an end that is already there is taken at once."""
        lane, context = group.lane, self._context
        if not submission.launched:
            pass_over(context, group)
            context.retire(submission, len(group.launches), group.commands, is_last=group.is_last)
            return
        event = lane.events.take()
        try:
            passed = lane.stream.record(event)
        except AccelError as error:
            context.report_fault(error)
            return
        group.marked(event)
        if passed:
            group.complete()
        else:
            context.watcher.watch(group)


def _raised_by(call: Callable[..., None], *arguments: Any) -> BaseException | None:
    """Return what a call raises: a ``CancelledError`` of a kernel's must not be taken for a cancellation of the actor that awaits this."""
    try:
        call(*arguments)
    except BaseException as error:
        return error
    return None


def _kind(launch: Bound, group: Sendable) -> str:
    """Return what an op is called, also when a fault has made its submission let go of it meanwhile."""
    return group.submission.kinds[launch.index]


def _before(group: Sendable) -> Iterator[Dependency]:
    """Yield what must be in the streams before a group is: its lane's earlier work, and what its ops depend on."""
    yield group.lane, group.launches[0].seq - 1
    for launch in group.launches:
        yield from launch.dependencies


def _is_due(group: Sendable) -> bool:
    """Return whether all of :func:`_before` is in the streams; most runs are one op that depends on nothing, and this is on its way."""
    if isinstance(group, OpSubmission):
        if group.lane.enqueued < group.seq - 1:
            return False
        if not group.dependencies:
            return True
    return all(timeline.enqueued >= seq for timeline, seq in _before(group))


async def _until_met(launch: Bound) -> None:
    """Wait for what an op depends on, once more: a capture may have begun while something else was waited for."""
    while late := next(((timeline, seq) for timeline, seq in launch.dependencies if timeline.enqueued < seq), None):
        await late[0].reached(late[1])  # type: ignore[attr-defined]  # the timelines of a context are its lanes


async def _until_due(group: Sendable) -> None:
    for timeline, seq in _before(group):
        if timeline.enqueued < seq:
            await timeline.reached(seq)  # type: ignore[attr-defined]  # the timelines of a context are its lanes
