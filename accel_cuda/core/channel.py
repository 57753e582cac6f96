"""How the pieces of large copies get into a stream: without the stream's own marks and its looking for an early end, from several threads."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from accel_cuda.core.driver import Handle
from accel_cuda.errors import NOT_READY

if TYPE_CHECKING:
    from accel.memory import Block
    from accel_cuda.core.context import CudaDevice
    from accel_cuda.core.driver import Section
    from accel_cuda.core.stream import CudaStream

__all__ = ["CopyPlace", "StreamChannel"]

_WITHOUT_TIMING, _SLEEPS = 2, 1


class CopyPlace:
    """See :class:`accel_cuda.core.staging.Place`. Many threads take turns at the interpreter's lock: so each transfer is few calls, with arguments made before.

    Attributes
    ----------
    address : int
        Where the pinned memory begins; 0 for a mark alone.
    handle : Handle
        The driver's CUevent.
    is_near : bool
        Whether waiting for it spins.
    is_set : bool
        Whether the event was recorded and not seen to have passed.
    """

    __slots__ = ("_channel", "_memory", "address", "handle", "is_near", "is_set")

    def __init__(self, channel: StreamChannel, *, is_near: bool) -> None:
        self._channel = channel
        self.is_near = is_near
        self.handle = Handle()
        self.is_set = False
        self.address = 0
        self._memory = Handle()
        context = channel.context
        flags = _WITHOUT_TIMING if is_near else _WITHOUT_TIMING | _SLEEPS
        with context.section:
            status = context.driver.hot.event_create(ctypes.byref(self.handle), flags)
        context.check(status, "cuEventCreate")

    def take(self, address: int) -> None:
        """Have it stand for other memory."""
        self.address = address
        self._memory = Handle(address)

    def push(self, destination: int, nbytes: int) -> None:
        """See :meth:`accel_cuda.core.staging.Place.push`."""
        channel = self._channel
        pointer = channel.ready()
        status = channel.copy_in(Handle(destination), self._memory, ctypes.c_size_t(nbytes), pointer)
        if status:
            raise channel.context.failure(status, "cuMemcpyHtoDAsync")
        self.mark(pointer)

    def pull(self, source: int, nbytes: int) -> None:
        """See :meth:`accel_cuda.core.staging.Place.pull`."""
        channel = self._channel
        pointer = channel.ready()
        status = channel.copy_out(self._memory, Handle(source), ctypes.c_size_t(nbytes), pointer)
        if status:
            raise channel.context.failure(status, "cuMemcpyDtoHAsync")
        self.mark(pointer)

    def mark(self, pointer: Handle) -> None:
        """Record the event in the stream."""
        channel = self._channel
        status = channel.record(self.handle, pointer)
        if status:
            raise channel.context.failure(status, "cuEventRecord")
        self.is_set = True

    def wait(self) -> None:
        """See :meth:`accel_cuda.core.staging.Place.wait`."""
        if not self.is_set:
            return
        context = self._channel.context
        status = self._channel.query(self.handle)  # mostly it has passed, and waiting costs more
        if status == NOT_READY:
            context.driver.call("cuEventSynchronize", self.handle.value or 0)
        elif status:
            raise context.failure(status, "cuEventQuery")
        self.is_set = False

    def close(self) -> None:
        """Keep it for the next copy."""
        self.is_set = False
        self._channel.give(self)


class StreamChannel:
    """See :class:`accel_cuda.core.staging.Channel`; of one stream.

    Attributes
    ----------
    context : CudaDevice
        The stream's.
    """

    def __init__(self, stream: CudaStream) -> None:
        self.context: CudaDevice = stream.context
        self._stream = stream
        self._places: dict[bool, list[CopyPlace]] = {False: [], True: []}
        self._is_closed = False
        hot = self.context.driver.hot
        self.copy_in, self.copy_out, self.record, self.query = hot.copy_from_host, hot.copy_to_host, hot.event_record, hot.event_query
        stream.at_close(self.close)

    @property
    def section(self) -> Section:
        """What a thread is in while it transfers: the context is current."""
        return self.context.section

    def ready(self) -> Handle:
        """Return the CUstream; raise if nothing can be enqueued."""
        self._stream.ready()
        return self._stream.pointer

    def push(self, destination: int, source: int, nbytes: int) -> None:
        """Enqueue a transfer of pinned memory to the device.

        In the section: without it the driver, given a stream whose context somebody has destroyed, crashes.
        """
        pointer = self.ready()
        status = self.copy_in(Handle(destination), Handle(source), ctypes.c_size_t(nbytes), pointer)
        if status:
            raise self.context.failure(status, "cuMemcpyHtoDAsync")

    def pull(self, destination: int, source: int, nbytes: int) -> None:
        """Enqueue a transfer of device memory to pinned memory. In the section, as above."""
        pointer = self.ready()
        status = self.copy_out(Handle(destination), Handle(source), ctypes.c_size_t(nbytes), pointer)
        if status:
            raise self.context.failure(status, "cuMemcpyDtoHAsync")

    def create_place(self, address: int, *, is_near: bool) -> CopyPlace:
        """Return a place that nothing is transferred from or to."""
        try:
            place = self._places[is_near].pop()
        except IndexError:
            place = CopyPlace(self, is_near=is_near)
        place.take(address)
        return place

    def reached(self) -> None:
        """Block until everything enqueued so far has ended, releasing the GIL."""
        place = self.create_place(0, is_near=False)
        try:
            with self.section:
                place.mark(self.ready())
                place.wait()
        finally:
            place.close()

    def begin(self, keep: object, piece: Block) -> None:
        """Note that the stream uses a piece until everything enqueued so far has ended."""
        self._stream.transfers.begin(keep, piece)

    def give(self, place: CopyPlace) -> None:
        """Take a place back that nobody uses."""
        if self._is_closed:
            self._destroy(place)
        else:
            self._places[place.is_near].append(place)

    def close(self) -> None:
        """Give the events back; the stream has ended."""
        self._is_closed = True
        for places in self._places.values():
            while places:
                self._destroy(places.pop())

    def _destroy(self, place: CopyPlace) -> None:
        if self.context.is_alive:
            with self.context.section:
                self.context.driver.ignore("cuEventDestroy", place.handle.value)
