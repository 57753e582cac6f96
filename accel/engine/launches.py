"""Bound ops: ops of one submission with their addresses and kernels, and the mark of their end.

An awaited op is one object on its whole way, an :class:`OpSubmission`: the caller awaits it, the
device's actor dispatches it, the lane enqueues it, and the watcher watches it. A batch is a
:class:`~accel.engine.submission.BatchSubmission`; each chunk of it is a :class:`LaunchGroup`, with
a :class:`BatchedOp` for each op. A *mark* is an event that is recorded after the ops; a
:class:`LaneMark` belongs to no ops.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

from accel.engine.submission import Submission, writes_of
from accel.errors import AccelError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Hashable, Sequence, Sized

    from accel.backend import AccelEvent, Injection, Kernel, WorkSpan
    from accel.completion import Watcher
    from accel.engine.stream_clock import StreamClock
    from accel.engine.submission import BatchSubmission, Chunk
    from accel.memory.usage import Dependency
    from accel.ops import KernelOp, Plan
    from accel.ref import AccelRef

__all__ = [
    "BatchedOp",
    "BoundGroup",
    "BoundOp",
    "LaneMark",
    "LaunchContext",
    "LaunchGroup",
    "OpSubmission",
    "complete_at_mark",
    "complete_dropped_group",
]


class _Failures(Protocol):
    """The failed work of a context; implemented by :class:`accel.engine.failures.Failures`."""

    @property
    def reported(self) -> Sized: ...

    @property
    def tracked(self) -> Sized: ...

    def reject_failed(self, group: BoundGroup) -> None:
        """End the submission of a group with the error of its first op that failed."""


class LaunchContext(Protocol):
    """The context in which launches run; see :class:`~accel.engine.context.Context`."""

    fault: AccelError | None
    watcher: Watcher

    @property
    def failures(self) -> _Failures:
        """The failed work of the context."""

    def charge(self, submission: Submission, span: WorkSpan) -> None:
        """Charge a submission the device time of a part of it that has ended."""

    def retire(self, submission: Submission, count: int, commands: int, *, is_last: bool) -> None:
        """Count ``count`` ops of a submission as ended; with ``is_last`` end the submission."""

    def report_fault(self, error: AccelError) -> None:
        """End the context because of a fault that has surfaced."""

    def wake(self) -> None:
        """Have tasks that wait for ops to retire check their conditions again."""


class BatchedOp:
    """One op of a batch, ready to be enqueued once it has a sequence number.

    Attributes
    ----------
    op, plan, kernel
        The op, its plan, and the function that enqueues it.
    inputs, outputs : sequence of int
        Addresses of the operands and results.
    seq : int
        Sequence number on the lane's clock.
    dependencies : list
        Sequence numbers of other lanes that must have ended before the op starts.
    injected_fault : Injection or AccelError or None
        The fault that a fault plan injects.
    index : int
        Index in the submission.
    is_offloaded : bool or None
        Whether a worker thread enqueues the op, because the call may block; ``None`` until the
        backend was asked.
    """

    __slots__ = ("dependencies", "index", "injected_fault", "inputs", "is_offloaded", "kernel", "op", "outputs", "plan", "seq")

    inputs: Sequence[int]
    outputs: Sequence[int]
    seq: int
    dependencies: list[Dependency]

    def __init__(self, op: KernelOp, plan: Plan, kernel: Kernel, injected_fault: Injection | AccelError | None, index: int) -> None:
        self.op = op
        self.plan = plan
        self.kernel = kernel
        self.injected_fault = injected_fault
        self.index = index
        self.is_offloaded: bool | None = None


class LaunchGroup:
    """Consecutive launches of a batch, and their mark; see :class:`accel.completion.Mark`.

    Attributes
    ----------
    submission, launches
        The batch, and its ops that go into the lane.
    lane, stream
        The lane, and its stream.
    is_last : bool
        Whether the submission ends with this group.
    commands : int
        Commands of all launches in the device's queues.
    event, enqueued_at, kind
        The mark, once it is recorded: its event, when that was (``perf_counter``), and the key of
        its predicted duration.
    span : WorkSpan or None
        Measures its device time, from its first launch on.
    """

    __slots__ = ("_context", "commands", "enqueued_at", "event", "is_last", "kind", "lane", "launches", "span", "stream", "submission")

    def __init__(
        self,
        context: LaunchContext,
        submission: BatchSubmission,
        lane: StreamClock,
        launches: list[BatchedOp],
        commands: int,
        *,
        is_last: bool,
    ) -> None:
        self._context = context
        self.submission = submission
        self.lane = lane
        self.stream = lane.stream
        self.launches = launches
        self.commands = commands
        self.is_last = is_last
        self.event: AccelEvent | None = None
        self.kind: Hashable = None
        self.span: WorkSpan | None = None

    def on_marked(self, event: AccelEvent) -> None:
        """Keep the recorded mark, which the stream has not passed yet.

        The lane calls this before the group is watched. After the last group the batch's operands
        are released.
        """
        submission, launches = self.submission, self.launches
        self.event = event
        self.enqueued_at = perf_counter()
        # As for a single op, the key has the bytes that move, to the nearest power of two. Only
        # this group's are counted: a sum over the whole batch for each group would be quadratic.
        nbytes = 0
        for launch in launches:
            for ref in (*launch.plan.reads, *submission.outputs[launch.index]):
                nbytes += ref.nbytes
        self.kind = (submission.kinds[launches[-1].index], len(launches), nbytes.bit_length())
        if self.is_last:
            submission.release_operands()

    def complete(self) -> None:
        """Retire the ops, and end the batch after its last group, or with the error of failed work.

        Called once, by the watcher, or by the lane if the stream is idle.
        """
        lane, failures = self.lane, self._context.failures
        lane.complete(self.launches[-1].seq)
        if self.event is not None:
            lane.events.release(self.event)
        if self.span is not None:
            self._context.charge(self.submission, self.span)
        if failures.reported or failures.tracked:
            failures.reject_failed(self)
        self._context.retire(self.submission, len(self.launches), self.commands, is_last=self.is_last)

    def fail(self, error: AccelError) -> None:
        """Report that the mark will never be passed; called by the watcher, once."""
        self._context.report_fault(error)


class OpSubmission(Submission):
    """An op that is awaited by itself: message, group of one bound op, and mark in one object.

    :meth:`bind` sets the attributes of the bound op, and :meth:`on_marked` those of the mark.

    Attributes
    ----------
    result_refs : tuple of AccelRef or None
        The refs of its results, where the sender has made them.
    library : str
        The op's library.
    op, plan
        The op and its plan; ``None`` once it is launched, so that its operands can be freed.
    kernel, inputs, outputs, seq, dependencies, injected_fault, is_offloaded, commands
        See :class:`BatchedOp` and :class:`LaunchGroup`.
    lane, stream, event, enqueued_at, kind, span
        See :class:`LaunchGroup`.
    """

    __slots__ = (
        "_context",
        "commands",
        "dependencies",
        "enqueued_at",
        "event",
        "injected_fault",
        "inputs",
        "is_offloaded",
        "kernel",
        "kind",
        "lane",
        "library",
        "op",
        "outputs",
        "plan",
        "result_refs",
        "seq",
        "span",
        "stream",
    )

    _context: LaunchContext
    inputs: Sequence[int]
    outputs: Sequence[int]
    seq: int
    dependencies: list[Dependency]

    index: ClassVar[int] = 0
    is_last: ClassVar[bool] = True

    def __init__(self, op: KernelOp, plan: Plan, future: asyncio.Future[Any], generation: int) -> None:
        # Not by super(): this is on the way of every op.
        self.name = op.kind
        self.future = future
        self.generation = generation
        self.launched = 0
        self.outstanding = 0
        self.result = None
        self.timer = None
        self.writes = writes_of((plan,)) if plan.writes else ()
        self.tears = 0
        self.observed = None
        self.library = op.library
        self.op: Any = op
        self.plan: Plan | None = plan
        self.result_refs: tuple[AccelRef, ...] | None = None
        self.event: AccelEvent | None = None
        self.span: WorkSpan | None = None

    def bind(
        self, context: LaunchContext, lane: StreamClock, kernel: Kernel, injected_fault: Injection | AccelError | None, commands: int
    ) -> None:
        """Set the lane, the kernel, the injected fault and the count of commands.

        The context calls it at the dispatch, before it sets the addresses and the sequence number.
        """
        self._context = context
        self.lane = lane
        self.stream = lane.stream
        self.kernel = kernel
        self.injected_fault = injected_fault
        self.is_offloaded: bool | None = None
        self.commands = commands

    @property
    def libraries(self) -> Sequence[str]:
        """The op's library."""
        return (self.library,)

    @property
    def kinds(self) -> Sequence[str]:
        """The op's name."""
        return (self.name,)

    @property
    def plans(self) -> Sequence[Plan]:
        """The op's plan, until it is launched."""
        return () if self.plan is None else (self.plan,)

    @property
    def chunks(self) -> Sequence[Chunk]:
        """Where in its lane the op is, once it is dispatched."""
        return ((self.lane, self.seq, 0, 1),)

    @property
    def submission(self) -> Submission:
        """The submission of this group: the op is both."""
        return self

    @property
    def launches(self) -> Sequence[BoundOp]:
        """The bound ops of this group: this one alone."""
        return (self,)

    def is_dropped(self, index: int) -> bool:
        """See :meth:`Submission.is_dropped`."""
        return self.future.done()

    def reject_from(self, index: int, error: AccelError) -> None:
        """See :meth:`Submission.reject_from`."""
        self.reject(error)

    def release_operands(self) -> None:
        """See :meth:`Submission.release_operands`."""
        self.op = None
        self.plan = None

    def free_results_from(self, index: int) -> None:
        """Do nothing: the caller gets the refs of results only when the op has ended."""

    def free_unlaunched_results(self) -> None:
        """Do nothing: the caller gets the refs of results only when the op has ended."""

    def on_marked(self, event: AccelEvent) -> None:
        """Keep the recorded mark, which the stream has not passed yet; drop the operands.

        The lane calls this before the op is watched.
        """
        self.event = event
        self.enqueued_at = perf_counter()
        # The key of the predicted duration: ops of one name whose bytes lie between the same powers
        # of two take about as long. An offloaded op has a key of its own: part of it may
        # have run before its mark was recorded.
        plan, nbytes = self.plan, 0
        if plan is not None:
            for ref in plan.reads:
                nbytes += ref.nbytes
            for ref in plan.writes:
                nbytes += ref.nbytes
            for spec in plan.creates:
                nbytes += spec.nbytes
        self.kind: Hashable = (self.name, nbytes.bit_length(), self.is_offloaded)
        self.op = self.plan = None

    def complete(self) -> None:
        """Retire the op, which ends its future: with its result, or the error of failed work.

        Called once, by the watcher, or by the lane if the stream is idle.
        """
        lane, event = self.lane, self.event
        if self.seq > lane.completed:  # as Timeline.complete: this is on the way of every op
            lane.completed = self.seq
        if event is not None:
            lane.events.release(event)
        context = self._context
        if self.span is not None:
            context.charge(self, self.span)
        failures = context.failures
        if failures.reported or failures.tracked:
            failures.reject_failed(self)
        context.retire(self, 1, self.commands, is_last=True)

    def fail(self, error: AccelError) -> None:
        """Report that the mark will never be passed; called by the watcher, once."""
        self._context.report_fault(error)


