"""The twins of the cases in this folder: graphs and copies of the driver, kernels of a given length, products and copies of PyTorch."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from accel_cuda.bench.others import CupyWays, TorchWays
from accel_cuda.bench.raw import Raw
from accel_cuda.bench.rig import Rig
from accel_cuda.core.driver import Handle
from accel_cuda.core.pinned import PinnedBlock

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    Array = np.ndarray[Any, Any]

__all__ = ["CupyTwins", "RawTwins", "TorchTwins", "TwinRig"]

_THREAD_LOCAL = 1
_SPIN = """
extern "C" __global__ void spin(unsigned long long nanoseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < nanoseconds);
}
"""


class RawTwins(Raw):
    """The driver alone: graphs, copies, and a look at an event in each iteration of the loop.

    Parameters
    ----------
    index
        The GPU.
    """

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._pinned: list[PinnedBlock] = []

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


class CupyTwins(CupyWays):
    """CuPy, with a kernel of a given length.

    Parameters
    ----------
    index
        The GPU.
    """

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._spin = self.cupy.RawKernel(_SPIN, "spin")

    def op(self, nanoseconds: int) -> Callable[[], Awaitable[None]]:
        """Return how a kernel of that length is awaited; 0 is the empty kernel."""
        return self.launched(self._spin, (np.uint64(nanoseconds),)) if nanoseconds else self.empty()


class TorchTwins(TorchWays):
    """PyTorch, with kernels of a given length, products, copies and pinned memory."""

    @property
    def stream(self) -> int:
        """The CUstream that PyTorch's ops go into."""
        return int(self._stream.cuda_stream)

    def matmul(self, n: int, dtype: str) -> Callable[[], object]:
        """Return a product of square matrices into a buffer."""
        torch = self.torch
        a, b, c = (torch.ones(n, n, dtype=getattr(torch, dtype), device=self._device) for _ in range(3))
        return lambda: torch.matmul(a, b, out=c)

    def products(self, matrices: Mapping[int, Array], streams: int) -> Callable[[int], Awaitable[None]]:
        """Return how the square of a matrix is computed into new memory, in streams taken in turn, and awaited by ``event.query``."""
        torch = self.torch
        far = {n: torch.from_numpy(matrix).to(self._device) for n, matrix in matrices.items()}
        pool = itertools.cycle([torch.cuda.Stream(self._device) for _ in range(streams)])
        torch.cuda.synchronize(self._device)

        async def product(n: int) -> None:
            operand, event = far[n], self._event()
            with torch.cuda.stream(next(pool)):
                made = operand @ operand
                event.record()
            while not event.query():  # noqa: ASYNC110 - this is what is measured
                await asyncio.sleep(0)
            del made
            self._events.append(event)

        return product

    def spinning(self, raw: RawTwins, streams: int) -> list[Callable[[int], Awaitable[None]]]:
        """Return, for each stream, how this project's spinning kernel is awaited by ``event.query``; it is launched raw."""
        torch = self.torch

        def spin_in(stream: Any) -> Callable[[int], Awaitable[None]]:
            async def spin(nanoseconds: int) -> None:
                event = self._event()
                raw.launch(nanoseconds, int(stream.cuda_stream))
                event.record(stream)
                while not event.query():  # noqa: ASYNC110 - this is what is measured
                    await asyncio.sleep(0)
                self._events.append(event)

            return spin

        return [spin_in(torch.cuda.Stream(self._device)) for _ in range(streams)]

    def copies(self, host: Array) -> tuple[Callable[[], object], Callable[[], object]]:
        """Return how an array is copied to the device and back, blocking."""
        torch, stream = self.torch, self._stream
        near = torch.from_numpy(host)
        far = torch.empty_like(near, device=self._device)

        def put() -> None:
            far.copy_(near, non_blocking=True)
            stream.synchronize()

        def get() -> None:
            near.copy_(far, non_blocking=True)
            stream.synchronize()

        return put, get

    def pinned(self, nbytes: int) -> Array:
        """Return pinned host memory of PyTorch's."""
        array: Array = self.torch.empty(nbytes, dtype=self.torch.uint8, pin_memory=True).numpy()
        return array

    def release(self) -> None:
        """Give cached memory back to the device."""
        self.torch.cuda.empty_cache()


TwinRig: TypeAlias = Rig[RawTwins, CupyTwins, TorchTwins]
"""The rig of the cases in this folder."""
