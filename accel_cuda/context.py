"""One generation of a GPU: the device's primary context, and everything that was made in it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from accel import ClosedError, InvalidArgumentError
from accel_cuda.blocking import Blocking
from accel_cuda.compiler import own_kernels
from accel_cuda.compute import CudaCompute
from accel_cuda.driver import Handle
from accel_cuda.event import CudaEvent
from accel_cuda.fft import FftLibrary
from accel_cuda.graph import GRAPH_KERNELS
from accel_cuda.rng import RNG
from accel_cuda.slab import CudaSlab, allocation_of, granularity_of
from accel_cuda.stream import CudaStream

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from accel import AccelError, DeviceDescription
    from accel.backend import Injection, Kernel
    from accel_cuda.driver import Driver

__all__ = ["CudaDevice"]

_MULTIPROCESSORS, _MAJOR, _MINOR, _SHARED = 16, 75, 76, 97


class CudaDevice:
    """See :class:`~accel.AccelDevice`. Made by ``CudaBackend.open``.

    Attributes
    ----------
    description : DeviceDescription
    granularity : int
        Slabs are multiples of so many bytes.
    shares_processor : bool
        ``False``: the work runs on the GPU.
    driver : Driver
    handle : int
        The driver's CUcontext.
    functions : dict
        Name -> handle of the CUfunction, of the backend's own kernels, loaded.
    multiprocessors, shared_limit : int
        How many the device has; bytes of shared memory that one block can have.
    fault : AccelError or None
        What poisoned the context. Whoever raises it raises a clone.
    """

    shares_processor: bool = False

    def __init__(self, driver: Driver, description: DeviceDescription) -> None:
        self.driver = driver
        self.description = description
        self.fault: AccelError | None = None
        self.functions: dict[str, Handle] = {}
        self._lock = threading.Lock()
        self._streams: dict[CudaStream, None] = {}
        self._abandoned: dict[CudaStream, None] = {}
        self._leftovers: list[Callable[[], None]] = []
        self._modules: list[Any] = []
        self._is_closed = False
        self._blocking = Blocking()
        self._fft = FftLibrary()
        self._kernels: Mapping[str, Mapping[str, Kernel]] = {**GRAPH_KERNELS, "fft": self._fft.kernels, "rng": RNG}
        self._device = driver.call("cuDeviceGet", description.index)
        self.allocation = allocation_of(driver, description.index)
        self.granularity = granularity_of(driver, self.allocation)
        self.multiprocessors = self._attribute(_MULTIPROCESSORS)
        self.shared_limit = self._attribute(_SHARED)
        self.handle = int(driver.call("cuDevicePrimaryCtxRetain", self._device))
        try:
            self._load_kernels()
        except BaseException:
            driver.ignore("cuDevicePrimaryCtxRelease", self._device)
            raise
        driver.watch(self)

    def _attribute(self, number: int) -> int:
        return int(self.driver.call("cuDeviceGetAttribute", self.driver.CUdevice_attribute(number), self._device))

    def _load_kernels(self) -> None:
        """Load every function now: the first launch of one that is not loaded may wait for the whole device."""
        driver = self.driver
        self.enter()
        for cubin in own_kernels(f"sm_{self._attribute(_MAJOR)}{self._attribute(_MINOR)}"):
            module = driver.call("cuModuleLoadData", cubin)
            self._modules.append(module)
            count = int(driver.call("cuModuleGetFunctionCount", module))
            for function in driver.call("cuModuleEnumerateFunctions", count, module):
                driver.call("cuFuncLoad", function)
                name = driver.call("cuFuncGetName", function).decode()
                if name.startswith("attention"):
                    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                    driver.call("cuFuncSetAttribute", function, limit, self.shared_limit)
                self.functions[name] = Handle(int(function))

    # -- what the protocol asks for

    def create_stream(self, *, priority: int = 0) -> CudaStream:
        """Create a stream. Lower ``priority`` numbers run first; the driver clamps them to what the device has.

        Raises
        ------
        ClosedError
            After :meth:`close`.
        AccelError
            The context's fault.
        """
        self._check_open()
        stream = CudaStream(self, priority)
        with self._lock:
            self._streams[stream] = None
        return stream

    def create_event(self) -> CudaEvent:
        """Create an event without timing. Never blocks."""
        self._check_open()
        return CudaEvent(self)

    def create_compute(self, stream: CudaStream) -> CudaCompute:
        """Create the compute interface whose calls go into ``stream``, initialized: with its cuBLAS handle, workspace and pinned memory."""
        compute = CudaCompute(stream)
        compute.init()
        return compute

    def kernels(self, library: str) -> Mapping[str, Kernel]:
        """Return native kernels of ``library``; its other ops go through the compute interface."""
        return self._kernels.get(library, {})

    def may_block(self, lane: Any, op: Any) -> bool:
        """Return whether enqueuing ``op`` may block this time; asked once for each op."""
        return self._fft.may_block(lane, op) if op.library == "fft" else self._blocking.may_block(lane, op)

    def create_slab(self, nbytes: int) -> CudaSlab:
        """Take a slab of at least ``nbytes``.

        Raises
        ------
        OutOfMemoryError
            If the device has no such piece.
        """
        self._check_open()
        return CudaSlab(self, nbytes)

    def inject(self, injection: Injection, stream: CudaStream) -> None:
        """Bring a fault about in ``stream``: a kernel that writes to an illegal address, or one that spins until it is let go.

        A poisoned context ends CUDA for the whole process; the fault's scope is PROCESS whatever the injection says.
        """
        if stream.context is not self:
            raise InvalidArgumentError("the stream belongs to another context", device=self.description.spec)
        stream.inject(injection)

    def close(self, *, abandon: bool = False) -> None:
        """Close every stream, and let go of the primary context. After a fault nothing is given back but slabs: the driver's objects are dead.

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
        if self.fault is None:
            self.release(self._release_context)

    def _release_context(self) -> None:
        self.enter()
        for module in self._modules:
            self.driver.ignore("cuModuleUnload", module)
        self._modules.clear()
        self.driver.ignore("cuDevicePrimaryCtxRelease", self._device)

    # -- what streams, events and slabs call

    @property
    def is_alive(self) -> bool:
        """Whether the driver's objects of this context can be used and given back."""
        return self.fault is None and not self._is_closed

    def use(self) -> None:
        """Make the context current on this thread, for hot calls."""
        self.driver.use(self.handle)

    def enter(self) -> None:
        """Make the context current on this thread, whatever others have made current since."""
        self.driver.use_surely(self.handle)

    def check(self, status: int, call: str) -> None:
        """Raise what ``status`` stands for, unless it is success."""
        if status:
            raise self.failure(status, call)

    def failure(self, status: int, call: str) -> AccelError:
        """Return the error for a status, after taking note of it if it is a fault."""
        error = self.driver.failure(status, call, device=self.description.spec)
        if error.is_fault:
            self.faulted(error)
        return error

    def faulted(self, error: AccelError) -> None:
        """Take note of the fault; the first one stands."""
        if self.fault is None:
            self.fault = error.clone(device=self.description.spec)

    def forget(self, stream: CudaStream) -> None:
        """Take a stream off the list that was closed."""
        with self._lock:
            self._streams.pop(stream, None)

    def abandon(self, stream: CudaStream) -> None:
        """Let a thread wait for the end of a stream that was abandoned."""
        with self._lock:
            self._streams.pop(stream, None)
            self._abandoned[stream] = None
        threading.Thread(target=self._bury, args=(stream,), name="accel-cuda-abandoned", daemon=True).start()

    def _bury(self, stream: CudaStream) -> None:
        stream.dispose()
        with self._lock:
            self._abandoned.pop(stream, None)
            leftovers = self._leftovers if not self._abandoned else []
            if leftovers:
                self._leftovers = []
        for close in leftovers:
            close()

    def release(self, close: Callable[[], None]) -> None:
        """Give something back now, or, if a stream that was abandoned may still use it, when that has ended."""
        with self._lock:
            if self._abandoned and self.fault is None:
                self._leftovers.append(close)
                return
        close()

    def _check_open(self) -> None:
        if self.fault is not None:
            raise self.fault.clone()
        if self._is_closed:
            raise ClosedError("the context is closed", device=self.description.spec)