BoundOp: TypeAlias = BatchedOp | OpSubmission
"""One op with its kernel and addresses, ready to be enqueued."""

BoundGroup: TypeAlias = LaunchGroup | OpSubmission
"""Bound ops of one submission that a lane enqueues in order, with one mark after them."""


class LaneMark:
    """A mark that moves its lane's clock when it is passed; see :class:`accel.completion.Mark`.

    Parameters
    ----------
    context
        Gets the fault that keeps the mark from being passed.
    lane
        The lane that is marked.
    seq
        The last sequence number before the mark.
    event
        The mark in the lane's stream.
    kind
        Key of the predicted duration.
    """

    __slots__ = ("_context", "_seq", "enqueued_at", "event", "kind", "lane", "stream")

    def __init__(self, context: LaunchContext, lane: StreamClock, seq: int, event: AccelEvent, kind: str) -> None:
        self._context = context
        self._seq = seq
        self.lane = lane
        self.stream = lane.stream
        self.event = event
        self.kind = kind
        self.enqueued_at = perf_counter()

    def complete(self) -> None:
        """Move the lane's clock, and wake what waits for it; called by the watcher, once."""
        self.lane.complete(self._seq)
        self.lane.events.release(self.event)
        self._context.wake()

    def fail(self, error: AccelError) -> None:
        """Report that the mark will never be passed; called by the watcher, once."""
        self._context.report_fault(error)


