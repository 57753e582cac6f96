"""The methods of :class:`~accel.Device` for other libraries' arrays, and for managed memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from accel import ops
from accel.dtype import DType, DTypeLike
from accel.ops.base import as_shape

if TYPE_CHECKING:
    from accel.engine.core import DeviceCore
    from accel.engine.host import Host
    from accel.engine.sender import Sender
    from accel.ops.memory import Advice
    from accel.ref import AccelRef
    from accel.sharing.sharing import Sharing

__all__ = ["MemoryExchange"]


class MemoryExchange:
    """The methods of :class:`~accel.Device` for memory beyond its buffers; a base class of it."""

    _core: DeviceCore
    _sender: Sender
    _host: Host

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

    async def _sharing(self) -> Sharing:
        """Wait until the device is ready, and return what shares its context's memory.

        On a process host that is :class:`~accel.remote.context.NoSharing`, which raises.
        """
        self._sender.guard()
        await self._sender.wait_ready(None)
        sharing: Sharing = self._host.context.sharing
        return sharing
