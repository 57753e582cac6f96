"""P18, P18c: a buffer from one device to another, beside the driver's own copy, and beside a copy through this process.

    python benchmarks/peer_copies.py [--mib 64] [--rounds 15]         two CPU devices, in all mixtures of hosts
    python benchmarks/peer_copies.py --device cuda [--rounds 15]      two GPUs, each in a process of its own

The ways take turns, so that all meet the same machine. The driver's copies are in a process of
their own, before and after: a GPU that two processes use by turns changes its context, which takes
as long as a small copy. An op of 4 KiB that is awaited on the target alone is one round trip to its
process; a copy takes two, at the same time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any, Literal

import numpy as np

import accel

Place = Literal["inline", "process"]
PLACES: tuple[Place, ...] = ("inline", "process")
SIZES = {4 << 10: "<= 250 us", 1 << 20: "", 16 << 20: "", 256 << 20: "0.8", 1 << 30: "0.95"}
"""Bytes that are copied between GPUs -> what must be: a time, or the rate over the driver's."""

Way = Callable[[], Awaitable[float]]
"""Copies once, and returns the seconds."""


async def seconds(copying: Awaitable[object]) -> float:
    """Return how long a copy took."""
    began = perf_counter()
    await copying
    return perf_counter() - began


async def medians(rounds: int, *ways: Way) -> list[float]:
    """Make ``rounds`` copies by each way, in turns, and return the median of each. The first turn does not count."""
    taken = [[await way() for way in ways] for _ in range(1 + rounds)]
    return [statistics.median(times) for times in zip(*taken[1:], strict=True)]


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
        fast, slow = await medians(rounds, lambda: seconds(target.put(ref)), lambda: seconds(through_host(source, target, ref)))
        copy, alone = await medians(20 * rounds, lambda: seconds(target.put(small)), await small_op(target))
        print(
            f"| {first} | {second} | {fast * 1e3:.1f} | {slow * 1e3:.1f} | {slow / fast:.2f} | {copy * 1e6:.0f} | {alone * 1e6:.0f} |",
            flush=True,
        )


class RawCopies:
    """Copies from GPU 0 to GPU 1 by ``cuMemcpyDtoDAsync`` alone, between memory of ``cuMemCreate`` as slabs are."""

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

    def seconds(self, nbytes: int) -> float:
        """Return how long one copy took, up to its end."""
        began = perf_counter()
        self._call("cuMemcpyDtoDAsync", self._target, self._source, nbytes, self._stream)
        self._call("cuStreamSynchronize", self._stream)
        return perf_counter() - began


def raw_medians(rounds: int) -> None:
    """Print the seconds of a raw copy of each size."""
    raw = RawCopies(max(SIZES))
    print(json.dumps([statistics.median([raw.seconds(nbytes) for _ in range(1 + rounds)][1:]) for nbytes in SIZES]))


def raw_twin(rounds: int) -> list[float]:
    """Return what :func:`raw_medians` prints, in a process of its own."""
    command = [sys.executable, __file__, "--raw", "--rounds", str(rounds)]
    found: list[float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found


async def on_cuda(rounds: int) -> None:
    """Print a row for each size: awaited copies from GPU 0 to GPU 1, beside the driver's, which are made before and after."""
    rows, before = list[tuple[float, float, float]](), raw_twin(rounds)
    async with accel.System() as system:
        source, target = await system.open_device("cuda:0", host="process"), await system.open_device("cuda:1", host="process")
        print(f"<!-- {await system.links()} -->", flush=True)
        for nbytes in SIZES:
            rows.append(await cuda_row(source, target, nbytes, rounds))
    print(
        "| bytes | put(ref), us | raw, us | rate of raw | an op alone, us | put(await get(ref)), us | GB/s | must |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    for (nbytes, must), raw, (copy, alone, host) in zip(SIZES.items(), map(min, before, raw_twin(rounds)), rows, strict=True):
        print(
            f"| {nbytes} | {copy * 1e6:.0f} | {raw * 1e6:.0f} | {raw / copy:.3f} | {alone * 1e6:.0f} | {host * 1e6:.0f} | {nbytes / copy / 1e9:.1f} | {must} |"
        )


async def cuda_row(source: accel.Device, target: accel.Device, nbytes: int, rounds: int) -> tuple[float, float, float]:
    """Return the seconds of a copy, of an op alone, and of a copy through this process."""
    ref = await source.zeros(nbytes, "uint8")
    copy, alone = await medians(rounds, lambda: seconds(target.put(ref)), await small_op(target))
    (host,) = await medians(2, lambda: seconds(through_host(source, target, ref)))
    return copy, alone, host


async def main() -> None:
    """Measure on the device that is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--raw", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.raw:
        raw_medians(arguments.rounds)
        return
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
