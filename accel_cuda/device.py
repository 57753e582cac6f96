"""One generation of a GPU: what :class:`~accel.AccelDevice` offers in its primary context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel import InvalidArgumentError
from accel.enums import CAPABILITIES
from accel_cuda.core.blocking import Blocking
from accel_cuda.core.commands import COMMANDS, QUEUE_LIMIT
from accel_cuda.core.compiler import Nvrtc, architecture
from accel_cuda.core.context import CudaContext
from accel_cuda.core.event import CudaEvent
from accel_cuda.core.graph import GRAPH_KERNELS
from accel_cuda.core.interop import CudaExchange
from accel_cuda.core.launch import UserKernels
from accel_cuda.core.managed import MANAGED_KERNELS
from accel_cuda.core.modules import Modules
from accel_cuda.core.nvtx import nvtx_probe
from accel_cuda.core.slab import CudaSlab, SlabAllocation
from accel_cuda.core.stream import CudaStream
from accel_cuda.errors import is_out_of_memory
from accel_cuda.families.checksum import checksum
from accel_cuda.families.context import STAGES, ContextFamilies
from accel_cuda.families.kernels.bench import BENCH, bench_kernels
from accel_cuda.families.programs import Programs

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping

    from accel import DeviceDescription, DType
    from accel.backend import Injection, Kernel
    from accel.ops import CompiledKernel, KernelLayout
    from accel_cuda.core.driver import Driver
    from accel_cuda.core.nccl import Nccl, NcclGroup

__all__ = ["CudaDevice"]


class CudaDevice(CudaContext):
    """See :class:`~accel.AccelDevice`. Made by ``CudaBackend.open``.

    Attributes
    ----------
    granularity : int
        The size of a slab in bytes is a multiple of it.
    shares_processor : bool
        ``False``: the work runs on the GPU.
    launch_blocks : bool
        ``True``: see :class:`accel.world.group.FormsGroups`.
    capabilities : mapping
        All that there are, and what libraries offer that are installed.
    scratch, commands : dict
        See :class:`accel.backend.TakesScratch` and :class:`~accel.backend.CountsCommands`.
    functions : Programs
        The backend's own kernels by name, loaded as they are needed.
    families : ContextFamilies
        The families of ops.
    probe : NvtxProbe or None
        See :class:`accel.backend.ObservesWork`.
    """

    shares_processor: bool = False
    launch_blocks: bool = True
    capabilities: Mapping[str, frozenset[DType]]
    queue_limit: int = QUEUE_LIMIT

    def __init__(self, driver: Driver, description: DeviceDescription) -> None:
        self._allocation = SlabAllocation(driver, description.index)
        super().__init__(driver, description)
        self.granularity = self._allocation.granularity
        self._modules = Modules(self, Nvrtc(architecture(*self.capability), driver.version))
        self.functions = Programs(self, self._modules)
        self._user_kernels = UserKernels(self, self._modules)
        self.families = ContextFamilies(self, self.functions)
        self.capabilities = {**CAPABILITIES, **self.families.capabilities()}
        self.scratch = self.families.scratch()
        self.probe = nvtx_probe()
        self._offer()
        try:
            self.functions.load("memory")  # what any stream may need
        except BaseException:
            self._release_context()
            raise
        driver.watch(self)

    def _offer(self) -> None:
        """Gather the native kernels, and what tells which ops may block."""
        families, user = self.families, self._user_kernels
        checks = {**families.checks(), ("compiler", "launch"): lambda lane, op: user.lacks(op)}
        blocking = Blocking(checks, families.signatures(), self.pinned)
        self.may_block: Callable[[Any, Any], bool] = blocking.may_block
        """Whether enqueuing an op may block this time; asked once for each, without a further call."""
        self.commands = {**COMMANDS, **families.commands()}
        self._kernels: dict[str, Mapping[str, Kernel]] = {
            **{name: blocking.noting(name, kernels) for name, kernels in families.kernels().items()},
            "capture": GRAPH_KERNELS,
            "compiler": {"launch": user.launch},
            "graph": GRAPH_KERNELS,
            "memory": {**MANAGED_KERNELS, "checksum": checksum},
        }

    def create_stream(self, *, library: str = "") -> CudaStream:
        """Create a stream. One for ``library`` ``"memory"`` or ``"batch"`` has pinned memory for small copies at once.

        Raises
        ------
        ClosedError
            After :meth:`close`.
        AccelError
            The context's fault.
        """
        self.check_open()
        stream = CudaStream(self, self.functions)
        self.adopt(stream)
        if library in STAGES:
            stream.transfers.prepare()
        return stream

    def create_event(self) -> CudaEvent:
        """Create an event without timing. Never blocks."""
        self.check_open()
        return CudaEvent(self)

    def kernels(self, library: str) -> Mapping[str, Kernel]:
        """Return the kernels of ``library``."""
        if library == BENCH and BENCH not in self._kernels:
            self._kernels[BENCH] = bench_kernels(self.functions)
        return self._kernels.get(library, {})

    def compile(self, kernel: CompiledKernel) -> KernelLayout:
        """Compile a kernel of a user's and load it; see :class:`accel.ops.CompilesKernels`."""
        self.check_open()
        return self._user_kernels.compile(kernel)

    def prepare(self, library: str, stream: CudaStream) -> None:
        """Load the kernels of a library, and make what it needs in a stream; see :class:`accel.backend.PreparesLibraries`."""
        self.families.prepare(library, stream)

    def workspaces_of(self, library: str) -> int:
        """Return how many workspaces the ops of a library use in a stream."""
        return self.families.workspaces_of(library)

    def measure_scratch(self, op: Any) -> None:
        """See :class:`accel.backend.TakesScratch`. May block."""
        self.check_open()
        self.families.measure_scratch(op)

    def unique_id(self) -> bytes:
        """Return the id of a communicator; see :class:`accel.world.group.FormsGroups`. May block."""
        self.check_open()
        return self._nccl().unique_id()

    def join(self, unique_id: bytes, rank: int, size: int, deadline: float, revoked: threading.Event) -> NcclGroup:
        """Join a communicator; see :class:`accel.world.group.FormsGroups`. Blocks until all ranks have joined."""
        self.check_open()
        return self._nccl().join(unique_id, rank, size, deadline, revoked)

    def _nccl(self) -> Nccl:
        nccl: Nccl = self.families.states["collective"].loaded()
        return nccl

    def create_slab(self, nbytes: int) -> CudaSlab:
        """Take a slab of at least ``nbytes``.

        Raises
        ------
        OutOfMemoryError
            If the device has no such piece.
        """
        self.check_open()
        return CudaSlab(self, self._allocation, nbytes)

    def import_slab(self, fd: int, nbytes: int) -> CudaSlab:
        """Map the memory of another context's slab; see :class:`accel.backend.ImportsSlabs`."""
        self.check_open()
        return CudaSlab(self, self._allocation, nbytes, fd=fd)

    def create_exchange(self) -> CudaExchange:
        """Create what shares memory with other libraries in this process; see :class:`accel.exchange.SharesMemory`."""
        self.check_open()
        exchange = CudaExchange(self, self.functions)
        self.adopt(exchange.stream)
        return exchange

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

    def _unload(self) -> None:
        self.families.close()
        self._modules.close(self._release_context)
