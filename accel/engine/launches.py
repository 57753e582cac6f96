"""What a lane is sent: ops of one submission, bound to addresses, and the mark of their end.

An awaited op is one object on its whole way, an :class:`OpSubmission`: its caller waits for it, the device's actor takes it, the lane enqueues it
and the watcher watches it. A batch is a :class:`~accel.engine.submission.BatchSubmission`. It is cut into a :class:`LaunchGroup` for each chunk, with a
:class:`BatchedOp` for each op.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

from accel.engine.submission import Submission, writes_of

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Hashable, Sequence, Sized

    from accel.backend import AccelEvent, Injection, Kernel
    from accel.completion import Watcher
    from accel.engine.stream_clock import StreamClock
    from accel.engine.submission import BatchSubmission
    from accel.errors import AccelError
    from accel.memory.usage import Dependency
    from accel.ops import KernelOp, Plan
    from accel.ref import AccelRef

__all__ = ["BatchedOp", "Bound", "LaunchContext", "LaunchGroup", "OpSubmission", "Sendable"]


class _Failures(Protocol):
    """The failed work of a context: see :class:`accel.engine.failures.Failures`."""

    @property
    def raised(self) -> Sized: ...

    @property
    def uses(self) -> Sized: ...

    def settle(self, group: Sendable) -> None:
        """Answer the first op of a group whose work has failed."""


class LaunchContext(Protocol):
    """What launches need of the context in which they run: see :class:`~accel.engine.context.Context`."""

    fault: AccelError | None
    watcher: Watcher

    @property
    def failures(self) -> _Failures:
        """Its failed work."""

    def retire(self, submission: Submission, count: int, commands: int, *, is_last: bool) -> None:
        """Note that ``count`` ops of a submission are over."""

    def report_fault(self, error: AccelError) -> None:
        """Take a fault that has surfaced."""

    def wake(self) -> None:
        """Have those look again that wait for the end of work."""


class BatchedOp:
    """One op of a batch, ready to be enqueued once it has a sequence number.

    Attributes
    ----------
    op, plan, kernel
        The op, what it does to memory, and the function that enqueues it.
    inputs, outputs : sequence of int
        Addresses of the operands and results.
    seq : int
        Sequence number on the lane's clock.
    dependencies : list
        Sequence numbers of other lanes that must have ended before the op starts.
    action : Injection or AccelError or None
        The fault that a fault plan injects.
    index : int
        Index in the submission.
    is_offloaded : bool or None
        Whether the op is enqueued on a worker thread, because the call may block; ``None`` until the backend was asked.
    commands : int
        Number of commands that it puts into the device's queues.
    """

    __slots__ = ("action", "commands", "dependencies", "index", "inputs", "is_offloaded", "kernel", "op", "outputs", "plan", "seq")

    inputs: Sequence[int]
    outputs: Sequence[int]
    seq: int
    dependencies: list[Dependency]

    def __init__(self, op: KernelOp, plan: Plan, kernel: Kernel, action: Injection | AccelError | None, index: int, commands: int) -> None:
        self.op = op
        self.plan = plan
        self.commands = commands
        self.kernel = kernel
        self.action = action
        self.index = index
        self.is_offloaded: bool | None = None


class LaunchGroup:
    """Consecutive launches of a batch, and the mark that ends them; see :class:`accel.completion.Mark`.

    Attributes
    ----------
    submission, launches
        The batch, and its ops that go into the lane.
    lane, stream
        The lane, and its stream.
    is_last : bool
        Whether the submission ends with this group.
    commands : int
        Number of commands of the launches in the device's queues.
    event, enqueued_at, kind
        The mark, once it is recorded.
    """

    __slots__ = ("_context", "commands", "enqueued_at", "event", "is_last", "kind", "lane", "launches", "stream", "submission")

    def __init__(
        self, context: LaunchContext, submission: BatchSubmission, lane: StreamClock, launches: list[BatchedOp], *, is_last: bool
    ) -> None:
        self._context = context
        self.submission = submission
        self.lane = lane
        self.stream = lane.stream
        self.launches = launches
        self.commands = sum([launch.commands for launch in launches])
        self.is_last = is_last
        self.event: AccelEvent | None = None
        self.kind: Hashable = None

    def on_marked(self, event: AccelEvent) -> None:
        """Note the mark, which is not passed yet."""
        self.event = event
        self.kind = _group_kind(self.submission, self.launches)
        self.enqueued_at = perf_counter()
        if self.is_last:
            self.submission.release_operands()

    def complete(self) -> None:
        """Retire the ops; called by the watcher, once."""
        lane, failures = self.lane, self._context.failures
        lane.complete(self.launches[-1].seq)
        if self.event is not None:
            lane.events.give(self.event)
        if failures.raised or failures.uses:
            failures.settle(self)
        self._context.retire(self.submission, len(self.launches), self.commands, is_last=self.is_last)

    def fail(self, error: AccelError) -> None:
        """Report that the mark will never be passed; called by the watcher, once."""
        self._context.report_fault(error)


class OpSubmission(Submission):
    """One op that is awaited by itself: message, group of one launch, and mark in one. Much is set only when it is bound.

    Attributes
    ----------
    made : tuple of AccelRef or None
        The refs of its results, where they were made before.
    library : str
        The op's.
    op, plan
        The work, and what it does to memory; ``None`` when it has reached the device, so that operands are not kept from being freed.
    kernel, inputs, outputs, seq, dependencies, action, is_offloaded, commands
        As of a :class:`BatchedOp`.
    lane, stream, event, enqueued_at, kind
        As of a :class:`LaunchGroup`.
    """

    __slots__ = (
        "_context", "action", "commands", "dependencies", "enqueued_at", "event", "inputs", "is_offloaded", "kernel", "kind", "lane", "library", "made", "op",
        "outputs", "plan", "seq", "stream",
    )  # fmt: skip

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
        self.library = op.library
        self.op: Any = op
        self.plan: Plan | None = plan
        self.made: tuple[AccelRef, ...] | None = None
        self.event: AccelEvent | None = None

    def bind(self, context: LaunchContext, lane: StreamClock, kernel: Kernel, action: Injection | AccelError | None, commands: int) -> None:
        """Take note of where it goes, and how."""
        self._context = context
        self.lane = lane
        self.stream = lane.stream
        self.kernel = kernel
        self.action = action
        self.is_offloaded: bool | None = None
        self.commands = commands

    @property
    def kinds(self) -> Sequence[str]:
        """The op's name."""
        return (self.name,)

    @property
    def plans(self) -> Sequence[Plan]:
        """What the op does to memory."""
        return () if self.plan is None else (self.plan,)

    @property
    def submission(self) -> Submission:
        """Itself."""
        return self

    @property
    def launches(self) -> Sequence[Bound]:
        """Itself alone."""
        return (self,)

    def is_dropped(self, index: int) -> bool:
        """Whether the op is not to be launched any more."""
        return self.future.done()

    def reject_from(self, index: int, error: AccelError) -> None:
        """Answer with the op's error."""
        self.reject(error)

    def release_operands(self) -> None:
        """Let go of the operands."""
        self.op = None
        self.plan = None

    def void(self, index: int) -> None:
        """Do nothing: the caller has no refs yet."""

    def void_unsound(self) -> None:
        """Do nothing: the caller has no refs yet."""

    def on_marked(self, event: AccelEvent) -> None:
        """Note the mark, which is not passed yet."""
        self.event = event
        self.enqueued_at = perf_counter()
        # Ops of one kind that move as much to the nearest power of two take about as long. Of one that was enqueued beside the loop, part is over by now.
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
        """Retire the op; called by the watcher, once."""
        lane, event = self.lane, self.event
        if self.seq > lane.completed:
            lane.completed = self.seq
        if event is not None:
            lane.events.give(event)
        context = self._context
        failures = context.failures
        if failures.raised or failures.uses:
            failures.settle(self)
        context.retire(self, 1, self.commands, is_last=True)

    def fail(self, error: AccelError) -> None:
        """Report that the mark will never be passed; called by the watcher, once."""
        self._context.report_fault(error)


Bound: TypeAlias = BatchedOp | OpSubmission
"""One op, ready to be enqueued."""

Sendable: TypeAlias = LaunchGroup | OpSubmission
"""What a lane is sent."""


def _group_kind(submission: BatchSubmission, launches: Sequence[BatchedOp]) -> Hashable:
    """Return what the duration of a group is predicted by: its last op's kind, how many they are, and how much they move, to the nearest power of two.

    Of this group alone: a sum over the whole batch for each of its groups would take a time that grows with the square of the batch's length.
    """
    plans = submission.plans[launches[0].index : launches[-1].index + 1]
    nbytes = sum([ref.nbytes for plan in plans for ref in plan.reads]) + sum([spec.nbytes for plan in plans for spec in plan.creates])
    return submission.kinds[launches[-1].index], len(launches), nbytes.bit_length()
