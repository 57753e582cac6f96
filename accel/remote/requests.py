"""The requests to one child, in the parent, and the answers that settle them."""

from __future__ import annotations

import marshal
import operator
import struct
from time import perf_counter
from typing import TYPE_CHECKING, TypeAlias

from accel.actors.turns import EVERY, Turn
from accel.engine.by_value import dumps
from accel.engine.in_flight import ContextBase
from accel.engine.launches import OpSubmission
from accel.engine.submission import BatchSubmission, result_of
from accel.errors import AccelError, ClosedError, StaleRefError
from accel.ops import Get
from accel.process.protocol import MAX_MESSAGE, ProtocolError
from accel.remote.arrays import COPIED_HERE, CopyBack, SharedArray, SharedArrays, close_all
from accel.remote.compiling import layout_of
from accel.remote.durable import DurableShare
from accel.remote.error_codec import decode_error
from accel.remote.injected_faults import sent_action
from accel.remote.messages import Failure, Kind, Timed, pack
from accel.remote.op_codec import OpWriter
from accel.remote.pending_request import PendingRequest, too_long

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from accel.engine.core import DeviceCore
    from accel.engine.in_flight import ContextOwner
    from accel.engine.program import GraphSubmission
    from accel.engine.submission import Submission
    from accel.ops import KernelLayout, KernelOp, Plan
    from accel.ref import AccelRef
    from accel.remote.link import Link
    from accel.remote.messages import WireOp

__all__ = ["Copy", "Landed", "RequestContext"]

Copy: TypeAlias = "Callable[[], None]"
"""Copies arrays from shared memory, on a worker thread."""

Landed: TypeAlias = "Callable[[AccelError | None], None]"
"""Called on the loop after the copy, with its error."""

_NUMBER = struct.Struct("<Q")
_buffer_of = operator.attrgetter("buffer")

_HEAD = 64 << 10
"""Bytes of a message that are reserved for what comes with the ops, such as numbers."""

_BURST = 16
"""Ops of one loop iteration after which the parent flushes: the child runs them meanwhile."""


