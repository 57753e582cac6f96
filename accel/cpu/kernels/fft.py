"""Fourier transforms through scipy, or numpy where scipy is not installed: both keep single precision, and scipy is faster for many small ones."""

from __future__ import annotations

import importlib
import importlib.util
import math
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.cpu.views import array

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from accel.backend import Kernel

__all__ = ["FFT", "transform"]

# Calls of scipy, one level of one element's transform; and what sends the first one to the stream's thread: an import takes tenths of a second.
_CALL, _LEVEL, _IMPORT = 15e-6, 1e-9, 1.0


@cache
def _library() -> Any:
    return importlib.import_module("scipy.fft" if importlib.util.find_spec("scipy") else "numpy.fft")


def transform(kind: str, source: Any, destination: Any, axes: tuple[int, ...], norm: str, lengths: tuple[int, ...] | None) -> None:
    """Write the transform ``kind`` of an array into another, which may be the same; ``lengths`` of the result where the source does not tell."""
    function = getattr(_library(), f"{kind}n")
    destination[...] = function(source, s=lengths, axes=axes, norm=norm)


def _kernel(lane: Any, op: Any, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    result = op.spec()
    size = math.prod(result.shape)
    if not size:
        return
    source, destination = array(inputs[0], op.x.shape, op.x.dtype.numpy), array(outputs[0], result.shape, result.dtype.numpy)
    lengths = op.lengths() if op.kind == "irfft" else None
    levels = sum(math.log2(length) + 1 for length in op.lengths())
    cost = _CALL + max(size, op.x.size) * levels * _LEVEL * (np.dtype(op.x.dtype.numpy).itemsize / 8)
    if not _library.cache_info().currsize:
        cost += _IMPORT
    lane.stream.submit(partial(transform, op.kind, source, destination, op.axes, op.norm, lengths), cost)


FFT: Mapping[str, Kernel] = dict.fromkeys(("fft", "ifft", "rfft", "irfft"), _kernel)
"""Op kind -> kernel."""
