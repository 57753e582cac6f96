"""Copies from other devices: their memory is mapped where it can be, else the host is between."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from accel import ops
from accel.backend import KnowsPeers
from accel.dtype import DType
from accel.errors import AccelError, DeadlineExceededError, InvalidArgumentError, StaleRefError
from accel.ops.base import result_in
from accel.ops.memory import Lend
from accel.process.protocol import ProtocolError
from accel.ref import AccelRef, RefView, SharedRef, view_of

if TYPE_CHECKING:
    from typing import Literal

    from accel.engine.core import DeviceCore
    from accel.engine.host import Host
    from accel.engine.loans import Loan
    from accel.engine.sender import Sender

__all__ = ["Peers", "peers_of"]

_LEND_FROM = 1 << 16
"""Bytes from which a buffer is lent: smaller ones are about as fast through the host, and map nothing."""

_MOST_MAPPED = 64
"""Slabs of other devices that one device has mapped at most."""

_IDLE_SECONDS = 2.0
"""Seconds without a use after which a slab is unmapped; up to twice as many."""


def peers_of(device: Any) -> Peers:
    """Return the peers of a :class:`~accel.Device`, which users do not see."""
    peers: Peers = device._peers  # noqa: SLF001 - its own half
    return peers


class _MappedSlab:
    """A slab of another device, and the copies from it that are going on."""

    __slots__ = ("copies", "is_recent", "ref")

    def __init__(self, ref: AccelRef) -> None:
        self.ref = ref
        self.copies = 0
        self.is_recent = True


class Peers:
    """The other devices, as one device copies from them.

    The other device *lends* the buffer: a read, in its order, that ends when the copy has ended.
    This device maps the slab that the buffer is in, and copies from there in its own order. The
    mapping keeps the memory, whatever becomes of the other device.

    Notes
    -----
    A write on the source waits for the copy, which waits for ops of this device. So that they
    never wait for each other in a circle, a device that has lent something itself is lent a copy,
    which nothing writes.

    Parameters
    ----------
    core, sender, host
        Of the device that copies.
    """

    def __init__(self, core: DeviceCore, sender: Sender, host: Host) -> None:
        self.core = core
        self.sender = sender
        self._host = host
        self._slabs: dict[tuple[str, int, int], _MappedSlab] = {}  # least recently used first
        self._mapping = asyncio.Lock()  # held while a slab is mapped
        self._copying = 0
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

    def way_from(self, source: Peers) -> Literal["mapped", "host"]:
        """Return how buffers of another device get here: from mapped memory, or through the host."""
        core, other = self.core, source.core
        if not (self.is_here and source.is_here):
            return "host"
        if type(core.backend) is not type(other.backend) or not (core.durable.is_offered and other.durable.is_offered):
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
        """Have the source lend a buffer, and copy it."""
        seconds_left = self.sender.seconds_left
        with source.core.loans:
            if self.core.loans.count:
                ref = await source.sender.run(ops.Copy(ref), seconds_left(deadline))
            loan: Loan = await source.sender.run(Lend(ref.base if isinstance(ref, RefView) else ref), seconds_left(deadline))
            try:
                if loan.fd < 0:
                    raise source.on_lie(f"the child of {source.core.name} has lent a buffer, and not said where that is")
                result = await self._copy_mapped(source, loan, ref, op, deadline)
            finally:
                loan.end()
        if ref.durable and source.core.refs.live_generation not in (0, loan.generation):
            raise StaleRefError(
                f"{ref!r} may have been written while it was copied: {source.core.name} was rebuilt meanwhile",
                device=source.core.name,
                retryable=True,
                remedy="Copy it again.",
            )
        return result

    async def _copy_mapped(self, source: Peers, loan: Loan, ref: AccelRef, op: ops.Copy, deadline: float | None) -> AccelRef:
        """Copy a lent buffer from its slab, which is mapped again if this device is rebuilt before."""
        while True:
            slab = await self._map((source.core.refs.identity, loan.generation, loan.slab), loan, deadline)
            slab.copies += 1
            try:
                there = view_of(slab.ref, loan.offset + ref.offset, ref.shape, ref.dtype, ref.strides)
                result: AccelRef = await self.sender.run(ops.Copy(there, op.destination, op.durable), self.sender.seconds_left(deadline))
            except StaleRefError:
                if not slab.ref.is_stale:
                    raise
            else:
                return result
            finally:
                slab.copies -= 1
                slab.is_recent = True
                slab = there = None  # type: ignore[assignment]  # an error's traceback keeps this frame

    # -- mapping

    async def _map(self, key: tuple[str, int, int], loan: Loan, deadline: float | None) -> _MappedSlab:
        """Return the slab of a loan, mapped here; the slab that was used least is unmapped for it."""
        await self.sender.wait_ready(self.sender.seconds_left(deadline))
        try:
            async with asyncio.timeout_at(deadline), self._mapping:
                slab = self._slabs.pop(key, None)
                if slab is None or slab.ref.is_stale:
                    while len(self._slabs) >= _MOST_MAPPED:  # of which one is idle: as many copies go on at most
                        del self._slabs[next(known for known, other in self._slabs.items() if not other.copies)]
                    slab = _MappedSlab(await self.attach(loan.fd, loan.slab_nbytes, (loan.slab_nbytes,), DType.UINT8))
                self._slabs[key] = slab
        except TimeoutError:
            raise DeadlineExceededError("the memory of the other device was not mapped in time", op="copy", device=self.core.name) from None
        if self._timer is None:
            self._timer = self.core.loop.call_later(_IDLE_SECONDS, self._unmap_idle)
        return slab

    async def attach(self, fd: int | None, nbytes: int, shape: tuple[int, ...], dtype: DType) -> SharedRef:
        """Return a ref to memory that is mapped as :meth:`.sharing.sharing.Sharing.attach` does."""
        refs = self.core.refs
        ref = SharedRef(refs, refs.next_buffer(), shape, dtype, refs.live_generation)
        await self._host.context.sharing.attach(ref.buffer, fd, nbytes)
        return ref

    def _unmap_idle(self) -> None:
        """Unmap the slabs that were not used since the last call; called by the timer."""
        self._timer = None
        idle = [key for key, slab in self._slabs.items() if not (slab.copies or slab.is_recent) or slab.ref.is_stale]
        for key in idle:
            del self._slabs[key]
        for slab in self._slabs.values():
            slab.is_recent = False
        context = self._host.context
        if idle and context is not None:
            context.apply_frees()  # without an op that does
        if self._slabs:
            self._timer = self.core.loop.call_later(_IDLE_SECONDS, self._unmap_idle)

    def on_lie(self, what: str) -> AccelError:
        """End this device's context, whose child has violated the protocol; return the error for the caller."""
        error, context = ProtocolError(what), self._host.context
        context.report_fault(error)
        failure: AccelError = context.poisoned_error(error)
        return failure
