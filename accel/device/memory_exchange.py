"""The methods of :class:`~accel.Device` for other libraries' arrays, and for managed memory."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from accel import ops
from accel.dtype import DType, DTypeLike
from accel.errors import DeadlineExceededError, InvalidArgumentError, UnsupportedError
from accel.memory import memfd_identity
from accel.ops.base import as_shape, operand
from accel.ops.memory import Lend
from accel.ref import AccelToken, SharedRef
from accel.remote.tokens import PublishedRefs, fetch

if TYPE_CHECKING:
    from accel.device.peers import Peers
    from accel.engine.core import DeviceCore
    from accel.engine.host import Host
    from accel.engine.sender import Sender
    from accel.ops.memory import Advice
    from accel.ref import AccelRef
    from accel.sharing.sharing import Sharing

__all__ = ["MemoryExchange", "SharedMemory"]

_NOT_SHAREABLE = "Make it with device.zeros(..., shareable=True); another process copies it by put(token)."


class SharedMemory(NamedTuple):
    """What another process needs to reach a buffer; made by ``device.share``.

    Attributes
    ----------
    fd : int
        Descriptor of the memory, to be closed by its owner. It travels over a Unix socket, with
        ``socket.send_fds``; the rest in any way.
    nbytes : int
        Of the memory, of which the buffer is the beginning.
    shape : tuple of int
    dtype : str
    uuid : str
        Of the hardware that has the memory.
    """

    fd: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    uuid: str


class MemoryExchange:
    """The methods of :class:`~accel.Device` for memory beyond its buffers; a base class of it."""

    _core: DeviceCore
    _sender: Sender
    _host: Host
    _peers: Peers
    _published: PublishedRefs

    async def wrap(self, array: Any) -> AccelRef:
        """Return a ref to the memory of another library's array, without a copy.

        Parameters
        ----------
        array
            Of torch, CuPy, numba or any library whose arrays speak DLPack or have a
            ``__cuda_array_interface__``; in this device's memory, C-contiguous and writable. On a
            CPU device: a numpy array, or what speaks DLPack.

        Returns
        -------
        AccelRef
            Whose ``is_foreign`` is true. Ops may read it and write it. The array is kept until the
            ref is dropped, or freed, and its last use is over.

        Raises
        ------
        InvalidArgumentError
            If it is no such array.
        UnsupportedError
            If this device cannot take arrays.

        Notes
        -----
        Every op on the ref waits for all work that was enqueued on the device before it in this
        process; so what the library does to the array is seen by ops that are sent later. What the
        library enqueues on the array after an op was awaited comes after that op.
        """
        return (await self._sharing()).wrap(array)

    async def managed(self, shape: Any, dtype: DTypeLike = "float32") -> AccelRef:
        """Make a buffer in memory that moves between device and host, contents not set.

        It does not count against ``memory_limit``.

        Raises
        ------
        UnsupportedError
            If the device has no such memory.
        OutOfMemoryError
            If there is no room.
        """
        dimensions, element = as_shape(shape), DType.of(dtype)
        return await (await self._sharing()).managed(dimensions, element)

    async def prefetch(self, ref: AccelRef, to: Literal["device", "host"] = "device", *, timeout: float | None = None) -> None:
        """Move a managed buffer, or a view of one, before it is used there; in stream order.

        ``timeout`` as in :meth:`Device.run`.
        """
        await self._sender.run(ops.Prefetch(ref, to), timeout)

    async def advise(self, ref: AccelRef, advice: Advice, *, undo: bool = False, timeout: float | None = None) -> None:
        """Tell the driver how a managed buffer, or a view of one, is going to be used.

        Parameters
        ----------
        ref
            The buffer.
        advice
            ``"read_mostly"``, ``"preferred_device"``, ``"preferred_host"``,
            ``"accessed_by_device"`` or ``"accessed_by_host"``.
        undo
            Withdraw the advice.
        timeout
            As in :meth:`Device.run`.
        """
        await self._sender.run(ops.Advise(ref, advice, undo), timeout)

    async def share(self, ref: AccelRef, *, timeout: float | None = None) -> SharedMemory:
        """Return what another process attaches a buffer by, once the ops sent before have ended.

        The other process reads and writes the memory at any time: the two have to tell each other
        when. The memory lives as long as any process has the descriptor, or has attached it.

        Parameters
        ----------
        ref
            Made by ``zeros(shareable=True)``, or by :meth:`attach`.
        timeout
            As in :meth:`run`.
        """
        self._check_here()
        if not isinstance(operand("ref", ref), SharedRef):
            raise InvalidArgumentError(f"{ref!r} is in memory with other buffers", remedy=_NOT_SHAREABLE)
        loan = await self._sender.run(Lend(ref), timeout)
        self._peers.check_lent(loan)
        try:
            return SharedMemory(os.dup(loan.fd), loan.slab_nbytes, ref.shape, ref.dtype.value, self._core.description.uuid)
        finally:
            loan.end()

    def publish(self, ref: AccelRef) -> AccelToken:
        """Return a token by which other processes of this machine, and of the same user, find a ref.

        It may travel in any way. There ``await device.attach(token)`` gives a ref to the same
        memory, if that is shareable, and ``await device.put(token)`` copies what is in it; so does
        ``put(token, node=...)`` on other machines, if an agent runs on this one. The token owns
        nothing: keep the ref until they have done so.

        Parameters
        ----------
        ref
            Of this device; a view, too.

        Raises
        ------
        StaleRefError
            If the memory is no longer there.
        UnsupportedError
            If this system has no such sockets.
        """
        self._core.guard()
        self._core.refs.check(operand("ref", ref))
        return self._published.publish(ref)

    async def attach(self, memory: SharedMemory | AccelToken, *, timeout: float | None = None) -> AccelRef:
        """Return a ref to memory of another process, or of another device.

        Parameters
        ----------
        memory
            What ``device.share`` has returned there, with the descriptor as it is in this process.
            It is duplicated: the caller closes its own. Or a token that ``device.publish`` has
            returned there; one of this device gives the ref itself.
        timeout
            Seconds to wait; ``None``: 30 for what has a token, of which the process may be stopped.

        Raises
        ------
        InvalidArgumentError
            If it is no such memory, or of hardware that this device does not reach.
        StaleRefError
            If the buffer of the token, or its process, is gone.
        AccelError
            What the process with the buffer answers, or if it does not.
        """
        if isinstance(memory, AccelToken):
            return await self._attach_token(memory, timeout)
        core = self._core
        if not isinstance(memory, tuple) or len(memory) != len(SharedMemory._fields):
            raise InvalidArgumentError(f"{memory!r} is no shared memory", remedy="Give what device.share() returned.")
        fd, nbytes, shape, dtype, uuid = memory
        spec = ops.Spec(as_shape(shape), DType.of(dtype))
        if (
            any(isinstance(number, bool) or not isinstance(number, int) for number in (fd, nbytes))
            or not 0 <= fd < 1 << 31
            or spec.nbytes > nbytes
        ):
            raise InvalidArgumentError(f"{memory!r} is no shared memory", remedy="Give what device.share() returned.")
        try:
            memfd_identity(fd, nbytes)
        except ValueError as error:
            raise InvalidArgumentError(f"{memory!r} is no shared memory: {error}", remedy="Give what device.share() returned.") from None
        if uuid != core.description.uuid:
            devices = await core.system.run_blocking(core.backend.devices)
            index = next((device.index for device in devices if device.uuid == uuid), None)
            if index is None or not self._peers.can_access(index):
                raise InvalidArgumentError(f"{core.name} does not reach the memory of {uuid!r}", remedy="Attach it on a device that does.")
        return await self._attach(fd, nbytes, spec, timeout)

    async def _attach_token(self, token: AccelToken, timeout: float | None) -> AccelRef:
        """Return a ref to the memory that a token names."""
        core = self._core
        core.guard()
        if token.device == core.refs.identity:
            return core.refs.resolve(token)
        self._check_here()
        deadline = self._sender.deadline_after(timeout)
        async with fetch(token, timeout, core.disposal, core.name) as memory:
            return token.of(await self.attach(SharedMemory(*memory), timeout=self._sender.seconds_left(deadline)))

    async def _attach(self, fd: int | None, nbytes: int, spec: ops.Spec, timeout: float | None) -> AccelRef:
        """Return a ref to the beginning of the slab of ``fd``; ``None``: a new one of ``nbytes``."""
        core, deadline = self._core, self._sender.deadline_after(timeout)
        self._sender.guard()
        self._check_here()
        await self._sender.wait_ready(timeout)
        try:
            async with asyncio.timeout_at(deadline):
                return await self._peers.attach(fd, nbytes, spec.shape, spec.dtype)
        except TimeoutError:
            raise DeadlineExceededError(f"memory was not attached within {timeout:g} s", op="attach", device=core.name) from None

    def _check_here(self) -> None:
        """Raise if the device is on another machine: no process of this one reaches its memory."""
        if not self._peers.is_here:
            raise UnsupportedError(
                "the device is on another machine", device=self._core.name, remedy="Copy: put(token) on the other device, or get(ref) here."
            )

    async def _sharing(self) -> Sharing:
        """Wait until the device is ready, and return what shares its context's memory.

        On a process host that is :class:`~accel.remote.context.NoSharing`, which raises.
        """
        self._sender.guard()
        await self._sender.wait_ready(None)
        sharing: Sharing = self._host.context.sharing
        return sharing
