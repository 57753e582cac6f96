"""Work that fails in a stream without a fault: whose error it is, and what must not be read.

Streams that run Python report what their work raises (see :class:`accel.backend.ReportsFailures`).
On any device a kernel may write a status that says so (see :class:`accel.ops.Status`). The op whose
work failed ends with its error; so do the later ops that read its results, directly or through
other ops. Memory is tracked by whole buffers: an invalid one is valid again once all of it was
rewritten.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from accel.backend import ReportsFailures
from accel.engine.launches import OpSubmission
from accel.engine.op_error import op_error
from accel.engine.submission import BatchSubmission
from accel.errors import AccelError
from accel.ref import RefView
from accel.storage.buffers import HeldResource

if TYPE_CHECKING:
    from collections.abc import Iterable

    from accel.engine.in_flight import ContextBase
    from accel.engine.launches import BoundGroup
    from accel.engine.status import PendingStatus
    from accel.engine.stream_clock import StreamClock
    from accel.engine.submission import Submission
    from accel.memory import Dependency, Timeline
    from accel.ops import Plan
    from accel.ref import AccelRef
    from accel.storage.buffers import Buffers
    from accel.storage.durable_slabs import DurableSlabs

__all__ = ["Failures"]


class _TrackedOp:
    """An op in flight that depends on writes that may still fail.

    Attributes
    ----------
    inputs : set of int
        Buffers that it reads, or keeps in part.
    reads, overwrites : list of Dependency
        Writes, pending at the op's dispatch, of what it reads, and of what it writes.
    replaced : list of int
        Buffers that existed before, all of whose contents it writes anew.
    overwritten : set of int
        Invalid buffers that it writes anew. They are invalid again if the op never runs.
    overwritten_error : AccelError or None
        The error of the failed write of one of them.
    error : AccelError or None
        The error that the op ends with: its own, or that of an op whose result it reads.
    """

    __slots__ = ("error", "inputs", "overwrites", "overwritten", "overwritten_error", "reads", "replaced")

    def __init__(self) -> None:
        self.inputs: set[int] = set()
        self.reads: list[Dependency] = []
        self.overwrites: list[Dependency] = []
        self.replaced: list[int] = []
        self.overwritten: set[int] = set()
        self.overwritten_error: AccelError | None = None
        self.error: AccelError | None = None


class Failures:
    """The failed work of one context. Used on the loop's thread; streams report from theirs.

    Parameters
    ----------
    context, buffers, durables
        The context, with its memory.

    Attributes
    ----------
    is_tracking : bool
        Whether work can fail: a stream of the context reports failures, or a status is pending.
    reported : deque
        Failures that streams have reported, and the loop has not handled: the lane and sequence
        number of an op, and the exception of its work.
    tracked : dict
        Lane and sequence number -> op that has not ended, in the order of dispatch.
    has_invalid : bool
        Whether there may be memory that must not be read.
    """

    def __init__(self, context: ContextBase, buffers: Buffers, durables: DurableSlabs) -> None:
        self._context = context
        self._buffers = buffers
        self._durables = durables
        self.is_tracking = False
        self.reported: deque[tuple[Dependency, BaseException]] = deque()
        self.tracked: dict[Dependency, _TrackedOp] = {}
        self.has_invalid = False
        self._has_reporting_stream = False
        self._statuses: dict[StreamClock, deque[tuple[int, PendingStatus]]] = {}  # not known yet, oldest first
        self._dropped: list[Dependency] = []
        # Buffer -> the error of its last write; until an op that writes all of it is dispatched.
        self._invalid: dict[int, AccelError] = {}

    def listen(self, lane: StreamClock) -> None:
        """Have a lane's stream report what its work raises, if it can: ops are tracked then.

        Called when the lane is made. The reports come from the stream's thread: a deque takes them
        without a lock.
        """
        stream, reported = lane.stream, self.reported
        if isinstance(stream, ReportsFailures):
            # Ops are enqueued in the order of their numbers: the one being enqueued has the next.
            stream.report_failures(lambda: lane.enqueued + 1, lambda seq, error: reported.append(((lane, seq), error)))
            self.is_tracking = self._has_reporting_stream = True

    # -- at the dispatch of an op

    def check(self, plan: Plan) -> None:
        """Raise if an op would read an invalid buffer, or keep a part of it.

        The error is that of the op whose write of the buffer failed. Handles the reports so far
        first. Called once all operands are known to be in memory, and before the op has a number;
        not called where nothing was reported and no memory is invalid.
        """
        self._handle_reported()
        self._forget_freed()  # else each later op would come here because of memory that is gone
        for buffer in self._inputs_of(plan).intersection(self._invalid):
            raise self._invalid[buffer].clone()

    def track(self, lane: StreamClock, seq: int, plan: Plan) -> None:
        """Record what an op reads and writes that may still fail; what it writes anew is valid again.

        Called before the op is recorded as the buffers' last user. Not called where nothing is in
        flight and no memory is invalid.
        """
        blocks, tracked_op = self._buffers.blocks, _TrackedOp()
        tracked_op.inputs = self._inputs_of(plan)
        tracked_op.replaced = [ref.buffer for ref in plan.writes if ref.buffer not in tracked_op.inputs]
        for refs, pending in ((plan.reads, tracked_op.reads), (plan.writes, tracked_op.overwrites)):
            for ref in refs:
                write = blocks[ref.buffer].usage.pending_write()
                if write is not None:
                    pending.append(write)
        if self._invalid:
            tracked_op.overwritten = self._with_graph_buffers(tracked_op.replaced).intersection(self._invalid)
            for buffer in tracked_op.overwritten:
                tracked_op.overwritten_error = self._invalid.pop(buffer)
            self.has_invalid = bool(self._invalid)
        if tracked_op.reads or tracked_op.overwrites or tracked_op.overwritten:
            self.tracked[lane, seq] = tracked_op

    def _inputs_of(self, plan: Plan) -> set[int]:
        """Return the buffers whose contents an op reads, or keeps in part.

        A replay also reads the inputs of its :class:`HeldResource`: buffers of the graph's own. A
        call of the graph as a function overwrites some of these before its ops run; so those that
        it writes are left out. It lists the ones whose contents it does read among its reads.
        """
        inputs = {ref.buffer for ref in plan.reads if ref.nbytes}
        for ref in plan.writes:
            block = self._buffers.blocks[ref.buffer]
            if isinstance(block, HeldResource):
                inputs |= block.inputs.difference([written.buffer for written in plan.writes])
            elif ref.nbytes and (plan.updates or (isinstance(ref, RefView) and ref.nbytes < block.nbytes)):
                inputs.add(ref.buffer)
        return inputs

    def expect_status(self, lane: StreamClock, seq: int, status: PendingStatus) -> None:
        """Expect an op's status, which will say whether it has succeeded.

        Called after :meth:`track`. From now on ops are tracked, until the status is read.
        """
        # An entry, so that `reject_failed` is called when ops end.
        self.tracked.setdefault((lane, seq), _TrackedOp())
        self._statuses.setdefault(lane, deque()).append((seq, status))
        self.is_tracking = True

    # -- at the end of an op

    def reject_failed(self, group: BoundGroup) -> None:
        """End a group's submission if one of its ops failed, or read the result of a failed op.

        Called when the group's mark is passed, before its ops retire. The group's ops are tracked
        no more; once nothing in flight can fail, no op is.
        """
        if self._statuses:
            self._read_statuses()
        self._handle_reported()
        for launch in group.launches:
            tracked_op = self.tracked.pop((group.lane, launch.seq), None)
            if tracked_op is not None and tracked_op.error is not None and not group.submission.is_dropped(launch.index):
                # Of a graph, the error says itself which of its ops failed.
                index = tracked_op.error.op_index if isinstance(group, OpSubmission) else launch.index
                group.submission.reject_from(launch.index, tracked_op.error.clone(op_index=index))
        if self._dropped:
            self._forget_dropped()
        if not self.tracked and not self._has_reporting_stream:
            self._forget_freed()
            # Nothing in flight can fail any more; only ops that read invalid memory are refused.
            self.is_tracking = self.has_invalid

    def _read_statuses(self) -> None:
        """Move failures from the statuses that are on the host to :attr:`reported`.

        The status of an op is on the host once the op, or one that reads its results, has ended. A
        fault that surfaces here is reported to the context.
        """
        for lane, waiting in tuple(self._statuses.items()):
            try:
                while waiting and waiting[0][1].is_known():
                    seq, status = waiting.popleft()
                    failure = status.failure()
                    if failure is not None:
                        self.reported.append(((lane, seq), failure))
                    status.close(lane)
            except AccelError as error:
                self._context.report_fault(error)
            if not waiting:
                del self._statuses[lane]

    def on_failed(self, lane: StreamClock, seq: int, error: AccelError) -> None:
        """Record that an op failed after its work began to be enqueued; called by its lane.

        The durable buffers that it writes become torn: they hold neither old nor new contents.
        """
        self._skip_status(lane, seq)
        submission, index = self.submission_of(lane, seq)
        if submission is not None:
            self._tear_durable([buffer for at, buffer, _ in submission.writes if at == index], submission.kinds[index])
        if self.is_tracking:
            self.reported.append(((lane, seq), error))

    def on_dropped(self, lane: StreamClock, seq: int) -> None:
        """Record that an op will never run: the contents that it was to overwrite stay.

        Called by its lane, where the submission's future had ended, the context had faulted, or the
        kernel raised before it enqueued anything.
        """
        self._skip_status(lane, seq)
        self._forget_dropped()
        tracked_op = self.tracked.get((lane, seq))
        if tracked_op is not None:
            self._dropped.append((lane, seq))
            # It neither fails nor replaces anything: its readers get what was there before it.
            tracked_op.inputs, tracked_op.replaced = set(), []
            if tracked_op.overwritten_error is not None:
                self._propagate({(lane, seq)}, set(tracked_op.overwritten), tracked_op.overwritten_error)

    def _skip_status(self, lane: StreamClock, seq: int) -> None:
        """Have the status of an op ignored: its kernel raised, or is not called."""
        for number, status in self._statuses.get(lane, ()):
            if number == seq:
                status.skip()

    def _forget_dropped(self) -> None:
        """Forget ops that never ran, once their lane's clock has passed their numbers."""
        for key in [key for key in self._dropped if key[1] <= key[0].completed]:
            self._dropped.remove(key)
            self.tracked.pop(key, None)

    def _handle_reported(self) -> None:
        """Record the error of each op whose failure was reported, and propagate it.

        An op's failure is reported before its mark, or that of a later op, is passed.
        """
        while self.reported:
            key, raised = self.reported.popleft()
            tracked_op = self.tracked.setdefault(key, _TrackedOp())
            if tracked_op.error is None:
                tracked_op.error = self._error_of(key, raised)
                failed = self._with_rest_of_batch(key)
                self._propagate(failed, self._written_by(failed), tracked_op.error.clone(op_index=None))

    def _propagate(self, failed: set[Dependency], invalid: set[int], error: AccelError) -> None:
        """Give the error to all ops in flight that depend on the failed ones.

        Their keys are added to the set ``failed``, and the buffers that they were to write to
        ``invalid``. These become invalid, unless a later op that did not fail writes them anew.
        """
        # The failed ops, and all ops whose writes follow theirs. A pending write of a buffer may be
        # one of these others: the buffers of a graph share one usage, so that it is the last write
        # of any of them.
        later = set(failed)
        # One pass is enough: an op is dispatched after those whose results it reads.
        for key, tracked_op in self.tracked.items():
            follows = not (later.isdisjoint(tracked_op.reads) and later.isdisjoint(tracked_op.overwrites))
            if follows and tracked_op.error is None and not invalid.isdisjoint(tracked_op.inputs):
                tracked_op.error = error
                if key not in failed:
                    also_failed = self._with_rest_of_batch(key)
                    invalid |= self._written_by(also_failed)
                    failed |= also_failed
                    later |= also_failed
            if key not in failed and not later.isdisjoint(tracked_op.overwrites):
                later.add(key)
                overwritten = invalid & self._with_graph_buffers(tracked_op.replaced)
                if overwritten:
                    invalid -= overwritten
                    tracked_op.overwritten |= overwritten
                    tracked_op.overwritten_error = error
        self._invalid.update(dict.fromkeys(invalid, error))
        self._forget_freed()
        self._tear_durable(invalid, error.op)

    def _tear_durable(self, written: Iterable[int], kind: str | None) -> None:
        """Mark durable buffers that a failed op was to write as torn."""
        torn = self._durables.buffers.intersection(written)
        if torn:
            self._context.core.keeper.tear(torn, f"the {kind} op that wrote it failed")

    def _with_rest_of_batch(self, key: Dependency) -> set[Dependency]:
        """Return the keys of an op and of the launched ops after it in its batch.

        A batch ends at its first error: the later ops count as failed, whatever they read.
        """
        submission, index = self.submission_of(*key)
        keys = {key}
        if submission is not None:
            for lane, first_seq, start, count in submission.chunks:
                later = range(max(start, index), min(start + count, submission.launched))
                keys.update([(lane, first_seq + at - start) for at in later])
        return keys

    def _written_by(self, ops: set[Dependency]) -> set[int]:
        """Return the buffers that ops in flight write or make, with those that a replay writes."""
        written: set[int] = set()
        for submission in self._context.submissions:
            indices = {
                start + seq - first_seq
                for lane, first_seq, start, count in submission.chunks
                for seq in range(first_seq, first_seq + count)
                if (lane, seq) in ops
            }
            for index in indices:
                made: Iterable[AccelRef] = ()
                if isinstance(submission, BatchSubmission):
                    made = submission.outputs[index]
                elif isinstance(submission, OpSubmission):
                    made = submission.result_refs or ()
                written.update([ref.buffer for ref in made])
            written.update([buffer for index, buffer, _ in submission.writes if index in indices])
        return self._with_graph_buffers(written)

    def _with_graph_buffers(self, written: Iterable[int]) -> set[int]:
        """Return the buffers that were written; for a graph's handle also what its replays write.

        A replay writes the handle in place of the graph's own buffers.
        """
        buffers, blocks = set(written), self._buffers.blocks
        for handle in [block for buffer in buffers if isinstance(block := blocks.get(buffer), HeldResource)]:
            buffers |= handle.outputs
        return buffers

    def _forget_freed(self) -> None:
        """Forget invalid buffers that were freed."""
        blocks = self._buffers.blocks
        self._invalid = {buffer: error for buffer, error in self._invalid.items() if buffer in blocks}
        self.has_invalid = bool(self._invalid)

    def _error_of(self, key: Dependency, raised: BaseException) -> AccelError:
        """Return the error of an op whose work raised in its stream, or whose status failed."""
        core = self._context.core
        submission, index = self.submission_of(*key)
        kind, library = (None, None) if submission is None else (submission.kinds[index], submission.libraries[index])
        error = op_error(raised, f"the work of {kind} of library {library!r}", core.loop, library=library)
        return error.clone(op=error.op or kind, library=error.library or library, device=core.name, generation=self._context.generation)

    def submission_of(self, lane: Timeline, seq: int) -> tuple[Submission | None, int]:
        """Return the submission in flight of the op with a number, and the op's index in it.

        ``(None, 0)`` if it has retired. An op whose failure was just reported has not.
        """
        for submission in self._context.submissions:
            for other, first_seq, start, count in submission.chunks:
                if other is lane and first_seq <= seq < first_seq + count:
                    return submission, start + seq - first_seq
        return None, 0
