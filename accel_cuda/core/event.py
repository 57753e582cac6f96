"""Events of the CUDA backend: marks, which have no timing, and pairs of events with timing."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from accel_cuda.core.driver import Handle
from accel_cuda.errors import NOT_READY

if TYPE_CHECKING:
    from accel_cuda.core.context import CudaContext
    from accel_cuda.core.transfers import StreamTransfers

__all__ = ["CudaEvent", "CudaSpan"]


class CudaEvent:
    """A mark in a :class:`~accel_cuda.core.stream.CudaStream`; see :class:`~accel.AccelEvent`. Made by ``CudaDevice.create_event``.

    Attributes
    ----------
    handle : Handle
        The driver's CUevent.
    has_passed : bool
        Whether it was seen to be passed.
    """

    __slots__ = ("_query", "_ticket", "_transfers", "context", "handle", "has_passed")

    def __init__(self, context: CudaContext) -> None:
        self.context = context
        # What was seen to have passed stays so: after a fault the driver answers with the fault for every event.
        self.has_passed = True
        self._transfers: StreamTransfers | None = None
        self._ticket = 0
        self._query = context.driver.query
        self.handle = Handle()
        flags = int(context.driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        with context.section:
            context.check(context.driver.hot.event_create(ctypes.byref(self.handle), flags), "cuEventCreate")

    def query(self) -> bool:
        """Return whether the stream has passed the mark. Never blocks.

        Raises
        ------
        AccelError
            The fault, if the mark was not seen to be passed before.
        """
        if self.has_passed:
            return True
        context = self.context
        if context.fault is not None:
            raise context.fault.clone()
        status = self._query(self.handle)
        if status == 0:
            self._pass()
            return True
        if status == NOT_READY:
            return False
        raise context.failure(status, "cuEventQuery")

    def synchronize(self) -> None:
        """Block this thread until the stream has passed the mark, releasing the GIL; raises as :meth:`query` does."""
        if not self.has_passed:
            self.context.call("cuEventSynchronize", self.handle.value or 0)
            self._pass()

    def close(self) -> None:
        """Give the event back. Idempotent. What the driver keeps of a dead context is left to it."""
        handle, self.handle = self.handle, Handle()
        self.has_passed = True
        self._transfers = None
        if handle.value and self.context.is_alive:
            with self.context.section:
                self.context.driver.ignore("cuEventDestroy", handle.value)

    def mark(self, transfers: StreamTransfers, ticket: int) -> None:
        """Note that the event was just recorded in a stream; ``ticket`` counts the stream's ``transfers`` before it."""
        self.has_passed = False
        self._transfers, self._ticket = transfers, ticket

    def _pass(self) -> None:
        transfers = self._transfers
        if transfers is not None and self._ticket > transfers.finished:
            transfers.finish(self._ticket)
        self.has_passed = True


class CudaSpan:
    """Two events with timing around work of one stream; see :class:`accel.backend.WorkSpan`.

    Parameters
    ----------
    context
        The context.
    idle
        Where the span goes once its time was read, to be recorded again.

    Attributes
    ----------
    begin, end : Handle
        The driver's CUevents.
    """

    __slots__ = ("_context", "_idle", "begin", "end")

    def __init__(self, context: CudaContext, idle: list[CudaSpan]) -> None:
        self._context = context
        self._idle = idle
        self.begin, self.end = Handle(), Handle()
        with context.section:
            for event in (self.begin, self.end):
                context.check(context.driver.hot.event_create(ctypes.byref(event), 0), "cuEventCreate")

    def seconds(self) -> float:
        """Return the device's time between the two events, which the stream has passed."""
        context, milliseconds = self._context, ctypes.c_float()
        if context.fault is not None:
            raise context.fault.clone()
        with context.section:
            status = context.driver.hot.event_elapsed(ctypes.byref(milliseconds), self.begin, self.end)
        context.check(status, "cuEventElapsedTime")
        self._idle.append(self)
        return milliseconds.value * 1e-3

    def close(self) -> None:
        """Give the events back. The context is alive."""
        for event in (self.begin, self.end):
            self._context.driver.ignore("cuEventDestroy", event.value or 0)
