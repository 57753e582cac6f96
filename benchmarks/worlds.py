"""P19: collectives of a world beside the library below it alone.

``python benchmarks/worlds.py [--device cpu|cuda] [--ranks 2] [--seconds 2] [--only reduce]``

``reduce`` awaits all-reduces one by one, 8 at a time, and in batches of 32. On CUDA the twin is :mod:`benchmarks.raw_nccl`, before and after.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # children import this file by its name in the package

import numpy as np

import accel
from benchmarks import raw_nccl

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

IN_FLIGHT, IN_A_BATCH = 8, 32
SIZES = {"cpu": (4 << 10, 1 << 20, 16 << 20), "cuda": raw_nccl.SIZES}
MUST = {"in_flight": 0.97, "awaited_us": 200.0}


async def until(seconds: float, work: Callable[[], Awaitable[object]]) -> float:
    """Return the microseconds that one call takes, of those that are awaited one by one."""
    spans, end = list[float](), time.perf_counter() + seconds
    while (began := time.perf_counter()) < end or len(spans) < 5:
        await work()
        spans.append(time.perf_counter() - began)
    return statistics.median(spans) * 1e6


async def of_size(world: accel.World, nbytes: int, seconds: float) -> dict[str, float]:
    """Return the microseconds of one all-reduce: awaited, with :data:`IN_FLIGHT` at a time, and in a batch."""
    given = [await world.each(lambda device, rank: device.put(np.full(nbytes // 4, rank + 1.0, np.float32))) for _ in range(IN_FLIGHT)]
    outs = [await world.each(lambda device, _: device.empty((nbytes // 4,), "float32")) for _ in range(IN_FLIGHT)]
    count, end = 0, 0.0

    async def client(number: int) -> None:
        nonlocal count
        while time.perf_counter() < end:
            await world.all_reduce(given[number], out=outs[number])
            count += 1

    async def batch() -> None:
        async with world.batch() as batch:
            for number in range(IN_A_BATCH):
                batch.all_reduce(given[number % IN_FLIGHT], out=outs[number % IN_FLIGHT])

    awaited = await until(seconds, lambda: world.all_reduce(given[0], out=outs[0]))
    began = time.perf_counter()
    end = began + seconds
    await asyncio.gather(*[client(number) for number in range(IN_FLIGHT)])
    in_flight = (time.perf_counter() - began) / count * 1e6
    in_batch = await until(seconds, batch) / IN_A_BATCH
    total = await world.devices[-1].get(outs[0][-1])
    assert (total == sum(range(1, world.size + 1))).all(), "a sum is wrong"
    return {"awaited": awaited, "in_flight": in_flight, "batch": in_batch}


async def measure_reduce(device: str, ranks: int, seconds: float) -> dict[str, Any]:
    """Compare a world with the library alone, which is measured before it and after it."""
    twins = [raw_nccl.measure(seconds)] if device == "cuda" else []
    async with accel.System() as system:
        world = await system.open_world(device, ranks=ranks)
        found: dict[str, Any] = {str(nbytes): await of_size(world, nbytes, seconds) for nbytes in SIZES[device]}
    if not twins:
        return found
    twins.append(raw_nccl.measure(seconds))
    raw = {size: {name: min(twin[size][name] for twin in twins) for name in twins[0][size]} for size in twins[0]}
    small, large = str(SIZES[device][0]), str(SIZES[device][-1])
    return {
        **found,
        "raw": raw,
        "in_flight_ratio": {"value": round(raw[large]["in_flight"] / found[large]["in_flight"], 3), "must": MUST["in_flight"]},
        "awaited_more_us": {"value": round(found[small]["awaited"] - raw[small]["awaited"], 1), "must": MUST["awaited_us"]},
    }


def main() -> None:
    """Measure, and print what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--only", default="reduce", help="what is measured, with commas")
    arguments = parser.parse_args()
    wanted = arguments.only.split(",")
    found: dict[str, Any] = {"device": arguments.device, "ranks": arguments.ranks}
    if "reduce" in wanted:
        found["reduce"] = asyncio.run(measure_reduce(arguments.device, arguments.ranks, arguments.seconds))
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
