"""One generation of a GPU: the device's primary context, and everything that was made in it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from accel import AccelError, ClosedError, InvalidArgumentError
from accel.memory import HostArena
from accel_cuda.core.blocking import NOTED, Blocking
from accel_cuda.core.commands import COMMANDS, QUEUE_LIMIT
from accel_cuda.core.compiler import Nvrtc, architecture
from accel_cuda.core.compute import CudaCompute
from accel_cuda.core.copies import Copiers
from accel_cuda.core.driver import Handle
from accel_cuda.core.event import CudaEvent
from accel_cuda.core.graph import GRAPH_KERNELS
from accel_cuda.core.interop import CudaExchange
from accel_cuda.core.kept import log_kept
from accel_cuda.core.launch import UserKernels
from accel_cuda.core.managed import MANAGED_KERNELS
from accel_cuda.core.natives import BLAS_KERNELS, DNN_KERNELS
from accel_cuda.core.pinned import PinnedRanges, Registration
from accel_cuda.core.programs import OPS_WITH_PROGRAMS, Modules, Programs
from accel_cuda.core.slab import CudaSlab, allocation_of, granularity_of
from accel_cuda.core.stream import CudaStream
from accel_cuda.errors.packages import is_out_of_memory
from accel_cuda.families.checksum import checksum
from accel_cuda.families.fft import FftLibrary
from accel_cuda.families.kernels.bench import BENCH, bench_kernels
from accel_cuda.families.rng import RNG_KERNELS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from accel import DeviceDescription
    from accel.backend import Injection, Kernel
    from accel.ops import CompiledKernel, KernelLayout
    from accel_cuda.core.driver import Driver

__all__ = ["CudaDevice"]

_STAGING, _STAGING_BLOCK = 1 << 30, 8 << 20
_MULTIPROCESSORS, _MAJOR, _MINOR, _SHARED = 16, 75, 76, 97


def _nobody(error: AccelError) -> None:
    """Tell nobody."""


class CudaDevice:
    """See :class:`~accel.AccelDevice`. Made by ``CudaBackend.open``.

    Attributes
    ----------
    description : DeviceDescription
    granularity : int
        Slabs are multiples of so many bytes.
    shares_processor : bool
        ``False``: the work runs on the GPU.
    scratch_libraries : frozenset of str
        Libraries whose kernels work in memory that the layers above lend them.
    driver : Driver
    device : CUdevice
        The driver's handle of the GPU.
    handle : int
        The driver's CUcontext.
    section : Section
        ``with context.section:`` makes the context current, and leaves the thread as it was. What enqueues by hot calls needs none; libraries do.
    functions : Programs
        The backend's own kernels by name, loaded as they are needed.
    capability : tuple of int
        The compute capability, major and minor.
    multiprocessors, shared_limit : int
        How many the device has; bytes of shared memory that one block can have.
    fault : AccelError or None
        What poisoned the context. Whoever raises it raises a clone.
    on_fault : callable
        See :class:`accel.fate.TellsFaults`.
    pinned : PinnedRanges
        Which host memory is page-locked.
    staging : HostArena
        Pinned memory through which all its streams copy ordinary arrays.
    copiers : Copiers
        The threads that copy large ones.
    """

    shares_processor: bool = False
    on_fault: Callable[[AccelError], object] = staticmethod(_nobody)
    scratch_libraries: frozenset[str] = frozenset({"fft"})
    queue_limit: int = QUEUE_LIMIT

    def __init__(self, driver: Driver, description: DeviceDescription) -> None:
        self.driver = driver
        self.description = description
        self.fault: AccelError | None = None
        self._lock = threading.Lock()
        self._streams: dict[CudaStream, None] = {}
        self._abandoned: dict[CudaStream, None] = {}
        self._leftovers: list[Callable[[], None]] = []
        self._is_closed = False
        self._fft = FftLibrary(self)
        self.staging = HostArena(_STAGING, registrar=self, block_bytes=_STAGING_BLOCK, device=description.spec)
        self.copiers = Copiers(self.staging, f"accel-cuda-{description.index}-copy")
        self.device = driver.call("cuDeviceGet", description.index)
        self.allocation = allocation_of(driver, description.index)
        self.granularity = granularity_of(driver, self.allocation)
        self.multiprocessors = self.attribute(_MULTIPROCESSORS)
        self.shared_limit = self.attribute(_SHARED)
        self.capability = self.attribute(_MAJOR), self.attribute(_MINOR)
        nvrtc = Nvrtc(architecture(*self.capability), driver.version)
        self._modules = Modules(self, nvrtc)
        self.functions = Programs(self, self._modules)
        self._user_kernels = UserKernels(self, self._modules)
        self.handle = int(driver.call("cuDevicePrimaryCtxRetain", self.device))
        self.section = driver.section(self.handle, self.failure)
        self.pinned = PinnedRanges(driver, self.section)
        self._offer()
        try:
            self.functions.load("memory")  # what any stream may need
        except BaseException:
            driver.ignore("cuDevicePrimaryCtxRelease", self.device)
            raise
        driver.watch(self)

    def _offer(self) -> None:
        """Gather the native kernels, and what tells which ops may block."""
        lacks = {**dict.fromkeys(OPS_WITH_PROGRAMS, self.functions.lacks), "launch": self._user_kernels.lacks}
        self._blocking = Blocking(lacks, dict.fromkeys(self._fft.kernels, self._fft.may_block), self.pinned)
        self.may_block: Callable[[Any, Any], bool] = self._blocking.may_block
        """Whether enqueuing an op may block this time; asked once for each, without a further call."""
        self._commands = {**COMMANDS, **dict.fromkeys(self._fft.kernels, self._fft.commands)}
        self._kernels: dict[str, Mapping[str, Kernel]] = {
            **{name: self._noting(kernels) for name, kernels in (("blas", BLAS_KERNELS), ("dnn", DNN_KERNELS))},
            "capture": GRAPH_KERNELS,
            "compiler": {"launch": self._user_kernels.launch},
            "fft": self._fft.kernels,
            "graph": GRAPH_KERNELS,
            "memory": {**MANAGED_KERNELS, "checksum": checksum},
            "rng": RNG_KERNELS,
        }

    def _noting(self, kernels: Mapping[str, Kernel]) -> Mapping[str, Kernel]:
        return {kind: self._blocking.noting(kernel) if kind in NOTED else kernel for kind, kernel in kernels.items()}

    def attribute(self, number: int) -> int:
        """Return one of the driver's CUdevice_attribute."""
        return int(self.driver.call("cuDeviceGetAttribute", self.driver.CUdevice_attribute(number), self.device))

    # -- what the protocol asks for

    def create_stream(self, *, priority: int = 0) -> CudaStream:
        """Create a stream. Lower ``priority`` numbers run first.

        Raises
        ------
        InvalidArgumentError
            If the device has no such priority; the message has its range.
        ClosedError
            After :meth:`close`.
        AccelError
            The context's fault.
        """
        self._check_open()
        self._check_priority(priority)
        stream = CudaStream(self, priority)
        with self._lock:
            self._streams[stream] = None
        return stream

    def create_event(self) -> CudaEvent:
        """Create an event without timing. Never blocks."""
        self._check_open()
        return CudaEvent(self)

    def create_compute(self, stream: CudaStream, library: str) -> CudaCompute:
        """Create the compute interface whose calls go into ``stream``, initialized, with what ``library`` needs; anything else is made at its first use."""
        compute = CudaCompute(stream, library)
        compute.init()
        return compute

    def kernels(self, library: str) -> Mapping[str, Kernel]:
        """Return native kernels of ``library``; its other ops go through the compute interface."""
        if library == BENCH and BENCH not in self._kernels:
            self._kernels[BENCH] = bench_kernels(self)
        return self._kernels.get(library, {})

    def compile(self, kernel: CompiledKernel) -> KernelLayout:
        """Compile a kernel of a user's and load it; see :class:`accel.backend.CompilesKernels`."""
        self._check_open()
        return self._user_kernels.compile(kernel)

    def prepare(self, library: str, compute: CudaCompute) -> None:
        """Load the kernels of a library, and make what it needs in a stream; see :class:`accel.backend.PreparesLibraries`."""
        self.functions.prepare(library)
        compute.prepare(library)
        if library == "fft":
            self._fft.prepare(compute.stream)

    def scratch_nbytes(self, op: Any) -> int | None:
        """Return how many bytes a kernel works in; see :class:`accel.backend.TakesScratch`."""
        return self._fft.scratch_nbytes(op)

    def measure_scratch(self, op: Any) -> None:
        """See that :meth:`scratch_nbytes` knows. May block."""
        self._check_open()
        self._fft.measure(op)

    def commands(self, op: Any) -> int:
        """Return how many commands an op enqueues at most; see :class:`accel.backend.CountsCommands`."""
        count = self._commands.get(op.kind, 1)
        return count if isinstance(count, int) else count(op)

    def create_slab(self, nbytes: int) -> CudaSlab:
        """Take a slab of at least ``nbytes``.

        Raises
        ------
        OutOfMemoryError
            If the device has no such piece.
        """
        self._check_open()
        return CudaSlab(self, nbytes)

    def import_slab(self, fd: int, nbytes: int) -> CudaSlab:
        """Map the memory of another context's slab; see :class:`accel.backend.ImportsSlabs`."""
        self._check_open()
        return CudaSlab(self, nbytes, fd=fd)

    def create_exchange(self) -> CudaExchange:
        """Create what shares memory with other libraries in this process; see :class:`accel.exchange.SharesMemory`."""
        self._check_open()
        exchange = CudaExchange(self)
        with self._lock:
            self._streams[exchange.stream] = None
        return exchange

    def register_host(self, address: int, nbytes: int) -> Registration:
        """Page-lock host memory; see :class:`accel.memory.HostRegistrar`. May block."""
        self._check_open()
        self.pinned.register(address, nbytes)
        return Registration(self.release, lambda: self.pinned.unregister(address))

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether torch or CuPy says that the device has no memory; see :class:`accel.backend.KnowsShortages`."""
        return is_out_of_memory(error)

    def check_alive(self, stream: CudaStream) -> None:
        """Raise the context's fault, if the driver knows of one; see :class:`accel.backend.ChecksAlive`."""
        stream.find_fault("cuStreamQuery")
        if self.fault is not None:
            raise self.fault.clone()

    def inject(self, injection: Injection, stream: CudaStream) -> None:
        """Bring a fault about in ``stream``: a kernel that writes to an illegal address, or one that spins until it is let go.

        A poisoned context ends CUDA for the whole process; the fault's scope is PROCESS whatever the injection says.
        """
        if stream.context is not self:
            raise InvalidArgumentError("the stream belongs to another context", device=self.description.spec)
        stream.inject(injection)

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
        self.on_fault = _nobody  # it would keep who is told alive
        self.driver.unwatch(self)
        if self.fault is None:
            self.release(self._release_context)
        elif self.driver.fault is not None:
            log_kept(self.description)

    def _release_context(self) -> None:
        self._fft.close()
        self._modules.close(lambda: self.driver.ignore("cuDevicePrimaryCtxRelease", self.device))

    # -- what streams, events and slabs call

    @property
    def is_alive(self) -> bool:
        """Whether the driver's objects of this context can be used and given back."""
        return self.fault is None and not self._is_closed

    def enter(self) -> None:
        """Make the context current on this thread for good. Only for threads of our own, where what blocks is done; elsewhere, use :attr:`section`."""
        self.check(self.driver.hot.set_current(Handle(self.handle)), "cuCtxSetCurrent")

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a driver function; see :meth:`accel_cuda.core.driver.Driver.call`. A fault that it raises is this context's, and taken note of."""
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
        """Return the error for a status, after taking note of it if it is a fault."""
        error = self.driver.failure(status, call, device=self.description.spec)
        if error.is_fault:
            self.faulted(error)
        return error

    def faulted(self, error: AccelError) -> None:
        """Take note of the fault; the first one stands."""
        if self.fault is None:
            self.fault = error.clone(device=self.description.spec)
            self.on_fault(self.fault)

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

    def _check_priority(self, priority: int) -> None:
        """Refuse what the driver would silently take for something else."""
        if not priority:
            return
        with self.section:
            lowest, highest = (int(each) for each in self.call("cuCtxGetStreamPriorityRange"))
        if not highest <= priority <= lowest:
            raise InvalidArgumentError(
                f"a stream cannot have priority {priority} on {self.description.name}",
                device=self.description.spec,
                remedy=f"Use {highest} (runs first) to {lowest}.",
            )

    def _check_open(self) -> None:
        if self.fault is not None:
            raise self.fault.clone()
        if self._is_closed:
            raise ClosedError("the context is closed", device=self.description.spec)