def complete_at_mark(context: LaunchContext, lane: StreamClock, seq: int, kind: str) -> None:
    """Mark a lane's stream, and move the lane's clock to ``seq`` once the stream passes the mark.

    All work up to ``seq`` must be in the stream. A mark that cannot be recorded is a fault of the
    context.
    """
    event = lane.events.acquire()
    try:
        is_passed = lane.stream.record(event)
    except AccelError as error:
        context.report_fault(error)
        return
    mark = LaneMark(context, lane, seq, event, kind)
    if is_passed:
        mark.complete()
    else:
        context.watcher.watch(mark)


def complete_dropped_group(context: LaunchContext, group: BoundGroup) -> None:
    """Move the lane's clock past the numbers of a group whose submission launched nothing.

    The clock moves now, or once the group's dependencies have ended. Else it would stand still
    until a later op of the lane ends, and memory that the group was to use would stay in use. The
    lane calls this, and retires the group right after.
    """
    lane, launches = group.lane, group.launches
    if lane.completed >= launches[0].seq - 1 and all(other.completed >= seq for op in launches for other, seq in op.dependencies):
        lane.complete(launches[-1].seq)
    else:
        # The mark waits for the dependencies too: Lane._prepare_launch has the stream wait for
        # them, also for an op that is dropped.
        complete_at_mark(context, lane, launches[-1].seq, "dropped")
