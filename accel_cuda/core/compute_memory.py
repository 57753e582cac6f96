"""The part of the CUDA compute interface that every call needs: readiness, what is supported, memory and copies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel import ComputeBackend, InvalidArgumentError, NotInitializedError, OutOfMemoryError, UnsupportedError, arguments
from accel_cuda.core.channel import StreamChannel
from accel_cuda.core.transfers import STAGED, move_small

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accel import DType
    from accel.memory import Block
    from accel_cuda.core.stream import CudaStream

__all__ = ["WORKSPACE", "CudaMemory", "lacks_workspace"]

WORKSPACE = 32 << 20
"""Bytes of the workspace that a stream has for its kernels and products, which run one after the other."""

_SMALLEST = 512


def lacks_workspace(lane: Any, op: Any) -> bool:
    """Return whether the lane has no workspace for kernels and products: a kernel that takes it may block."""
    return not lane.compute.has_workspace


class CudaMemory(ComputeBackend):
    """Readiness, capabilities, allocation and copies of :class:`accel_cuda.families.compute.CudaCompute`.

    Parameters
    ----------
    stream
        Where the work goes.
    library
        What is going to be called: what it needs is made by :meth:`init`, the rest at its first use.

    Attributes
    ----------
    channel : StreamChannel
        The stream, for copies between host and device.
    """

    def __init__(self, stream: CudaStream, library: str) -> None:
        self._library = library
        self._stream = stream
        self._context = stream.context
        self._device = stream.context.description.spec
        self._supported: Mapping[str, frozenset[DType]] | None = None
        self._sizes: dict[int, int] = {}
        self._free: dict[int, list[int]] = {}
        self._workspaces: list[int] = []
        self.channel = StreamChannel(stream)

    @property
    def stream(self) -> CudaStream:
        """Where the work goes."""
        return self._stream

    @property
    def name(self) -> str:
        """``"cuda"``."""
        return "cuda"

    @property
    def is_initialized(self) -> bool:
        """Whether :meth:`init` has been called."""
        return self._supported is not None

    def synchronize(self) -> None:
        """Block until the stream is idle, releasing the GIL; raises the context's fault."""
        self._ready()
        self._stream.synchronize()

    def alloc(self, nbytes: int) -> int:
        """Allocate device memory; what was freed before is used again, in the stream's order.

        Raises
        ------
        OutOfMemoryError
            If the device has no room for it.
        """
        self._ready()
        arguments.not_negative("alloc", nbytes=nbytes)
        size = 1 << (max(nbytes, _SMALLEST) - 1).bit_length()
        free = self._free.get(size)
        pointer = free.pop() if free else self._take(size)
        self._sizes[pointer] = size
        return pointer

    def free(self, pointer: int) -> None:
        """Give memory back. Only this stream is given it again, behind what is enqueued so far.

        Raises
        ------
        InvalidArgumentError
            If ``pointer`` did not come from :meth:`alloc`, or was freed before.
        """
        self._ready()
        if pointer == 0:
            return
        size = self._sizes.pop(pointer, None)
        if size is None:
            raise InvalidArgumentError(f"{pointer:#x} is not allocated", device=self._device, op="free")
        self._free.setdefault(size, []).append(pointer)

    def copy_htod(self, destination: int, source: memoryview) -> None:
        """Enqueue a copy of host memory to the device.

        Up to 256 KiB are staged in pinned memory at once. More is transferred from where it lies if it is pinned. Else this thread copies it piece by
        piece, from 12 MiB on with others, and blocks while the stream is behind.
        """
        self._ready()
        data = arguments.host_bytes("copy_htod", source)
        if data.size:
            arguments.pointers("copy_htod", destination=destination)
            self._copy(destination, data.ctypes.data, data.size, source, is_put=True)

    def copy_dtoh(self, destination: memoryview, source: int) -> None:
        """Enqueue a copy of device memory to the host; see :meth:`copy_htod`."""
        self._ready()
        data = arguments.host_bytes("copy_dtoh", destination, is_written=True)
        if data.size:
            arguments.pointers("copy_dtoh", source=source)
            self._copy(source, data.ctypes.data, data.size, destination, is_put=False)

    def _copy(self, device: int, host: int, nbytes: int, keep: memoryview, *, is_put: bool) -> None:
        """Copy between addresses of the device and of the host; ``keep`` is the host memory."""
        stream, channel = self._stream, self.channel
        context, transfers = stream.ready(), stream.transfers
        if nbytes <= STAGED and (piece := self._room(nbytes)) is not None:
            if is_put:
                move_small(piece.address, host, nbytes)
            with context.section:
                channel.transfer(device, piece.address, nbytes, is_put=is_put)
            if is_put:
                transfers.begin(None, piece)
            else:
                transfers.begin(keep, piece, host, nbytes)
        elif context.pinned.covers(host, nbytes):
            with context.section:
                channel.transfer(device, host, nbytes, is_put=is_put)
            transfers.begin(keep)
        elif not context.copiers.copy(channel, device, host, nbytes, is_put=is_put):
            # No pinned memory is left: the driver stages it, with one thread. It may hold others up while it waits for the stream, so wait before.
            channel.reached()
            with context.section:
                if is_put:
                    context.call("cuMemcpyHtoDAsync", device, host, nbytes, stream.handle)
                else:
                    context.call("cuMemcpyDtoHAsync", host, device, nbytes, stream.handle)
            transfers.begin(keep)

    def prepare_transfers(self) -> None:
        """Make the pinned memory that small copies are staged in, if it is not there. May block."""
        self._stream.transfers.prepare()

    def use_workspace(self, address: int, nbytes: int) -> None:
        """Take a workspace; see :class:`accel.backend.TakesWorkspace`."""
        self._workspaces.append(address)

    def release_workspaces(self) -> None:
        """Use no workspace any more; see :class:`accel.backend.TakesWorkspace`."""
        self._workspaces.clear()

    @property
    def has_workspace(self) -> bool:
        """Whether there is a workspace for kernels and products."""
        return bool(self._workspaces)

    def prepare_workspace(self) -> int:
        """Return the workspace of kernels and products; an instance that was lent none takes one of its own. May block then."""
        if not self._workspaces:
            self._workspaces.append(self._take(WORKSPACE))
        return self._workspaces[0]

    def _room(self, nbytes: int) -> Block | None:
        """Return pinned memory for one piece. Growing the arena blocks: only a caller that may, or that did not ask whether it may, gets there."""
        transfers = self._stream.transfers
        return transfers.stage(nbytes) or transfers.grow(nbytes)

    def _take(self, size: int) -> int:
        try:
            with self._context.section:
                pointer = int(self._context.call("cuMemAlloc", size))
        except OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"the device has no {size} bytes", requested=size, code=error.code, library=error.library, device=self._device, op="alloc"
            ) from error
        self._stream.at_close(lambda: self._context.driver.ignore("cuMemFree", pointer))
        return pointer

    def _ready(self) -> None:
        if self._supported is None:
            raise NotInitializedError("the compute interface is not initialized", device=self._device, remedy="Call init() first.")

    def _require(self, call: str, dtype: DType) -> None:
        """Refuse a call with elements that it is not offered for."""
        if self._supported is None:
            self._ready()
        elif dtype not in self._supported.get(call, ()):
            raise UnsupportedError(f"{call} is not offered for {getattr(dtype, 'value', dtype)!s}", device=self._device, op=call)
