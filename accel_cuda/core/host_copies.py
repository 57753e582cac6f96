"""Copies between host and device, each by the way that is fastest for its size and its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_cuda.core.channel import StreamChannel
from accel_cuda.core.transfers import STAGED, move_small

if TYPE_CHECKING:
    from accel.memory import Block
    from accel_cuda.core.transfers import StreamTransfers

__all__ = ["HostCopies"]


class HostCopies:
    """The copies of one stream.

    Parameters
    ----------
    stream
        Where they go: the :class:`~accel_cuda.core.stream.CudaStream` that has them.
    """

    __slots__ = ("_channel", "_stream")

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._channel = StreamChannel(stream)

    def run(self, device: int, host: int, nbytes: int, keep: memoryview, *, is_put: bool) -> None:
        """Enqueue a copy between addresses of the device and of the host; ``keep`` is the host memory.

        Up to 256 KiB are staged in pinned memory at once. More is transferred from where it lies if it is pinned.
        Else this thread copies it piece by piece, from 12 MiB on with others, and blocks while the stream is behind.
        """
        stream, channel = self._stream, self._channel
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

    def _room(self, nbytes: int) -> Block | None:
        """Return pinned memory for one piece. Growing the arena blocks: only a caller that may, or that did not ask whether it may, gets there."""
        transfers: StreamTransfers = self._stream.transfers
        return transfers.stage(nbytes) or transfers.grow(nbytes)
