"""Transfers between pinned memory and the device in one stream, also from several threads at once. They leave the stream's own marks alone."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from accel_cuda.core.driver import Handle
from accel_cuda.errors import NOT_READY

if TYPE_CHECKING:
    from accel.memory import Block
    from accel_cuda.core.context import CudaContext
    from accel_cuda.core.driver import Section

__all__ = ["StreamChannel", "StreamSlot"]


class StreamSlot:
    """See :class:`accel_cuda.core.copies.Slot`.

    Attributes
    ----------
    address : int
        Where the pinned memory begins; 0 for an event alone.
    handle : Handle
        The driver's CUevent.
    """

    __slots__ = ("_channel", "_is_recorded", "address", "handle")

    def __init__(self, channel: StreamChannel) -> None:
        self._channel = channel
        self._is_recorded = False
        self.address = 0
        self.handle = Handle()
        context = channel.context
        kinds = context.driver.CUevent_flags
        flags = int(kinds.CU_EVENT_DISABLE_TIMING | kinds.CU_EVENT_BLOCKING_SYNC)  # waiting threads sleep
        with context.section:
            status = context.driver.hot.event_create(ctypes.byref(self.handle), flags)
        context.check(status, "cuEventCreate")

    def transfer(self, device: int, nbytes: int, *, is_put: bool) -> None:
        """See :meth:`accel_cuda.core.copies.Slot.transfer`."""
        self._channel.transfer(device, self.address, nbytes, is_put=is_put)
        self.record()

    def record(self) -> None:
        """Record the event in the stream."""
        channel = self._channel
        channel.context.check(channel.context.driver.hot.event_record(self.handle, channel.ready()), "cuEventRecord")
        self._is_recorded = True

    def wait(self) -> None:
        """See :meth:`accel_cuda.core.copies.Slot.wait`."""
        if not self._is_recorded:
            return
        context = self._channel.context
        status = context.driver.hot.event_query(self.handle)  # most events have passed, and waiting costs more
        if status == NOT_READY:
            context.call("cuEventSynchronize", self.handle.value or 0)
        else:
            context.check(status, "cuEventQuery")
        self._is_recorded = False

    def close(self) -> None:
        """Keep the event for the next copy."""
        self._is_recorded = False
        self._channel.give(self)


class StreamChannel:
    """See :class:`accel_cuda.core.copies.CopyChannel`.

    Parameters
    ----------
    stream
        Where the transfers go.

    Attributes
    ----------
    context : CudaContext
        The stream's.
    """

    def __init__(self, stream: Any) -> None:
        self.context: CudaContext = stream.context
        self._stream = stream
        self._slots: list[StreamSlot] = []
        self._is_closed = False
        stream.at_close(self.close)

    @property
    def section(self) -> Section:
        """Makes the context current: given a stream whose context is destroyed, the driver would crash without it."""
        return self.context.section

    def ready(self) -> Handle:
        """Return the CUstream; raise if nothing can be enqueued."""
        self._stream.ready()
        pointer: Handle = self._stream.pointer
        return pointer

    def transfer(self, device: int, pinned: int, nbytes: int, *, is_put: bool) -> None:
        """Enqueue a transfer of pinned memory to the device, or back. In the section."""
        hot, size, stream = self.context.driver.hot, ctypes.c_size_t(nbytes), self.ready()
        if is_put:
            self.context.check(hot.copy_from_host(Handle(device), Handle(pinned), size, stream), "cuMemcpyHtoDAsync")
        else:
            self.context.check(hot.copy_to_host(Handle(pinned), Handle(device), size, stream), "cuMemcpyDtoHAsync")

    def create_slot(self, address: int) -> StreamSlot:
        """See :meth:`accel_cuda.core.copies.CopyChannel.create_slot`."""
        try:
            slot = self._slots.pop()
        except IndexError:
            slot = StreamSlot(self)
        slot.address = address
        return slot

    def reached(self) -> None:
        """See :meth:`accel_cuda.core.copies.CopyChannel.reached`."""
        slot = self.create_slot(0)
        try:
            with self.section:
                slot.record()
                slot.wait()
        finally:
            slot.close()

    def begin(self, keep: object, piece: Block) -> None:
        """See :meth:`accel_cuda.core.copies.CopyChannel.begin`."""
        self._stream.transfers.begin(keep, piece)

    def give(self, slot: StreamSlot) -> None:
        """Take a slot back that nothing uses."""
        if self._is_closed:
            self._destroy(slot)
        else:
            self._slots.append(slot)

    def close(self) -> None:
        """Give the events back; the stream has ended."""
        self._is_closed = True
        while self._slots:
            self._destroy(self._slots.pop())

    def _destroy(self, slot: StreamSlot) -> None:
        if self.context.is_alive:
            with self.context.section:
                self.context.driver.ignore("cuEventDestroy", slot.handle.value)
