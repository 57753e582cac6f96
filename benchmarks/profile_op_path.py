"""Shows where the time of one awaited op goes: ``python benchmarks/profile_op_path.py [--ops N] [--op NAME] [--lines N]``.

Two views. First the latency without a profiler, taken apart by subtraction: each line adds one part of the way. Then cProfile's table, which
charges every Python call about as much as the call takes, so that it shows how many calls there are rather than what they cost.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

import accel
from accel import ops

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class Echo(accel.Actor[int, int]):
    """Answers with the message."""

    carries_context = False

    async def receive(self, message: int, context: accel.ActorContext) -> int:
        """Answer."""
        return message


async def per_await(function: Callable[[], Awaitable[Any]], count: int) -> float:
    """Return the median of microseconds per await."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        await function()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def per_call(function: Callable[[], object], count: int) -> float:
    """Return the mean of microseconds per call."""
    began = time.perf_counter()
    for _ in range(count):
        function()
    return (time.perf_counter() - began) / count * 1e6


async def bare() -> None:
    """Await a future that the next turn resolves."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    loop.call_soon(future.set_result, None)
    await future


async def take_apart(system: accel.System, device: accel.Device, count: int) -> None:
    """Print the latency of parts of the way."""
    a = np.random.default_rng().standard_normal((8, 8), dtype=np.float32)
    out = np.empty_like(a)
    x = await device.put(a)
    z = await device.empty((8, 8))
    echo = await system.spawn(Echo)
    gemm = ops.Gemm(x, x)
    lines = [
        ("numpy.matmul(out=)", per_call(lambda: np.matmul(a, a, out=out), count)),
        ("make the op", per_call(lambda: ops.Gemm(x, x), count)),
        ("plan the op", per_call(gemm.plan, count)),
        ("bare future by call_soon", await per_await(bare, count)),
        ("actor ask round trip", await per_await(lambda: echo.ask(1), count)),
        ("await empty(), which enqueues nothing", await per_await(lambda: device.empty((8, 8)), count)),
        ("await gemm(out=), which allocates nothing", await per_await(lambda: device.blas.gemm(x, x, out=z), count)),
        ("await gemm", await per_await(lambda: device.blas.gemm(x, x), count)),
    ]
    for name, microseconds in lines:
        print(f"{microseconds:8.2f} us  {name}")


async def work(device: accel.Device, op: str, count: int) -> None:
    """Await one kind of op ``count`` times."""
    a = np.random.default_rng().standard_normal((8, 8), dtype=np.float32)
    x = await device.put(a)
    run: dict[str, Callable[[], Awaitable[Any]]] = {
        "gemm": lambda: device.blas.gemm(x, x),
        "unary": lambda: device.elementwise.unary("relu", x),
        "put": lambda: device.put(a),
        "get": lambda: device.get(x),
    }
    for _ in range(count):
        await run[op]()


async def profile(arguments: argparse.Namespace) -> None:
    """Print both views."""
    async with accel.System() as system:
        device = await system.open_device(arguments.backend)
        await work(device, arguments.op, 1000)
        await take_apart(system, device, arguments.ops // 4)
        profiler = cProfile.Profile()
        profiler.enable()
        await work(device, arguments.op, arguments.ops)
        profiler.disable()
    stats = pstats.Stats(profiler)
    print(f"\ncProfile, {arguments.ops} ops; divide tottime by it")
    stats.sort_stats("tottime").print_stats(arguments.lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", type=int, default=20_000)
    parser.add_argument("--op", choices=("gemm", "unary", "put", "get"), default="gemm")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--lines", type=int, default=35)
    asyncio.run(profile(parser.parse_args()))
