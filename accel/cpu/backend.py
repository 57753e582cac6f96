"""The CPU as a device: what ``open_device("cpu")`` finds, and the context that owns its streams."""

from __future__ import annotations

import hashlib
import mmap
import platform
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.backend import DeviceDescription
from accel.cpu.context import CpuContext
from accel.cpu.exchange import CpuExchange
from accel.cpu.families.digest import checksum
from accel.cpu.group import CpuGroup, Rendezvous
from accel.cpu.parts import PARTS
from accel.cpu.stream import CpuEvent, CpuStream
from accel.enums import CAPABILITIES
from accel.errors import BackendUnavailableError, ClosedError, InvalidArgumentError
from accel.memory.machine import memory_size
from accel.memory.slab import MemfdSlab

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from accel.backend import Injection, Kernel
    from accel.dtype import DType

__all__ = ["CpuBackend", "CpuDevice", "CpuSlab"]

_WARM = np.ones((128, 128), np.float32)
"""Larger than what BLAS computes on the calling thread alone."""

_MANY_OPS = 64
"""Ops of a graph that are enqueued on the loop's thread."""


class CpuBackend:
    """The processor of this machine, as one device.

    Attributes
    ----------
    name : str
        ``"cpu"``.
    preference : int
        The lowest: ``open_device("auto")`` takes the CPU only where there is nothing better.
    """

    name: str = "cpu"
    preference: int = 0

    def devices(self) -> Sequence[DeviceDescription]:
        """List the one device."""
        return (DeviceDescription(backend=self.name, index=0, name=_processor_name(), uuid=_machine_uuid(), memory=memory_size()),)

    def open(self, index: int) -> CpuDevice:
        """Create a context. Any number of them can be open; each has streams and a fault of its own.

        Raises
        ------
        BackendUnavailableError
            If ``index`` is not 0.
        """
        devices = self.devices()
        if not 0 <= index < len(devices):
            raise BackendUnavailableError(f"cpu:{index} is not there: the backend has {len(devices)} device(s)", remedy="Use 'cpu'.")
        return CpuDevice(devices[index])


