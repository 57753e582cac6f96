"""The primary context of a GPU: how it is entered, what it knows of faults, the memory that its streams copy through, and how it ends."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol

from accel import AccelError, ClosedError
from accel.memory import HostArena
from accel_cuda.core.copies import Copiers
from accel_cuda.core.driver import Handle
from accel_cuda.core.nvml import log_kept
from accel_cuda.core.pinned import PinnedRanges, Registration

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel import DeviceDescription
    from accel_cuda.core.driver import Driver

__all__ = ["ContextStream", "CudaContext"]

_STAGING, _STAGING_BLOCK = 1 << 30, 8 << 20


def _ignore(error: AccelError) -> None:
    """Stand for no listener."""


class ContextStream(Protocol):
    """What a context does with its streams."""

    def close(self, *, abandon: bool = False) -> None:
        """Give the stream back after what is enqueued, or return at once and call :meth:`CudaContext.abandon`."""

    def dispose(self) -> None:
        """Wait for the stream's end and give everything back."""


class CudaContext:
    """The primary context of one GPU, for one generation.

    Parameters
    ----------
    driver
        The driver.
    description
        The GPU.

    Attributes
    ----------
    description : DeviceDescription
    driver : Driver
    device : CUdevice
        The driver's handle of the GPU.
    handle : int
        The driver's CUcontext.
    section : Section
        ``with context.section:`` makes the context current, and leaves the thread as it was. What enqueues by hot calls needs none; libraries do.
    query_section : QuerySection
        See :class:`accel.backend.QueriesInSection`.
    capability : tuple of int
        The compute capability, major and minor.
    multiprocessors, shared_limit : int
        How many the device has; bytes of shared memory that one block can have.
    fault : AccelError or None
        What poisoned the context. What raises it raises a clone.
    on_fault : callable
        See :class:`accel.backend.TellsFaults`.
    pinned : PinnedRanges
        Which host memory is page-locked.
    staging : HostArena
        Pinned memory through which all its streams copy pageable arrays.
    copiers : Copiers
        The threads that copy large ones.
    """

    on_fault: Callable[[AccelError], object] = staticmethod(_ignore)

    def __init__(self, driver: Driver, description: DeviceDescription) -> None:
        self.driver = driver
        self.description = description
        self.fault: AccelError | None = None
        self._lock = threading.Lock()
        self._streams: dict[ContextStream, None] = {}
        self._abandoned: dict[ContextStream, None] = {}
        self._leftovers: list[Callable[[], None]] = []
        self._is_closed = False
        self._is_released = False
        self.staging = HostArena(_STAGING, registrar=self, block_bytes=_STAGING_BLOCK, device=description.spec)
        self.copiers = Copiers(self.staging, f"accel-cuda-{description.index}-copy")
        self.device = driver.call("cuDeviceGet", description.index)
        self.multiprocessors = self.attribute("MULTIPROCESSOR_COUNT")
        self.shared_limit = self.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        self.capability = self.attribute("COMPUTE_CAPABILITY_MAJOR"), self.attribute("COMPUTE_CAPABILITY_MINOR")
        self.handle = int(driver.call("cuDevicePrimaryCtxRetain", self.device))
        self.section = driver.section(self.handle, self.failure)
        self.query_section = driver.query_section
        self.pinned = PinnedRanges(driver, self.section)

    @property
    def is_alive(self) -> bool:
        """Whether the driver's objects of this context can be used and given back."""
        return self.fault is None and not self._is_released

    def attribute(self, name: str) -> int:
        """Return an attribute of the device by the driver's name, without ``CU_DEVICE_ATTRIBUTE_``."""
        return self.driver.device_attribute(self.device, name)

    def enter(self) -> None:
        """Make the context current on this thread for good. Only for threads of our own, where what blocks is done; elsewhere, use :attr:`section`."""
        self.check(self.driver.hot.set_current(Handle(self.handle)), "cuCtxSetCurrent")

    def check_open(self) -> None:
        """Raise the fault, or :class:`~accel.ClosedError` after :meth:`close`."""
        if self.fault is not None:
            raise self.fault.clone()
        if self._is_closed:
            raise ClosedError("the context is closed", device=self.description.spec)

    # -- calls and faults

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a driver function; see :meth:`accel_cuda.core.driver.Driver.call`. A fault that it raises is recorded as this context's."""
        try:
            return self.driver.call(name, *arguments)
        except AccelError as error:
            if error.is_fault:
                self.faulted(error)
            raise

    def check(self, status: int, call: str) -> None:
        """Raise what ``status`` stands for, unless it is success."""
        if status:
            raise self.failure(status, call)

    def failure(self, status: int, call: str) -> AccelError:
        """Return the error for a status, and record it if it is a fault."""
        error = self.driver.failure(status, call, device=self.description.spec)
        if error.is_fault:
            self.faulted(error)
        return error

    def faulted(self, error: AccelError) -> None:
        """Record a fault; the first one stands."""
        if self.fault is None:
            self.fault = error.clone(device=self.description.spec)
            self.on_fault(self.fault)

    # -- memory

    def register_host(self, address: int, nbytes: int) -> Registration:
        """Page-lock host memory; see :class:`accel.memory.HostRegistrar`. May block."""
        self.check_open()
        self.pinned.register(address, nbytes)
        return Registration(self.release, lambda: self.pinned.unregister(address))

    def release(self, close: Callable[[], None]) -> None:
        """Give something back now, or, if a stream that was abandoned may still use it, when that has ended."""
        with self._lock:
            if self._abandoned and self.fault is None:
                self._leftovers.append(close)
                return
        close()

    # -- streams and the end

    def workspaces_of(self, library: str) -> int:
        """Return how many workspaces the ops of a library use in a stream."""
        return 0

    def adopt(self, stream: ContextStream) -> None:
        """Have :meth:`close` close a stream."""
        with self._lock:
            self._streams[stream] = None

    def forget(self, stream: ContextStream) -> None:
        """Take a stream off the list that was closed."""
        with self._lock:
            self._streams.pop(stream, None)

    def abandon(self, stream: ContextStream) -> None:
        """Let a thread wait for the end of a stream that was abandoned."""
        with self._lock:
            self._streams.pop(stream, None)
            self._abandoned[stream] = None
        threading.Thread(target=self._bury, args=(stream,), name="accel-cuda-abandoned", daemon=True).start()

    def _bury(self, stream: ContextStream) -> None:
        stream.dispose()
        with self._lock:
            self._abandoned.pop(stream, None)
            leftovers = self._leftovers if not self._abandoned else []
            if leftovers:
                self._leftovers = []
        for close in leftovers:
            close()

    def close(self, *, abandon: bool = False) -> None:
        """Close every stream, and let go of the primary context.

        After a fault the driver's objects are dead, and left alone; slabs, which are all that ops worked in, are unmapped and come back. The primary context
        is never reset: that would unmap page-locked host memory of torch and CuPy, which the process may still read. What stays on the device is logged.

        Parameters
        ----------
        abandon
            Return at once; what still runs ends on its own, and a thread then gives back what it used.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            streams = list(self._streams)
        for stream in streams:
            stream.close(abandon=abandon)
        self.copiers.close()
        self.release(self.staging.close)
        self.on_fault = _ignore  # the listener must not be kept alive
        self.driver.unwatch(self)
        if self.fault is None:
            self.release(self._unload)
        elif self.driver.fault is not None:
            log_kept(self.description)

    def _unload(self) -> None:
        """Give back what was made in the context, and then the context. It is healthy, and no stream is left."""
        self._release_context()

    def _release_context(self) -> None:
        self._is_released = True
        self.driver.ignore("cuDevicePrimaryCtxRelease", self.device)
