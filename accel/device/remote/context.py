"""The parent's half of a context: it sends ops to the child, and answers those who wait with what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
import struct
import threading
from typing import TYPE_CHECKING

from accel.device.checksums import verify
from accel.device.graph import GraphSubmission, Replay
from accel.device.in_flight import ContextBase
from accel.device.remote.apart import Apart
from accel.device.remote.arrays import COPIED_HERE, Landing, Outgoing, SharedArrays, close_all
from accel.device.remote.durable import DurableShare, kept_message
from accel.device.remote.messages import Failure, Kind, WireReplay, pack, pickled_library
from accel.device.remote.sent import Sent, array_of, land, wired
from accel.device.run import OpSubmission
from accel.device.submission import BatchSubmission
from accel.errors import AccelError, ClosedError, FaultScope, StaleRefError, UnsupportedError
from accel.hosts.error_codec import decode_error, encode_error
from accel.hosts.protocol import ProtocolError
from accel.ops import Free, Get, Put
from accel.ref import AccelRef

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from accel.device.core import DeviceCore
    from accel.device.graph import Program
    from accel.device.submission import Submission
    from accel.hosts.channel import Channel
    from accel.memory import HostBlock
    from accel.ops import KernelOp, Plan

__all__ = ["RemoteContext"]

_NUMBER = struct.Struct("<Q")


class RemoteContext(ContextBase):
    """One generation of a device in a child process.

    Parameters
    ----------
    core
        What the device keeps over all generations.
    land
        Has a function called on a worker thread, and then another one on the loop, in order.
    """

    def __init__(self, core: DeviceCore, land: Callable[[Callable[[], None], Callable[[], None]], None]) -> None:
        super().__init__(core)
        self._land = land
        self.channel: Channel
        self.pid = 0
        self.kill: Callable[[], object] = lambda: None
        self.heard = True
        self.device = None  # it is in the child
        self.sharing = Apart(core.name)
        self._arrays = SharedArrays(core.pinned.arena, self._announce)
        self._numbers = itertools.count(1)
        self._sent: dict[int, Sent] = {}
        self._landing: dict[int, Landing] = {}  # of answered gets: what is still to be copied
        self._asked: dict[int, asyncio.Future[None]] = {}
        self.own: dict[str, bool] = {}
        self._live: dict[int, int] = {}
        self._durable = DurableShare(core.durable)
        self._reserved = self._workspace = 0

    # -- dispatch

    def dispatch_now(self, submission: OpSubmission) -> bool:
        """Send one op if nothing has to be waited for; else change nothing and return ``False``."""
        if self.core.dropped:
            self.apply_frees()
        op = submission.op
        if type(op) is Free:
            self._drop([op.ref.buffer])
            submission.succeed()
            return True
        plan = submission.plan
        assert plan is not None, "an op that is not dispatched has its plan"
        self._check(plan)
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
        self._send_op(submission, plan, outgoing)
        return True

    async def dispatch(self, submission: Submission) -> None:
        """Send a submission; see :meth:`accel.device.context.Context.dispatch`."""
        if isinstance(submission, BatchSubmission):
            await self._dispatch_batch(submission)
            return
        assert isinstance(submission, OpSubmission), "there are two kinds"
        if isinstance(submission, GraphSubmission):
            self._send_graph(submission)
            return
        while not submission.is_settled and not self.dispatch_now(submission):
            op, plan = submission.op, submission.plan
            outgoing = await self._place(op)
            if self.fault is not None or submission.is_settled or plan is None:
                outgoing.close()  # the child has never heard of it
                self.check_alive()
                return
            self._send_op(submission, plan, outgoing)
            return

    async def _place(self, op: KernelOp, index: int | None = None) -> Outgoing:
        """Make a place for an op's array, and fill it, off the loop."""
        array = array_of(op)
        assert array is not None, "other ops need not wait"

        def place() -> Outgoing | None:
            outgoing = self._arrays.take(array) or self._arrays.make(array)
            if outgoing is not None and type(op) is Put:
                outgoing.fill()
            return outgoing

        outgoing = await self.core.system.run_blocking(place)
        if outgoing is None:
            raise UnsupportedError(
                "there is no room in shared host memory", remedy="Open the device with a larger pinned_limit.", op=op.kind, op_index=index
            )
        return outgoing

    async def _dispatch_batch(self, submission: BatchSubmission) -> None:
        arrays: list[Outgoing] = []
        ops = list(submission.ops)
        await self.wait_for_room(min(len(ops), self.core.options.max_in_flight))
        try:
            for index, op in enumerate(ops):
                if array_of(op) is not None:
                    arrays.append(await self._place(op, index))
                    ops[index] = wired(op, arrays[-1])
            self.check_alive()
            if not submission.is_settled:
                self._admit(submission)
        except BaseException:
            close_all(arrays)
            raise
        if submission.is_settled:
            submission.void_unsound()
            close_all(arrays)
            return
        number = next(self._numbers)
        ids = [[ref.buffer for ref in refs] for refs in submission.outputs]
        actions = [self._action(op.kind) for op in ops]
        for each in arrays:
            self._arrays.announce(each)
        self._durable.sent(number, submission.plans, (ref for refs in submission.outputs for ref in refs))
        self._post(number, Sent(submission, len(ops), arrays, []), Kind.BATCH, pack(number, ids, ops, actions))

    def _admit(self, submission: BatchSubmission) -> None:
        """Check the operands of a batch that is about to be sent, and count what it makes. In one go: refs may be dropped whenever others run."""
        for index, (plan, made) in enumerate(zip(submission.plans, submission.outputs, strict=True)):
            try:
                self._check(plan)
            except AccelError as error:
                error.op_index = index
                raise
            self._live.update((ref.buffer, ref.nbytes) for ref in made)

    def _send_graph(self, submission: GraphSubmission) -> None:
        program = submission.program
        for plan in program.plans:
            self._check(plan, of=program)
        self._live[program.handle.buffer] = 0
        for refs in program.outputs:
            self._live.update((ref.buffer, ref.nbytes) for ref in refs)
        number = next(self._numbers)
        ids = [[ref.buffer for ref in refs] for refs in program.outputs]
        self._post(number, Sent(submission, 1, [], []), Kind.GRAPH, pack(number, ids, program.ops, handle=program.handle.buffer))

    def _send_op(self, submission: OpSubmission, plan: Plan, outgoing: Outgoing | None) -> None:
        core, op = self.core, submission.op
        made = submission.made
        if made is None:
            made = tuple(
                [AccelRef(core, core.next_buffer(), spec.shape, spec.dtype, self.generation, durable=spec.durable) for spec in plan.creates]
            )
        for ref in made:
            self._live[ref.buffer] = ref.nbytes
        submission.result = op.result(plan.writes + made)
        arrays = [] if outgoing is None else [outgoing]
        landing = arrays if type(op) is Get else []
        if outgoing is not None:
            self._arrays.announce(outgoing)
            op = wired(op, outgoing)
        elif type(op) is Replay:
            op = WireReplay(op.program.handle.buffer)
        number = next(self._numbers)
        data = pack(number, [[ref.buffer for ref in made]], [op], [self._action(submission.name)])
        self._durable.sent(number, (plan,), made)
        self._post(number, Sent(submission, 1, arrays, landing), Kind.OP, data)

    def _post(self, number: int, sent: Sent, kind: Kind, data: bytes) -> None:
        submission = sent.submission
        self._sent[number] = sent
        # From here on it may be on the device.
        submission.launched = submission.outstanding = sent.count
        self.in_flight += sent.count
        self.submissions[submission] = None
        self._tell(kind, data)

    def _action(self, kind: str) -> bytes | str | None:
        """Return what a fault plan does to an op, as the child takes it."""
        faults = self.core.options.faults
        action = None if faults is None else faults.take(kind)
        if action is None or isinstance(action, AccelError):
            return None if action is None else encode_error(action)
        if action.kind == "poison":
            if action.error is None:
                return action.kind  # the backend has an error for it
            return encode_error(action.error.clone(scope=max(action.error.scope, FaultScope.CONTEXT)))
        if action.kind == "kill":
            self.kill()
            return None
        if action.release is not None:
            release, loop = action.release, self.core.loop

            def wait() -> None:
                release()
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(self._tell, Kind.RELEASE)

            threading.Thread(target=wait, name="accel-hang", daemon=True).start()
        return action.kind

    async def port(self, library: str) -> None:
        """Have the child make a registered library.

        Raises
        ------
        UnsupportedError
            If its class cannot be sent.
        LibraryError
            If it cannot be made or opened there.
        """
        data = pickled_library(library, self.core.own[library])
        number = next(self._numbers)
        answer = self._asked[number] = self.core.loop.create_future()
        self._tell(Kind.REGISTER, _NUMBER.pack(number) + pickle.dumps((library, data)))
        try:
            await answer
        finally:
            self._asked.pop(number, None)
        self.own[library] = True

    async def bind(self) -> None:
        """Have the child bind what is durable of the generation before; nothing else was sent to it yet."""
        kept = await self.core.durable.to_bind()
        answers = []
        for slab in kept:
            number = next(self._numbers)
            answers.append(self._asked.setdefault(number, self.core.loop.create_future()))
            self._tell(Kind.HELD, kept_message(number, slab), fds=(slab.fd,))
            self._live.update((buffer, size) for buffer, _, _, size in slab.blocks)
        await asyncio.gather(*answers)
        await verify(self, self.core)

    def unfinished(self) -> Iterable[int]:
        """Return the durable buffers that the child was to write and has not said to have written."""
        return self._durable.unfinished()

    def _check(self, plan: Plan, of: Program | None = None) -> None:
        own = {ref.buffer for refs in of.outputs for ref in refs} if of is not None else ()
        for ref in (*plan.reads, *plan.writes):
            if ref.buffer not in self._live and ref.buffer not in own:
                raise StaleRefError(f"{ref!r} is not in memory any more", reason="freed", device=self.core.name, generation=self.generation)

    def _announce(self, number: int, block: HostBlock) -> None:
        self._tell(Kind.BLOCK, struct.pack("<QQ", number, block.nbytes), fds=(block.fd,))

    def _tell(self, kind: Kind, data: bytes = b"", fds: Sequence[int] = ()) -> None:
        """Send a message; to a child that is gone, nothing: its end is about to be told to everybody."""
        with contextlib.suppress(ClosedError):
            self.channel.send(kind, data, fds=fds)

    def ping(self) -> None:
        """Ask the child whether it is there; it answers from its loop."""
        self.heard = False
        self._tell(Kind.PING)

    # -- memory

    def apply_frees(self) -> None:
        """Tell the child of refs that were dropped."""
        dropped = self.core.dropped
        buffers = []
        while dropped:
            buffers.append(dropped.popleft())
        self._drop(buffers)

    def _drop(self, buffers: list[int]) -> None:
        known = [buffer for buffer in buffers if self._live.pop(buffer, None) is not None]
        for buffer in known if self.core.durable.buffers else ():
            self.core.durable.dropped(buffer)
        if known and self.fault is None:
            self._tell(Kind.FREE, struct.pack(f"<{len(known)}Q", *known))

    def memory(self) -> tuple[int, int, int]:
        """Return the bytes that are used, reserved, and held by libraries."""
        return sum(self._live.values()), self._reserved, self._workspace

    # -- the way back

    def received(self, kind: int, data: bytes, fds: list[int]) -> None:
        """Take a message of the child's."""
        self.heard = True
        if kind == Kind.PONG:
            return
        if kind == Kind.DONE:
            for (number,) in _NUMBER.iter_unpack(data):
                self._ended(number, None, -1)
        elif kind == Kind.FAILED:
            number, index = Failure.unpack_from(data)
            self._ended(number, decode_error(data[Failure.size :]), index)
        elif kind == Kind.FAULT:
            self.report_fault(decode_error(data))
        elif kind == Kind.MEMORY:
            self._reserved, self._workspace = struct.unpack("<QQ", data)
        elif kind in (Kind.SLAB, Kind.SLAB_GONE, Kind.PLACED):
            self._live.update(self._durable.take(kind, data, fds))
        else:
            raise ProtocolError(f"the child of {self.core.name} sent a message of kind {kind}", device=self.core.name)

    def _ended(self, number: int, error: AccelError | None, index: int) -> None:
        asked = self._asked.pop(number, None)
        if asked is not None:
            if not asked.done():
                asked.set_result(None) if error is None else asked.set_exception(error)
            return
        self._durable.ended(number)
        sent = self._sent.pop(number, None)
        if sent is None:
            raise ProtocolError(f"the child of {self.core.name} answered what it was not asked", device=self.core.name)
        if error is not None:
            self._failed(sent, error, index)
        elif any(each.is_copied for each in sent.landing) and sent.landing[0].array.nbytes > COPIED_HERE:
            landing = self._landing[number] = Landing(sent.landing)
            self._land(landing.copy, lambda: self._landed(number, sent))
            return
        else:
            land(sent)
        self._retire(sent)

    def _landed(self, number: int, sent: Sent) -> None:
        self._landing.pop(number, None)
        self._retire(sent)

    def _failed(self, sent: Sent, error: AccelError, index: int) -> None:
        submission = sent.submission
        own = error.clone(device=self.core.name, generation=self.generation, op_index=index if index >= 0 else None)
        submission.reject_from(max(index, 0), own)

    def _retire(self, sent: Sent) -> None:
        close_all(sent.arrays)
        if self.fault is None:
            self.retire(sent.submission, sent.count, is_last=True)

    # -- the end

    def gone(self) -> None:
        """Give the shared memory back that the child used: it is gone. Not before."""
        sent, self._sent = self._sent, {}
        for each in sent.values():
            close_all(each.arrays)
        while self._landing:
            self._landing.popitem()[1].give_up()

    def fail_all(self, error: AccelError) -> None:
        """End everything that waits for the child."""
        asked, self._asked = self._asked, {}
        for each in asked.values():
            if not each.done():
                each.set_exception(self.poisoned(error))
        super().fail_all(error)

    def ask_to_close(self) -> None:
        """Ask the child to give everything back and end."""
        self._tell(Kind.CLOSE)
        self.channel.flush()

    def end(self) -> None:
        """Take no more, and tell everybody who waits that it was closed."""
        if self.fault is None:
            self.fault = ClosedError(f"the context of {self.core.name} was closed", device=self.core.name)
        self.fail_all(self.fault)
