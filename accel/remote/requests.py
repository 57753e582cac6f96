"""The requests to one child in the parent: what is sent, and how the answers settle it."""

from __future__ import annotations

import pickle
import struct
from typing import TYPE_CHECKING, TypeAlias

from accel.actors.turns import EVERY, Turn
from accel.engine.in_flight import ContextBase
from accel.engine.launches import OpSubmission
from accel.engine.op_error import result_of
from accel.engine.submission import BatchSubmission
from accel.errors import AccelError, ClosedError, StaleRefError
from accel.ops import Get
from accel.process.protocol import MAX_MESSAGE, ProtocolError
from accel.remote.arrays import COPIED_HERE, CopyBack, SharedArray, SharedArrays, close_all
from accel.remote.compiling import layout_of
from accel.remote.durable import DurableShare
from accel.remote.error_codec import decode_error
from accel.remote.injected_faults import sent_action
from accel.remote.messages import Failure, Kind, pack
from accel.remote.op_codec import OpWriter
from accel.remote.pending_request import PendingRequest, admit, fitting, land, too_long

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

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
"""Copies an array that came back, on a worker thread."""

Landed: TypeAlias = "Callable[[AccelError | None], None]"
"""Called on the loop after the copy, with the error that kept it from being made."""

_NUMBER = struct.Struct("<Q")

_BURST = 16
"""The parent flushes after this many ops of one loop iteration: the child runs them while the parent sends the next ones."""


