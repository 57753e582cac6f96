"""The parent's half of a context: it sends ops to the child, and answers those who wait with what comes back."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import struct
import threading
from typing import TYPE_CHECKING

from accel.device.graph import GraphSubmission
from accel.device.in_flight import ContextBase
from accel.device.remote.apart import Apart
from accel.device.remote.arrays import COPIED_HERE, Outgoing, SharedArrays
from accel.device.remote.attention import Pacing
from accel.device.remote.compiling import SentKernels, layout_of
from accel.device.remote.hang import HangWatch
from accel.device.remote.messages import Failure, Kind, pack, pickled_library
from accel.device.remote.wiring import Sent, array_of, wired, with_array
from accel.device.run import OpSubmission
from accel.device.submission import BatchSubmission
from accel.errors import AccelError, ClosedError, FaultScope, HostDiedError, StaleRefError, UnsupportedError
from accel.hosts.error_codec import decode_error, encode_error
from accel.hosts.op_table import OpWriter
from accel.hosts.protocol import ProtocolError
from accel.ops import Free, Get, Put
from accel.ref import AccelRef

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from accel.device.core import DeviceCore
    from accel.device.graph import Program
    from accel.device.remote.link import Link
    from accel.device.submission import Submission
    from accel.ops import CompiledKernel, KernelLayout, KernelOp, Plan

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
    link
        The child.
    """

    def __init__(self, core: DeviceCore, land: Callable[[Callable[[], None], Callable[[], None]], None], link: Link) -> None:
        super().__init__(core)
        self._land = land
        self._link = link
        self._tell = link.tell
        self.pid = link.pid
        timeout = core.options.hang_timeout
        self._hang = (
            None if timeout is None else HangWatch(core.loop, timeout, lambda: not self.in_flight, lambda: link.is_busy, self._hung)
        )
        self.device = None  # it is in the child
        self.sharing = Apart(core.name)
        self._arrays = SharedArrays(core.pinned.arena, link.known, link.announce)
        self._kernels = SentKernels(link.tell)
        self._ops = OpWriter(lambda number, cls: link.tell(Kind.CLASS, _NUMBER.pack(number) + pickle.dumps(cls)))
        self._numbers = itertools.count(1)
        self._sent: dict[int, Sent] = {}
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self.own: dict[str, bool] = {}
        self._live: dict[int, int] = {}
        self._reserved = self._workspace = 0
        self._pacing = Pacing(core.loop, link.channel.flush)

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
            self.check_alive()
            if submission.is_settled or plan is None:
                outgoing.close()
                return
            self._send_op(submission, plan, outgoing)
            return

    async def _place(self, op: KernelOp) -> Outgoing:
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
                "there is no room in shared host memory", remedy="Open the device with a larger pinned_limit.", op=op.kind
            )
        return outgoing

    async def _dispatch_batch(self, submission: BatchSubmission) -> None:
        arrays: list[Outgoing] = []
        ops: list[KernelOp] = []
        limit = self.core.options.max_in_flight
        await self.wait_for_room(min(len(submission.ops), limit))
        try:
            for index, (op, plan, made) in enumerate(zip(submission.ops, submission.plans, submission.outputs, strict=True)):
                try:
                    self._check(plan)
                    array = array_of(op)
                    if array is not None:
                        arrays.append(await self._place(op))
                        op = with_array(op, arrays[-1])
                    else:
                        op = wired(op, self._kernels)
                except AccelError as error:
                    error.op_index = index
                    raise
                self._live.update((ref.buffer, ref.nbytes) for ref in made)
                ops.append(op)
            self.check_alive()
        except BaseException:
            for each in arrays:
                each.close()
            raise
        if submission.is_settled:
            submission.void_unsound()
            return
        number = next(self._numbers)
        ids = [[ref.buffer for ref in refs] for refs in submission.outputs]
        actions = [self._action(op.kind) for op in ops]
        written = [self._ops.write(op) for op in ops]
        for each in arrays:
            self._arrays.announce(each)
        self._post(number, Sent(submission, len(ops), arrays, []), Kind.BATCH, pack(number, ids, written, actions))

    def _send_graph(self, submission: GraphSubmission) -> None:
        program = submission.program
        for plan in program.plans:
            self._check(plan, of=program)
        self._live[program.handle.buffer] = 0
        for refs in program.outputs:
            self._live.update((ref.buffer, ref.nbytes) for ref in refs)
        number = next(self._numbers)
        ids = [[ref.buffer for ref in refs] for refs in program.outputs]
        ops = [self._ops.write(wired(op, self._kernels)) for op in program.ops]
        self._post(number, Sent(submission, 1, [], []), Kind.GRAPH, pack(number, ids, ops, handle=program.handle.buffer))

    def _send_op(self, submission: OpSubmission, plan: Plan, outgoing: Outgoing | None) -> None:
        core, op = self.core, submission.op
        made = submission.made
        if made is None:
            made = tuple([AccelRef(core, core.next_buffer(), spec.shape, spec.dtype, self.generation) for spec in plan.creates])
        for ref in made:
            self._live[ref.buffer] = ref.nbytes
        submission.result = op.result(plan.writes + made)
        arrays = [] if outgoing is None else [outgoing]
        landing = arrays if type(op) is Get else []
        if outgoing is not None:
            self._arrays.announce(outgoing)
            op = with_array(op, outgoing)
        else:
            op = wired(op, self._kernels)
        number = next(self._numbers)
        written = self._ops.write(op)
        data = pack(number, [[ref.buffer for ref in made]], [written], [self._action(submission.name)])
        self._post(number, Sent(submission, 1, arrays, landing), Kind.OP, data)

    def _post(self, number: int, sent: Sent, kind: Kind, data: bytes) -> None:
        submission = sent.submission
        self._sent[number] = sent
        # From here on it may be on the device.
        submission.launched = submission.outstanding = sent.count
        self.in_flight += sent.count
        self.submissions[submission] = None
        if self._hang is not None:
            self._hang.sent()
        self._tell(kind, data)
        self._pacing.sent(is_first=self.in_flight == sent.count)

    def _action(self, kind: str) -> bytes | str | None:
        """Return what a fault plan does to an op, as the child takes it."""
        faults = self.core.options.faults
        action = None if faults is None else faults.take(kind)
        if action is None or isinstance(action, AccelError):
            return None if action is None else encode_error(action)
        if action.kind == "poison":
            error = action.error  # without one, the backend's own
            return action.kind if error is None else encode_error(error.clone(scope=max(error.scope, FaultScope.CONTEXT)))
        if action.kind == "kill":
            self._link.kill()
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
        await self._ask(Kind.REGISTER, pickle.dumps((library, data)))
        self.own[library] = True

    async def compile(self, kernel: CompiledKernel) -> KernelLayout:
        """Have the child compile and load a kernel; see :class:`accel.device.compiler.CompilesApart`."""
        return layout_of(await self._ask(Kind.COMPILE, pickle.dumps(kernel)))

    async def _ask(self, kind: Kind, data: bytes) -> bytes:
        """Send what is answered by itself, and return the answer."""
        self.check_alive()
        number = next(self._numbers)
        answer = self._asked[number] = self.core.loop.create_future()
        self._tell(kind, _NUMBER.pack(number) + data)
        told: bytes = await answer  # who is cancelled leaves it there: the answer comes all the same
        return told

    def _check(self, plan: Plan, of: Program | None = None) -> None:
        own = {ref.buffer for refs in of.outputs for ref in refs} if of is not None else ()
        for ref in (*plan.reads, *plan.writes):
            if ref.buffer not in self._live and ref.buffer not in own:
                raise StaleRefError(f"{ref!r} is not in memory any more", reason="freed", device=self.core.name, generation=self.generation)

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
        self._ops.told.difference_update(known)
        if known and self.fault is None:
            self._tell(Kind.FREE, struct.pack(f"<{len(known)}Q", *known))

    def memory(self) -> tuple[int, int, int]:
        """Return the bytes that are used, reserved, and held by libraries."""
        return sum(self._live.values()), self._reserved, self._workspace

    # -- the way back

    def received(self, kind: int, data: bytes) -> None:
        """Take a message of the child's."""
        if self._hang is not None:
            self._hang.heard()
        if kind == Kind.DONE:
            for (number,) in _NUMBER.iter_unpack(data):
                self._ended(number, None, -1)
        elif kind == Kind.FAILED:
            number, index = Failure.unpack_from(data)
            self._ended(number, decode_error(data[Failure.size :]), index)
        elif kind == Kind.FAULT:
            self.report_fault(decode_error(data))
        elif kind == Kind.COMPILED:
            self._ended(_NUMBER.unpack_from(data)[0], None, -1, data[_NUMBER.size :])
        elif kind == Kind.MEMORY:
            self._reserved, self._workspace = struct.unpack("<QQ", data)
        elif kind == Kind.BUSY:
            pass  # the link knows
        else:
            raise ProtocolError(f"the child of {self.core.name} sent a message of kind {kind}", device=self.core.name)

    def _ended(self, number: int, error: AccelError | None, index: int, answer: bytes = b"") -> None:
        asked = self._asked.pop(number, None)
        if asked is not None:
            if not asked.done():
                asked.set_result(answer) if error is None else asked.set_exception(error)
            return
        sent = self._sent.pop(number, None)
        if sent is None:
            raise ProtocolError(f"the child of {self.core.name} answered what it was not asked", device=self.core.name)
        if error is not None:
            self._failed(sent, error, index)
        elif any(each.is_copied for each in sent.landing) and sent.landing[0].array.nbytes > COPIED_HERE:
            self._land(sent.land, lambda: self._retire(sent))
            return
        else:
            sent.land()
        self._retire(sent)

    def _failed(self, sent: Sent, error: AccelError, index: int) -> None:
        submission = sent.submission
        own = error.clone(device=self.core.name, generation=self.generation, op_index=index if index >= 0 else None)
        submission.reject_from(max(index, 0), own)

    def _retire(self, sent: Sent) -> None:
        if self.in_flight == sent.count:
            self._pacing.idle()
            self._link.rest()
        for each in sent.arrays:
            each.close()
        if self.fault is None:
            self.retire(sent.submission, sent.count, is_last=True)

    # -- the end

    def _hung(self) -> None:
        """Give up what does not end."""
        name, seconds = self.core.name, self.core.options.hang_timeout
        self.report_fault(
            HostDiedError(f"the child of {name} hung: nothing has ended for {seconds:g} s", device=name, scope=FaultScope.CONTEXT)
        )

    def gone(self) -> None:
        """Give the shared memory back that the child used: it is gone. Not before."""
        sent, self._sent = self._sent, {}
        for each in sent.values():
            for outgoing in each.arrays:
                outgoing.close()

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
        self._link.channel.flush()

    def end(self) -> None:
        """Take no more, and tell everybody who waits that it was closed."""
        if self.fault is None:
            self.fault = ClosedError(f"the context of {self.core.name} was closed", device=self.core.name)
        self._pacing.end()
        if self._hang is not None:
            self._hang.stop()
        self.fail_all(self.fault)
