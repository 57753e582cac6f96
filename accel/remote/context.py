"""The parent's half of a context: it sends ops to the child, and answers those who wait with what comes back."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import struct
from typing import TYPE_CHECKING, TypeAlias

from accel.engine.checksums import verify
from accel.engine.in_flight import ContextBase
from accel.engine.launches import OpSubmission
from accel.engine.op_error import result_of
from accel.engine.program import GraphSubmission
from accel.engine.submission import BatchSubmission
from accel.errors import AccelError, ClosedError, StaleRefError
from accel.ops import Free, Get, Put
from accel.process.protocol import MAX_MESSAGE, ProtocolError
from accel.remote.arrays import COPIED_HERE, CopyBack, Outgoing, SharedArrays, close_all
from accel.remote.compiling import layout_of
from accel.remote.durable import DurableShare, kept_message
from accel.remote.error_codec import decode_error
from accel.remote.injected_faults import sent_action
from accel.remote.messages import Failure, Kind, pack, pickled_library
from accel.remote.no_sharing import NoSharing
from accel.remote.op_codec import OpWriter
from accel.remote.pending_request import PendingRequest, admit, array_of, fitting, land, too_long
from accel.remote.transfers import MOST_OPS, Transfers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from accel.engine.core import DeviceCore
    from accel.engine.in_flight import ContextOwner
    from accel.engine.program import Program
    from accel.engine.submission import Submission
    from accel.ops import CompiledKernel, KernelLayout, KernelOp, Plan
    from accel.ref import AccelRef
    from accel.remote.link import Link

__all__ = ["Copy", "Landed", "RemoteContext"]

Copy: TypeAlias = "Callable[[], None]"
"""Copies what has come back, on a worker thread."""

Landed: TypeAlias = "Callable[[AccelError | None], None]"
"""Is told on the loop that it was copied, or why not."""

_NUMBER = struct.Struct("<Q")

_BURST = 16
"""Of the ops that are sent in one loop iteration, each so many leave at once: the child runs them while the parent goes on."""


class RemoteContext(ContextBase):
    """One generation of a device in a child process.

    Parameters
    ----------
    core
        What the device keeps over all generations.
    owner
        Decides what follows a fault.
    land
        Has a function called on a worker thread, and then another one on the loop, in order, with what kept the first one from being called.
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
        self.sharing = NoSharing(core.name)
        self._arrays = SharedArrays(core.pinned, link.known, link.announce)
        self._transfers = Transfers(self, self._arrays)
        self._ops = OpWriter(lambda number, named: link.tell(Kind.NAMED, _NUMBER.pack(number) + pickle.dumps(named)))
        self._numbers = itertools.count(1)
        self._sent: dict[int, PendingRequest] = {}
        self._landing: dict[int, CopyBack] = {}  # of answered gets: what is still to be copied
        self._asked: dict[int, asyncio.Future[KernelLayout | None]] = {}
        self.own: dict[str, bool] = {}
        self._live: dict[int, int] = {}
        link.watchdog.watch(self._sent, self._asked)
        self._durable = DurableShare(core.durable)
        self._reserved = self._workspace = 0

    # -- dispatch

    def dispatch_now(self, submission: OpSubmission) -> bool:
        """Send one op if nothing has to be waited for; else change nothing and return ``False``."""
        if self.core.refs.dropped:
            self.apply_frees()
        op = submission.op
        if type(op) is Free:
            self._drop([op.ref.buffer])
            submission.succeed()
            return True
        plan = submission.plan
        assert plan is not None, "an op that is not dispatched has its plan"
        array = array_of(op)
        outgoing = None
        if array is not None:
            outgoing = self._arrays.take(array)
            if outgoing is None or (type(op) is Put and outgoing.is_copied and array.nbytes > COPIED_HERE):
                if outgoing is not None:
                    outgoing.close()
                return False
            if type(op) is Put:
                outgoing.fill()
        self.send_op(submission, plan, outgoing)
        return True

    def must_wait(self, submission: Submission) -> bool:
        """Whether a submission has an array for which there is no shared memory at once."""
        array = array_of(submission.op) if isinstance(submission, OpSubmission) else None
        return array is not None and not self._arrays.has_place(array)

    def batch_now(self, submission: BatchSubmission) -> bool:
        """Send a batch if it brings no arrays, there is room for it, and it goes in one message; else return ``False``: :meth:`dispatch` sends the rest."""
        ops, limit = submission.ops, self.core.options.max_in_flight
        if submission.sent or len(ops) > MOST_OPS or self.in_flight + min(len(ops), limit) > limit:
            return False
        if any(array_of(op) is not None for op in ops):
            return False
        if self.core.refs.dropped:
            self.apply_frees()
        self.send_batch(submission, ops, {})
        return submission.sent == len(submission.outputs)

    async def dispatch(self, submission: Submission) -> None:
        """Send a submission; see :meth:`accel.engine.context.Context.dispatch`."""
        if isinstance(submission, BatchSubmission):
            await self._transfers.send_batch(submission)
            return
        assert isinstance(submission, OpSubmission), "there are two kinds"
        if isinstance(submission, GraphSubmission):
            self._send_graph(submission)
        elif not submission.is_settled and not self.dispatch_now(submission):
            await self._transfers.send(submission)

    def send_batch(self, submission: BatchSubmission, ops: Sequence[KernelOp], arrays: Mapping[int, Outgoing]) -> None:
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
        self, number: int, submission: BatchSubmission, start: int, ops: Sequence[KernelOp], arrays: Mapping[int, Outgoing]
    ) -> tuple[int, None] | None:
        """Send ops of a batch as one message. Where not all of them go into one, return before which it ends."""
        written, cut = [self._ops.write(op, arrays[index].place if index in arrays else None) for index, op in enumerate(ops, start)], None
        ids = [[ref.buffer for ref in refs] for refs in submission.outputs[start : start + len(ops)]]
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
        for each in used:
            self._arrays.announce(each)
        self._durable.sent(number, submission.plans[start:end], [ref for refs in submission.outputs[start:end] for ref in refs])
        self._post(number, PendingRequest(submission, start, len(written), used), Kind.BATCH, data)
        submission.sent = end
        return cut

    def _send_graph(self, submission: GraphSubmission) -> None:
        program = submission.program
        for plan in program.plans:
            self._check(plan, of=program)
        self._live[program.handle.buffer] = 0
        for refs in program.outputs:
            self._live.update((ref.buffer, ref.nbytes) for ref in refs)
        number, ids = next(self._numbers), [[ref.buffer for ref in refs] for refs in program.outputs]
        try:
            data = pack(number, ids, [self._ops.write(op) for op in program.ops], handle=program.handle.buffer)
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

    def send_op(self, submission: OpSubmission, plan: Plan, outgoing: Outgoing | None) -> None:
        """Send one op as a whole, with the place of its array, if it has one."""
        op, arrays, number = submission.op, () if outgoing is None else (outgoing,), next(self._numbers)
        landing = arrays if type(op) is Get else ()
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

    def _packed(self, number: int, made: list[int], op: KernelOp, outgoing: Outgoing | None, action: bytes | str | None) -> bytes:
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
        self, submission: Submission, op: KernelOp, made: list[int], outgoing: Outgoing | None, action: bytes | str | None
    ) -> asyncio.Future[AccelError | None]:
        """Send a step of a transfer; return what ends with what went wrong, or ``None``. Memory that a step fills is then its receiver's."""
        number, arrays = next(self._numbers), () if outgoing is None else (outgoing,)
        answer: asyncio.Future[AccelError | None] = self.core.loop.create_future()
        landing = arrays if type(op) is Get else ()
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

    def _post(self, number: int, sent: PendingRequest, kind: Kind, data: bytes) -> None:
        self.check_alive()  # a child that is given up does not answer, and what waited may have been overtaken by the fault
        submission, is_first = sent.submission, not self.in_flight
        self._tell(kind, data, now=is_first or not number % _BURST)  # no answer is taken before this returns
        self._sent[number] = sent
        self._begun(submission, sent.count)

    def _begun(self, submission: Submission, count: int) -> None:
        """Take note that ops may be on the device from here on."""
        submission.launched += count
        submission.outstanding += count
        self.sent(submission, count, count)

    def action(self, kind: str) -> bytes | str | None:
        """Return what a fault plan does to an op, as the child takes it."""
        faults = self.core.options.faults
        return None if faults is None else sent_action(faults.take(kind), self._link, self.core.loop)

    async def port(self, library: str) -> None:
        """Have the child make a registered library. Raises what keeps it from being sent, made or opened."""
        await self._ask(Kind.REGISTER, pickle.dumps((library, pickled_library(library, self.core.own[library]))))
        self.own[library] = True

    async def compile(self, kernel: CompiledKernel) -> KernelLayout:
        """Have the child compile and load a kernel; see :class:`accel.device.compiler.CompilesApart`."""
        layout = await self._ask(Kind.COMPILE, pickle.dumps(kernel))
        if layout is None:
            self.report_fault(
                ProtocolError(f"the child of {self.core.name} says that it has compiled a kernel, and not what the kernel is")
            )
            self.check_alive()
        assert layout is not None, "it was given up"
        return layout

    async def _ask(self, kind: Kind, data: bytes) -> KernelLayout | None:
        """Send what is answered by itself, and return the answer."""
        self.check_alive()
        number = next(self._numbers)
        answer = self._asked[number] = self.core.loop.create_future()
        self._tell(kind, _NUMBER.pack(number) + data)
        told: KernelLayout | None = await answer  # who is cancelled leaves it there: the answer comes all the same
        return told

    async def bind(self) -> None:
        """Have the child bind what is durable of the generation before; nothing else was sent to it yet."""
        kept = await self.core.durable.to_bind()
        self.check_alive()  # else nobody would end what is asked now
        answers = []
        for slab in kept:
            number = next(self._numbers)
            answers.append(self._asked.setdefault(number, self.core.loop.create_future()))
            self._tell(Kind.HELD, kept_message(number, slab), fds=(slab.fd,))
        errors = await asyncio.gather(*answers, return_exceptions=True)
        self.check_alive()
        for slab, error in zip(kept, errors, strict=True):
            if isinstance(error, AccelError):  # this child may be honest, and the one that made the slab not
                self.core.durable.slab_not_bound(slab.number, error)
            else:
                self._live.update((buffer, size) for buffer, _, _, size in slab.blocks)
        await verify(self, self.core)

    def unfinished(self) -> Iterable[int]:
        """Return the durable buffers that the child was to write and has not said to have written."""
        return self._durable.unfinished()

    def _check(self, plan: Plan, of: Program | None = None) -> None:
        live, own = self._live, () if of is None else {ref.buffer for refs in of.outputs for ref in refs}
        for ref in plan.reads + plan.writes:
            if ref.buffer not in live and ref.buffer not in own:
                raise StaleRefError(f"{ref!r} is not in memory any more", reason="freed", device=self.core.name, generation=self.generation)

    # -- memory

    def apply_frees(self) -> None:
        """Tell the child of refs that were dropped."""
        dropped = self.core.refs.dropped
        buffers = []
        while dropped:
            buffers.append(dropped.popleft())
        self._drop(buffers)

    def _drop(self, buffers: list[int]) -> None:
        known = [buffer for buffer in buffers if self._live.pop(buffer, None) is not None]
        for buffer in known:
            self._durable.dropped(buffer)
        if known and self.fault is None:
            self._tell(Kind.FREE, struct.pack(f"<{len(known)}Q", *known))

    def memory(self) -> tuple[int, int, int]:
        """Return the bytes that are used, reserved, and held by libraries."""
        return sum(self._live.values()), self._reserved, self._workspace

    # -- the way back

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
        asked = self._asked.pop(number, None)
        if asked is not None:
            if not asked.done():
                asked.set_result(answer) if error is None else asked.set_exception(error)
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
            index = sent.first + max(index, 0) if isinstance(sent.submission, BatchSubmission) else index
            own = error.clone(device=self.core.name, generation=self.generation, op_index=index if index >= 0 else None)
            sent.submission.reject_from(max(index, 0), own)
        elif sent.landing:
            if any(each.is_copied for each in sent.landing) and sent.landing[0].array.nbytes > COPIED_HERE:
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
        """Take note that ops of a submission have ended."""
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
        """Give the shared memory back that the child used: it is gone. Not before."""
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
        self._transfers.end()
        super().fail_all(error)

    def ask_to_close(self) -> None:
        """Ask the child to give everything back and end."""
        self._tell(Kind.CLOSE, now=True)

    def end(self) -> None:
        """Take no more, and tell everybody who waits that it was closed."""
        if self.fault is None:
            self.fault = ClosedError(f"the context of {self.core.name} was closed", device=self.core.name)
        self.fail_all(self.fault)
