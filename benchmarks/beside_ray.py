"""P21c and P22c: two replicas of a model that does nothing beside Ray Serve with two; and an awaited op on a node beside a call of a Ray actor.

``python benchmarks/beside_ray.py [--passes 3] [--seconds 3] [--clients 64] [--json FILE]``, with ``pip install 'ray[serve]'``. Each pass measures both in
turn, on this machine. Serve's HTTP proxy is off: its requests come through a handle, ours through ``submit``.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # children import this file by its name in the package

import numpy as np
import ray
from ray import serve

import accel
from accel.integrations.ray import nodes
from benchmarks.measures import hold_medians

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

ITEM = np.ones(8, np.float32)
BUCKETS = (1, 64)


class Nothing:
    """A model that returns what it is given."""

    def open(self, weights: Any, description: object, stream: object) -> None:
        """Take no weights."""

    def run(self, inputs: Any) -> Any:
        """Compute nothing."""
        return np.array(inputs["x"])


class Served:
    """The same for Ray Serve."""

    async def __call__(self, x: Any) -> Any:
        """Compute nothing."""
        return x

    async def pid(self) -> int:
        """Return the process of the replica that is asked."""
        return os.getpid()


class Holder:
    """A Ray actor that has a matrix, and multiplies it where it is."""

    def __init__(self) -> None:
        self.matrix = np.ones((8, 8))
        self.product = self.matrix

    def gemm(self) -> None:
        """Multiply the matrix by itself."""
        self.product = self.matrix @ self.matrix


async def median_us(call: Callable[[], Awaitable[object]], calls: int) -> float:
    """Return the median microseconds of calls, one after the other."""
    took = []
    for number in range(calls + calls // 10):
        began = time.perf_counter()
        await call()
        if number >= calls // 10:
            took.append(time.perf_counter() - began)
    return statistics.median(took) * 1e6


async def load(ask: Callable[[], Awaitable[object]], clients: int, seconds: float) -> tuple[float, int]:
    """Return answers a second, and how many requests failed, of clients which each await an answer before the next request."""
    answered = failed = 0
    began = time.perf_counter()

    async def client() -> None:
        nonlocal answered, failed
        while time.perf_counter() < began + seconds:
            try:
                await ask()
                answered += 1
            except Exception:
                failed += 1

    await asyncio.gather(*[client() for _ in range(clients)])
    return answered / (time.perf_counter() - began), failed


async def killed(ask: Callable[[], Awaitable[object]], pid: Callable[[], Awaitable[int]], given: Any) -> int:
    """Return how many requests of a load fail while a replica is killed."""
    loading = asyncio.ensure_future(load(ask, given.clients, given.seconds))
    await asyncio.sleep(given.seconds / 3)
    os.kill(await pid(), signal.SIGKILL)
    return (await loading)[1]


async def measure_services(given: Any) -> dict[str, float]:
    """Return the numbers of a service on two devices, each in a process of its own, and of two replicas of Ray Serve, measured in turn."""
    deployment = serve.deployment(Served, num_replicas=2, max_ongoing_requests=256, ray_actor_options={"num_cpus": 0})
    handle = await asyncio.to_thread(serve.run, deployment.bind(), route_prefix=None)

    async def ask() -> object:
        return await handle.remote(ITEM)

    async def pid() -> int:
        return int(await handle.pid.remote())

    try:
        async with accel.System() as system:
            pool = await system.open_pool("cpu", count=2, host="process")
            models = await pool.load_model(
                "benchmarks.beside_ray:Nothing", inputs={"x": accel.TensorSpec(("batch", 8), "float32")}, buckets={"batch": BUCKETS}
            )
            async with accel.serve(models) as service:

                async def submit() -> object:
                    return await service.submit(ITEM)

                async def child() -> int:
                    return pool[0].info().pid or 0

                medians = [(await median_us(submit, given.calls), await median_us(ask, given.calls)) for _ in range(5)]
                ours, serves = map(statistics.median, zip(*medians, strict=True))
                rates = [(await load(way, given.clients, given.seconds))[0] for way in (submit, ask)]
                failed = [await killed(submit, child, given), await killed(ask, pid, given)]
    finally:
        await asyncio.to_thread(serve.delete, "default")
    return {
        "accel, no-op, us": ours,
        "accel, requests/s": rates[0],
        "accel, failed when one is killed": failed[0],
        "Ray Serve, no-op, us": serves,
        "Ray Serve, requests/s": rates[1],
        "Ray Serve, failed when one is killed": failed[1],
    }


async def measure_ops(given: Any) -> dict[str, float]:
    """Return the medians of an 8 x 8 product on a node that Ray has started, and in a Ray actor, measured in turn."""
    actor = ray.remote(Holder).options(num_cpus=0).remote()

    async def call() -> None:
        await actor.gemm.remote()

    async with nodes(count=1) as machines, accel.System() as system:
        device = await system.open_device("cpu", node=machines[0])
        a = await device.put(np.ones((8, 8)))
        pairs = [(await median_us(lambda: device.blas.gemm(a, a), given.calls), await median_us(call, given.calls)) for _ in range(3)]
    ray.kill(actor)
    on_node, of_actor = map(statistics.median, zip(*pairs, strict=True))
    return {"op on a node, us": on_node, "call of a Ray actor, us": of_actor}


async def measure(given: Any) -> dict[str, float]:
    """Return one pass."""
    found = {**await measure_services(given), **await measure_ops(given)}
    found["no-op, accel over Serve"] = found["accel, no-op, us"] / found["Ray Serve, no-op, us"]
    found["requests/s, accel over Serve"] = found["accel, requests/s"] / found["Ray Serve, requests/s"]
    found["op on a node over an actor's call"] = found["op on a node, us"] / found["call of a Ray actor, us"]
    return found


MUST = {
    "no-op, accel over Serve": (0.25, "<="),
    "requests/s, accel over Serve": (5.0, ">="),
    "accel, failed when one is killed": (0.0, "<="),
    "op on a node over an actor's call": (0.5, "<="),
}


def main() -> int:
    """Measure, print the median of all passes, and return 1 if a budget is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--calls", type=int, default=200, help="of each median")
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args()
    ray.init(num_cpus=2, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False)
    serve.start(proxy_location="Disabled")
    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # a line for each request that a killed replica had
    try:
        passes = [asyncio.run(measure(given)) for _ in range(given.passes)]
    finally:
        serve.shutdown()
        ray.shutdown()
    return hold_medians(passes, MUST, given.json)


if __name__ == "__main__":
    sys.exit(main())