class RequestContext(ContextBase):
    """The requests to one child: sends ops and questions as messages, and settles them with the child's answers.

    Parameters
    ----------
    core
        What the device keeps over all generations.
    owner
        Decides what follows a fault.
    land
        Calls a function on a worker thread and then another one on the loop, in order, with the error that kept the first one from being called.
    link
        The child.
    """

    def __init__(self, core: DeviceCore, owner: ContextOwner, land: Callable[[Copy, Landed], None], link: Link) -> None:
        super().__init__(core, owner)
        self._land = land
        self._link = link
        self._tell = link.tell
        self.pid = link.pid
        self.device = None  # it is in the child
        self._arrays = SharedArrays(core.pinned, link.known, link.announce)
        self._ops = OpWriter(lambda number, named: link.tell(Kind.NAMED, _NUMBER.pack(number) + pickle.dumps(named)))
        self._numbers = link.numbers
        self._sent: dict[int, PendingRequest] = {}
        self._landing: dict[int, CopyBack] = {}  # of answered gets: what is still to be copied
        self._asked = link.asked
        self.own: dict[str, bool] = {}
        self._live: dict[int, int] = {}
        link.watchdog.watch(self._sent, self._asked)
        self._durable = DurableShare(core.durable)
        self._reserved = self._workspace = 0

    # -- sending

    def send_batch(self, submission: BatchSubmission, ops: Sequence[KernelOp], arrays: Mapping[int, SharedArray]) -> None:
        """Send the next ops of a batch, as many as a message holds. Of those before one that cannot be sent; then raise what is wrong with it.

        Parameters
        ----------
        submission, ops
            The batch, and the ops that come next.
        arrays
            The shared memory for their arrays, by the index of the op.
        """
        start = submission.sent
        end, refused = admit(submission, start, start + len(ops), self._check, self._live)
        if end > start:
            number = next(self._numbers)
            try:
                end, refused = self._send_ops(number, submission, start, ops[: end - start], arrays) or (end, refused)
            except BaseException:
                self._durable.ended(number)
                raise
        if refused is not None:
            try:
                raise refused
            finally:
                del refused  # its traceback holds this frame

    def _send_ops(
        self, number: int, submission: BatchSubmission, start: int, ops: Sequence[KernelOp], arrays: Mapping[int, SharedArray]
    ) -> tuple[int, AccelError | None] | None:
        """Send ops of a batch as one message. Where not all of them can be sent, return before which it ends, and what is wrong with the next."""
        written: list[WireOp] = []
        cut: tuple[int, AccelError | None] | None = None
        for index, op in enumerate(ops, start):
            try:
                written.append(self._ops.write(op, arrays[index].place if index in arrays else None))
            except AccelError as error:
                error.op_index = index
                if index == start:
                    raise
                cut = index, error.with_traceback(None)  # its frames hold this one
                break
        ids = [[ref.buffer for ref in refs] for refs in submission.outputs[start : start + len(written)]]
        data = pack(number, ids, written)
        if len(data) > MAX_MESSAGE:
            count = fitting(submission, start, ids, written)
            ids, written, cut = ids[:count], written[:count], (start + count, None)
            data = pack(number, ids, written)
        end = start + len(written)
        actions = [self.action(kind) for kind in submission.kinds[start:end]]
        if any(actions):
            data = pack(number, ids, written, actions)
        used = [outgoing for index, outgoing in arrays.items() if index < end]
        landing = [outgoing for index, outgoing in arrays.items() if index < end and isinstance(ops[index - start], Get)]
        for each in used:
            self._arrays.announce(each)
        self._durable.sent(number, submission.plans[start:end], [ref for refs in submission.outputs[start:end] for ref in refs])
        self._post(number, PendingRequest(submission, start, len(written), used, landing), Kind.BATCH, data)
        submission.sent = end
        return cut

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
        try:
            data = pack(number, ids, written, handle=program.handle.buffer)
            if len(data) > MAX_MESSAGE:
                what = f"a graph of {len(program.ops)} ops"
                raise too_long(what, len(data), "Record several graphs with fewer ops each, and replay one after the other.")  # noqa: TRY301
            self._post(number, PendingRequest(submission, 0, 1, ()), Kind.GRAPH, data)
        except BaseException:
            self._durable.ended(number)
            raise

    def make(self, submission: Submission, index: int, op: KernelOp, plan: Plan) -> tuple[AccelRef, ...]:
        """Return refs of what an op is about to make; its operands are checked again, for it may have waited."""
        self._check(plan)
        core = self.core
        made: tuple[AccelRef, ...] = ()
        if isinstance(submission, OpSubmission):
            made = submission.made or ()
            if plan.creates and not made:
                made = core.refs.make(plan.creates, self.generation)
            submission.result = result_of(op, plan.writes + made, core.loop)
        elif isinstance(submission, BatchSubmission):
            made = submission.outputs[index]
        for ref in made:
            self._live[ref.buffer] = ref.nbytes
        return made

    def send_op(self, submission: OpSubmission, plan: Plan, outgoing: SharedArray | None) -> None:
        """Send one op as a whole, with the place of its array, if it has one."""
        op, arrays, number = submission.op, () if outgoing is None else (outgoing,), next(self._numbers)
        landing = arrays if isinstance(op, Get) else ()
        try:
            made = self.make(submission, 0, op, plan)
            if outgoing is not None:
                self._arrays.announce(outgoing)
            data = self._packed(number, [ref.buffer for ref in made], op, outgoing, self.action(submission.name))
            if made or self.core.durable.buffers:
                self._durable.sent(number, (plan,), made)
            self._post(number, PendingRequest(submission, 0, 1, arrays, landing), Kind.OP, data)
        except BaseException:
            self._durable.ended(number)
            close_all(arrays)
            raise

    def _packed(self, number: int, made: list[int], op: KernelOp, outgoing: SharedArray | None, action: bytes | str | None) -> bytes:
        """Return the payload of an OP message."""
        wire = self._ops.write(op, None if outgoing is None else outgoing.place)
        return pack(number, [made], [wire], None if action is None else [action])

    def begin(self, submission: Submission, plan: Plan, made: tuple[AccelRef, ...]) -> int:
        """Take note that an op moves an array part by part from here on; return its number, for :meth:`end_parts`."""
        number = next(self._numbers)
        self._durable.sent(number, (plan,), made)
        self._begun(submission, 1)
        return number

    def end_parts(self, number: int) -> None:
        """Take note that no part of an array is to be written any more."""
        self._durable.ended(number)

    def send_part(
        self, submission: Submission, op: KernelOp, made: list[int], outgoing: SharedArray | None, action: bytes | str | None
    ) -> asyncio.Future[AccelError | None]:
        """Send a step of a transfer; return what ends with what went wrong, or ``None``. Memory that a step fills is then its receiver's."""
        number, arrays = next(self._numbers), () if outgoing is None else (outgoing,)
        answer: asyncio.Future[AccelError | None] = self.core.loop.create_future()
        landing = arrays if isinstance(op, Get) else ()
        try:
            self.check_alive()  # a child that is given up does not answer
            if outgoing is not None:
                self._arrays.announce(outgoing)
            self._tell(Kind.OP, self._packed(number, made, op, outgoing, action), now=True)
        except BaseException:
            self._durable.ended(number)
            close_all(arrays)
            raise
        self._sent[number] = PendingRequest(submission, 0, 0, arrays, landing, answer)
        self.sent(submission, 0, 0)  # it goes on: what is of many parts is no stall
        return answer

    async def ask(self, kind: Kind, data: bytes) -> KernelLayout | None:
        """Send a question, which takes no place in the order of ops, and return its answer."""
        self.check_alive()
        told: KernelLayout | None = await self._link.ask(kind, data)
        return told

    def _post(self, number: int, sent: PendingRequest, kind: Kind, data: bytes) -> None:
        self.check_alive()  # a child that is given up does not answer, and what waited may have been overtaken by the fault
        submission, is_first = sent.submission, not self.in_flight
        self._tell(kind, data, now=is_first or not number % _BURST)  # no answer is taken before this returns
        self._sent[number] = sent
        self._begun(submission, sent.count)

    def _begun(self, submission: Submission, count: int) -> None:
        """Count ops as launched: they may be on the device from here on."""
        submission.launched += count
        submission.outstanding += count
        self.sent(submission, count, count)

    def action(self, kind: str) -> bytes | str | None:
        """Return what a fault plan does to an op, as the child takes it."""
        faults = self.core.options.faults
        return None if faults is None else sent_action(faults.take(kind), self._link, self.core.loop)

    def _check(self, plan: Plan, own: Collection[int] = ()) -> None:
        live = self._live
        for ref in plan.reads + plan.writes:
            if ref.buffer not in live and ref.buffer not in own:
                raise StaleRefError(f"{ref!r} is not in memory any more", reason="freed", device=self.core.name, generation=self.generation)

    def unfinished(self) -> Iterable[int]:
        """Return the durable buffers with a write that the child has not answered."""
        return self._durable.unfinished()

    # -- memory

    def apply_frees(self, most: int | None = None) -> None:
        """Tell the child of refs that were dropped, of ``most`` at most."""
        dropped = self.core.refs.dropped
        self.drop([dropped.popleft() for _ in range(len(dropped) if most is None else min(most, len(dropped)))])

    def drop(self, buffers: list[int]) -> None:
        """Have the child free buffers."""
        known = [buffer for buffer in buffers if self._live.pop(buffer, None) is not None]
        for buffer in known:
            self._durable.dropped(buffer)
        if known and self.fault is None:
            self._tell(Kind.FREE, struct.pack(f"<{len(known)}Q", *known))

    def memory(self) -> tuple[int, int, int]:
        """Return the bytes that are used, reserved, and held by libraries."""
        return sum(self._live.values()), self._reserved, self._workspace

    # -- answers

    def received(self, kind: int, data: bytes, fds: list[int]) -> None:
        """Take a message of the child's."""
        if kind == Kind.DONE:
            for (number,) in _NUMBER.iter_unpack(data):
                self._ended(number, None, -1)
        elif kind == Kind.FAILED:
            number, index = Failure.unpack_from(data)
            self._ended(number, decode_error(data[Failure.size :]), index)
        elif kind == Kind.FAULT:
            self.report_fault(decode_error(data))
        elif kind == Kind.COMPILED:
            self._ended(_NUMBER.unpack_from(data)[0], None, -1, layout_of(data[_NUMBER.size :]))
        elif kind == Kind.MEMORY:
            self._reserved, self._workspace = struct.unpack("<QQ", data)
        elif kind == Kind.TORN:
            self.core.durable.torn((number for (number,) in _NUMBER.iter_unpack(data)), "an op that wrote it failed")
        elif kind in (Kind.SLAB, Kind.SLAB_GONE, Kind.PLACED):
            self._live.update(self._durable.take(kind, data, fds))
        elif kind != Kind.BUSY:  # the link knows of that
            raise ProtocolError(f"the child of {self.core.name} sent a message of kind {kind}", device=self.core.name)

    def _ended(self, number: int, error: AccelError | None, index: int, answer: KernelLayout | None = None) -> None:
        if self._link.answered(number, error, answer):
            return
        self._durable.ended(number)
        sent = self._sent.pop(number, None)
        if sent is None:
            raise ProtocolError(f"the child of {self.core.name} answered what it was not asked", device=self.core.name)
        if sent.answer is not None:
            if error is not None or not sent.landing:
                close_all(sent.arrays)
            if not sent.answer.done():
                sent.answer.set_result(error)
            return
        if error is not None:
            name = sent.submission.name
            if isinstance(sent.submission, BatchSubmission):
                index = sent.first + min(max(index, 0), sent.count - 1)
                name = sent.submission.kinds[index]
            own = error.clone(
                op=error.op or name, device=self.core.name, generation=self.generation, op_index=index if index >= 0 else None
            )
            sent.submission.reject_from(max(index, 0), own)
        elif sent.landing:
            if sum([each.array.nbytes for each in sent.landing if each.is_copied]) > COPIED_HERE:
                landing = self._landing[number] = CopyBack(sent.landing)
                self._land(landing.copy, lambda error: self._landed(number, sent, error))
                return
            land(sent)
        self._retire(sent)

    def _landed(self, number: int, sent: PendingRequest, error: AccelError | None) -> None:
        landing = self._landing.pop(number, None)
        if error is not None:
            if landing is not None:
                landing.give_up()
            sent.submission.reject(error.clone(op=sent.submission.name, device=self.core.name, generation=self.generation))
        self._retire(sent)

    def _retire(self, sent: PendingRequest) -> None:
        if sent.arrays:
            close_all(sent.arrays)
        self.over(sent.submission, sent.count, is_last=sent.is_last)

    def over(self, submission: Submission, count: int, *, is_last: bool) -> None:
        """Retire ops of a submission."""
        if self.in_flight == count:
            self._link.rest()
        if self.fault is None:
            self.retire(submission, count, count, is_last=is_last)

    def stall(self) -> str:
        """Return what shows that the child makes no progress, or nothing."""
        return super().stall() or self._link.watchdog.silence()

    def busy_seconds(self) -> float:
        """See :meth:`ContextBase.busy_seconds`."""
        return self._link.busy_seconds()

    # -- the end

    def gone(self) -> None:
        """Give back the shared memory that the child used, after its process has ended."""
        while self._sent:
            close_all(self._sent.popitem()[1].arrays)
        while self._landing:
            self._landing.popitem()[1].give_up()

    def fail_all(self, error: AccelError) -> None:
        """End everything that waits for the child."""
        for each in self._asked.values():
            if not each.done():
                each.set_exception(self.poisoned(error))
        self._asked.clear()
        for sent in self._sent.values():
            if sent.answer is not None and not sent.answer.done():
                sent.answer.set_result(self.poisoned(error))
        super().fail_all(error)

    def ask_to_close(self) -> None:
        """Ask the child to give everything back and end."""
        self._tell(Kind.CLOSE, now=True)

    def end(self) -> None:
        """Take no more requests, and fail those in flight with :class:`ClosedError`."""
        if self.fault is None:
            self.fault = ClosedError(f"the context of {self.core.name} was closed", device=self.core.name)
        self.fail_all(self.fault)
