"""The raw twins: what a careful user writes with the driver alone. No streams, memory or waiting of this project is in their way.

Launches go through the same ``ctypes`` calls as this project's, which are the fastest there are from Python; what blocks goes through
``cuda.bindings``. Nothing but this module and :mod:`accel_cuda.core.driver` calls the driver.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from accel_cuda.backend import CudaBackend
from accel_cuda.core.driver import LaunchConfig
from accel_cuda.core.libraries import load_module

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Raw"]


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

    def enter(self) -> None:
        """Make the context current on this thread."""
        self.context.enter()

    def close(self) -> None:
        """Give everything back."""
        self.context.close()
