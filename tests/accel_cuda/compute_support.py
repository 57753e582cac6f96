"""A compute interface on the GPU for tests: arrays at any offset in, poisoned results out."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np

import accel
from accel.compute import DeviceCompute
from accel_cuda import CudaBackend

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Iterator

__all__ = ["Array", "Bench", "bench", "close", "longest_gap", "opened", "random", "unaligned", "wide"]

Array = np.ndarray[Any, Any]
_POISON = 0xA5


@contextlib.asynccontextmanager
async def opened(**options: Any) -> AsyncIterator[accel.Device]:
    """Open the first CUDA device in a system of its own."""
    async with accel.System() as system:
        yield await system.open_device("cuda", **options)


async def longest_gap(use: Awaitable[Any]) -> tuple[Any, float]:
    """Return what an await gives, and the longest time that the event loop stood still until then, in seconds."""
    task, loop, longest = asyncio.ensure_future(use), asyncio.get_running_loop(), 0.0
    while not task.done():
        began = loop.time()
        await asyncio.sleep(0.001)
        longest = max(longest, loop.time() - began - 0.001)
    return await task, longest


async def unaligned(device: accel.Device, array: Array, skipped: int) -> accel.AccelRef:
    """Return a view whose first element lies ``skipped`` elements after an aligned address."""
    whole = np.concatenate([np.zeros(skipped, array.dtype), array.reshape(-1)])
    return (await device.put(whole))[skipped:].reshape(array.shape)


class Bench:
    """One stream's compute interface, and buffers that are given back at the end."""

    def __init__(self, compute: DeviceCompute) -> None:
        self.compute = compute
        self._taken: list[int] = []

    def put(self, array: Array, offset: int = 0) -> int:
        """Return the address of a copy that lies ``offset`` elements behind an aligned address."""
        pointer = self._take(array.nbytes + offset * array.itemsize) + offset * array.itemsize
        self.compute.copy_htod(pointer, array.reshape(-1).view(np.uint8).data)
        return pointer

    def poisoned(self, count: int, dtype: np.dtype[Any], offset: int = 0) -> int:
        """Return the address of a result that nothing has been written to, with a guard of 16 elements behind it."""
        return self.put(self._poison(count + 16, dtype), offset)

    def get(self, pointer: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a result; what lies behind it must be untouched."""
        count = int(np.prod(shape))
        out = np.empty(count + 16, dtype)
        self.compute.copy_dtoh(out.view(np.uint8).data, pointer)
        self.compute.synchronize()
        assert np.array_equal(out[count:].view(np.uint8), self._poison(16, dtype).view(np.uint8)), "something was written behind the result"
        return out[:count].reshape(shape)

    def clear(self) -> None:
        """Give the buffers back."""
        for pointer in self._taken:
            self.compute.free(pointer)
        self._taken.clear()

    @staticmethod
    def _poison(count: int, dtype: np.dtype[Any]) -> Array:
        return np.full(count * dtype.itemsize, _POISON, np.uint8).view(dtype)

    def _take(self, nbytes: int) -> int:
        self._taken.append(self.compute.alloc(nbytes))
        return self._taken[-1]


@contextlib.contextmanager
def bench() -> Iterator[Bench]:
    """Open the first device and close it again."""
    context = CudaBackend().open(0)
    try:
        stream = context.create_stream()
        compute = DeviceCompute(context, stream)
        compute.init()
        yield Bench(compute)
        stream.close()
        compute.close()
    finally:
        context.close()


def wide(array: Array) -> Array:
    """Return the array in the widest type of its kind."""
    return array.astype(
        np.complex128
        if array.dtype.kind == "c"
        else np.int64
        if array.dtype.kind == "i"
        else np.uint64
        if array.dtype.kind == "u"
        else np.float64
    )


def random(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return normal floats, or integers over the whole range."""
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, shape, dtype, endpoint=True)
    values: Array = rng.standard_normal(shape)
    if dtype.kind == "c":
        values = values + 1j * rng.standard_normal(shape)
    return values.astype(dtype)


def close(got: Array, expected: Any, tolerance: float, case: str) -> None:
    """Compare, relative to the largest value."""
    scale = float(np.max(np.abs(expected), initial=1e-300))
    np.testing.assert_allclose(wide(got), expected, rtol=tolerance, atol=tolerance * scale, err_msg=case)
