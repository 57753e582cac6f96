"""Tensors whose elements do not lie in C order in a file: parts of them are gathered by reads, in bounded memory.

The file is not mapped: a process ends by a signal if a file is truncated while a mapping of it is read.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from accel.files.regular_file import RegularFile
    from accel.files.stored_tensor import StoredTensor

__all__ = ["gather"]

Array: TypeAlias = np.ndarray[Any, Any]

_SMALL: Final = 64 << 10
"""Bytes that are read as fast as a few."""
_WINDOW: Final = 4 << 20
"""Bytes that are read at once at most, ..."""
_SPARSEST: Final = 4
"""... if not more than this many are read for each that is wanted."""
_PAGE: Final = 4096
"""Bytes that follow each other and are read alone: a file is kept in pieces of this size."""


def gather(file: RegularFile, stored: StoredTensor, start: int, out: memoryview) -> None:
    """Fill ``out`` with bytes of a tensor in C order, from ``start`` on. May block; several threads may call it at once.

    Raises
    ------
    InvalidArgumentError
        The file cannot be read any more, or was truncated.
    """
    size = stored.dtype.itemsize
    first, last = start // size, -(-(start + len(out)) // size)
    elements = np.empty(last - first, stored.dtype.numpy)
    assert stored.strides is not None, "others are read in one piece"
    _range(file, elements, stored.start, stored.shape, stored.strides, first)
    np.copyto(np.frombuffer(out, np.uint8), elements.view(np.uint8)[start - first * size :][: len(out)])


def _range(file: RegularFile, out: Array, place: int, shape: tuple[int, ...], strides: tuple[int, ...], first: int) -> None:
    """Fill ``out`` with the elements from number ``first`` on, of a tensor whose first element is at byte ``place``."""
    if not out.size:
        return
    step = strides[0] * out.itemsize
    inner = math.prod(shape[1:])
    row, within = divmod(first, inner)
    if within or out.size < inner:  # a part of a row
        count = min(inner - within, out.size)
        _range(file, out[:count], place + row * step, shape[1:], strides[1:], within)
    else:
        count = out.size // inner * inner
        _block(file, out[:count].reshape(-1, *shape[1:]), place + row * step, strides)
    if count < out.size:
        _range(file, out[count:], place, shape, strides, first + count)


def _block(file: RegularFile, out: Array, place: int, strides: tuple[int, ...]) -> None:
    """Fill ``out`` from a block of elements, of which the first is at byte ``place``.

    Long runs of them are read one by one. Others are read at once, or in halves where there is much between them.
    """
    run, outer = _run(out.shape, strides)
    if run * out.itemsize >= _PAGE:
        places = np.full(1, place)
        for length, stride in zip(out.shape[:outer], strides, strict=False):
            places = np.add.outer(places, np.arange(length) * stride * out.itemsize)
        for into, at in zip(out.reshape(-1, run).view(np.uint8), places.ravel().tolist(), strict=True):
            file.fill(at, into.data)
        return
    span = (1 + sum([(length - 1) * stride for length, stride in zip(out.shape, strides, strict=True)])) * out.itemsize
    if span <= _SMALL or span <= min(_WINDOW, _SPARSEST * out.nbytes):
        steps = [stride * out.itemsize for stride in strides]
        out[...] = np.ndarray(out.shape, out.dtype, file.read(place, span), 0, steps)
        return
    axis = max(range(out.ndim), key=lambda each: strides[each] if out.shape[each] > 1 else -1)
    half = out.shape[axis] // 2
    before = (slice(None),) * axis
    _block(file, out[(*before, slice(None, half))], place, strides)
    _block(file, out[(*before, slice(half, None))], place + half * strides[axis] * out.itemsize, strides)


def _run(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int]:
    """Return how many elements follow each other in C order, and the number of dimensions before theirs."""
    run, outer = 1, len(shape)
    while outer and (strides[outer - 1] == run or shape[outer - 1] == 1):
        outer -= 1
        run *= shape[outer]
    return run, outer
