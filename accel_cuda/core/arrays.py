"""Copies between the device and numpy arrays in page-locked memory: where they lie is found once, when it is asked whether the copy may block.

All else goes the way of :meth:`CudaMemory.copy_htod` and :meth:`CudaMemory.copy_dtoh`.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from accel.engine import kernels

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from accel.backend import Kernel

__all__ = ["ARRAY_KERNELS", "address_of"]

_BYTE = ctypes.c_byte


def address_of(array: Any) -> int:
    """Return where the elements of a numpy array of one element or more start."""
    try:
        return ctypes.addressof(_BYTE.from_buffer(array))  # a third of what numpy's own way takes
    except (TypeError, ValueError, BufferError):  # read-only, or of elements that the buffer protocol does not know
        return int(array.ctypes.data)


def put(lane: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Copy a host array to the device."""
    source = op.source
    address = lane.stream.transfers.taken_address(source)
    if address:
        lane.compute.copy_from_pinned(outputs[0], address, source)
    else:
        kernels.put(lane, op, inputs, outputs)


def get(lane: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Copy device memory into a host array."""
    destination = op.destination
    address = lane.stream.transfers.taken_address(destination)
    if address:
        lane.compute.copy_to_pinned(address, inputs[0], destination)
    else:
        kernels.get(lane, op, inputs, outputs)


ARRAY_KERNELS: Mapping[str, Kernel] = {"put": put, "get": get}
"""Op kind -> kernel."""
