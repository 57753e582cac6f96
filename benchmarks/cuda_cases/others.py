"""How others wait: CuPy with a host function, PyTorch with events."""

from __future__ import annotations

import asyncio
import importlib
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from benchmarks.cuda_cases.raw import Raw

    Array = np.ndarray[Any, Any]

__all__ = ["CupyWays", "TorchWays"]

_EMPTY = 'extern "C" __global__ void nothing() {}'
_SPIN = """
extern "C" __global__ void spin(unsigned long long nanoseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < nanoseconds);
}
"""
_ONE = (1,)


class CupyWays:
    """CuPy: ``RawKernel``, and a host function that wakes the loop.

    Parameters
    ----------
    index
        The GPU.

    Raises
    ------
    ImportError, RuntimeError
        If CuPy is not installed, or not for this GPU.
    """

    name = "CuPy"

    def __init__(self, index: int) -> None:
        cupy: Any = importlib.import_module("cupy")
        cupy.cuda.Device(index).use()
        self.cupy = cupy
        self._empty = cupy.RawKernel(_EMPTY, "nothing")
        self._spin = cupy.RawKernel(_SPIN, "spin")
        self._stream = cupy.cuda.Stream(non_blocking=True)

    def empty(self) -> Callable[[], Awaitable[None]]:
        """Return how an empty kernel is awaited on the running loop."""
        return self.launched(self._empty, ())

    def launched(self, kernel: Any, arguments: tuple[Any, ...]) -> Callable[[], Awaitable[None]]:
        """Return how one thread of a ``RawKernel`` is awaited on the running loop."""
        loop, stream = asyncio.get_running_loop(), self._stream

        def wake(future: asyncio.Future[None]) -> None:
            loop.call_soon_threadsafe(future.set_result, None)

        async def op() -> None:
            future: asyncio.Future[None] = loop.create_future()
            with stream:
                kernel(_ONE, _ONE, arguments)
            stream.launch_host_func(wake, future)
            await future

        return op

    def op(self, nanoseconds: int) -> Callable[[], Awaitable[None]]:
        """Return how a kernel of that length is awaited; 0 is the empty kernel."""
        return self.launched(self._spin, (np.uint64(nanoseconds),)) if nanoseconds else self.empty()


class TorchWays:
    """PyTorch: an op in a stream of its own and an event, waited for in a thread or queried in each iteration of the loop.

    Events are used again, and the stream is made current once: both are faster than what most programs do.

    Parameters
    ----------
    index
        The GPU.

    Raises
    ------
    ImportError, RuntimeError, AssertionError
        If PyTorch is not installed, or not for this GPU.
    """

    name = "PyTorch"

    def __init__(self, index: int) -> None:
        self.torch: Any = importlib.import_module("torch")
        torch = self.torch
        # As this project and the raw twin compute.
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        self._device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self._device)
        torch.cuda.set_device(self._device)
        torch.cuda.set_stream(self._stream)
        self._x = torch.zeros(1, device=self._device)
        self._events: list[Any] = []

    def add(self) -> Callable[[], object]:
        """Return PyTorch's cheapest op: one addition in place."""
        add = self._x.add_
        return lambda: add(1.0)

    def queried(self, launch: Callable[[], object]) -> Callable[[], Awaitable[None]]:
        """Return how an op is awaited with a query of the event in each iteration of the loop."""

        async def op() -> None:
            event = self._event()
            launch()
            event.record()
            while not event.query():  # noqa: ASYNC110 - this is what is measured
                await asyncio.sleep(0)
            self._events.append(event)

        return op

    def in_thread(self, launch: Callable[[], object]) -> Callable[[], Awaitable[None]]:
        """Return how an op is awaited by a thread that blocks."""

        async def op() -> None:
            event = self._event()
            launch()
            event.record()
            await asyncio.to_thread(event.synchronize)
            self._events.append(event)

        return op

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

    def spinning(self, raw: Raw, streams: int) -> list[Callable[[int], Awaitable[None]]]:
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

    def synchronize(self) -> None:
        """Wait for all that is enqueued."""
        self.torch.cuda.synchronize(self._device)

    def release(self) -> None:
        """Give cached memory back to the device."""
        self.torch.cuda.empty_cache()

    def _event(self) -> Any:
        return self._events.pop() if self._events else self.torch.cuda.Event()
