"""Which of several ways to compute the same is the quickest on the device: by trying them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from accel import InvalidArgumentError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel_cuda.core.stream import CudaStream

__all__ = ["quickest"]

_REPEATS = 5


def quickest(stream: CudaStream, count: int, enqueue: Callable[[int], object]) -> int:
    """Return which of ``count`` ways is the quickest. Blocks; the context is current.

    Parameters
    ----------
    stream
        Where they are tried.
    enqueue
        Enqueues the way of a number. One that the library refuses all the same is not chosen.
    """
    context, times = stream.context, []
    start, end = (context.call("cuEventCreate", 0) for _ in range(2))
    try:
        for way in range(count):
            try:
                enqueue(way)  # the first time, it may load its kernel
            except (UnsupportedError, InvalidArgumentError):
                times.append(math.inf)
                continue
            context.call("cuEventRecord", start, stream.handle)
            for _ in range(_REPEATS):
                enqueue(way)
            context.call("cuEventRecord", end, stream.handle)
            context.call("cuEventSynchronize", end)
            times.append(float(context.call("cuEventElapsedTime", start, end)))
    finally:
        for event in (start, end):
            context.driver.ignore("cuEventDestroy", event)
    return times.index(min(times))
