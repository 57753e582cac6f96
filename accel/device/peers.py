"""Copies from other devices: their memory is mapped where it can be, else the host is between."""

from __future__ import annotations

import asyncio
import os
import weakref
from typing import TYPE_CHECKING, Any

from accel import ops
from accel.backend import KnowsPeers
from accel.dtype import DType
from accel.engine.launches import OpSubmission
from accel.errors import DeadlineExceededError, InvalidArgumentError, StaleRefError
from accel.fork import close_after_fork
from accel.ops.base import result_in
from accel.ops.memory import Lend
from accel.process.protocol import ProtocolError
from accel.ref import AccelRef, RefView, SharedRef, view_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Literal

    from accel.engine.core import DeviceCore
    from accel.engine.host import Host
    from accel.engine.loans import Loan
    from accel.engine.sender import Sender

__all__ = ["Peers", "peers_of"]

_LEND_FROM = 1 << 12
"""Bytes from which a buffer is lent: smaller ones are about as fast through the host."""

_MOST_MAPPED = 64
"""The most slabs of other devices that one device has mapped; and the most copies from such slabs at
a time, so that at most as many are in use. Further copies go through the host."""

_IDLE_SECONDS = 2.0
"""Period of the timer that unmaps slabs. A slab is unmapped 2 to 4 seconds after its last use."""


def peers_of(device: Any) -> Peers:
    """Return the peers of a :class:`~accel.Device`, which users do not see."""
    peers: Peers = device._peers  # noqa: SLF001 - its own half
    return peers


