"""The requests to one child, in the parent, and the answers that settle them."""

from __future__ import annotations

import json
import marshal
import operator
import struct
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias

from accel.actors.turns import CHECK_EVERY, Turn
from accel.engine.by_value import dumps
from accel.engine.in_flight import ContextBase
from accel.engine.launches import OpSubmission
from accel.engine.loans import Loan
from accel.engine.submission import BatchSubmission, result_of
from accel.errors import AccelError, ClosedError, StaleRefError
from accel.memory import memfd_identity
from accel.ops import Get
from accel.process.protocol import MAX_MESSAGE, ProtocolError
from accel.remote.arrays import MAX_INLINE_COPY, CopyBack, SharedArray, SharedArrays, release_all
from accel.remote.durable import DurableReports
from accel.remote.error_codec import decode_error
from accel.remote.injected_faults import begin_action
from accel.remote.messages import Failure, Kind, Lent, Timed, layout_of, pack
from accel.remote.op_codec import OpWriter
from accel.remote.pending_request import PendingRequest, message_too_long

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from accel.engine.core import DeviceCore
    from accel.engine.in_flight import ContextOwner
    from accel.engine.program import GraphSubmission
    from accel.engine.submission import Submission
    from accel.ops import KernelOp, Plan
    from accel.ref import AccelRef
    from accel.remote.link import Link
    from accel.remote.messages import WireOp

__all__ = ["CopyCall", "CopyDone", "RequestContext"]

CopyCall: TypeAlias = "Callable[[], None]"
"""Copies arrays from shared memory, on a worker thread."""

CopyDone: TypeAlias = "Callable[[AccelError | None], None]"
"""Called on the loop after such a copy, with its error."""

_NUMBER = struct.Struct("<Q")
_buffer_of = operator.attrgetter("buffer")  # no Python call for each op, as in a comprehension

_HEAD = 64 << 10
"""Bytes of a message kept free for what comes with ops: ids of results, fault actions, freed buffers."""

_BURST = 16
"""Requests of one loop iteration after which the parent flushes: the child runs them meanwhile."""

_ONE_OP_REMEDY = "Put the values that it holds on the device as an array, and give it the ref."
"""Remedy for one op that does not fit into a message."""


