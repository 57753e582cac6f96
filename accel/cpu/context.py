"""The state that the streams of one CPU device share: the fault, and the memory, which is bounded and which abandoned work may still use."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Protocol

from accel._log import get_logger
from accel.errors import AccelError, DriverError, FaultScope, LibraryError, OutOfMemoryError, said
from accel.fork import NO_FORK, pause_around_fork

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CpuContext", "CpuContextStream", "is_fault"]

logger = get_logger()


class CpuContextStream(Protocol):
    """What a context needs of its streams: :class:`accel.cpu.stream.CpuStream`."""

    fault: AccelError | None
    """What stopped the stream."""

    @property
    def is_touching(self) -> bool:
        """Whether the stream runs work that may use device memory."""

    def stop(self, fault: AccelError) -> None:
        """Run nothing more."""

    def close(self, *, abandon: bool = False) -> None:
        """End the stream's worker."""

    def pause(self, deadline: float) -> bool:
        """Begin no more work, and return whether none runs; wait for that until the deadline."""

    def resume(self) -> None:
        """Go on after :meth:`pause` has returned ``True``."""


class CpuContext:
    """One generation of a CPU device.

    Parameters
    ----------
    device_name
        Name that errors carry, such as ``"cpu:0"``.
    memory
        Bytes that the slabs may have together; 0 for no bound.

    Attributes
    ----------
    fault : AccelError or None
        What poisoned the context. Callers raise a clone of it.
    leftovers : list of callables
        Release memory once no abandoned work runs any more.
    held : int
        Bytes of the slabs that exist.
    """

    __slots__ = ("__weakref__", "_lock", "_paused", "_streams", "device_name", "fault", "held", "leftovers", "memory")

    def __init__(self, device_name: str, memory: int = 0) -> None:
        self.device_name = device_name
        self.memory = memory
        self.held = 0
        self.fault: AccelError | None = None
        self.leftovers: list[Callable[[], None]] = []
        self._streams: list[CpuContextStream] = []
        self._paused: list[CpuContextStream] = []
        self._lock = threading.Lock()
        pause_around_fork(self)

    def pause(self, deadline: float) -> None:
        """See :class:`accel.fork.Pausable`."""
        self._paused = [stream for stream in self.streams() if stream.pause(deadline)]
        if time.monotonic() >= deadline:
            logger.warning("fork_beside_running_work", device=self.device_name)

    def resume(self) -> None:
        """See :class:`accel.fork.Pausable`."""
        paused, self._paused = self._paused, []
        for stream in paused:
            stream.resume()

    def add(self, stream: CpuContextStream) -> None:
        """Add a stream, which a fault of the context stops; raises the fault if there is one."""
        with NO_FORK, self._lock:  # a fork pauses the streams that there are
            if self.fault is not None:
                raise self.fault.clone()
            self._streams.append(stream)

    def remove(self, stream: CpuContextStream) -> None:
        """Remove a stream that was closed and runs no work."""
        with self._lock:
            if stream in self._streams:
                self._streams.remove(stream)

    def streams(self) -> list[CpuContextStream]:
        """Return all streams that were created."""
        with self._lock:
            return list(self._streams)

    def poison(self, error: AccelError) -> None:
        """Stop every stream; the first fault counts. May be called from any thread."""
        with self._lock:
            if self.fault is not None:
                return
            self.fault = error
            streams = list(self._streams)
        for stream in streams:
            stream.stop(error)

    def failure(self, error: BaseException) -> AccelError:
        """Return the fault that an exception raised by enqueued work stands for."""
        if isinstance(error, AccelError) and is_fault(error):
            return error
        fault = LibraryError(
            f"work on a stream raised {type(error).__name__}: {said(error)}",
            library="cpu",
            device=self.device_name,
            scope=FaultScope.CONTEXT,
        )
        fault.__cause__ = error
        return fault

    def injected(self, error: AccelError | None) -> AccelError:
        """Return the fault for an injection: ``error``, if any, of scope CONTEXT at least."""
        if error is None:
            error = DriverError(
                "the context was poisoned by a fault plan",
                code="INJECTED_FAULT",
                library="driver",
                remedy="The plan asked for it: see that what was tested copes with it.",
            )
        return error.clone(scope=max(error.scope, FaultScope.CONTEXT), device=error.device or self.device_name)

    def reserve(self, nbytes: int) -> None:
        """Count ``nbytes`` more as held.

        The operating system maps more memory than there is, and kills a process that touches it. So the limit is checked here.

        Raises
        ------
        OutOfMemoryError
            If that would be more than the machine has, or this process's control group may have.
        """
        with self._lock:
            if self.memory and self.held + nbytes > self.memory:
                raise OutOfMemoryError(
                    f"this process may have {self.memory} bytes of memory, this context holds {self.held}, and {nbytes} more were asked for",
                    requested=nbytes,
                    reserved=self.held,
                    limit=self.memory,
                    device=self.device_name,
                )
            self.held += nbytes

    def unreserve(self, nbytes: int) -> None:
        """Count ``nbytes`` as released. May be called from any thread."""
        with self._lock:
            self.held -= nbytes

    def release(self, close: Callable[[], None]) -> None:
        """Release memory now, or once abandoned work has ended.

        An abandoned thread cannot be stopped in the middle of a numpy call, and unmapping the memory that it reads would end the process.
        """
        with self._lock:
            if self._is_touched():
                self.leftovers.append(close)
                return
        close()

    def settle(self) -> None:
        """Release the memory that had to wait; called by a stream that ended an item."""
        with self._lock:
            if self._is_touched():
                return
            ready, self.leftovers = self.leftovers, []
        for close in ready:
            close()

    def _is_touched(self) -> bool:
        return any(stream.fault is not None and stream.is_touching for stream in self._streams)


def is_fault(error: BaseException) -> bool:
    """Return whether an error poisons the context. An error class of a user's that cannot say so, for want of a constructor, does not."""
    try:
        return isinstance(error, AccelError) and error.is_fault
    except Exception:
        return False
