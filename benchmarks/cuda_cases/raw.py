"""The raw twins: what a careful user writes with the driver alone. No streams, memory or waiting of this project is in their way.

Launches go through the same ``ctypes`` calls as this project's, which are the fastest there are from Python; what blocks goes through
``cuda.bindings``. Nothing but this module and :mod:`accel_cuda.core.driver` calls the driver.
"""

from __future__ import annotations

import asyncio
import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from accel_cuda.backend import CudaBackend
from accel_cuda.core.driver import Handle, LaunchConfig
from accel_cuda.core.libraries import load_module
from accel_cuda.core.pinned import PinnedBlock

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Array = np.ndarray[Any, Any]

__all__ = ["Raw"]

_THREAD_LOCAL = 1


class Raw:
    """One stream on the device's primary context, which is kept for the whole run.

    Parameters
    ----------
    index
        The GPU.

    Attributes
    ----------
    context : CudaDevice
        Has the loaded kernels, and makes device memory.
    bindings : module
        ``cuda.bindings.driver``.
    own_stream : CudaStream
        Where the twins launch.
    stream : int
        Its CUstream, as a number.
    handle
        The same, as ``cuda.bindings`` takes it.
    """

    def __init__(self, index: int) -> None:
        self.bindings: Any = load_module("cuda.bindings.driver", "cuda-bindings")
        self.context = CudaBackend().open(index)
        self.context.enter()  # as in a program without this project, whose context is current on its thread throughout
        self.own_stream = self.context.create_stream()
        self.stream = self.own_stream.handle
        self.handle = self.bindings.CUstream(self.stream)
        self._launch = self.context.driver.hot.launch
        self._pinned: list[PinnedBlock] = []

    def _arguments(self, nanoseconds: int, stream: int) -> tuple[Any, ...]:
        """Return what ``cuLaunchKernelEx`` is called with; it keeps alive what its pointers point to."""
        config = ctypes.pointer(LaunchConfig(1, 1, 1, 1, 1, 1, 0, stream, None, 0))
        if not nanoseconds:
            return config, self.context.functions["empty"], None, None
        parameters = (ctypes.POINTER(ctypes.c_uint64) * 1)(ctypes.pointer(ctypes.c_uint64(nanoseconds)))
        return config, self.context.functions["spin"], parameters, None

    def waiter(self) -> Callable[[], object]:
        """Return a call that blocks until the stream is through."""
        synchronize, stream = self.bindings.cuStreamSynchronize, self.handle
        return lambda: synchronize(stream)

    def blocking(self, nanoseconds: int = 0, *, launches: int = 1) -> Callable[[], object]:
        """Return a call that launches the given number of kernels and blocks until they have ended."""
        launch, synchronize, stream = self._launch, self.bindings.cuStreamSynchronize, self.handle
        config, function, parameters, extra = self._arguments(nanoseconds, self.stream)
        # Looked at once: a twin that fails is fast.
        self.context.check(launch(config, function, parameters, extra), "cuLaunchKernelEx")

        def one() -> None:
            launch(config, function, parameters, extra)
            synchronize(stream)

        def many() -> None:
            for _ in range(launches):
                launch(config, function, parameters, extra)
            synchronize(stream)

        return one if launches == 1 else many

    def launch(self, nanoseconds: int, stream: int) -> None:
        """Launch the kernel that spins for ``nanoseconds`` into a CUstream."""
        self._launch(*self._arguments(nanoseconds, stream))

    def launcher(self, nanoseconds: int = 0, *, stream: int | None = None) -> Callable[[], object]:
        """Return a call that launches the empty kernel, or one that spins, into ``stream`` (``None``: the own one) and returns at once."""
        launch = self._launch
        arguments = self._arguments(nanoseconds, self.stream if stream is None else stream)
        self.context.check(launch(*arguments), "cuLaunchKernelEx")
        return lambda: launch(*arguments)

    def turning(self, enqueue: Callable[[], object]) -> Callable[[], Awaitable[None]]:
        """Return what enqueues, and queries an event in each iteration of the loop until the work has ended."""
        stream, event = self.own_stream, self.context.create_event()

        async def run() -> None:
            enqueue()
            stream.record(event)
            while not event.query():  # noqa: ASYNC110 - this is what is measured
                await asyncio.sleep(0)

        return run

    def graph(self, launches: int) -> Callable[[], object]:
        """Return a call that launches a graph of the given number of empty kernels in a row, and blocks until it has ended."""
        call, launch = self.context.driver.call, self.launcher()
        mode = self.bindings.CUstreamCaptureMode(_THREAD_LOCAL)
        call("cuStreamBeginCapture", self.handle, mode)
        for _ in range(launches):
            launch()
        graph = call("cuStreamEndCapture", self.handle)
        executable, stream = Handle(int(call("cuGraphInstantiate", graph, 0))), Handle(self.stream)
        replay, synchronize, handle = self.context.driver.hot.graph_launch, self.bindings.cuStreamSynchronize, self.handle
        self.context.check(replay(executable, stream), "cuGraphLaunch")

        def run() -> None:
            replay(executable, stream)
            synchronize(handle)

        return run

    def pinned(self, nbytes: int) -> Array:
        """Return page-locked host memory of this process, which stays until the end."""
        block = PinnedBlock(self.context.driver, nbytes)
        self._pinned.append(block)
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(block.address))

    def pinned_copies(self, device: int, host: Array) -> tuple[Callable[[], object], Callable[[], object]]:
        """Return how pinned memory is copied to the device and back: an asynchronous copy, and waiting for the stream."""
        to, back, stream, wait = self.bindings.cuMemcpyHtoDAsync, self.bindings.cuMemcpyDtoHAsync, self.handle, self.waiter()
        address, nbytes = host.ctypes.data, host.nbytes

        def put() -> None:
            to(device, address, nbytes, stream)
            wait()

        def get() -> None:
            back(address, device, nbytes, stream)
            wait()

        return put, get

    def pageable_copies(self, device: int, host: Array) -> tuple[Callable[[], object], Callable[[], object]]:
        """Return how ordinary memory is copied to the device and back: the driver's blocking copies."""
        to, back, address, nbytes = self.bindings.cuMemcpyHtoD, self.bindings.cuMemcpyDtoH, host.ctypes.data, host.nbytes
        return lambda: to(device, address, nbytes), lambda: back(address, device, nbytes)

    def enter(self) -> None:
        """Make the context current on this thread."""
        self.context.enter()

    def close(self) -> None:
        """Give everything back."""
        self.context.close()