class RequestContext(ContextBase):
    """Sends ops and questions to one child, and settles them with the answers.

    Parameters
    ----------
    core
        State of the device that outlives its contexts.
    owner
        Decides what follows a fault.
    land
        Calls a copy on a worker thread, in order, and then a function on the loop with its error.
    link
        The child.
    """

    def __init__(self, core: DeviceCore, owner: ContextOwner, land: Callable[[Copy, Landed], None], link: Link) -> None:
        super().__init__(core, owner)
        self._land = land
        self._link = link
        self._tell = link.tell
        self.pid = link.pid
        self.device = None  # the device is in the child
        self._arrays = SharedArrays(core.pinned, link.known, link.announce)
        self._ops = OpWriter(lambda number, named: link.tell(Kind.NAMED, _NUMBER.pack(number) + dumps(named)))
        self._numbers = link.numbers
        self._sent: dict[int, PendingRequest] = {}
        self._landing: dict[int, CopyBack] = {}  # number -> copy, of answered gets
        self._asked = link.asked
        self._faults = core.options.faults
        self._freed: list[int] = []  # buffers that the next message frees
        self._has_durable = False  # whether there was a durable buffer
        self.own: dict[str, bool] = {}
        self._live: dict[int, int] = {}
        link.watchdog.watch(self._sent, self._asked)
        self._durable = DurableShare(core.durable)
        self._reserved = self._workspace = 0

    # -- sending

    def send_batch(self, submission: BatchSubmission, ops: Sequence[KernelOp], arrays: Mapping[int, SharedArray]) -> None:
        """Send the next ops of a batch, as many as a message holds.

        If one of them cannot be sent, send those before it, and raise the error.

        Parameters
        ----------
        submission, ops
            The batch, and the ops that come next.
        arrays
            The shared memory for their arrays, by the index of the op.
        """
        start, room = submission.sent, MAX_MESSAGE - _HEAD
        ids: list[list[int]] = []
        written: list[WireOp] = []
        refused: AccelError | None = None
        for index, op in enumerate(ops, start):  # without an await: refs may be dropped during one
            try:
                made = self.make(submission, index, submission.plans[index])
                wire = self._ops.write(op, arrays[index].place if index in arrays else None)
                room -= (nbytes := len(marshal.dumps(wire)))
                if room < 0 and not written:
                    what = f"{submission.kinds[index]}, op {index} of a batch,"
                    raise too_long(what, nbytes, "Put what it holds on the device as an array, and give it the ref.")
            except AccelError as error:
                error.op_index = index
                refused = error.with_traceback(None)  # its frames hold this one
                break
            if room < 0:
                break
            ids.append([ref.buffer for ref in made])
            written.append(wire)
        if written:
            self._send_ops(submission, start, ids, written, {index: arrays[index] for index in arrays if index < start + len(written)})
        if refused is not None:
            try:
                raise refused
            finally:
                del refused  # its traceback holds this frame

    def _send_ops(
        self,
        submission: BatchSubmission,
        start: int,
        ids: list[list[int]],
        written: list[WireOp],
        arrays: Mapping[int, SharedArray],
    ) -> None:
        """Send ops of a batch as one message."""
        end = start + len(written)
        landing = [outgoing for index, outgoing in arrays.items() if isinstance(submission.ops[index], Get)]
        actions = None if self._faults is None else [self.action(kind) for kind in submission.kinds[start:end]]
        request = PendingRequest(submission, start, len(written), tuple(arrays.values()), landing)
        self._send(request, ids, written, actions)
        submission.sent = end

    async def send_graph(self, submission: GraphSubmission) -> None:
        """Send the ops of a graph, which the child captures. A long one is encoded in turns."""
        program, turn = submission.program, Turn()
        own = {ref.buffer for ref in program.made}
        written: list[WireOp] = []
        for op, plan in zip(program.ops, program.plans, strict=True):
            self._check(plan, own)
            written.append(self._ops.write(op))
            if not len(written) % EVERY and turn.is_over:
                await turn.next()
        if submission.is_settled:
            return
        self._live[program.handle.buffer] = 0
        self._live.update((ref.buffer, ref.nbytes) for ref in program.made)
        number, ids = next(self._numbers), [[ref.buffer for ref in refs] for refs in program.outputs]
        data = pack(number, ids, written, handle=program.handle.buffer)
        if len(data) > MAX_MESSAGE:
            what = f"a graph of {len(program.ops)} ops"
            raise too_long(what, len(data), "Record several graphs with fewer ops each, and replay one after the other.")
        self.tell(number, PendingRequest(submission, 0, 1), Kind.GRAPH, data)

    def make(self, submission: Submission, index: int, plan: Plan) -> tuple[AccelRef, ...]:
        """Check an op's operands again, because it may have waited; return refs of its results."""
        self._check(plan)
        core, live = self.core, self._live
        if isinstance(submission, BatchSubmission):
            made = submission.outputs[index]
        else:
            assert isinstance(submission, OpSubmission), "there are two kinds"
            made = submission.made or ()
            if plan.creates and not made:
                made = core.refs.make(plan.creates, self.generation)
            submission.result = result_of(submission.op, plan.writes + made, core.loop)
        for ref in made:
            live[ref.buffer] = ref.nbytes
            if ref.durable:
                self._has_durable = True
                self._durable.expect(ref)
        return made

    def send_op(self, submission: OpSubmission, plan: Plan, outgoing: SharedArray | None) -> None:
        """Send one op as a whole, with the place of its array, if it has one."""
        op, arrays = submission.op, () if outgoing is None else (outgoing,)
        try:
            made = self.make(submission, 0, plan)
            wire = self._ops.write(op, None if outgoing is None else outgoing.place)
            actions = None if self._faults is None else [self.action(submission.name)]
            request = PendingRequest(submission, 0, 1, arrays, arrays if isinstance(op, Get) else ())
            self._send(request, [list(map(_buffer_of, made))], [wire], actions)
        except BaseException:
            close_all(arrays)
            raise

    def begin(self, submission: Submission) -> None:
        """Count an op whose array moves in pieces."""
        submission.launched += 1
        submission.outstanding += 1
        self.sent(submission, 1, 1)

    def send_piece(
        self, submission: Submission, ops: Sequence[KernelOp], ids: list[list[int]], outgoing: SharedArray, action: bytes | str | None
    ) -> PendingRequest:
        """Send one piece of an array: the last of the ops moves it."""
        request = PendingRequest(submission, 0, 0, (outgoing,), (outgoing,) if isinstance(ops[-1], Get) else ())
        try:
            wires = [self._ops.write(op, outgoing.place) for op in ops]
            self._send(request, ids, wires, None if action is None else [action, *[None] * (len(ops) - 1)])
        except BaseException:
            outgoing.close()
            raise
        return request

    async def wait_answered(self, submission: Submission) -> None:
        """Wait until the child has answered all messages of a submission."""
        await self.until(lambda: all(request.submission is not submission for request in self._sent.values()))

    async def wait_over(self, request: PendingRequest) -> None:
        """Wait until the child has answered a piece, and what has come back was copied."""
        await self.until(lambda: request.is_over)

    async def ask(self, kind: Kind, data: bytes) -> KernelLayout | None:
        """Send a question, which takes no place in the order of ops, and return its answer."""
        self.check_alive()
        told: KernelLayout | None = await self._link.ask(kind, data)
        return told

    def _send(self, request: PendingRequest, ids: list[list[int]], ops: list[WireOp], actions: list[bytes | str | None] | None) -> None:
        """Send ops as one message, with the buffers that were dropped since the last one."""
        for outgoing in request.arrays:
            self._arrays.announce(outgoing)
        if self.core.refs.dropped:
            self._note_dropped()
        number, work = next(self._numbers), request.submission.observed
        is_timed = work is not None and work.is_timed
        self.tell(number, request, Kind.BATCH, pack(number, ids, ops, actions, self._freed, is_timed=is_timed))
        self._freed = []

    def tell(self, number: int, request: PendingRequest, kind: Kind, data: bytes) -> None:
        """Send a request, and count its ops as launched: they may be on the device now."""
        if self.fault is not None:  # the child does not answer; this request may have waited
            raise self.poisoned(self.fault)
        submission, count = request.submission, request.count
        self._tell(kind, data, now=not self.in_flight or not number % _BURST)
        self._sent[number] = request
        submission.launched += count
        submission.outstanding += count
        self.sent(submission, count, count)

    def action(self, kind: str) -> bytes | str | None:
        """Return what the fault plan does to an op, for the child."""
        return None if self._faults is None else sent_action(self._faults.take(kind), self._link, self.core.loop)

    def _check(self, plan: Plan, own: Collection[int] = ()) -> None:
        live = self._live
        for ref in plan.reads + plan.writes:
            if ref.buffer not in live and ref.buffer not in own:
                raise StaleRefError(f"{ref!r} is not in memory any more", reason="freed", device=self.core.name, generation=self.generation)

    # -- memory

    def apply_frees(self, most: int | None = None) -> None:
        """Have the child free the buffers of dropped refs, of ``most`` at most."""
        self._note_dropped(most)
        freed, self._freed = self._freed, []
        if freed and self.fault is None:
            self._tell(Kind.FREE, struct.pack(f"<{len(freed)}Q", *freed))

    def _note_dropped(self, most: int | None = None) -> None:
        """Collect the buffers of dropped refs, for the next message."""
        dropped = self.core.refs.dropped
        for _ in range(len(dropped) if most is None else min(most, len(dropped))):
            buffer = dropped.popleft()
            if self._live.pop(buffer, None) is not None:
                self._freed.append(buffer)
                if self._has_durable:
                    self._durable.dropped(buffer)

    def memory(self) -> tuple[int, int, int]:
        """Return the bytes that are used, that are reserved, and that libraries hold."""
        return sum(self._live.values()), self._reserved, self._workspace

    # -- answers

    def on_message(self, kind: int, data: bytes, fds: list[int]) -> None:
        """Handle a message of the child."""
        if kind == Kind.DONE:
            for (number,) in _NUMBER.iter_unpack(data):
                self._ended(number, None, -1)
        elif kind == Kind.TIMES:
            for number, nanoseconds in Timed.iter_unpack(data):
                self._timed(number, nanoseconds * 1e-9)
        elif kind == Kind.FAILED:
            number, index = Failure.unpack_from(data)
            self._ended(number, decode_error(data[Failure.size :]), index)
        elif kind in (Kind.FAULT, Kind.REFUSED):
            self.report_fault(decode_error(data))
        elif kind == Kind.COMPILED:
            self._ended(_NUMBER.unpack_from(data)[0], None, -1, layout_of(data[_NUMBER.size :]))
        elif kind == Kind.MEMORY:
            self._reserved, self._workspace = struct.unpack("<QQ", data)
        elif kind == Kind.TORN:
            self.core.durable.tear((number for (number,) in _NUMBER.iter_unpack(data)), "an op that wrote it failed")
        elif kind in (Kind.SLAB, Kind.SLAB_GONE, Kind.PLACED):
            self._live.update(self._durable.take(kind, data, fds))
        elif kind != Kind.BUSY:  # the link has handled that
            raise ProtocolError(f"the child of {self.core.name} sent a message of kind {kind}", device=self.core.name)

    def _timed(self, number: int, seconds: float) -> None:
        """Charge the device time of a request, which cannot be longer than it was away."""
        request = self._sent.get(number)
        if request is None:
            raise ProtocolError(f"the child of {self.core.name} has timed what it was not asked", device=self.core.name)
        submission, now = request.submission, perf_counter()
        self.charge_seconds(submission, min(seconds, now - self.submissions.get(submission, now)))

    def _ended(self, number: int, error: AccelError | None, index: int, answer: KernelLayout | None = None) -> None:
        if self._asked and self._link.answered(number, error, answer):
            return
        request = self._sent.pop(number, None)
        if request is None:
            raise ProtocolError(f"the child of {self.core.name} answered what it was not asked", device=self.core.name)
        if error is not None:
            self._failed(request, error, index)
        elif request.landing:
            # In order: a copy off the loop must not be overtaken by a later one.
            if self._landing or sum([outgoing.array.nbytes for outgoing in request.landing if outgoing.is_copied]) > COPIED_HERE:
                landing = self._landing[number] = CopyBack(request.landing)
                self._land(landing.copy, lambda error: self._landed(number, request, error))
                self.wake()
                return
            for outgoing in request.landing:
                outgoing.land()
        self._retire(request)

    def _failed(self, request: PendingRequest, error: AccelError, index: int) -> None:
        """Fail a submission with the error of an op. That of a piece is kept for its sender."""
        submission = request.submission
        if not request.count:
            request.error = error
            return
        name = submission.name
        if isinstance(submission, BatchSubmission):
            index = request.first + min(max(index, 0), request.count - 1)
            name = submission.kinds[index]
        own = error.clone(op=error.op or name, device=self.core.name, generation=self.generation, op_index=index if index >= 0 else None)
        submission.reject_from(max(index, 0), own)

    def _landed(self, number: int, request: PendingRequest, error: AccelError | None) -> None:
        landing = self._landing.pop(number, None)
        if error is not None:
            if landing is not None:
                landing.give_up()
            request.error = error
            if request.count:
                request.submission.reject(error.clone(op=request.submission.name, device=self.core.name, generation=self.generation))
        self._retire(request)

    def _retire(self, request: PendingRequest) -> None:
        if request.arrays:
            close_all(request.arrays)
        request.is_over = True
        if request.count:
            self.over(request.submission, request.count)
        else:
            self.wake()

    def over(self, submission: Submission, count: int) -> None:
        """Retire ops of a submission."""
        if self.in_flight == count and self._link.is_busy:
            self._link.rest()
        if self.fault is None:
            is_sent = not isinstance(submission, BatchSubmission) or submission.sent == len(submission.outputs)
            self.retire(submission, count, count, is_last=is_sent and submission.outstanding == count)

    def stall(self) -> str:
        """Return why the child seems to make no progress, or ``""``."""
        return super().stall() or self._link.watchdog.silence()

    def busy_seconds(self) -> float:
        """See :meth:`ContextBase.busy_seconds`."""
        return self._link.busy_seconds()

    # -- the end

    def gone(self) -> None:
        """Release the shared memory that the child used, after its process has ended."""
        while self._sent:
            close_all(self._sent.popitem()[1].arrays)
        while self._landing:
            self._landing.popitem()[1].give_up()

    def fail_all(self, error: AccelError) -> None:
        """End everything that waits for the child."""
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(self.poisoned(error))
        self._asked.clear()
        super().fail_all(error)

    def ask_to_close(self) -> None:
        """Ask the child to release everything and end."""
        self._tell(Kind.CLOSE, now=True)

    def end(self) -> None:
        """Refuse further requests, and fail those in flight with :class:`ClosedError`."""
        if self.fault is None:
            self.fault = ClosedError(f"the context of {self.core.name} was closed", device=self.core.name)
        self.fail_all(self.fault)
