"""A lane: one stream, the queue of what waits for its turn there, and the one place that enqueues.

A context owns its lanes; they are plain objects. A lane enqueues a group in the sender's call, if
everything before it is in the streams and no call may block. Else the group is queued, and the
lane's task enqueues it in its turn; the task ends when the queue is empty.

The error of an op goes to its caller, and the lane continues with the next op. A fault goes to the
context.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from accel._log import get_logger
from accel.backend import Injection, TakesWorkspace, TimesWork
from accel.engine.captures import captures_of
from accel.engine.launches import LaunchContext, OpSubmission, complete_dropped_group
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
    from accel.engine.launches import BoundGroup, BoundOp
    from accel.engine.offloaded import OffloadedCalls
    from accel.engine.stream_clock import EventPool
    from accel.engine.submission import Submission
    from accel.memory import Dependency, Timeline
    from accel.storage.buffers import Buffers

__all__ = ["Lane", "LaneContext"]

logger = get_logger()

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
        """Return the fault that an error of a kernel was caused by, or ``None``."""

    def is_out_of_memory(self, raised: BaseException) -> bool:
        """Return whether a kernel's exception says that the device has no memory."""


class Lane(StreamClock):
    """One stream of a context, with its queue: enqueues ops in order, and marks their ends.

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
    ready_libraries : set of str
        Libraries whose workspaces are there; see :class:`accel.backend.TakesWorkspace`.
    task : Task or None
        Enqueues what is queued; to be cancelled when the context ends.
    pending_waits : list
        Other lanes' work that the stream could not be made to wait for, for an op that was rejected
        then. That op's number stands for this work: work on its memory waits for the number alone.
        So the lane counts the number as enqueued, and goes on, only when the work has ended.
    """

    __slots__ = (
        "_context",
        "_next_index",
        "_passed_event",
        "_queue",
        "_timed_stream",
        "device",
        "pending_waits",
        "ready_libraries",
        "task",
    )

    def __init__(self, name: str, context: LaneContext, stream: AccelStream) -> None:
        super().__init__(name, stream, context.events)
        self.device: AccelDevice = context.device
        self._timed_stream = stream if isinstance(stream, TimesWork) else None
        self.ready_libraries: set[str] = set()
        self.pending_waits: list[tuple[Lane, int]] = []
        self._context = context
        self._passed_event: AccelEvent | None = None  # was passed when recorded: for the next mark
        self._queue: deque[BoundGroup] = deque()
        self._next_index = 0  # of the first op of the first group that is not enqueued yet
        self.task: asyncio.Task[None] | None = None

    def needs_workspace(self, library: str) -> bool:
        """Return whether ops of a library need a workspace that the stream does not have yet."""
        return isinstance(self.stream, TakesWorkspace) and self.stream.workspace_wanted(library) > 0

    def send(self, group: BoundGroup) -> None:
        """Enqueue a group now if it need not wait; else append it to the queue.

        Called by the context at the dispatch, so that groups come in the order of their numbers.
        """
        if not self._queue and self._enqueue(group):
            return
        self._queue.append(group)
        if self.task is None or self.task.done():  # with eager tasks it may be done at once
            self.task = self._context.core.loop.create_task(self._drain_queue())

    # -- enqueuing

    def _enqueue(self, group: BoundGroup) -> bool:
        """Enqueue a group's ops and record its mark, as far as that is possible at once.

        Returns ``False`` at an op that must wait for another lane, or that a worker thread must
        enqueue, and at one that has left ``pending_waits``: ``_next_index`` is its index in the
        group. Returns ``True`` once the group needs no further call, also where ops of it failed.
        """
        context = self._context
        try:
            submission: Submission = group if isinstance(group, OpSubmission) else group.submission
            launches: Sequence[BoundOp] = (group,) if isinstance(group, OpSubmission) else group.launches
            work = submission.observed
            while self._next_index < len(launches):
                launch = launches[self._next_index]
                if (launch.dependencies and self._unenqueued_dependency(launch) is not None) or self._must_offload(launch):
                    return False
                try:
                    # The common case is decided here, because this is on the way of every op.
                    is_plain = not (launch.dependencies or launch.injected_fault or submission.future.done() or context.fault)
                    if is_plain or self._prepare_launch(launch, group):
                        submission.launched += 1  # before the call: it may enqueue work and raise
                        if work is not None and group.span is None:
                            self._begin_span(group)
                        launch.kernel(self, launch.op, launch.plan, launch.inputs, launch.outputs)
                except BaseException as error:
                    self._on_raised(error, launch, group)
                if self.pending_waits:
                    return False
                self.enqueued = launch.seq  # as `advance`, without a call
                if self._waiters:
                    self._wake()
                self._next_index += 1
            self._next_index = 0
            if context.fault is None:
                self._record_mark(group, submission)
        except BaseException as error:
            self._on_mark_failed(error, group)
        finally:
            # The traceback of a kernel's error holds this frame, and the future holds the error.
            submission = launches = launch = None  # type: ignore[assignment]
        return True

    async def _drain_queue(self) -> None:
        """Enqueue the queued groups in order, until the queue is empty: the lane's task.

        It runs while the first one waits for another lane, or for a worker thread; later groups of
        the lane must not overtake it.
        """
        try:
            while self._queue:
                if self._enqueue(self._queue[0]):
                    self._queue.popleft()
                    continue
                group = self._queue[0]
                launch = group.launches[self._next_index]
                if not self.pending_waits:  # else `_enqueue` has rejected the op: only the wait is left
                    # A stream can only wait for work that is in the other stream already.
                    while (dependency := self._unenqueued_dependency(launch)) is not None:
                        timeline, seq = dependency
                        await timeline.wait_enqueued(seq)  # type: ignore[attr-defined]  # the timelines of a context have streams
                    if not self._must_offload(launch):
                        continue
                    await self._enqueue_offloaded(launch, group)
                if self.pending_waits:
                    await self._wait_on_host()
                # The next pass of this ``while`` enqueues the group's later ops, or records its mark.
                self.advance(launch.seq)
                self._next_index += 1
        finally:
            self._queue.clear()  # if cancelled: the context has failed what is queued
            self.task = None

    @staticmethod
    def _unenqueued_dependency(launch: BoundOp) -> Dependency | None:
        """Return a dependency of an op that is not in its own stream yet, or ``None``."""
        for timeline, seq in launch.dependencies:
            if timeline.enqueued < seq:
                return timeline, seq
        return None

    def _must_offload(self, launch: BoundOp) -> bool:
        """Return whether a worker thread must enqueue an op, because the call may block.

        The backend is asked once for each op: the op's ``is_offloaded`` keeps the answer.
        """
        if launch.is_offloaded is None:
            context = self._context
            try:
                launch.is_offloaded = context.fault is None and (context.core.options.debug or context.kernels.may_block(self, launch.op))
            except Exception:  # the backend's bug must not keep the op from being answered
                logger.exception("may_block_failed", device=context.core.name, op=None if launch.op is None else launch.op.kind)
                launch.is_offloaded = True
        return launch.is_offloaded

    async def _enqueue_offloaded(self, launch: BoundOp, group: BoundGroup) -> None:
        """Enqueue an op by calling its kernel on a worker thread, or drop it.

        An error ends the op's submission and is not raised. With ``debug`` this waits for the op's
        end, so that a fault is reported as this op's. If this is cancelled, because the context
        ends, the call runs on.
        """
        context = self._context
        raised = None
        try:
            if self._prepare_launch(launch, group):
                group.submission.launched += 1  # before the call, which a cancellation does not end
                self._begin_span(group)
                # While a stream is captured, no work of other libraries is marked.
                capture_scope = captures_of(context.core).capturing() if launch.op.captures else _NO_CAPTURE
                call = context.offloaded.call_kernel
                with capture_scope:
                    raised = await context.core.system.run_blocking(
                        _call_and_catch, call, launch.kernel, self, launch.op, launch.plan, launch.inputs, launch.outputs
                    )
                if raised is not None:
                    self._on_raised(raised, launch, group)
                elif context.core.options.debug:
                    await self._synchronize(launch, group)
        except Exception as error:  # there is no thread for the call: it was not begun
            self._on_raised(error, launch, group, is_kernel_called=False)
        finally:
            # An error's traceback holds this frame, which must not keep the op and its operands.
            raised = None
            del launch, group

    def _prepare_launch(self, launch: BoundOp, group: BoundGroup) -> bool:
        """Enqueue the waits of an op, and inject its planned fault.

        Not called for an op that needs none of this. Returns whether its kernel is to be called. If
        not, all is done here: the results of a dropped op and of those after it are freed, and an
        error that was raised has ended its future.
        """
        try:
            # Also for a dropped op: later ops of the lane rely on the waits of its sequence number.
            self._enqueue_waits(launch.dependencies)
            if group.submission.is_dropped(launch.index) or self._context.fault is not None:
                self._context.failures.on_dropped(self, launch.seq)
                group.submission.free_results_from(launch.index)
                return False
            if launch.injected_fault is not None:
                self._inject_fault(launch.injected_fault)
        except BaseException as error:
            group.submission.launched += 1  # the waits may be in the stream: the group gets a mark
            self._on_raised(error, launch, group, is_kernel_called=False)
            return False
        return True

    def _begin_span(self, group: BoundGroup) -> None:
        """Begin to measure the device time of a group, at its first launch, if it is to be measured.

        Called after the waits for other lanes are in the stream: their time is not the group's.
        """
        work = group.submission.observed
        if work is not None and work.is_timed and group.span is None and self._timed_stream is not None:
            group.span = self._timed_stream.begin_span()

    def _inject_fault(self, fault: Injection | AccelError) -> None:
        """Bring about the fault that a :class:`accel.testing.FaultPlan` has planned for an op.

        An error is raised as if the kernel had raised it; others are injected into the stream.
        """
        if isinstance(fault, AccelError):
            raise fault.clone()
        if fault.kind == "kill":
            raise UnsupportedError("the host to be killed is this process", remedy="Open the device with host='process'.")
        self.device.inject(fault, self.stream)

    def _enqueue_waits(self, dependencies: list[Dependency]) -> None:
        """Have the stream wait for all dependencies, then raise the first failure, if any."""
        failed: Exception | None = None
        for other, seq in dependencies:
            try:
                self._enqueue_wait(other, seq)
            except Exception as error:
                failed = failed or error
        if failed is not None:
            try:
                raise failed
            finally:
                del failed  # its traceback holds this frame

    def _enqueue_wait(self, other: Timeline, seq: int) -> None:
        """Have the stream wait for work that is in another stream already.

        A fault is reported to the context, and not raised.

        Raises
        ------
        Exception
            If it cannot: then the op is not launched. A wait for another lane is added to
            ``pending_waits``. One for other libraries is not: a capture of theirs may be in the
            way, which fails the op alone, and each op on memory that they share waits anew.
        """
        try:
            self.wait_for(other, seq)
        except Exception as error:
            if isinstance(error, AccelError) and error.is_fault:
                self._context.report_fault(error)
                return
            if isinstance(other, Lane):
                self.pending_waits.append((other, seq))
            raise

    async def _wait_on_host(self) -> None:
        """Wait for the end of the ``pending_waits``, each on a worker thread.

        If that is impossible too, the order of the device's work cannot be kept: the context ends.
        """
        context = self._context
        while self.pending_waits and context.fault is None:
            other, seq = self.pending_waits.pop()
            try:
                if other.completed < seq:
                    await context.core.system.run_blocking(other.stream.synchronize)
                    other.complete(seq)
            except Exception as error:
                context.report_fault(op_error(error, f"waiting for the end of work in {other.name}", context.core.loop))

    async def _synchronize(self, launch: BoundOp, group: BoundGroup) -> None:
        """With ``debug``: wait until the stream is idle, on a worker thread; an error there is this op's."""
        core = self._context.core
        try:
            await core.system.run_blocking(self.stream.synchronize)
        except Exception as error:
            self._on_op_failed(op_error(error, f"waiting for the end of {_op_name(launch, group)}", core.loop), launch, group)

    # -- the end of a group

    def _record_mark(self, group: BoundGroup, submission: Submission) -> None:
        """Record the mark of a group, and have it watched until the stream passes it.

        A group whose mark is passed at once completes here. One of a submission of which nothing
        was launched gets no mark of its own, and retires here.
        """
        context = self._context
        if not submission.launched:
            complete_dropped_group(context, group)
            context.retire(submission, len(group.launches), group.commands, is_last=group.is_last)
            return
        # On a device that runs ops in the call, every mark is passed at once: one event is enough,
        # and is not taken from the pool for each group.
        event = self._passed_event or self.events.acquire()
        self._passed_event = None
        try:
            if group.span is not None and self._timed_stream is not None:
                self._timed_stream.end_span(group.span)
            is_passed = self.stream.record(event)
        except AccelError as error:
            context.report_fault(error)
            return
        if is_passed:
            self._passed_event = event
            group.complete()
        else:
            group.on_marked(event)
            context.watcher.watch(group)

    def _on_mark_failed(self, raised: BaseException, group: BoundGroup) -> None:
        """Reject and retire a group whose mark could not be recorded, or report the fault.

        Its ops count as failed: nothing says when they end. A later mark of the lane covers them.
        """
        context, submission, launches = self._context, group.submission, group.launches
        self._next_index = 0
        self.advance(launches[-1].seq)
        error = op_error(raised, f"marking the end of {submission.name}", context.core.loop)
        if error.is_fault or context.fault is not None:
            context.report_fault(error)
            return
        if submission in context.submissions:  # else it was retired before the exception
            for launch in launches:
                context.failures.on_failed(self, launch.seq, error)
            self._on_op_failed(error, launches[0], group)
            context.failures.reject_failed(group)
            context.retire(submission, len(launches), group.commands, is_last=group.is_last)

    # -- what goes wrong

    def _on_raised(self, raised: BaseException, launch: BoundOp, group: BoundGroup, *, is_kernel_called: bool = True) -> None:
        """Reject an op whose kernel raised, or report the fault that has caused the error.

        The op counts as launched already. Without ``is_kernel_called`` the exception is from before
        the kernel's call: the op has enqueued nothing. Frees idle memory if there was too little.
        """
        context, library = self._context, group.submission.libraries[launch.index]
        what = f"the {_op_name(launch, group)} kernel of library {library!r}"
        error = op_error(raised, what, context.core.loop, is_out_of_memory=context.is_out_of_memory(raised), library=library)
        if isinstance(error, OutOfMemoryError):
            context.buffers.close_idle_slabs()
        if not error.is_fault:
            error = context.fault_of(self.stream, error) or error
        if not error.is_fault:
            if is_kernel_called and not isinstance(error, _REFUSALS):
                context.failures.on_failed(self, launch.seq, error)
            else:
                context.failures.on_dropped(self, launch.seq)
        self._on_op_failed(error, launch, group)

    def _on_op_failed(self, error: AccelError, launch: BoundOp, group: BoundGroup) -> None:
        """Report a fault to the context; end the submission with any other error of an op."""
        submission, context = group.submission, self._context
        if error.is_fault:
            context.report_fault(error.clone(op=error.op or _op_name(launch, group)))
            return
        op_failure = error.clone(
            op=error.op or _op_name(launch, group),
            device=context.core.name,
            generation=context.generation,
            op_index=None if isinstance(group, OpSubmission) else launch.index,
        )
        submission.reject_from(launch.index, op_failure)


def _call_and_catch(call: Callable[..., None], *arguments: Any) -> BaseException | None:
    """Call a function, and return what it raises instead of raising it.

    A ``CancelledError`` that a kernel raises must not look like a cancellation of the lane's task.
    """
    try:
        call(*arguments)
    except BaseException as error:
        return error
    return None


def _op_name(launch: BoundOp, group: BoundGroup) -> str:
    """Return an op's name for errors; ``launch.op`` may be released by now."""
    return group.submission.kinds[launch.index]
