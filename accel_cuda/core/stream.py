"""Streams of the CUDA backend."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from accel import AccelError, ClosedError, InvalidArgumentError, UnsupportedError
from accel_cuda.core.driver import Handle, LaunchConfig
from accel_cuda.core.event import CudaSpan
from accel_cuda.core.host_copies import HostCopies
from accel_cuda.core.pinned import PinnedBlock
from accel_cuda.core.transfers import StreamTransfers
from accel_cuda.errors import NOT_READY, error_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from accel.backend import HostFunction, Injection
    from accel_cuda.core.context import CudaContext
    from accel_cuda.core.event import CudaEvent

__all__ = ["WORKSPACE", "CudaStream", "lacks_workspace"]

WORKSPACE = 32 << 20
"""Bytes of the workspace that a stream has for its kernels and products, which run one after the other."""

_BLOCK = 256
_KERNEL_FILLS = {8: "fill8", 16: "fill16"}
_ARGUMENTS = 24


class CudaStream:
    """An ordered queue of device work; see :class:`~accel.AccelStream`. Made by ``CudaDevice.create_stream``.

    One thread at a time enqueues; any thread may synchronize.

    Attributes
    ----------
    functions : mapping
        The backend's own kernels by name.
    handle : int
        The driver's CUstream.
    pointer : Handle
        The same, for hot calls.
    is_capturing : bool
        Whether what is enqueued now becomes part of a graph, and does not run.
    transfers : Transfers
        Copies between host and device that are on their way.
    blas : object or None
        What cuBLAS has for this stream, once it is made: see :func:`accel_cuda.families.cublas.blas_of`.
    workspaces : list of int
        Addresses of memory that kernels and libraries work in, one after the other; see :class:`accel.backend.TakesWorkspace`.
    """

    __slots__ = (
        "_config",
        "_config_pointer",
        "_copies",
        "_functions",
        "_hangs",
        "_hot",
        "_idle_spans",
        "_on_close",
        "_parameters",
        "_refusal",
        "_values",
        "blas",
        "context",
        "functions",
        "handle",
        "is_capturing",
        "pointer",
        "transfers",
        "workspaces",
    )

    def __init__(self, context: CudaContext, functions: Mapping[str, Handle]) -> None:
        self.context = context
        self.functions = functions
        self.transfers = StreamTransfers(context.staging)
        self._refusal: AccelError | None = None
        self._functions: dict[int, HostFunction] = {}
        self._hangs: list[PinnedBlock] = []
        self._on_close: list[Callable[[], object]] = []
        self._idle_spans: list[CudaSpan] = []
        self._hot = context.driver.hot  # and not its functions: in a forked process it replaces them
        # The driver copies the arguments before a launch returns, so one place for them is enough.
        self._values: Any = (ctypes.c_uint64 * _ARGUMENTS)()  # takes slices of tuples, unlike what its stubs say
        start = ctypes.addressof(self._values)
        self._parameters = (ctypes.c_void_p * _ARGUMENTS)(*(start + 8 * i for i in range(_ARGUMENTS)))
        with context.section:
            self.handle = int(context.call("cuStreamCreate", int(context.driver.CUstream_flags.CU_STREAM_NON_BLOCKING)))
        self.is_capturing = False
        self.blas: Any = None
        self.workspaces: list[int] = []
        self._copies = HostCopies(self)
        self.pointer = Handle(self.handle)
        self._config = LaunchConfig(1, 1, 1, 1, 1, 1, 0, self.handle, None, 0)
        self._config_pointer = ctypes.byref(self._config)

    # -- what the protocol asks for

    def record(self, event: CudaEvent) -> bool:
        """Put a mark after everything enqueued so far; return ``False``: whether it has been passed already costs more to ask than it brings."""
        context = self.ready()
        if event.context is not context:
            raise _foreign()
        transfers = self.transfers
        # Before the mark: a thread beside the loop may begin another transfer meanwhile, which the mark says nothing of.
        ticket = transfers.issued
        status = self._hot.event_record(event.handle, self.pointer)
        if status:
            raise context.failure(status, "cuEventRecord")
        event.mark(self.transfers, ticket)
        if transfers.reserved:
            transfers.release_reserved()
        return False

    def begin_span(self) -> CudaSpan:
        """See :class:`accel.backend.TimesWork`."""
        context = self.ready()
        if self._idle_spans:
            span = self._idle_spans.pop()
        else:
            span = CudaSpan(context, self._idle_spans)
            self.at_close(span.close)
        context.check(self._hot.event_record(span.begin, self.pointer), "cuEventRecord")
        return span

    def end_span(self, span: CudaSpan) -> None:
        """See :class:`accel.backend.TimesWork`."""
        self.ready().check(self._hot.event_record(span.end, self.pointer), "cuEventRecord")

    def wait(self, event: CudaEvent) -> None:
        """Let later work wait for the event's mark as it is recorded now."""
        context = self.ready()
        if event.context is not context:
            raise _foreign()
        if not event.has_passed:
            context.check(context.driver.hot.wait_event(self.pointer, event.handle, 0), "cuStreamWaitEvent")

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        """Copy device memory to device memory."""
        context = self.ready()
        if nbytes:
            with context.section:
                status = context.driver.hot.copy(Handle(destination), Handle(source), ctypes.c_size_t(nbytes), self.pointer)
            context.check(status, "cuMemcpyDtoDAsync")

    def fill(self, destination: int, pattern: bytes, count: int) -> None:
        """Write ``pattern`` ``count`` times.

        Raises
        ------
        InvalidArgumentError
            If ``pattern`` is not of 1, 2, 4, 8 or 16 bytes, or ``count`` is negative.
        """
        width = len(pattern)
        if width not in (1, 2, 4, 8, 16) or count < 0:
            raise InvalidArgumentError(
                f"fill of {count} patterns of {width} bytes", remedy="Use 1, 2, 4, 8 or 16 bytes, and a count of 0 or more."
            )
        context = self.ready()
        if not count:
            return
        if pattern == pattern[:1] * width:
            pattern, count, width = pattern[:1], count * width, 1
        if width <= 4:
            value = ctypes.c_uint(int.from_bytes(pattern, "little"))
            with context.section:
                status = context.driver.hot.fill[width](Handle(destination), value, ctypes.c_size_t(count), self.pointer)
            context.check(status, "cuMemsetAsync")
        else:
            low, high = int.from_bytes(pattern[:8], "little"), int.from_bytes(pattern[8:], "little")
            self.launch(self.functions[_KERNEL_FILLS[width]], -(-count // _BLOCK), _BLOCK, destination, low, high, count)

    def copy_htod(self, destination: int, source: memoryview) -> None:
        """Copy host memory to device memory; see :class:`~accel_cuda.core.host_copies.HostCopies`."""
        if source.nbytes:
            self._copies.run(destination, np.frombuffer(source, np.uint8).ctypes.data, source.nbytes, source, is_put=True)

    def copy_dtoh(self, destination: memoryview, source: int) -> None:
        """Copy device memory to host memory; see :class:`~accel_cuda.core.host_copies.HostCopies`."""
        if destination.nbytes:
            self._copies.run(source, np.frombuffer(destination, np.uint8).ctypes.data, destination.nbytes, destination, is_put=False)

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the version of the protocol by which CUDA libraries exchange streams, and the handle."""
        return 0, self.handle

    def launch_host_function(self, function: HostFunction) -> None:
        """Call ``function``'s C function, on a thread of the driver's, once everything enqueued so far has ended. After a fault it is never called."""
        context = self.ready()
        # Kept to the end: the driver does not say when it was called, and callers use a few functions again and again.
        self._functions[id(function)] = function
        status = context.driver.hot.launch_host_function(self.pointer, Handle(function.address), Handle(function.argument))
        context.check(status, "cuLaunchHostFunc")

    def synchronize(self) -> None:
        """Block this thread until everything enqueued so far has ended, releasing the GIL; raises the context's fault."""
        context = self.context
        if context.fault is not None:
            raise context.fault.clone()
        if not self.handle:
            raise self._refusal or ClosedError("the stream is closed", device=context.description.spec)
        ticket = self.transfers.issued
        context.call("cuStreamSynchronize", self.handle)
        self.transfers.finish(ticket)

    def close(self, *, abandon: bool = False) -> None:
        """Give the stream back after what is enqueued; enqueuing raises :class:`~accel.ClosedError` from now on. Idempotent.

        Parameters
        ----------
        abandon
            Return at once. What is enqueued runs on; a thread waits for its end, and then gives back what it used.
        """
        if self._refusal is not None:
            return
        self._refusal = ClosedError("the stream is closed", device=self.context.description.spec)
        if abandon and self.context.fault is None:
            for block in self._hangs:
                ctypes.c_int.from_address(block.address).value = 1
            self.context.abandon(self)
        else:
            self.dispose()
            self.context.forget(self)

    # -- workspaces

    def workspace_wanted(self, library: str) -> int:
        """Return the bytes of the next workspace that a library needs here; see :class:`accel.backend.TakesWorkspace`."""
        return WORKSPACE if len(self.workspaces) < self.context.workspaces_of(library) else 0

    def use_workspace(self, address: int, nbytes: int) -> None:
        """Take a workspace; cuBLAS's handle, if it is there and has given its workspace back, gets the first one."""
        self.workspaces.append(address)
        if self.blas is not None and len(self.workspaces) == 1:
            self.blas.use_workspace(address, nbytes)

    def release_workspaces(self) -> None:
        """Use no workspace any more; see :class:`accel.backend.TakesWorkspace`."""
        self.workspaces.clear()

    def prepare_workspace(self) -> int:
        """Return the first workspace; a stream that was lent none takes one of its own. May block then."""
        if not self.workspaces:
            context = self.ready()
            with context.section:
                pointer = int(context.call("cuMemAlloc", WORKSPACE))
            self.at_close(lambda: context.driver.ignore("cuMemFree", pointer))
            self.workspaces.append(pointer)
        return self.workspaces[0]

    # -- what the context and the kernels call

    def ready(self) -> CudaContext:
        """Return the context; raise if nothing can be enqueued.

        It need not be current to launch kernels, and to record, query and wait for events. Copies, fills and a library's calls go into ``context.section``.
        """
        context = self.context
        if context.fault is not None:
            raise context.fault.clone()
        if self._refusal is not None:
            raise self._refusal.clone()
        return context

    def launch(self, function: Handle, blocks: int, threads: int, *arguments: int) -> None:
        """Enqueue a one-dimensional launch of a kernel whose arguments, or the fields of its only one, are 8 bytes each."""
        self._values[: len(arguments)] = arguments
        config = self._config
        config.grid_x = blocks
        config.block_x = threads
        status = self._hot.launch(self._config_pointer, function, self._parameters, None)
        if status:
            raise self.context.failure(status, "cuLaunchKernelEx")

    def launch_wide(self, function: Handle, grid: tuple[int, int], block: tuple[int, int], shared: int, *arguments: int) -> None:
        """Enqueue a two-dimensional launch, with ``shared`` bytes of dynamic shared memory a block."""
        self._values[: len(arguments)] = arguments
        self._launch_wide(function, grid, block, shared, self._parameters)

    def launch_with(
        self, function: Handle, grid: tuple[int, int], block: tuple[int, int], argument: ctypes.Structure, shared: int = 0
    ) -> None:
        """Enqueue a two-dimensional launch of a kernel whose only argument is a structure."""
        self._launch_wide(function, grid, block, shared, (ctypes.c_void_p * 1)(ctypes.addressof(argument)))

    def _launch_wide(
        self, function: Handle, grid: tuple[int, int], block: tuple[int, int], shared: int, parameters: ctypes.Array[ctypes.c_void_p]
    ) -> None:
        config = LaunchConfig(*grid, 1, *block, 1, shared, self.handle, None, 0)
        self.context.check(self._hot.launch(ctypes.byref(config), function, parameters, None), "cuLaunchKernelEx")

    def launch_graph(self, graph: Handle) -> None:
        """Enqueue an executable graph. In the section, which fails if the context was destroyed, as for copies."""
        context = self.context
        with context.section:
            status = self._hot.graph_launch(graph, self.pointer)
        if status:
            raise context.failure(status, "cuGraphLaunch")

    def failure(self, status: int, call: str, library: str) -> AccelError:
        """Return what a library's status stands for: the device's fault, if there is one behind it."""
        fault = self.find_fault(f"{library} {call}")
        return error_of(status, call, library=library, device=self.context.description.spec) if fault is None else fault

    def find_fault(self, call: str) -> AccelError | None:
        """Return the fault that the driver has found by now, ``None`` if there is none. Waits for nothing; what asked is ``call``."""
        context = self.context
        # A stream that is being captured must not be asked; of one that is closed nothing is known.
        found = 0 if self.is_capturing or not self.handle else context.driver.status("cuStreamQuery", self.handle)
        return None if found in (0, NOT_READY) else context.failure(found, call)

    def at_close(self, release: Callable[[], object]) -> None:
        """Call ``release`` once the stream has ended, unless the context is dead then."""
        self._on_close.append(release)

    def inject(self, injection: Injection) -> None:
        """Enqueue a fault or a hang."""
        context = self.ready()
        if injection.kind == "poison":
            context.driver.planned = injection.error
            self.launch(self.functions["poison"], 1, 1)
            return
        if injection.kind != "hang":
            raise UnsupportedError(f"there is no injection {injection.kind!r}", device=context.description.spec)
        with context.section:
            flag = PinnedBlock(context.driver, 4)
        self.at_close(flag.close)
        self.launch(self.functions["hang"], 1, 1, flag.address)
        release = injection.release
        if release is None:
            self._hangs.append(flag)
        else:
            name = f"accel-cuda-{context.description.index}-hang"
            threading.Thread(target=_end_hang, args=(release, flag), name=name, daemon=True).start()

    def dispose(self) -> None:
        """Wait for the stream's end and give everything back; of a dead context, what is not the driver's."""
        context, handle = self.context, self.handle
        if context.fault is None:
            with contextlib.suppress(AccelError), context.section:  # a fault that shows here is recorded
                self._give_back(handle)
        self.handle = 0
        self._on_close.clear()
        self.transfers.close()
        self._functions.clear()

    def _give_back(self, handle: int) -> None:
        context = self.context
        status = context.driver.status("cuStreamSynchronize", handle) if handle else 0
        if status:
            context.failure(status, "cuStreamSynchronize")  # records a fault
        if context.fault is None:
            self.transfers.finish(self.transfers.issued)
            for release in self._on_close:
                release()
            if handle:
                context.driver.ignore("cuStreamDestroy", handle)


def lacks_workspace(lane: Any, op: Any) -> bool:
    """Return whether the lane's stream has no workspace: a kernel that takes it may block."""
    return not lane.stream.workspaces


def _end_hang(release: Callable[[], object], flag: PinnedBlock) -> None:
    try:
        release()
    finally:
        ctypes.c_int.from_address(flag.address).value = 1


def _foreign() -> AccelError:
    return InvalidArgumentError("the event belongs to another context", remedy="Create events on the device whose streams use them.")
