"""P18, P18c: a buffer from one device to another, beside the driver's own copy, and beside a copy through this process.

    python benchmarks/peer_copies.py [--mib 64] [--rounds 15]         two CPU devices, in all mixtures of hosts
    python benchmarks/peer_copies.py --device cuda [--rounds 15]      two GPUs, each in a process of its own

The ways take turns, so that all meet the same machine. A turn is of several copies, and its first
one counts apart: a GPU that another process has used just before changes to this one's context.
Beside the copies, an op of 4 KiB is awaited on the target alone: one round trip to its process. A
copy takes two, at the same time.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Awaitable, Callable
from functools import partial
from time import perf_counter
from typing import Any, Literal

import numpy as np

import accel

Place = Literal["inline", "process"]
PLACES: tuple[Place, ...] = ("inline", "process")
TURN = 4
"""Copies of a turn, of which the first is not counted."""

Way = Callable[[], Awaitable[float]]
"""Copies once, and returns the seconds."""


async def seconds(copying: Awaitable[object]) -> float:
    """Return how long a copy took."""
    began = perf_counter()
    await copying
    return perf_counter() - began


async def medians(rounds: int, *ways: Way) -> list[tuple[float, float]]:
    """Make at least ``rounds`` copies by each way, in turns.

    Return the median of each, and that of the first copies of its turns. Of the first turn nothing
    counts.
    """
    turns: list[list[list[float]]] = [[] for _ in ways]
    for _ in range(1 + -(-rounds // (TURN - 1))):
        for way, taken in zip(ways, turns, strict=True):
            taken.append([await way() for _ in range(TURN)])
    return [
        (statistics.median(time for turn in taken[1:] for time in turn[1:]), statistics.median(turn[0] for turn in taken[1:]))
        for taken in turns
    ]


async def small_op(target: accel.Device) -> Way:
    """Return the way to await an op on one device alone."""
    ref = await target.zeros(1024, "float32")
    return lambda: seconds(target.run(accel.ops.Fill(ref.shape, ref.dtype, 1.0, ref)))


async def through_host(source: accel.Device, target: accel.Device, ref: accel.AccelRef) -> accel.AccelRef:
    """Copy by way of an array of this process."""
    return await target.put(await source.get(ref))


async def on_cpu(first: Place, second: Place, nbytes: int, rounds: int) -> None:
    """Print the row of one mixture of hosts."""
    async with accel.System() as system:
        source, target = await system.open_device("cpu", host=first), await system.open_device("cpu", host=second)
        ref = await source.put(np.random.default_rng(0).integers(0, 256, nbytes, np.uint8))
        small = await source.zeros(1024, "float32")
        (fast, _), (slow, _) = await medians(rounds, lambda: seconds(target.put(ref)), lambda: seconds(through_host(source, target, ref)))
        (copy, _), (alone, _) = await medians(20 * rounds, lambda: seconds(target.put(small)), await small_op(target))
        print(
            f"| {first} | {second} | {fast * 1e3:.1f} | {slow * 1e3:.1f} | {slow / fast:.2f} | {copy * 1e6:.0f} | {alone * 1e6:.0f} |",
            flush=True,
        )


class RawCopies:
    """Copies from GPU 0 to GPU 1 by ``cuMemcpyDtoDAsync`` alone, in this process, between memory of ``cuMemCreate`` as slabs are."""

    def __init__(self, nbytes: int) -> None:
        from accel_cuda.core.driver import load_driver

        driver: Any = load_driver()
        self._call: Callable[..., Any] = driver.call
        self._contexts = [self._call("cuDevicePrimaryCtxRetain", self._call("cuDeviceGet", index)) for index in (0, 1)]
        self._call("cuCtxSetCurrent", self._contexts[1])
        self._stream = self._call("cuStreamCreate", 1)
        self._source, self._target = (self._map(driver, index, nbytes) for index in (0, 1))

    def _map(self, driver: Any, index: int, nbytes: int) -> int:
        properties, access = driver.CUmemAllocationProp(), driver.CUmemAccessDesc()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        for wanted, gpu in ((properties, index), (access, 1)):  # GPU 1 reaches both
            location = driver.CUmemLocation()
            location.type, location.id = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, gpu
            wanted.location = location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        size = -(-nbytes // (2 << 20)) * (2 << 20)
        handle, address = self._call("cuMemCreate", size, properties, 0), int(self._call("cuMemAddressReserve", size, 0, 0, 0))
        self._call("cuMemMap", address, size, 0, handle, 0)
        self._call("cuMemSetAccess", address, size, [access], 1)
        return address

    async def seconds(self, nbytes: int) -> float:
        """Return how long one copy took, up to its end."""
        began = perf_counter()
        self._call("cuMemcpyDtoDAsync", self._target, self._source, nbytes, self._stream)
        self._call("cuStreamSynchronize", self._stream)
        return perf_counter() - began


async def on_cuda(rounds: int) -> None:
    """Print a row for each size: awaited copies from GPU 0 to GPU 1, beside the driver's."""
    print(
        "| bytes | put(ref), us | first of a turn | raw, us | first of a turn | rate of raw | an op alone, us | put(await get(ref)), us | GB/s | must |\n"
        "|---|---|---|---|---|---|---|---|---|---|"
    )
    raw = RawCopies(1 << 30)
    async with accel.System() as system:
        source, target = await system.open_device("cuda:0", host="process"), await system.open_device("cuda:1", host="process")
        print(f"<!-- {await system.links()} -->")
        for nbytes, must in ((4 << 10, "<= 250 us"), (1 << 20, ""), (16 << 20, ""), (256 << 20, "0.8"), (1 << 30, "0.95")):
            print(await cuda_row(source, target, raw, nbytes, rounds), must, "|", flush=True)


async def cuda_row(source: accel.Device, target: accel.Device, raw: RawCopies, nbytes: int, rounds: int) -> str:
    """Measure copies of one size, and return their row without its last field."""
    ref = await source.zeros(nbytes, "uint8")
    (copy, first), (driver, driver_first), (alone, _) = await medians(
        rounds, lambda: seconds(target.put(ref)), partial(raw.seconds, nbytes), await small_op(target)
    )
    ((host, _),) = await medians(TURN - 1, lambda: seconds(through_host(source, target, ref)))
    times = " | ".join(f"{time * 1e6:.0f}" for time in (copy, first, driver, driver_first))
    return f"| {nbytes} | {times} | {driver / copy:.3f} | {alone * 1e6:.0f} | {host * 1e6:.0f} | {nbytes / copy / 1e9:.1f} |"


async def main() -> None:
    """Measure on the device that is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        await on_cuda(arguments.rounds)
        return
    print(
        f"{arguments.mib} MiB, medians of {arguments.rounds}\n"
        "| source | target | put(ref), ms | put(await get(ref)), ms | times | 4 KiB: put(ref), us | an op alone, us |\n"
        "|---|---|---|---|---|---|---|"
    )
    for first in PLACES:
        for second in PLACES:
            await on_cpu(first, second, arguments.mib << 20, arguments.rounds)


if __name__ == "__main__":
    asyncio.run(main())
