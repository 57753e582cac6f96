"""Checksums of device memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["checksum"]

_BLOCK = 256
_BLOCKS_PER_PROCESSOR = 16


def checksum(lane: Any, op: Any, plan: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Fetch the checksum of the source's bytes; see ``checksum`` in ``families/kernels/memory.cu``."""
    stream, nbytes = lane.stream, op.source.nbytes
    context = stream.ready()
    stream.fill(outputs[0], bytes(8), 1)
    blocks = min(-(-nbytes // (8 * _BLOCK)), _BLOCKS_PER_PROCESSOR * context.multiprocessors)
    stream.launch(stream.functions["checksum"], max(1, blocks), _BLOCK, inputs[0], nbytes, outputs[0])
    lane.stream.copy_dtoh(memoryview(op.destination), outputs[0])