class _Slab:
    """A slab of another device, which is mapped when it is first copied from.

    Attributes
    ----------
    fd, nbytes : int
        Its descriptor, and its size.
    ref : SharedRef or None
        A ref to the whole slab; ``None`` before it is mapped.
    offsets : mapping
        Ref of a buffer that was lent -> its offset in the slab, in bytes.
    copies : int
        How many copies from it are running.
    is_recent : bool
        Whether it was used since the last call of :meth:`Peers._unmap_idle`.
    """

    __slots__ = ("__weakref__", "copies", "fd", "is_recent", "nbytes", "offsets", "ref")

    def __init__(self, loan: Loan) -> None:
        self.fd, loan.fd = loan.fd, -1
        self.nbytes = loan.slab_nbytes
        self.ref: SharedRef | None = None
        self.offsets: weakref.WeakKeyDictionary[AccelRef, int] = weakref.WeakKeyDictionary()
        self.copies = 0
        self.is_recent = True
        close_after_fork(self)

    def close_inherited(self) -> None:
        """Close the descriptor; see :class:`accel.fork.Inherited`."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    __del__ = close_inherited


class Peers:
    """The other devices, as one device copies from them.

    The other device *lends* the buffer: a read, in its order, that ends when the copy has ended.
    This device maps the slab that the buffer is in, and copies from there in its own order. The
    mapping keeps the memory, whatever becomes of the other device.

    Notes
    -----
    A write on the source waits for the copy, which waits for ops of this device. So that they
    never wait for each other in a circle, a device that has lent something itself is lent a copy,
    which nothing writes. So is a rank by a rank: a collective that waits for the end of the copy on
    one of them makes the other one wait.

    Parameters
    ----------
    core, sender, host
        Of the device that copies.
    """

    def __init__(self, core: DeviceCore, sender: Sender, host: Host) -> None:
        self.core = core
        self.sender = sender
        self._host = host
        # By device, its generation, and the number of the slab there; least recently used first.
        self._slabs: dict[tuple[str, int, int], _Slab] = {}
        self._mapping = asyncio.Lock()  # held while a slab is being mapped
        self._copying = 0  # copies from lent buffers that are running
        self._timer: asyncio.TimerHandle | None = None

    # -- copying

    async def copy(self, ref: AccelRef, out: AccelRef | None, durable: bool, timeout: float | None) -> AccelRef:
        """Copy a buffer of another device to this one; see :meth:`Device.put`."""
        core = self.core
        if ref.owner is core.refs:
            raise InvalidArgumentError(
                f"{ref!r} is on {core.name} already", remedy="Use device.copy(source, destination).", device=core.name
            )
        core.guard()
        if out is not None:  # before anything is sent
            core.refs.check(out, None, ops.Plan((), *result_in(out, ref.shape, ref.dtype, durable=durable)))
        deadline = self.sender.deadline_after(timeout)
        source: Peers = peers_of(ref.owner.device)
        # Through the host go small buffers, those that are in no slab of the source, and what cannot
        # be mapped.
        if ref.nbytes < _LEND_FROM or ref.is_foreign or ref.is_managed or self._copying >= _MOST_MAPPED or self.way_from(source) == "host":
            array = await ref.owner.device.get(ref, timeout=timeout)
            result: AccelRef = await self.sender.run(ops.Put(array, out, durable), self.sender.seconds_left(deadline))
            return result
        self._copying += 1
        try:
            return await self._copy_lent(source, ref, ops.Copy(ref, out, durable), deadline)
        finally:
            self._copying -= 1

    @property
    def is_here(self) -> bool:
        """Whether the device is on this machine: descriptors are not sent to others."""
        return not self._host.children.node_address

    def is_beside(self, source: Peers) -> bool:
        """Whether another device is of the same backend, and both are on this machine."""
        return self.is_here and source.is_here and type(self.core.backend) is type(source.core.backend)

    def way_from(self, source: Peers) -> Literal["mapped", "host"]:
        """Return how buffers of another device get here: from mapped memory, or through the host."""
        core, other = self.core, source.core
        if not self.is_beside(source) or not (core.durable.is_offered and other.durable.is_offered):
            return "host"
        return "host" if self.can_access(other.description.index) is False else "mapped"

    def can_access(self, index: int) -> bool | None:
        """Return whether this device reaches the memory of hardware ``index`` of its backend.

        ``None`` for its own hardware, and where the backend does not tell. The driver answers at
        once: it was loaded when the device was opened.
        """
        core = self.core
        if index == core.description.index or not isinstance(core.backend, KnowsPeers):
            return None
        known: dict[tuple[str, int, int], bool] = core.shared.setdefault(Peers, {})
        key = core.description.backend, core.description.index, index
        if key not in known:
            known[key] = core.backend.can_access_peer(core.description.index, index)
        return known[key]

    async def _copy_lent(self, source: Peers, ref: AccelRef, op: ops.Copy, deadline: float | None) -> AccelRef:
        """Have the source lend the buffer of ``ref``, and copy ``ref`` from its slab as ``op`` says."""
        lender, sender = source.core, source.sender
        with lender.loans:
            if self.core.loans.count or (self.core.worlds and lender.worlds):
                # Only a copy is lent, so that no devices wait for each other: see the class's notes.
                ref = await sender.run(ops.Copy(ref), sender.seconds_left(deadline))
            base = ref.base if isinstance(ref, RefView) else ref
            sender.guard()
            name, generation = lender.refs.identity, lender.refs.live_generation
            known = {key[2]: slab for key, slab in self._slabs.items() if key[:2] == (name, generation)}
            lend = Lend(base, tuple(known))
            submission = OpSubmission(lend, sender.check(lend), lender.loop.create_future(), generation)
            lending = lender.loop.create_task(sender.run(None, sender.seconds_left(deadline), submission))
            loan: Loan | None = None
            result: AccelRef | None = None
            try:
                await asyncio.sleep(0)  # in which `lending` sends its op, unless that has to wait
                if (slab := self._known_slab(name, base, submission.result)) is not None:
                    result = await self._copy_from(slab, base, ref, op, deadline)
                loan = await lending
                source.check_lent(loan)
                generation = loan.generation
                slab = self._slab_of((name, generation, loan.slab), loan, known)
                slab.offsets[base] = loan.offset
                if result is None:
                    result = await self._copy_from(slab, base, ref, op, deadline)
            finally:
                if loan is not None:
                    loan.end()
                else:
                    lending.cancel()
                    await asyncio.gather(lending, return_exceptions=True)
                # An error's traceback keeps this frame.
                known = slab = submission = lending = None  # type: ignore[assignment]
        # Ops of a later generation do not wait for the loan's end; 0: there is no later one yet.
        if ref.durable and lender.refs.live_generation not in (0, generation):
            raise StaleRefError(
                f"{ref!r} may have been written while it was copied: {lender.name} was rebuilt meanwhile",
                device=lender.name,
                retryable=True,
                remedy="Copy it again.",
            )
        return result

    def _known_slab(self, name: str, base: AccelRef, loan: Loan | None) -> _Slab | None:
        """Return the slab of a buffer that may be copied before its loan is answered, or ``None``.

        It may if the loan was sent, no write of the buffer was in flight then, and an earlier loan of
        the same generation has said where the buffer is.
        """
        if loan is None or not loan.is_settled:
            return None
        slabs = [slab for key, slab in self._slabs.items() if key[:2] == (name, loan.generation) and base in slab.offsets]
        return slabs[0] if slabs else None

    def _slab_of(self, key: tuple[str, int, int], loan: Loan, known: Mapping[int, _Slab]) -> _Slab:
        """Return the slab of a loan, and make it the most recently used one.

        If there are too many slabs, the least recently used one without a running copy is forgotten.

        Parameters
        ----------
        key
            Of ``_slabs``.
        known
            Number -> slab, of those that the lender was told of: of these it has sent no descriptor.
        """
        slab = self._slabs.pop(key, None) or known.get(loan.slab) or _Slab(loan)
        while len(self._slabs) >= _MOST_MAPPED:  # at least one is idle, as this copy has none yet
            del self._slabs[next(other for other, idle in self._slabs.items() if not idle.copies)]
        self._slabs[key] = slab
        if self._timer is None:
            self._timer = self.core.loop.call_later(_IDLE_SECONDS, self._unmap_idle)
        return slab

    async def _copy_from(self, slab: _Slab, base: AccelRef, ref: AccelRef, op: ops.Copy, deadline: float | None) -> AccelRef:
        """Map a slab, and copy ``ref``, a view of ``base`` in it; anew if this device is rebuilt."""
        offset = slab.offsets[base] + ref.offset
        slab.copies += 1
        try:
            while True:
                whole = await self._map(slab, deadline)
                copy = ops.Copy(view_of(whole, offset, ref.shape, ref.dtype, ref.strides), op.destination, op.durable)
                try:
                    result: AccelRef = await self.sender.run(copy, self.sender.seconds_left(deadline))
                except StaleRefError:
                    if not whole.is_stale:
                        raise
                else:
                    return result
        finally:
            slab.copies -= 1
            slab.is_recent = True
            whole = copy = slab = None  # type: ignore[assignment]  # as above

    # -- mapping

    async def _map(self, slab: _Slab, deadline: float | None) -> SharedRef:
        """Return the ref of a slab, which is mapped if it is not."""
        if slab.ref is None or slab.ref.is_stale:
            await self.sender.wait_ready(self.sender.seconds_left(deadline))
            try:
                async with asyncio.timeout_at(deadline), self._mapping:
                    if slab.ref is None or slab.ref.is_stale:
                        slab.ref = await self.attach(slab.fd, slab.nbytes, (slab.nbytes,), DType.UINT8)
            except TimeoutError:
                raise DeadlineExceededError(
                    "the memory of the other device was not mapped in time", op="copy", device=self.core.name
                ) from None
        return slab.ref

    async def attach(self, fd: int | None, nbytes: int, shape: tuple[int, ...], dtype: DType) -> SharedRef:
        """Return a ref to memory that is mapped as :meth:`.sharing.sharing.Sharing.attach` does."""
        refs = self.core.refs
        ref = SharedRef(refs, refs.next_buffer(), shape, dtype, refs.live_generation)
        await self._host.context.sharing.attach(ref.buffer, fd, nbytes)
        return ref

    def _unmap_idle(self) -> None:
        """Unmap the slabs that were not used since the last call; the timer's callback."""
        self._timer = None
        idle = [key for key, slab in self._slabs.items() if not (slab.copies or slab.is_recent)]
        for key in idle:
            del self._slabs[key]
        for slab in self._slabs.values():
            slab.is_recent = False
        context = self._host.context
        if idle and context is not None:
            context.apply_frees()  # without an op that does
        if self._slabs:
            self._timer = self.core.loop.call_later(_IDLE_SECONDS, self._unmap_idle)

    def close(self) -> None:
        """Forget all slabs: the device is closed."""
        self._slabs.clear()
        if self._timer is not None:
            self._timer.cancel()

    def check_lent(self, loan: Loan) -> None:
        """Raise, and end this device's context, if the answer of its child has not placed a loan."""
        if loan.is_placed:
            return
        error, context = ProtocolError(f"the child of {self.core.name} has lent a buffer, and not said where that is"), self._host.context
        context.report_fault(error)
        raise context.poisoned_error(error)
