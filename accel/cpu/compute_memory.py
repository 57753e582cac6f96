"""The part of the CPU's compute interface that every call needs: readiness, what is supported, memory and copies."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from accel import arguments
from accel.compute import ComputeBackend
from accel.cpu import costs
from accel.cpu.views import Array, array
from accel.errors import InvalidArgumentError, NotInitializedError, OutOfMemoryError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from accel.dtype import DType

__all__ = ["ALIGNMENT", "CpuMemory", "WorkStream"]

ALIGNMENT = 256
"""What the addresses that :meth:`CpuMemory.alloc` returns are multiples of."""

_BYTES = np.dtype(np.uint8)


class WorkStream(Protocol):
    """What a compute interface needs of its stream."""

    def submit(self, work: Callable[[], None], cost: float, keep: object = None) -> None:
        """Run ``work``, which takes about ``cost`` seconds, after everything submitted so far; ``keep`` lives until it has ended."""

    def synchronize(self) -> None:
        """Block until everything submitted so far has ended."""


class CpuMemory(ComputeBackend):
    """Readiness, capabilities, allocation and copies of :class:`accel.cpu.compute.CpuCompute`.

    Parameters
    ----------
    stream
        Where the work goes.
    device
        Name of the device, for error messages.
    """

    def __init__(self, stream: WorkStream, *, device: str = "cpu:0") -> None:
        self._stream = stream
        self._submit = stream.submit
        self._device = device
        self._supported: Mapping[str, frozenset[DType]] | None = None
        self._blocks: dict[int, Array] = {}

    @property
    def name(self) -> str:
        """``"cpu"``."""
        return "cpu"

    def init(self) -> None:
        """Make the instance ready; the first one of a process starts the threads of numpy's BLAS."""
        if self._supported is None:
            # Larger than what BLAS computes on the calling thread alone.
            warm = np.ones((128, 128), np.float32)
            self._submit(lambda: np.matmul(warm, warm), 1.0)  # on the stream: a fork waits for what runs there
            self._stream.synchronize()
            self._supported = self.capabilities()

    @property
    def is_initialized(self) -> bool:
        """Whether :meth:`init` has been called."""
        return self._supported is not None

    def synchronize(self) -> None:
        """Block until the stream is idle, releasing the GIL; raises the context's fault."""
        self._ready()
        self._stream.synchronize()

    def alloc(self, nbytes: int) -> int:
        """Allocate anonymous memory.

        Raises
        ------
        OutOfMemoryError
            If the system has no room for it.
        """
        self._ready()
        arguments.not_negative("alloc", nbytes=nbytes)
        try:
            block = np.empty(max(1, nbytes) + ALIGNMENT - 1, _BYTES)
        except (MemoryError, ValueError) as error:
            raise OutOfMemoryError(f"the system has no {nbytes} bytes", requested=nbytes, device=self._device, op="alloc") from error
        address = -(-block.ctypes.data // ALIGNMENT) * ALIGNMENT
        self._blocks[address] = block
        return address

    def free(self, pointer: int) -> None:
        """Give memory back once the work submitted so far has ended.

        Raises
        ------
        InvalidArgumentError
            If ``pointer`` did not come from :meth:`alloc`, or was freed before.
        """
        self._ready()
        if pointer == 0:
            return
        block = self._blocks.pop(pointer, None)
        if block is None:
            raise InvalidArgumentError(f"{pointer:#x} is not allocated", device=self._device, op="free")
        self._submit(_nothing, 0.0, block)

    def copy_htod(self, destination: int, source: memoryview) -> None:
        """Enqueue a copy of host memory to the device."""
        self._ready()
        data = arguments.host_bytes("copy_htod", source)
        if data.size:
            arguments.pointers("copy_htod", destination=destination)
            self._submit(partial(_copy, array(destination, data.shape, _BYTES), data), costs.copying(data.size), source)

    def copy_dtoh(self, destination: memoryview, source: int) -> None:
        """Enqueue a copy of device memory to the host."""
        self._ready()
        data = arguments.host_bytes("copy_dtoh", destination, is_written=True)
        if data.size:
            arguments.pointers("copy_dtoh", source=source)
            self._submit(partial(_copy, data, array(source, data.shape, _BYTES)), costs.copying(data.size), destination)

    def _ready(self) -> None:
        if self._supported is None:
            raise NotInitializedError("the compute interface is not initialized", device=self._device, remedy="Call init() first.")

    def _require(self, call: str, dtype: DType) -> None:
        """Refuse a call with elements that it is not offered for."""
        if self._supported is None:
            self._ready()
        elif dtype not in self._supported.get(call, ()):
            raise UnsupportedError(f"{call} is not offered for {getattr(dtype, 'value', dtype)!s}", device=self._device, op=call)


def _nothing() -> None:
    pass


def _copy(destination: Array, source: Array) -> None:
    destination[...] = source
