"""Work that fails in a stream without a fault: whose error it is, and what must not be read.

Streams that run Python report what their work raises (see :class:`accel.backend.ReportsFailures`).
On any device a kernel may write a status that says so (see :class:`accel.ops.Status`). The op whose
work failed ends with its error; so do the ops behind it that read what it was to write, or what
such an op made of it. Memory is tracked by whole buffers: one is sound again once all of it is
written anew.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from accel.backend import ReportsFailures
from accel.engine.launches import OpSubmission
from accel.engine.op_error import op_error
from accel.engine.submission import BatchSubmission
from accel.errors import AccelError
from accel.memory import Block
from accel.ref import RefView

if TYPE_CHECKING:
    from collections.abc import Iterable

    from accel.engine.in_flight import ContextBase
    from accel.engine.launches import Sendable
    from accel.engine.status import PendingStatus
    from accel.engine.stream_clock import StreamClock
    from accel.engine.submission import Submission
    from accel.memory import Dependency, Timeline
    from accel.ops import Plan
    from accel.ref import AccelRef
    from accel.storage.buffers import Buffers, Held
    from accel.storage.durable_slabs import DurableSlabs

__all__ = ["Failures"]


class _Uses:
    """The uses of memory by an op in flight that a failure before it affects.

    Attributes
    ----------
    reads : list of Dependency
        Writes, pending at the op's dispatch, whose results it reads, or keeps in part.
    replaces : list of Dependency
        Pending writes whose results it overwrites: their results stay if the op never runs.
    replaced : AccelError or None
        The error of the write whose result it overwrites.
    error : AccelError or None
        The op's own error.
    """

    __slots__ = ("error", "reads", "replaced", "replaces")

    def __init__(self) -> None:
        self.reads: list[Dependency] = []
        self.replaces: list[Dependency] = []
        self.replaced: AccelError | None = None
        self.error: AccelError | None = None


class Failures:
    """The failed work of one context. Used on the loop's thread, but for what streams report.

    Parameters
    ----------
    context, buffers, durables
        The context, with its memory.

    Attributes
    ----------
    is_tracking : bool
        Whether work can fail: a stream of the context reports failures, or a status is pending.
    raised : deque
        Failures that streams have reported, and the loop has not handled: the number of an op, and
        the exception of its work.
    uses : dict
        Number -> uses of an op that has not ended, in the order of dispatch.
    has_unsound : bool
        Whether there may be memory that must not be read.
    """

    def __init__(self, context: ContextBase, buffers: Buffers, durables: DurableSlabs) -> None:
        self._context = context
        self._buffers = buffers
        self._durables = durables
        self.is_tracking = False
        self.raised: deque[tuple[Dependency, BaseException]] = deque()
        self.uses: dict[Dependency, _Uses] = {}
        self.has_unsound = False
        self._is_listening = False
        self._statuses: dict[StreamClock, deque[tuple[int, PendingStatus]]] = {}  # not known yet, oldest first
        self._dropped: list[Dependency] = []
        # Buffer -> the failed write, and its error. The buffer is unsound while that is its last
        # write.
        self._unsound: dict[int, tuple[Dependency, AccelError]] = {}

    def listen(self, lane: StreamClock) -> None:
        """Have a lane's stream report what its work raises, if it can."""
        stream, raised = lane.stream, self.raised
        if isinstance(stream, ReportsFailures):
            # Ops are enqueued in the order of their numbers: the one being enqueued has the next.
            stream.report_failures(lambda: lane.enqueued + 1, lambda seq, error: raised.append(((lane, seq), error)))
            self.is_tracking = self._is_listening = True

    # -- at the dispatch of an op

    def check(self, plan: Plan) -> None:
        """Raise the error of the op that was to write what an op would read, or keep in part."""
        self._collect()
        self._forget_sound()
        blocks = self._buffers.blocks
        kept = [ref for ref in plan.writes if plan.updates or _is_part(ref, blocks[ref.buffer])]
        for ref in (*plan.reads, *kept):
            if ref.buffer in self._unsound and ref.nbytes:
                raise self._unsound[ref.buffer][1].clone()

    def enlist(self, lane: StreamClock, seq: int, plan: Plan) -> None:
        """Record what an op reads and overwrites. Called before its uses are recorded.

        Where nothing is in flight and all memory is sound, nothing is recorded.
        """
        blocks, uses = self._buffers.blocks, _Uses()
        for ref in plan.reads:
            write = blocks[ref.buffer].usage.pending_write()
            if write is not None:
                uses.reads.append(write)
        for ref in plan.writes:
            block, is_replaced = blocks[ref.buffer], True
            if plan.updates or _is_part(ref, block):
                is_replaced = False
            elif ref.buffer in self._unsound:
                uses.replaced = self._unsound[ref.buffer][1]
            write = block.usage.pending_write()
            if write is not None:
                (uses.replaces if is_replaced else uses.reads).append(write)
        if uses.reads or uses.replaces or uses.replaced is not None:
            self.uses[lane, seq] = uses

    def expect(self, lane: StreamClock, seq: int, status: PendingStatus) -> None:
        """Expect an op's status, which will say whether it has succeeded.

        Called after :meth:`enlist`.
        """
        self.uses.setdefault((lane, seq), _Uses())  # so that the end of any op looks at it
        self._statuses.setdefault(lane, deque()).append((seq, status))
        self.is_tracking = True

    # -- at the end of an op

    def settle(self, group: Sendable) -> None:
        """Answer the first op of a group that failed, or that read the result of a failed op.

        The group's mark is passed.
        """
        if self._statuses:
            self._read_statuses()
        self._collect()
        for launch in group.launches:
            uses = self.uses.pop((group.lane, launch.seq), None)
            if uses is not None and uses.error is not None and not group.submission.is_dropped(launch.index):
                # Of a graph, the error says itself which of its ops failed.
                index = uses.error.op_index if isinstance(group, OpSubmission) else launch.index
                group.submission.reject_from(launch.index, uses.error.clone(op_index=index))
        if self._dropped:
            self._forget_dropped()
        if not self.uses and not self._is_listening:
            self._forget_sound()
            self.is_tracking = self.has_unsound

    def _read_statuses(self) -> None:
        """Check the statuses that have been copied to the host.

        The status of an op has been, once the op, or one that reads its results, has ended.
        """
        for lane, waiting in tuple(self._statuses.items()):
            try:
                while waiting and waiting[0][1].is_known():
                    seq, status = waiting.popleft()
                    failure = status.failure()
                    if failure is not None:
                        self.raised.append(((lane, seq), failure))
                    status.close(lane)
            except AccelError as error:
                self._context.report_fault(error)
            if not waiting:
                del self._statuses[lane]

    def on_failed(self, lane: StreamClock, seq: int, error: AccelError) -> None:
        """Record that an op failed after its work began to be enqueued.

        The durable buffers that it writes hold neither the old nor the new contents.
        """
        self._skip_status(lane, seq)
        submission, index = self.owner(lane, seq)
        if submission is not None:
            self._tear([buffer for at, buffer, _ in submission.writes if at == index], submission.kinds[index])
        if self.is_tracking:
            self.raised.append(((lane, seq), error))

    def on_dropped(self, lane: StreamClock, seq: int) -> None:
        """Record that an op will never run: the contents that it was to overwrite stay."""
        self._skip_status(lane, seq)
        self._forget_dropped()
        uses = self.uses.get((lane, seq))
        if uses is not None:
            self._dropped.append((lane, seq))
            uses.reads = uses.replaces  # its readers get the contents that it did not overwrite
            if uses.replaced is not None:
                self._spread({(lane, seq)}, uses.replaced)

    def _skip_status(self, lane: StreamClock, seq: int) -> None:
        """Skip the status of an op whose kernel raised, or is not called: it may not be written."""
        for number, status in self._statuses.get(lane, ()):
            if number == seq:
                status.skip()

    def _forget_dropped(self) -> None:
        """Forget the ops that never ran and whose numbers are over."""
        for key in [key for key in self._dropped if key[1] <= key[0].completed]:
            self._dropped.remove(key)
            self.uses.pop(key, None)

    def _collect(self) -> None:
        """Handle the failures that streams have reported.

        An op's failure is reported before its mark, or that of an op behind it, is passed.
        """
        while self.raised:
            key, raised = self.raised.popleft()
            uses = self.uses.setdefault(key, _Uses())
            if uses.error is None:
                uses.error = self._error(key, raised)
                self._spread(self._with_batch(key), uses.error.clone(op_index=None))

    def _spread(self, failed: set[Dependency], error: AccelError) -> None:
        """Pass the error of failed ops on to the ops that read their results, and so on.

        Nothing else may read what they were to write.

        No op was dispatched before one whose results it reads. What was written anew behind a
        failed op is sound.
        """
        for key, uses in self.uses.items():
            if uses.error is None and not failed.isdisjoint(uses.reads):
                uses.error = error
                failed |= self._with_batch(key)
            if not failed.isdisjoint(uses.replaces):
                uses.replaced = error
        found = {buffer: write for buffer, block in self._buffers.blocks.items() if (write := block.usage.last_write()) in failed}
        self._unsound.update((buffer, (write, error)) for buffer, write in found.items() if write is not None)
        self.has_unsound = bool(self._unsound)
        self._tear(found, error.op)

    def _tear(self, written: Iterable[int], kind: str | None) -> None:
        """Tear the durable buffers among those that a failed op was to write."""
        torn = self._durables.buffers.intersection(written)
        if torn:
            self._context.core.keeper.tear(torn, f"the {kind} op that wrote it failed")

    def _with_batch(self, key: Dependency) -> set[Dependency]:
        """Return an op's number, and those of the launched ops behind it in its batch.

        They count as failed, whatever they read.
        """
        submission, index = self.owner(*key)
        places = submission.places if isinstance(submission, BatchSubmission) else []
        launched = 0 if submission is None else submission.launched
        behind = [
            (lane, first + at - start)
            for lane, first, start, count in places
            for at in range(max(start, index), min(start + count, launched))
        ]
        return {key, *behind}

    def _forget_sound(self) -> None:
        """Forget unsound buffers that are gone, or were written anew."""
        blocks = self._buffers.blocks
        self._unsound = {
            buffer: found for buffer, found in self._unsound.items() if buffer in blocks and blocks[buffer].usage.last_write() == found[0]
        }
        self.has_unsound = bool(self._unsound)

    def _error(self, key: Dependency, raised: BaseException) -> AccelError:
        core = self._context.core
        submission, index = self.owner(*key)
        kind = None if submission is None else submission.kinds[index]
        library = submission.libraries[index] if isinstance(submission, BatchSubmission) else getattr(submission, "library", None)
        error = op_error(raised, f"the work of {kind} of library {library!r}", core.loop, library=library)
        return error.clone(op=error.op or kind, library=error.library or library, device=core.name, generation=self._context.generation)

    def owner(self, lane: Timeline, seq: int) -> tuple[Submission | None, int]:
        """Return the submission of the op with a number, and the op's index in it.

        One whose work was just reported has not retired.
        """
        for submission in self._context.submissions:
            if isinstance(submission, BatchSubmission):
                for other, first, start, count in submission.places:
                    if other is lane and first <= seq < first + count:
                        return submission, start + seq - first
            elif isinstance(submission, OpSubmission) and submission.lane is lane and submission.seq == seq:
                return submission, 0
        return None, 0


def _is_part(ref: AccelRef, block: Block | Held) -> bool:
    """Return whether a ref names less than the whole of its buffer."""
    return isinstance(ref, RefView) and ref.nbytes < (block.nbytes if isinstance(block, Block) else ref.base.nbytes)