class CpuDevice:
    """One generation of the CPU device; see :class:`~accel.backend.AccelDevice`.

    Parameters
    ----------
    description
        The device.

    Attributes
    ----------
    description : DeviceDescription
    granularity : int
        The size of a slab in bytes is a multiple of it.
    shares_processor : bool
        ``True``.
    capabilities : mapping
        All that there are.
    launch_blocks : bool
        ``False``: a collective is work of a stream like any other.
    """

    granularity: int = 1 << 16
    shares_processor: bool = True
    capabilities: Mapping[str, frozenset[DType]] = CAPABILITIES
    launch_blocks: bool = False

    def __init__(self, description: DeviceDescription) -> None:
        self.description = description
        self._context = CpuContext(description.spec, description.memory)
        self._rendezvous = Rendezvous()
        self._lock = threading.Lock()
        self._streams = 0
        self._is_closed = False

    def create_stream(self, *, library: str = "") -> CpuStream:
        """Create a stream, and the thread for work that is too large for the caller's.

        Parameters
        ----------
        library
            Streams of all libraries are alike.

        Raises
        ------
        ClosedError
            After :meth:`close`.
        OutOfMemoryError
            If the operating system has no thread for it.
        AccelError
            The context's fault.
        """
        with self._lock:
            if self._is_closed:
                raise ClosedError("the context is closed", device=self.description.spec)
            self._streams += 1
            stream = CpuStream(self._context, f"accel-cpu-{self.description.index}-stream-{self._streams}")
        if self._streams == 1:  # the threads of numpy's BLAS start here, not in the first product on the loop's thread
            stream.submit(partial(np.matmul, _WARM, _WARM))  # on the stream: a fork waits for what runs there
            stream.synchronize()
        return stream

    def create_event(self) -> CpuEvent:
        """Create an event. Never blocks."""
        return CpuEvent(self._context)

    def kernels(self, library: str) -> Mapping[str, Kernel]:
        """Return the kernels of ``library``."""
        if library == "memory":
            return {"checksum": checksum}
        part = PARTS.get(library)
        return {} if part is None else part.kernels

    def may_block(self, lane: Any, op: Any) -> bool:
        """Return whether the op is a graph of many small ones, each of which may run as it is enqueued. What takes long runs on the stream's own thread."""
        return op.library == "graph" and len(op.program.ops) > _MANY_OPS

    def create_slab(self, nbytes: int) -> CpuSlab:
        """Take a slab of at least ``nbytes``; it belongs to the caller, and outlives the context.

        Raises
        ------
        OutOfMemoryError
            If the system has no such piece, or this context would hold more than the machine has.
        """
        return CpuSlab(self._context, nbytes)

    def import_slab(self, fd: int, nbytes: int) -> CpuSlab:
        """Map the memory of another context's slab; see :class:`accel.backend.ImportsSlabs`."""
        return CpuSlab(self._context, nbytes, fd=fd)

    def create_exchange(self) -> CpuExchange:
        """Create what takes other libraries' arrays in this process's memory."""
        return CpuExchange(self._context)

    def unique_id(self) -> bytes:
        """Return an id for a group of devices of this machine; see :class:`accel.world.group.FormsGroups`."""
        return self._rendezvous.unique_id()

    def join(self, unique_id: bytes, rank: int, size: int, deadline: float, revoked: threading.Event) -> CpuGroup:
        """Join a group; see :class:`accel.world.group.FormsGroups`."""
        return self._rendezvous.join(unique_id, rank, size, deadline, revoked)

    def check_alive(self, stream: CpuStream) -> None:
        """Raise the context's fault, if it has one; see :class:`accel.backend.ChecksAlive`."""
        if self._context.fault is not None:
            raise self._context.fault.clone()

    def inject(self, injection: Injection, stream: CpuStream) -> None:
        """Bring a fault about in ``stream``, once it gets there. It always surfaces later, never in this call.

        Raises
        ------
        InvalidArgumentError
            If ``stream`` belongs to another context.
        """
        if stream.context is not self._context:
            raise InvalidArgumentError("the stream belongs to another context", device=self.description.spec)
        stream.inject(injection)

    def close(self, *, abandon: bool = False) -> None:
        """Close every stream. Idempotent.

        Parameters
        ----------
        abandon
            Return at once. Work that is running ends on its daemon thread, which touches no other memory than before: slabs closed
            meanwhile are unmapped once it has ended. Do not reuse a slab of an abandoned context.
        """
        with self._lock:
            self._is_closed = True
        self._rendezvous.close()
        for stream in self._context.streams():
            stream.close(abandon=abandon)


class CpuSlab(MemfdSlab):
    """A slab whose closing waits, without blocking, for work that was abandoned while it ran.

    Attributes
    ----------
    closed : threading.Event
        See :class:`accel.backend.HeldSlab`.
    """

    __slots__ = ("_context", "closed")

    def __init__(self, context: CpuContext, nbytes: int, *, fd: int | None = None) -> None:
        self.closed = threading.Event()
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE  # what it will be: other threads must find it counted while it is made
        context.reserve(size)
        try:
            super().__init__(nbytes, fd=fd)
        except BaseException:
            context.unreserve(size)
            raise
        self._context = context

    def close(self) -> None:
        """Give the memory back, as soon as no abandoned work can touch it. Idempotent."""
        if self._map is None:
            super().close()
        else:
            self._context.release(self._unmap)

    def _unmap(self) -> None:
        if self._map is not None:  # closed twice while it had to wait
            super().close()
            self._context.unreserve(self.nbytes)
            self.closed.set()


def _processor_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() == "model name":
                    return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "CPU"


def _machine_uuid() -> str:
    """Return what tells this machine from others. Hashed: a machine's id is not for publishing."""
    identity = platform.node()
    try:
        with open("/etc/machine-id", encoding="ascii") as file:
            identity = file.read().strip() or identity
    except OSError:
        pass
    return f"CPU-{hashlib.sha256(f'accel:{identity}'.encode()).hexdigest()[:32]}"
