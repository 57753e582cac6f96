"""A lane: one stream, the queue of what waits for its turn there, and the one place that enqueues.

A context owns its lanes; they are plain objects. A lane enqueues a group in the sender's call, if
everything before it is in the streams and no call may block. Else the group is queued, and the
lane's task enqueues it in its turn; the task ends when the queue is empty.

The error of an op goes to its caller, and the lane goes on with the next op. A fault goes to the
context.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from accel._log import get_logger
from accel.backend import Injection, TakesWorkspace, TimesWork
from accel.engine.captures import captures_of
from accel.engine.launches import LaunchContext, OpSubmission
from accel.engine.marks import pass_over
from accel.engine.op_error import op_error
from accel.engine.stream_clock import StreamClock
from accel.errors import AccelError, ClosedError, CompileError, InvalidArgumentError, OutOfMemoryError, StaleRefError, UnsupportedError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from accel.backend import AccelDevice, AccelEvent, AccelStream
    from accel.engine.core import DeviceCore
    from accel.engine.failures import Failures
    from accel.engine.kernel_table import KernelTable
    from accel.engine.launches import Bound, Sendable
    from accel.engine.offloaded import OffloadedCalls
    from accel.engine.stream_clock import EventPool
    from accel.engine.submission import Submission
    from accel.memory import Dependency, Timeline
    from accel.storage.buffers import Buffers

__all__ = ["Lane", "LaneContext"]

logger = get_logger()

_CAPTURE = "capture"
"""Library of the op that captures a stream into a graph."""

_NO_CAPTURE = contextlib.nullcontext()

_REFUSALS = (InvalidArgumentError, UnsupportedError, CompileError, StaleRefError, ClosedError)
"""Errors that a kernel raises before it enqueues anything."""


class LaneContext(LaunchContext, Protocol):
    """The context that owns a lane; see :class:`~accel.engine.context.Context`."""

    core: DeviceCore
    device: AccelDevice
    generation: int
    in_flight: int
    events: EventPool
    buffers: Buffers
    failures: Failures
    kernels: KernelTable
    offloaded: OffloadedCalls
    submissions: dict[Submission, float]

    def fault_of(self, stream: AccelStream, error: AccelError) -> AccelError | None:
        """Return the fault that is behind what a kernel raised."""

    def is_out_of_memory(self, raised: BaseException) -> bool:
        """Return whether what a kernel raised says that the device has no memory."""


class Lane(StreamClock):
    """One stream of a context.

    Parameters
    ----------
    name
        Shown by ``system.tree()``.
    context
        The context that owns it.
    stream
        The stream.

    Attributes
    ----------
    device : AccelDevice
        The backend's context.
    provided : set of str
        Libraries whose workspaces are there; see :class:`accel.backend.TakesWorkspace`.
    task : Task or None
        Enqueues what is queued; to be cancelled when the context ends.
    owed : list
        Waits that could not be put into the stream: the next op is not enqueued before they are.
    """

    __slots__ = ("_context", "_event", "_next", "_queue", "_timed_stream", "device", "owed", "provided", "task")

    def __init__(self, name: str, context: LaneContext, stream: AccelStream) -> None:
        super().__init__(name, stream, context.events)
        self.device: AccelDevice = context.device
        self._timed_stream = stream if isinstance(stream, TimesWork) else None
        self.provided: set[str] = set()
        self.owed: list[Dependency] = []
        self._context = context
        self._event: AccelEvent | None = None  # that was passed when it was recorded
        self._queue: deque[Sendable] = deque()
        self._next = 0  # of the first group: the op that is to be enqueued next
        self.task: asyncio.Task[None] | None = None

    def needs_workspace(self, library: str) -> bool:
        """Return whether ops of a library need memory here that the lane does not have yet."""
        return isinstance(self.stream, TakesWorkspace) and self.stream.workspace_wanted(library) > 0

    def send(self, group: Sendable) -> None:
        """Enqueue a group: now, or behind what is queued."""
        if not self._queue and self._enqueue(group):
            return
        self._queue.append(group)
        if self.task is None:
            self.task = self._context.core.loop.create_task(self._serve())

    def close(self, *, abandon: bool) -> None:
        """Close the stream. May block unless ``abandon``."""
        self.stream.close(abandon=abandon)

    # -- enqueuing

    def _enqueue(self, group: Sendable) -> bool:
        """Enqueue a group and mark its end; return ``False`` at an op that must wait or may block.

        Called again, it goes on with that op.
        """
        context = self._context
        try:
            submission: Submission = group if isinstance(group, OpSubmission) else group.submission
            launches: Sequence[Bound] = (group,) if isinstance(group, OpSubmission) else group.launches
            while self._next < len(launches):
                launch = launches[self._next]
                if (launch.dependencies and self._late(launch) is not None) or self._is_offloaded(launch):
                    return False
                try:
                    is_plain = not (
                        launch.dependencies
                        or self.owed
                        or launch.action
                        or submission.observed
                        or submission.future.done()
                        or context.fault
                    )
                    if is_plain or self._begin(launch, group):
                        launch.kernel(self, launch.op, launch.plan, launch.inputs, launch.outputs)
                        submission.launched += 1
                except BaseException as error:
                    self._raised(error, launch, group)
                self.enqueued = launch.seq
                if self._waiters:
                    self._wake()
                self._next += 1
            self._next = 0
            if context.fault is None:
                self._mark(group, submission)
        except BaseException as error:
            self._unmarked(error, group)
        finally:
            # The traceback of a kernel's error holds this frame, and the future holds the error.
            submission = launches = launch = None  # type: ignore[assignment]
        return True

    async def _serve(self) -> None:
        """Enqueue what is queued, in its order."""
        try:
            while self._queue:
                if self._enqueue(self._queue[0]):
                    self._queue.popleft()
                    continue
                group = self._queue[0]
                launch = group.launches[self._next]
                while (late := self._late(launch)) is not None:
                    timeline, seq = late
                    await timeline.wait_enqueued(seq)  # type: ignore[attr-defined]  # the timelines of a context have streams
                if self._is_offloaded(launch):
                    await self._enqueue_offloaded(launch, group)
                    self.advance(launch.seq)
                    self._next += 1
                del group, launch
        finally:
            self._queue.clear()  # of a context that ends, which has answered what is queued
            self.task = None

    @staticmethod
    def _late(launch: Bound) -> Dependency | None:
        """Return something that an op depends on, and that is not in its stream yet."""
        for timeline, seq in launch.dependencies:
            if timeline.enqueued < seq:
                return timeline, seq
        return None

    def _is_offloaded(self, launch: Bound) -> bool:
        """Return whether a thread enqueues an op; the backend is asked once."""
        if launch.is_offloaded is None:
            context = self._context
            try:
                launch.is_offloaded = context.fault is None and (context.core.options.debug or context.kernels.may_block(self, launch.op))
            except Exception:  # the backend's bug must not keep the op from being answered
                logger.exception("may_block_failed", device=context.core.name, op=None if launch.op is None else launch.op.kind)
                launch.is_offloaded = True
        return launch.is_offloaded

    async def _enqueue_offloaded(self, launch: Bound, group: Sendable) -> None:
        """Call an op's kernel on a thread; with ``debug`` wait for its end, for its own error."""
        submission, context = group.submission, self._context
        run_blocking = context.core.system.run_blocking
        raised = operands = None
        try:
            if self._begin(launch, group):
                # Counted before the call: from here on it may be launched, even if cancelled.
                submission.launched += 1
                call = context.offloaded.run
                try:
                    with captures_of(context.core).one_more() if launch.op.library == _CAPTURE else _NO_CAPTURE:
                        operands = launch.op, launch.plan, launch.inputs, launch.outputs
                        raised = await run_blocking(_raised_by, call, launch.kernel, self, *operands)
                except Exception:
                    submission.launched -= 1  # it never began
                    raise
                if raised is not None:
                    submission.launched -= 1
                    self._raised(raised, launch, group)
                elif context.core.options.debug:
                    await self._synchronize(launch, group)
        except Exception as error:
            self._raised(error, launch, group, is_begun=False)
        finally:
            raised = operands = None
            del submission, group

    def _begin(self, launch: Bound, group: Sendable) -> bool:
        """Put the waits of an op into the stream; return whether its kernel is to be called."""
        try:
            # Also for a dropped op: later ops of the lane rely on the waits of its sequence number.
            self._wait_for_all(launch.dependencies)
            if group.submission.is_dropped(launch.index) or self._context.fault is not None:
                self._context.failures.on_dropped(self, launch.seq)
                group.submission.void(launch.index)
                return False
            if launch.action is not None:
                self._act(launch.action)
            work = group.submission.observed
            if work is not None and work.is_timed and group.span is None and self._timed_stream is not None:
                group.span = self._timed_stream.begin_span()
        except BaseException as error:
            self._raised(error, launch, group, is_begun=False)
            return False
        return True

    def _act(self, action: Injection | AccelError) -> None:
        """Inject the fault of a fault plan."""
        if isinstance(action, AccelError):
            raise action.clone()
        if action.kind == "kill":
            raise UnsupportedError("the host to be killed is this process", remedy="Open the device with host='process'.")
        self.device.inject(action, self.stream)

    def _wait_for_all(self, dependencies: list[Dependency]) -> None:
        """Put all waits into the stream, whatever fails; then raise the first failure."""
        failed: Exception | None = None
        if self.owed:
            dependencies, self.owed = [*self.owed, *dependencies], []
        for other, seq in dependencies:
            try:
                self._wait_or_owe(other, seq)
            except Exception as error:
                failed = failed or error
        if failed is not None:
            try:
                raise failed
            finally:
                del failed  # its traceback holds this frame

    def _wait_or_owe(self, other: Timeline, seq: int) -> None:
        """Let the stream wait for work that another stream has already.

        Raises
        ------
        Exception
            If it cannot: then the op is not launched. A wait for another lane is owed to the next
            op.
        """
        try:
            self.wait_for(other, seq)
        except Exception as error:
            if isinstance(error, AccelError) and error.is_fault:
                self._context.report_fault(error)
                return
            if isinstance(other, Lane):
                self.owed.append((other, seq))
            raise

    async def _synchronize(self, launch: Bound, group: Sendable) -> None:
        core = self._context.core
        try:
            await core.system.run_blocking(self.stream.synchronize)
        except Exception as error:
            self._failed(op_error(error, f"waiting for the end of {_kind(launch, group)}", core.loop), launch, group)

    # -- the end of a group

    def _mark(self, group: Sendable, submission: Submission) -> None:
        """Record the end of a group and have it watched; one that is passed completes at once."""
        context = self._context
        if not submission.launched:
            pass_over(context, group)
            context.retire(submission, len(group.launches), group.commands, is_last=group.is_last)
            return
        event = self._event or self.events.take()
        self._event = None
        try:
            if group.span is not None and self._timed_stream is not None:
                self._timed_stream.end_span(group.span)
            is_passed = self.stream.record(event)
        except AccelError as error:
            context.report_fault(error)
            return
        if is_passed:
            self._event = event
            group.complete()
        else:
            group.on_marked(event)
            context.watcher.watch(group)

    def _unmarked(self, raised: BaseException, group: Sendable) -> None:
        """End a group whose mark could not be recorded; a later mark of the lane stands for it."""
        context, submission, launches = self._context, group.submission, group.launches
        self._next = 0
        self.advance(launches[-1].seq)
        error = op_error(raised, f"marking the end of {submission.name}", context.core.loop)
        if error.is_fault or context.fault is not None:
            context.report_fault(error)
            return
        if submission in context.submissions:
            for launch in launches:
                context.failures.on_failed(self, launch.seq, error)
            self._failed(error, launches[0], group)
            context.failures.settle(group)
            context.retire(submission, len(launches), group.commands, is_last=group.is_last)

    # -- what goes wrong

    def _raised(self, raised: BaseException, launch: Bound, group: Sendable, *, is_begun: bool = True) -> None:
        """End an op whose kernel, or begin, raised; report a fault behind the error."""
        library = None if launch.op is None else launch.op.library
        what = f"the {_kind(launch, group)} kernel" if library is None else f"the {_kind(launch, group)} kernel of library {library!r}"
        context = self._context
        error = op_error(raised, what, context.core.loop, is_out_of_memory=context.is_out_of_memory(raised), library=library)
        if isinstance(error, OutOfMemoryError):
            context.buffers.release_idle()
        if not error.is_fault:
            error = context.fault_of(self.stream, error) or error
        if not error.is_fault:
            group.submission.launched += 1  # it may have enqueued something, which has to end
            if is_begun and not isinstance(error, _REFUSALS):
                context.failures.on_failed(self, launch.seq, error)
            else:
                context.failures.on_dropped(self, launch.seq)
        self._failed(error, launch, group)

    def _failed(self, error: AccelError, launch: Bound, group: Sendable) -> None:
        submission, context = group.submission, self._context
        if error.is_fault:
            submission.launched += 1  # it may have reached the device
            context.report_fault(error.clone(op=error.op or _kind(launch, group)))
            return
        own = error.clone(
            op=error.op or _kind(launch, group),
            device=context.core.name,
            generation=context.generation,
            op_index=None if isinstance(group, OpSubmission) else launch.index,
        )
        submission.reject_from(launch.index, own)


def _raised_by(call: Callable[..., None], *arguments: Any) -> BaseException | None:
    """Return what a call raises: a kernel's ``CancelledError`` must not cancel this task."""
    try:
        call(*arguments)
    except BaseException as error:
        return error
    return None


def _kind(launch: Bound, group: Sendable) -> str:
    """Return the op's name, which the submission keeps after it has released the op."""
    return group.submission.kinds[launch.index]
