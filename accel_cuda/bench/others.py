"""How others wait: CuPy with a host function, PyTorch with events."""

from __future__ import annotations

import asyncio
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["CupyWays", "TorchWays"]

_EMPTY = 'extern "C" __global__ void nothing() {}'
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

    def _event(self) -> Any:
        return self._events.pop() if self._events else self.torch.cuda.Event()
