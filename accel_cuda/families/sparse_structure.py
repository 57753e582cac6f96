"""Checked copies of the indices of sparse matrices: indices may say anything, and cuSPARSE reads and writes wherever they say.

Whether they are sound is known on the device only, when the library's calls are enqueued already. So copies that are not sound
are replaced by ones that are; the library computes with these, and the status fails the op.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel.ops.sparse_operands import index_out_of_range
from accel_cuda.families.kernels import aligned

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from accel_cuda.core.stream import CudaStream

__all__ = ["copy_structure", "is_sound", "structure_nbytes"]

_BLOCK, _MOST_BLOCKS = 256, 4096
_SORTED = ("add", "solve")
"""Ops whose libraries rely on the order of indices in each row: ``csrgeam2``, and cuDSS."""
_INFO = 16
"""Where the info of a system is in its status."""


def structure_nbytes(op: Any) -> int:
    """Return the bytes of the copies."""
    return sum(aligned(numbers.nbytes) for _, (_, _, indices, indptr, _) in _matrices(op) for numbers in (indices, indptr))


def copy_structure(stream: CudaStream, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> tuple[list[int], list[int]]:
    """Enqueue the check and the copies; the op's status tells what is wrong.

    Returns
    -------
    inputs, outputs
        What the rest of the op's kernel takes: the copies in place of what they are of; and results, the info of a system, and memory to work in.

    Raises
    ------
    InvalidArgumentError
        If there are elements, and none can be sound.
    """
    taken, (*made, status, scratch) = list(inputs), outputs
    stream.ready()
    for first, (form, data, indices, indptr, shape) in _matrices(op):
        is_coo, count, marks, width = form == "coo", indices.size, indptr.size, indices.dtype.itemsize
        major, minor = shape[::-1] if form == "csc" else shape
        if form == "bsr":
            major, minor = major // data.shape[1], minor // data.shape[2]
        if count and (not major or not minor or count >> (8 * width - 1)):
            raise index_out_of_range(0)
        copies = scratch, scratch + aligned(indices.nbytes)
        scratch = copies[1] + aligned(indptr.nbytes)
        if max(count, marks):
            blocks, sizes = min(-(-max(count, marks) // _BLOCK), _MOST_BLOCKS), (count, marks, major, minor, int(is_coo))
            is_sorted = int(op.kind in _SORTED)
            check, replace = (stream.functions[f"sparse_{step}_{width}"] for step in ("check", "replace"))
            stream.launch(check, blocks, _BLOCK, taken[first + 1], taken[first + 2], *copies, status, *sizes, is_sorted)
            stream.launch(replace, blocks, _BLOCK, *copies, status, *sizes)
        taken[first + 1], taken[first + 2] = copies
    if getattr(op, "check", False):
        made.append(status + _INFO)
    return taken, [*made, scratch]


def is_sound(lane: Any, outputs: Sequence[int]) -> bool:
    """Return whether all indices are sound, for an op that waits for the device anyway. Blocks."""
    told = bytearray(8)
    lane.stream.copy_dtoh(memoryview(told), outputs[-2])
    lane.stream.synchronize()
    return not any(told)


def _matrices(op: Any) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Yield the sparse operands, each with the place of its first address among the inputs."""
    if op.kind == "sddmm":
        yield 2, op.pattern
        return
    yield 0, op.a
    if op.kind in ("add", "spgemm", "spgemm_size"):
        yield 3, op.b
