"""Memory given by address: numpy views, through which the CPU kernels see it, copies and fills."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from accel.memory.space import BASE

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.ref import AccelRef

__all__ = ["Array", "array", "fill_memory", "move", "move_small", "operand", "result"]

Array: TypeAlias = np.ndarray[Any, Any]
"""A numpy array of any shape and element type."""

# numpy makes a view of memory that it does not own from an object with a buffer and an offset into it. Building such an object for each pointer
# costs microseconds, so there is one, which spans the whole address space and owns nothing: an address is an offset into it. It starts at the
# second page because ctypes takes address 0 for "no buffer", and ends where numpy's signed offsets end.
_MEMORY: Any = (ctypes.c_char * (2**63 - 1 - BASE)).from_address(BASE)


def operand(pointer: int, ref: AccelRef) -> Array:
    """Return a view of the memory at ``pointer`` with the shape, dtype and strides of a ref."""
    dtype = ref.dtype.numpy
    strides = tuple([step * dtype.itemsize for step in ref.strides]) if ref.is_strided else None
    return np.ndarray(ref.shape, dtype, _MEMORY, pointer - BASE, strides)


def result(pointer: int, plan: Any, place: int = 0) -> Array:
    """Return a view of the memory at ``pointer`` as one result of a plan, the first unless ``place`` says which."""
    writes = plan.writes
    if place < len(writes):
        return operand(pointer, writes[place])
    shape, dtype, _ = plan.creates[place - len(writes)]
    return np.ndarray(shape, dtype.numpy, _MEMORY, pointer - BASE)


def array(pointer: int, shape: tuple[int, ...], dtype: np.dtype[Any], strides: tuple[int, ...] | None = None) -> Array:
    """Return a writable view of the memory at ``pointer``. It keeps nothing alive.

    Parameters
    ----------
    pointer
        Address of the first element, at least :data:`accel.memory.space.BASE`.
    shape
        Elements along each axis.
    dtype
        numpy's element type.
    strides
        **Bytes** between neighbours along each axis; C-contiguous where left out.
    """
    return np.ndarray(shape, dtype, _MEMORY, pointer - BASE, strides)


_MEMMOVE = ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
_POINTER_ARGUMENTS = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

move: Callable[[int, int, int], object] = ctypes.CFUNCTYPE(ctypes.c_void_p, *_POINTER_ARGUMENTS)(_MEMMOVE)
"""``move(destination, source, nbytes)``, releasing the GIL; the ranges may overlap."""

# A small copy takes far less time than getting the GIL back from a busy thread (5 ms): it keeps it.
move_small: Callable[[int, int, int], object] = ctypes.PYFUNCTYPE(ctypes.c_void_p, *_POINTER_ARGUMENTS)(_MEMMOVE)
"""``move_small(destination, source, nbytes)``: the same, keeping the GIL."""

_WIDE: dict[int, np.dtype[Any]] = {2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}


def fill_memory(address: int, pattern: bytes, count: int) -> None:
    """Write ``pattern`` (1, 2, 4, 8 or 16 bytes) ``count`` times from ``address`` on."""
    if count == 0:
        return
    width = len(pattern)
    if pattern == pattern[:1] * width:
        ctypes.memset(address, pattern[0], width * count)
        return
    # numpy has no integer of 16 bytes: two columns of 8 do the same.
    columns = 2 if width == 16 else 1
    dtype = _WIDE[width // columns]
    array(address, (count, columns), dtype)[...] = np.frombuffer(pattern, dtype=dtype)