class RequestContext(ContextBase):
    """Sends ops and questions to one child, and settles them with the answers.

    Making one has the child's watchdog bound the time until its requests are answered.

    Parameters
    ----------
    core
        State of the device that outlives its contexts.
    owner
        Decides what follows a fault.
    copy_off_loop
        Makes a copy on a worker thread, in the order of the calls, and then calls a function on
        the loop with the copy's error.
    link
        The child.
    """

    def __init__(self, core: DeviceCore, owner: ContextOwner, copy_off_loop: Callable[[CopyCall, CopyDone], None], link: Link) -> None:
        super().__init__(core, owner)
        self._copy_off_loop = copy_off_loop
        self._link = link
        self.pid = link.pid
        self._arrays = SharedArrays(core.pinned, link.sent_blocks, link.send_block, is_sent=link.node is not None)
        self._op_writer = OpWriter(lambda number, named: link.tell(Kind.DEFINE, _NUMBER.pack(number) + dumps(named)))
        self._numbers = link.numbers
        self._pending: dict[int, PendingRequest] = {}  # sent and not answered, by their numbers
        self._copies: dict[int, CopyBack] = {}  # of answered gets, by their numbers
        self._questions = link.questions
        self._faults = core.options.faults
        self._freed: list[int] = []  # buffers that the next message frees
        self._has_durable = False  # whether a durable buffer was made or bound in this generation
        self.registered: set[str] = set()  # names of the registered libraries that the child has open
        self._buffer_nbytes: dict[int, int] = {}  # of the buffers that the child has
        link.watchdog.watch(self._pending, self._questions, self.busy_seconds)
        self._durable = DurableReports(core.durable)
        self._reserved = self._workspace = self.peak = 0  # bytes, as the child has reported them

    # -- sending

    def send_batch(self, submission: BatchSubmission, ops: Sequence[KernelOp], arrays: Mapping[int, SharedArray]) -> None:
        """Send the next ops of a batch, as many as a message holds.

        ``submission.dispatched`` counts what was sent: the caller sends the rest after the answer.
        If one of the ops cannot be sent, send those before it, and raise the error, with its
        ``op_index``.

        Parameters
        ----------
        submission, ops
            The batch, and the ops that come next.
        arrays
            The shared memory for their arrays, by the index of the op.
        """
        start, room = submission.dispatched, MAX_MESSAGE - _HEAD
        result_ids: list[list[int]] = []
        wire_ops: list[WireOp] = []
        refused: AccelError | None = None
        # Encode as many ops as fit, without an await: refs may be dropped during one.
        for index, op in enumerate(ops, start):
            try:
                result_refs = self.make_results(submission, index, submission.plans[index])
                wire_op = self._op_writer.write(op, arrays[index].place if index in arrays else None)
                room -= (nbytes := len(marshal.dumps(wire_op)))
                if room < 0 and not wire_ops:
                    what = f"{submission.kinds[index]}, op {index} of a batch,"
                    raise message_too_long(what, nbytes, _ONE_OP_REMEDY)
            except AccelError as error:
                error.op_index = index
                refused = error.with_traceback(None)  # its frames hold this one
                break
            if room < 0:  # the op is the first of the next message, for which all this is done again
                break
            result_ids.append([ref.buffer for ref in result_refs])
            wire_ops.append(wire_op)
        if wire_ops:
            self._send_batch_part(
                submission, start, result_ids, wire_ops, {index: arrays[index] for index in arrays if index < start + len(wire_ops)}
            )
        if refused is not None:
            try:
                raise refused
            finally:
                del refused  # its traceback holds this frame

    def _send_batch_part(
        self,
        submission: BatchSubmission,
        start: int,
        result_ids: list[list[int]],
        wire_ops: list[WireOp],
        arrays: Mapping[int, SharedArray],
    ) -> None:
        """Send encoded ops of a batch, from index ``start`` on, as one message."""
        end = start + len(wire_ops)
        to_copy_back = [shared for index, shared in arrays.items() if isinstance(submission.ops[index], Get)]
        fault_actions = None if self._faults is None else [self.take_fault_action(kind) for kind in submission.kinds[start:end]]
        request = PendingRequest(submission, start, len(wire_ops), tuple(arrays.values()), to_copy_back)
        self._send_ops(request, result_ids, wire_ops, fault_actions)
        submission.dispatched = end

    async def send_graph(self, submission: GraphSubmission) -> None:
        """Send the ops of a graph, which the child captures. A long one is encoded in turns.

        If the caller has gone meanwhile, nothing is sent. Raises if the ops do not fit into one
        message, or an operand was freed.
        """
        program, turn = submission.program, Turn()
        created = {ref.buffer for ref in program.owned_refs}
        wire_ops: list[WireOp] = []
        for op, plan in zip(program.ops, program.plans, strict=True):
            self._check_operands(plan, created)
            wire_ops.append(self._op_writer.write(op))
            if not len(wire_ops) % CHECK_EVERY and turn.is_over:
                await turn.next()
        if submission.future.done():
            return
        self._buffer_nbytes[program.handle.buffer] = 0  # freeing it makes the child drop the graph
        self._buffer_nbytes.update((ref.buffer, ref.nbytes) for ref in program.owned_refs)
        number, result_ids = next(self._numbers), [[ref.buffer for ref in refs] for refs in program.outputs]
        data = pack(number, result_ids, wire_ops, handle=program.handle.buffer)
        if len(data) > MAX_MESSAGE:
            what = f"a graph of {len(program.ops)} ops"
            raise message_too_long(what, len(data), "Record several graphs with fewer ops each, and replay one after the other.")
        self.send_request(number, PendingRequest(submission, 0, 1), Kind.GRAPH, data)

    def make_results(self, submission: Submission, index: int, plan: Plan) -> tuple[AccelRef, ...]:
        """Return the refs of an op's results, right before the op is sent, and count them as live.

        The ops of a batch have theirs since they were recorded. For an op that is awaited by itself
        the refs are made here, unless its sender has made them, and ``submission.result`` is set.

        Raises
        ------
        StaleRefError
            An operand was freed while the op waited to be sent.
        """
        self._check_operands(plan)
        core, live = self.core, self._buffer_nbytes
        if isinstance(submission, BatchSubmission):
            result_refs = submission.outputs[index]
        else:
            assert isinstance(submission, OpSubmission), "there are two kinds"
            result_refs = submission.result_refs or ()
            if plan.creates and not result_refs:
                result_refs = core.refs.make(plan.creates, self.generation)
            submission.result = result_of(submission.op, plan.writes + result_refs, core.loop)
        for ref in result_refs:
            live[ref.buffer] = ref.nbytes
            if ref.durable:
                self._has_durable = True
                self._durable.expect(ref)
        return result_refs

    def send_op(self, submission: OpSubmission, plan: Plan, shared: SharedArray | None) -> None:
        """Send one op as a whole, with the place of its array, if it has one.

        The caller gives ``shared`` away: it is closed by the answer, or here if this raises.
        """
        op, arrays = submission.op, () if shared is None else (shared,)
        try:
            result_refs = self.make_results(submission, 0, plan)
            wire_op = self._op_writer.write(op, None if shared is None else shared.place)
            fault_actions = None if self._faults is None else [self.take_fault_action(submission.name)]
            request = PendingRequest(submission, 0, 1, arrays, arrays if isinstance(op, Get) else ())
            self._send_ops(request, [list(map(_buffer_of, result_refs))], [wire_op], fault_actions)
        except BaseException:
            release_all(arrays)
            raise

    def begin_chunked(self, submission: Submission) -> None:
        """Count an op as launched and in flight, before the first chunk of its array is sent.

        After its last chunk, or a failed one, the caller takes it back: ``retire_ops(submission, 1)``.
        """
        submission.launched += 1
        submission.outstanding += 1
        self.on_dispatched(submission, 1, 1)

    def send_chunk(
        self, submission: Submission, ops: Sequence[KernelOp], result_ids: list[list[int]], shared: SharedArray, action: bytes | str | None
    ) -> PendingRequest:
        """Send one chunk of an array, and return the request, for :meth:`wait_done`.

        The last of ``ops`` moves the chunk; with the first chunk of a new buffer, the one before
        makes that. The answer to a chunk ends no op, so the request counts none: see
        :meth:`begin_chunked`. ``shared`` is closed by the answer, or here if this raises.
        """
        request = PendingRequest(submission, 0, 0, (shared,), (shared,) if isinstance(ops[-1], Get) else ())
        try:
            wire_ops = [self._op_writer.write(op, shared.place) for op in ops]
            self._send_ops(request, result_ids, wire_ops, None if action is None else [action, *[None] * (len(ops) - 1)])
        except BaseException:
            shared.close()
            raise
        return request

    async def wait_answered(self, submission: Submission) -> None:
        """Wait until the child has answered all messages of a submission; its next is sent then.

        A batch ends at its first error: the ops after it must not be sent. What a get has returned
        may still be being copied back.

        Raises
        ------
        ContextPoisonedError
            If the context has faulted, or faults meanwhile.
        """
        await self.wait_until(lambda: all(request.submission is not submission for request in self._pending.values()))

    async def wait_done(self, request: PendingRequest) -> None:
        """Wait until the child has answered a chunk, and what it returned was copied back.

        Raises as :meth:`wait_answered` does.
        """
        await self.wait_until(lambda: request.is_done)

    async def ask(self, kind: Kind, data: bytes, fds: Sequence[int] = ()) -> Any:
        """Send a question, which takes no place in the order of ops, and wait for its answer.

        The descriptors in ``fds`` go with the question; they remain the caller's.

        Return the layout if a kernel was compiled, what a rank of a world has returned, and
        ``None`` for other questions that succeeded; raise the error that the child answers.
        """
        self.check_alive()
        return await self._link.ask(kind, data, fds)

    def _send_ops(
        self, request: PendingRequest, result_ids: list[list[int]], wire_ops: list[WireOp], fault_actions: list[bytes | str | None] | None
    ) -> None:
        """Send ops as one message, which also frees the buffers dropped since the last one.

        Blocks of host memory that the arrays are in are sent before, unless the child has them.
        """
        for shared in request.arrays:
            self._arrays.send_block(shared)
        if self.core.refs.dropped:
            self._collect_dropped()
        number, work = next(self._numbers), request.submission.observed
        is_timed = work is not None and work.is_timed
        data = pack(number, result_ids, wire_ops, fault_actions, self._freed, is_timed=is_timed)
        if len(data) > MAX_MESSAGE:  # only a single op: send_batch limits the ops of a message
            raise message_too_long(request.submission.name, len(data), _ONE_OP_REMEDY)
        if request.arrays and self._link.node is not None and self.fault is None:
            sources = [shared for shared in request.arrays if shared not in request.to_copy_back]
            self._link.node.announce(number, sources, request.to_copy_back)
        self.send_request(number, request, Kind.BATCH, data)
        self._freed = []

    def send_request(self, number: int, request: PendingRequest, kind: Kind, data: bytes) -> None:
        """Send a request, and count its ops as launched: they may be on the device now.

        Raises the error of the fault if the context has one: nothing is sent then.
        """
        if self.fault is not None:  # the child does not answer; this request may have waited
            raise self.poisoned_error(self.fault)
        submission, count = request.submission, request.count
        # At once if the child has nothing to do, and after every few requests: else it would wait
        # for the end of this loop iteration.
        self._link.tell(kind, data, now=not self.in_flight or not number % _BURST)
        self._pending[number] = request
        submission.launched += count
        submission.outstanding += count
        self.on_dispatched(submission, count, count)

    def take_fault_action(self, kind: str) -> bytes | str | None:
        """Count an op in the fault plan, and return what the child is to do to it.

        ``None``: nothing, or there is no plan. If the plan kills the child here, it is killed at
        once.
        """
        return None if self._faults is None else begin_action(self._faults.take(kind), self._link, self.core.loop)

    def _check_operands(self, plan: Plan, created: Collection[int] = ()) -> None:
        """Raise unless each operand is live, or ``created`` by an op before in the same message."""
        live = self._buffer_nbytes
        for ref in plan.reads + plan.writes:
            if ref.buffer not in live and ref.buffer not in created:
                raise StaleRefError(f"{ref!r} is not in memory any more", reason="freed", device=self.core.name, generation=self.generation)

    # -- memory

    def apply_frees(self, max_count: int | None = None) -> None:
        """Have the child free the buffers of dropped refs, of ``max_count`` at most.

        After a fault they are only forgotten: the memory ends with the child.
        """
        self._collect_dropped(max_count)
        freed, self._freed = self._freed, []
        if freed and self.fault is None:
            self._link.tell(Kind.FREE, struct.pack(f"<{len(freed)}Q", *freed))

    def _collect_dropped(self, max_count: int | None = None) -> None:
        """Move the buffers of dropped refs to those that the next message frees.

        Those that the child does not have, such as buffers of an earlier generation, are forgotten.
        """
        dropped = self.core.refs.dropped
        for _ in range(len(dropped) if max_count is None else min(max_count, len(dropped))):
            buffer = dropped.popleft()
            if self._buffer_nbytes.pop(buffer, None) is not None:
                self._freed.append(buffer)
                if self._has_durable:
                    self._durable.on_dropped(buffer)

    def memory(self) -> tuple[int, int, int]:
        """Return the bytes used by buffers, reserved on the device, and held by libraries."""
        return sum(self._buffer_nbytes.values()), self._reserved, self._workspace

    # -- answers

    def on_message(self, kind: int, data: bytes, fds: list[int]) -> None:
        """Handle a message of the child. Descriptors that are kept are removed from ``fds``.

        Called by the context's actor from READY on. For a message that cannot be true it raises,
        and the child is ended.
        """
        if kind == Kind.DONE:
            for (number,) in _NUMBER.iter_unpack(data):
                self._on_answer(number, None, -1)
        elif kind == Kind.TIMES:
            for number, nanoseconds in Timed.iter_unpack(data):
                self._on_device_time(number, nanoseconds * 1e-9)
        elif kind == Kind.FAILED:
            number, index = Failure.unpack_from(data)
            self._on_answer(number, decode_error(data[Failure.size :]), index)
        elif kind in (Kind.FAULT, Kind.REFUSED):
            self.report_fault(decode_error(data))
        elif kind == Kind.COMPILED:
            self._on_answer(_NUMBER.unpack_from(data)[0], None, -1, layout_of(data[_NUMBER.size :]))
        elif kind == Kind.WORLD_DONE:
            self._on_answer(_NUMBER.unpack_from(data)[0], None, -1, json.loads(data[_NUMBER.size :]))
        elif kind == Kind.LENT:
            self._on_lent(data, fds)
        elif kind == Kind.MEMORY:
            self._reserved, self._workspace = struct.unpack("<QQ", data)
            self.peak = max(self.peak, self._reserved)
        elif kind == Kind.TORN:
            self.core.durable.tear((number for (number,) in _NUMBER.iter_unpack(data)), "an op that wrote it failed")
        elif kind in (Kind.NEW_SLAB, Kind.FREED_SLAB, Kind.NEW_BUFFER):
            self._buffer_nbytes.update(self._durable.on_message(kind, data, fds))
        else:
            raise ProtocolError(f"the child of {self.core.name} sent a message of kind {kind}", device=self.core.name)

    def _on_lent(self, data: bytes, fds: list[int]) -> None:
        """Note where a buffer is that the child lends, and keep the descriptor of its slab.

        Raises
        ------
        ValueError
            If the message cannot be true.
        """
        number, slab, nbytes, offset = Lent.unpack(data)
        request = self._pending.get(number)
        loan = None if request is None else request.submission.result
        if not isinstance(loan, Loan) or len(fds) > 1:
            raise ValueError(f"slab {slab} comes with {len(fds)} descriptors, or was not asked for")
        for fd in fds:
            memfd_identity(fd, nbytes)
        loan.place(slab, nbytes, offset, fds[0] if fds else -1, partial(self._link.tell, Kind.END_LOAN, _NUMBER.pack(number)))
        fds.clear()

    def _on_device_time(self, number: int, seconds: float) -> None:
        """Charge a submission the device time that the child has measured for one of its requests.

        A child may report anything: at most the time since the submission was sent is charged.
        """
        request = self._pending.get(number)
        work = None if request is None else request.submission.observed
        if request is None or work is None or not work.is_timed:
            raise ProtocolError(f"the child of {self.core.name} has timed what it was not asked to", device=self.core.name)
        submission, now = request.submission, perf_counter()
        self.charge_seconds(submission, min(seconds, now - self.submissions.get(submission, now)))

    def _on_answer(self, number: int, error: AccelError | None, index: int, answer: object = None) -> None:
        """Settle the question, or retire the request, that the child has answered.

        A request whose arrays are copied back off the loop is retired after the copy.

        Parameters
        ----------
        number
            Of the question or request.
        error, index
            Its error, ``None`` if it has succeeded, and the op that failed, counted from the first
            of the message; -1: unknown.
        answer
            The layout of a kernel that was compiled, or what a rank of a world has returned.
        """
        if self._questions and self._link.settle(number, error, answer):
            return
        request = self._pending.pop(number, None)
        if request is None:
            raise ProtocolError(f"the child of {self.core.name} answered what it was not asked", device=self.core.name)
        if error is not None:
            self._on_failed(request, error, index)
        elif request.to_copy_back:
            # A large copy is made off the loop; and any copy after it, for they end in order.
            if self._copies or sum([shared.array.nbytes for shared in request.to_copy_back if shared.is_copied]) > MAX_INLINE_COPY:
                copy = self._copies[number] = CopyBack(request.to_copy_back)
                self._copy_off_loop(copy.copy, lambda error: self._on_copied_back(number, request, error))
                self.wake()  # for `wait_answered`
                return
            for shared in request.to_copy_back:
                shared.copy_back()
        self._retire(request)

    def _on_failed(self, request: PendingRequest, error: AccelError, index: int) -> None:
        """Fail a submission with the error of one of its ops.

        The error of a chunk is kept in the request, for the task that sends the chunks.
        """
        submission = request.submission
        if not request.count:
            request.error = error
            return
        name = submission.name
        if isinstance(submission, BatchSubmission):  # the child counts from the message's first op
            index = request.first + min(max(index, 0), request.count - 1)
            name = submission.kinds[index]
        failure = error.clone(
            op=error.op or name, device=self.core.name, generation=self.generation, op_index=index if index >= 0 else None
        )
        submission.reject_from(max(index, 0), failure)

    def _on_copied_back(self, number: int, request: PendingRequest, error: AccelError | None) -> None:
        """End a request whose arrays were copied back off the loop, or could not be.

        Called on the loop, by the context's actor, after the copy.
        """
        copy = self._copies.pop(number, None)  # None: the child has ended, and the copy was given up
        if error is not None:
            if copy is not None:
                copy.give_up()
            request.error = error
            if request.count:
                request.submission.reject(error.clone(op=request.submission.name, device=self.core.name, generation=self.generation))
        self._retire(request)

    def _retire(self, request: PendingRequest) -> None:
        """Release the shared memory of an answered request, and retire its ops.

        A chunk has no op: its sender, which waits in :meth:`wait_done`, is woken.
        """
        if request.arrays:
            release_all(request.arrays)
        request.is_done = True
        if request.count:
            self.retire_ops(request.submission, request.count)
        else:
            self.wake()

    def retire_ops(self, submission: Submission, count: int) -> None:
        """Retire ops of a submission that the child has answered, and end it after the last ones.

        Once nothing is in flight the child counts as not busy. After a fault nothing is retired: all
        ops have failed by it.
        """
        if self.in_flight == count and not self._questions and self._link.is_busy:
            self._link.end_busy()
        if self.fault is None:
            all_sent = not isinstance(submission, BatchSubmission) or submission.dispatched == len(submission.outputs)
            self.retire(submission, count, count, is_last=all_sent and submission.outstanding == count)

    def stall_reason(self) -> str:
        """Return why the child seems to make no progress, or ``""``."""
        return super().stall_reason() or self._link.watchdog.silence()

    def busy_seconds(self) -> float:
        """Return for how many seconds in all the child has opened, loaded or compiled something."""
        return self._link.busy_seconds() + self.core.loans.seconds()

    # -- the end

    def on_child_ended(self) -> None:
        """Release the shared memory that the child could use; called when its process has ended."""
        while self._pending:
            release_all(self._pending.popitem()[1].arrays)
        while self._copies:
            self._copies.popitem()[1].give_up()

    def fail_all(self, error: AccelError) -> None:
        """Fail questions and submissions in flight: the child does not answer any more."""
        if self._questions:
            self._link.fail_questions(self.poisoned_error(error))
        super().fail_all(error)

    def shut_down(self) -> None:
        """Refuse further requests, and fail those in flight with :class:`ClosedError`.

        If the context has faulted before, with the fault instead.
        """
        if self.fault is None:
            self.fault = ClosedError(f"the context of {self.core.name} was closed", device=self.core.name)
        self.fail_all(self.fault)
