"""A context in a child, as the parent sees it: sends ops at once, or once they have shared memory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pickle
from typing import TYPE_CHECKING, Any

from accel._log import get_logger
from accel.engine.launches import OpSubmission
from accel.engine.loans import Loan
from accel.engine.program import GraphSubmission
from accel.engine.registration import Registration, Unregistration
from accel.engine.submission import BatchSubmission
from accel.errors import AccelError, OutOfMemoryError, UnsupportedError
from accel.ops import Free
from accel.process.protocol import ProtocolError
from accel.remote.arrays import host_array_of, release_from
from accel.remote.durable import encode_slab
from accel.remote.messages import Attach, Kind, pickled_library
from accel.remote.pending_request import PendingRequest
from accel.remote.requests import RequestContext
from accel.remote.transfers import MAX_MESSAGE_OPS, ArrayTransfers

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.engine.core import DeviceCore
    from accel.engine.in_flight import ContextOwner
    from accel.engine.submission import Submission
    from accel.ops import CompiledKernel, KernelLayout
    from accel.ref import AccelRef
    from accel.remote.link import Link
    from accel.remote.requests import CopyCall, CopyDone

__all__ = ["NoSharing", "RemoteContext"]

logger = get_logger()


class RemoteContext(RequestContext):
    """One generation of a device in a child process.

    Its parameters are those of :class:`RequestContext`.
    """

    def __init__(self, core: DeviceCore, owner: ContextOwner, copy_off_loop: Callable[[CopyCall, CopyDone], None], link: Link) -> None:
        super().__init__(core, owner, copy_off_loop, link)
        self.sharing = NoSharing(self)
        self.members = RemoteMembers(self)
        self._transfers = ArrayTransfers(self, self._arrays)

    def dispatch_now(self, submission: OpSubmission) -> bool:
        """Send one op if it need not wait; else do nothing and return ``False``.

        It waits for shared memory, or for a large copy to there. A :class:`Free` has succeeded when
        this returns.
        """
        op = submission.op
        if type(op) is Free:
            self.core.refs.dropped.append(op.ref.buffer)
            self.apply_frees()
            submission.succeed()
            return True
        plan = submission.plan
        assert plan is not None, "an op that is not dispatched has its plan"
        shared = None
        if host_array_of(op) is not None:
            placed = self._arrays.place_now((op,))
            if placed is None:
                return False
            shared = placed[0]
        self.send_op(submission, plan, shared)
        return True

    def must_wait(self, submission: Submission) -> bool:
        """Return whether a submission is an op with an array that has to wait for shared memory.

        Later submissions may then overtake it. ``False`` for batches, which hold the queue up.
        """
        array = host_array_of(submission.op) if isinstance(submission, OpSubmission) else None
        return array is not None and not self._arrays.has_place(array)

    def dispatch_batch_now(self, submission: BatchSubmission) -> bool:
        """Send a batch if it fits into a message, and there is room for it and for its arrays.

        Return whether all of it was sent. If not, :meth:`dispatch` sends the rest, from
        ``submission.dispatched`` on.
        """
        ops, limit = submission.ops, self.core.options.max_in_flight
        if submission.dispatched or len(ops) > MAX_MESSAGE_OPS or self.in_flight + min(len(ops), limit) > limit:
            return False
        arrays = self._arrays.place_now(ops)
        if arrays is None:
            return False
        try:
            self.send_batch(submission, ops, arrays)
        finally:
            release_from(arrays, submission.dispatched)
        return submission.dispatched == len(submission.outputs)  # its ops may be released by now

    async def dispatch(self, submission: Submission) -> None:
        """Send a submission once the ops before it, and room for its arrays, allow it.

        The device actor calls this for submissions that :meth:`dispatch_now` and
        :meth:`dispatch_batch_now` have not sent, or not to their end.
        """
        await self.apply_many_frees()
        if isinstance(submission, BatchSubmission):
            await self._transfers.send_batch(submission)
            return
        assert isinstance(submission, OpSubmission), "there are two kinds"
        if isinstance(submission, Unregistration):
            self._send_unregistration(submission)
        elif isinstance(submission, GraphSubmission):
            await self.send_graph(submission)
        elif not submission.future.done() and not self.dispatch_now(submission):
            await self._transfers.send(submission)

    async def open(self, library: str) -> None:
        """Have the child make and open a registered library; raise if it cannot.

        If this is cancelled, the child closes the library after it has opened it.
        """
        registration = self.core.registrations[library]
        # While the child opens a library it handles no other message, such as the unregistration of
        # an earlier one of this name.
        await self.wait_until(lambda: not any(isinstance(other, Unregistration) and other.library == library for other in self.submissions))
        try:
            await self.ask(Kind.REGISTER, pickled_library(registration))
        except asyncio.CancelledError:
            # The child opens it all the same. It has to close it before its memory is reused.
            unwanted = Unregistration(library, self.core.loop.create_future(), self.generation)
            unwanted.future.cancel()
            with contextlib.suppress(AccelError):  # the child has ended
                self._send_unregistration(unwanted)
            raise
        self.registered.add(library)

    async def open_ahead(self, registration: Registration) -> None:
        """Have the child open an eager library before the generation is ready.

        If it cannot, log that: the first op of the library opens it then. Raises only if the
        context has faulted.
        """
        name = registration.name
        try:
            registration.check()
            await self.ask(Kind.REGISTER, pickled_library(registration))
        except AccelError as error:
            self.check_alive()
            logger.warning("library_not_opened", device=self.core.name, generation=self.generation, library=name, error=error)
        else:
            self.registered.add(name)

    def _send_unregistration(self, submission: Unregistration) -> None:
        """Forget a registered library, and have the child close it after the ops sent before.

        The answer ends the submission. The child handles messages in order, so nothing waits here.
        """
        self.check_alive()
        name = submission.library
        submission.registration = self.core.withdraw_registration(name)
        self.registered.discard(name)
        number = next(self._numbers)
        self.send_request(number, PendingRequest(submission, 0, 1), Kind.UNREGISTER, number.to_bytes(8, "little") + name.encode())

    async def compile(self, kernel: CompiledKernel) -> KernelLayout:
        """Have the child compile and load a kernel. An answer without a layout is a fault.

        See :class:`~accel.device.compiler.CompilesRemotely`.
        """
        layout: KernelLayout | None = await self.ask(Kind.COMPILE, pickle.dumps(kernel))
        if layout is None:
            self.report_fault(
                ProtocolError(f"the child of {self.core.name} says that it has compiled a kernel, and not what the kernel is")
            )
            self.check_alive()
        assert layout is not None, "it was given up"
        return layout

    async def attach(self, buffer: int, fd: int | None, nbytes: int) -> None:
        """Have the child map memory as a buffer; see :meth:`.sharing.sharing.Sharing.attach`."""
        if nbytes >= 1 << 63:  # more than a message can say
            raise OutOfMemoryError(f"no room for {nbytes} bytes", requested=nbytes, device=self.core.name)
        self._buffer_nbytes[buffer] = 0  # it does not count against the memory of the device
        await self.ask(Kind.ATTACH, Attach.pack(buffer, nbytes), fds=() if fd is None else (fd,))

    async def drop_unregistered(self) -> None:
        """Have a promoted spare close the libraries that were unregistered since it opened them.

        Called before its generation begins. The link's record of open libraries is empty then.
        """
        libraries = self._link.libraries
        for name in [name for name, registration in libraries.items() if self.core.registrations.get(name) is not registration]:
            del libraries[name]
            await self.ask(Kind.UNREGISTER, name.encode())
        libraries.clear()  # or their memory would be kept after they are unregistered

    async def bind(self) -> None:
        """Have the child bind the durable buffers of the last generation, before the first op.

        A slab that the child cannot map is lost, with its buffers; the others are verified. Slabs
        that the child had mapped as a spare and that are not needed are unmapped.
        """
        slabs = await self.core.durable.slabs_to_bind()
        self.check_alive()  # after a fault there is no answer
        errors = await asyncio.gather(
            *[self._link.ask(Kind.MAP_SLAB, encode_slab(slab), fds=(slab.fd,)) for slab in slabs], return_exceptions=True
        )
        self.check_alive()
        self._link.unmap_slabs(set(self._link.mapped_slabs).difference(slab.number for slab in slabs))
        for slab, error in zip(slabs, errors, strict=True):
            if isinstance(error, AccelError):  # the child that made the slab may have lied
                self.core.durable.on_slab_lost(slab.number, error)
            else:
                self._buffer_nbytes.update((buffer, size) for buffer, _, _, size in slab.blocks)
                self._has_durable = True
        await self.verify_checksums()

    def fail_all(self, error: AccelError) -> None:
        """Fail everything that waits for the child, or for shared memory to send an op to it."""
        self._transfers.on_context_over()
        super().fail_all(error)


class RemoteMembers:
    """The ranks of worlds that the child is; see :class:`accel.world.member.Members`.

    The types of the child's answers are checked.
    """

    def __init__(self, context: RemoteContext) -> None:
        self._context = context

    async def unique_id(self) -> str:
        """See :meth:`accel.world.member.Members.unique_id`."""
        answer = await self._call("unique_id")
        if not isinstance(answer, str):
            raise self._meaningless(answer)
        return answer

    async def join(self, *place: Any) -> None:
        """See :meth:`accel.world.member.Members.join`."""
        await self._call("join", *place)

    async def revoke(self, world: int, epoch: int) -> int:
        """See :meth:`accel.world.member.Members.revoke`."""
        answer = await self._call("revoke", world, epoch)
        if type(answer) is not int:
            raise self._meaningless(answer)
        return answer

    async def _call(self, *call: Any) -> object:
        """Have the child call a method, and return its answer, unchecked.

        ``call`` is the name of the method, and its arguments.
        """
        return await self._context.ask(Kind.WORLD, json.dumps(call).encode())

    def _meaningless(self, answer: object) -> ProtocolError:
        """Return the error for an answer of a wrong type."""
        return ProtocolError(f"the child of {self._context.core.name} is a rank of a world, and answered {answer!r:.80}")


class NoSharing:
    """The ``sharing`` of a context in a child, whose memory other libraries cannot reach: refuses.

    Other devices and processes can.
    """

    def __init__(self, context: RemoteContext) -> None:
        self._context = context
        self.attach = context.attach

    def lend(self, ref: AccelRef, mapped: tuple[int, ...]) -> Loan:
        """Return the loan of a buffer; the child's answer says where that is.

        Called when the op that lends is sent: the submissions in flight were sent before it.
        """
        context = self._context
        is_settled = not any(buffer == ref.buffer for submission in context.submissions for _, buffer, _ in submission.writes)
        return Loan(context.core.loop, context.generation, ref.nbytes, mapped, is_settled=is_settled)

    def check_free(self, ref: AccelRef) -> None:
        """Accept the free: no other library has the memory."""

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedError(
            "other libraries cannot reach the memory of a process host",
            device=self._context.core.name,
            remedy="Open the device with host='inline', or copy: await device.get(ref), await device.put(array).",
        )
