"""Copies and fills of memory given by address."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu.views import array

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["fill_memory", "move", "move_small"]

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
