"""How the pieces of large copies get into a stream: without the stream's own marks and its looking for an early end, from several threads."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from accel_cuda.driver import Handle
from accel_cuda.errors import NOT_READY

if TYPE_CHECKING:
    from accel.memory import Block
    from accel_cuda.context import CudaDevice
    from accel_cuda.driver import Section
    from accel_cuda.stream import CudaStream

__all__ = ["CopyMark", "StreamChannel"]

_WITHOUT_TIMING, _SLEEPS = 2, 1


class CopyMark:
    """See :class:`accel_cuda.staging.Mark`.

    Attributes
    ----------
    handle : Handle
        The driver's CUevent.
    is_near : bool
        Whether waiting for it spins.
    is_set : bool
        Whether it was recorded and not seen to have passed.
    """

    __slots__ = ("_channel", "handle", "is_near", "is_set")

    def __init__(self, channel: StreamChannel, *, is_near: bool) -> None:
        self._channel = channel
        self.is_near = is_near
        self.handle = Handle()
        self.is_set = False
        context = channel.context
        flags = _WITHOUT_TIMING if is_near else _WITHOUT_TIMING | _SLEEPS
        with context.section:
            status = context.driver.hot.event_create(ctypes.byref(self.handle), flags)
        context.check(status, "cuEventCreate")

    def wait(self) -> None:
        """See :meth:`accel_cuda.staging.Mark.wait`."""
        if not self.is_set:
            return
        context = self._channel.context
        status = context.driver.query(self.handle)  # mostly it has passed, and waiting costs more
        if status == NOT_READY:
            context.driver.call("cuEventSynchronize", self.handle.value or 0)
        else:
            context.check(status, "cuEventQuery")
        self.is_set = False

    def close(self) -> None:
        """Keep it for the next copy."""
        self.is_set = False
        self._channel.give(self)


class StreamChannel:
    """See :class:`accel_cuda.staging.Channel`; of one stream.

    Attributes
    ----------
    context : CudaDevice
        The stream's.
    """

    def __init__(self, stream: CudaStream) -> None:
        self.context: CudaDevice = stream.context
        self._stream = stream
        self._marks: dict[bool, list[CopyMark]] = {False: [], True: []}
        self._is_closed = False
        hot = self.context.driver.hot
        self._copy_in, self._copy_out, self._record = hot.copy_from_host, hot.copy_to_host, hot.event_record
        stream.at_close(self.close)

    @property
    def section(self) -> Section:
        """What a thread is in while it transfers: the context is current."""
        return self.context.section

    def push(self, destination: int, source: int, nbytes: int, mark: CopyMark | None = None) -> None:
        """Enqueue a transfer of pinned memory to the device, and set the mark behind it.

        In the section: without it the driver, given a stream whose context somebody has destroyed, crashes.
        """
        context, pointer = self._stream.ready(), self._stream.pointer
        status = self._copy_in(Handle(destination), Handle(source), ctypes.c_size_t(nbytes), pointer)
        if status:
            raise context.failure(status, "cuMemcpyHtoDAsync")
        if mark is not None:
            self._set(mark)

    def pull(self, destination: int, source: int, nbytes: int, mark: CopyMark | None = None) -> None:
        """Enqueue a transfer of device memory to pinned memory, and set the mark behind it. In the section, as above."""
        context, pointer = self._stream.ready(), self._stream.pointer
        status = self._copy_out(Handle(destination), Handle(source), ctypes.c_size_t(nbytes), pointer)
        if status:
            raise context.failure(status, "cuMemcpyDtoHAsync")
        if mark is not None:
            self._set(mark)

    def _set(self, mark: CopyMark) -> None:
        status = self._record(mark.handle, self._stream.pointer)
        if status:
            raise self.context.failure(status, "cuEventRecord")
        mark.is_set = True

    def create_mark(self, *, is_near: bool) -> CopyMark:
        """Return a mark that counts as passed."""
        try:
            return self._marks[is_near].pop()
        except IndexError:
            return CopyMark(self, is_near=is_near)

    def reached(self) -> None:
        """Block until everything enqueued so far has ended, releasing the GIL."""
        mark = self.create_mark(is_near=False)
        try:
            self._set(mark)
            mark.wait()
        finally:
            mark.close()

    def begin(self, keep: object, piece: Block) -> None:
        """Note that the stream uses a piece until everything enqueued so far has ended."""
        self._stream.transfers.begin(keep, piece)

    def give(self, mark: CopyMark) -> None:
        """Take a mark back that nobody uses."""
        if self._is_closed:
            self._destroy(mark)
        else:
            self._marks[mark.is_near].append(mark)

    def close(self) -> None:
        """Give the marks back; the stream has ended."""
        self._is_closed = True
        for marks in self._marks.values():
            while marks:
                self._destroy(marks.pop())

    def _destroy(self, mark: CopyMark) -> None:
        if self.context.is_alive:
            with self.context.section:
                self.context.driver.ignore("cuEventDestroy", mark.handle.value)
