"""P21: one service on two devices beside the same on one; with a device that is four times slower; and while a device's process is killed.

``python benchmarks/replicas.py [--device cpu|cuda] [--replicas 2] [--seconds 3] [--clients 256] [--only scale,small,slow,killed]``

On the CPU each device is a process, and a batch of the model waits 6 ms, as for a device that works: so the numbers are of the scheduling, not of the cores.
``small`` has a model that computes and waits for nothing. On CUDA a batch multiplies matrices for 6 ms. ``slow`` sends requests at 60 % of what the other
devices can answer, with the slow device and without it, in turns. Everything goes through one service and one queue.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # children import this file by its name in the package

import numpy as np

import accel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel.patterns import ModelService

WIDTH, ITEMS = 2048, 16
BATCH_SECONDS = 0.006
SLOWER = 4
MUST = {"scale": 0.95, "small": 1.0, "slow": 1.5, "gap": 0.05}
"""Of ``scale`` per device: two are 1.9 times one."""


class Waiting:
    """A sum of rows that takes a time of its own, as on a device that works for itself."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    def open(self, weights: Any, description: object, stream: object) -> None:
        """Take no weights."""

    def run(self, inputs: Any) -> Any:
        """Compute a batch."""
        time.sleep(self._seconds)
        return np.asarray(inputs["x"]).sum(1)


def build_products(count: int) -> Any:
    """Return a module of torch that multiplies by a matrix again and again."""
    import torch
    from torch import nn

    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.eye(WIDTH, dtype=torch.float16))

        def forward(self, x: Any) -> Any:
            y = x.half()
            for _ in range(count):
                y = y @ self.matrix
            return y.float().mean(1)

    return Products()


def build() -> Any:
    """Return the module whose batch takes as long as ``REPLICAS_PRODUCTS`` says."""
    return build_products(int(os.environ["REPLICAS_PRODUCTS"]))


def build_slow() -> Any:
    """Return one that takes :data:`SLOWER` times as long."""
    return build_products(SLOWER * int(os.environ["REPLICAS_PRODUCTS"]))


async def load(device: accel.Device, *, seconds: float, is_slow: bool = False) -> accel.Model:
    """Load the model, on a GPU the one that was measured."""
    takes: dict[str, Any] = {"inputs": {"x": accel.TensorSpec(("batch", WIDTH), "float32")}, "buckets": {"batch": (ITEMS,)}}
    if device.name.startswith("cuda"):
        return await device.load_model(f"benchmarks.replicas:{'build_slow' if is_slow else 'build'}", **takes)
    return await device.load_model("benchmarks.replicas:Waiting", options={"seconds": seconds * (SLOWER if is_slow else 1)}, **takes)


async def choose_products(system: accel.System) -> None:
    """Set ``REPLICAS_PRODUCTS`` so that a batch takes :data:`BATCH_SECONDS` on the first GPU."""
    count = 512  # long beside the copies, which are measured with them
    os.environ["REPLICAS_PRODUCTS"] = str(count)
    device = await system.open_device("cuda:0", host="process")
    model = await load(device, seconds=0.0)
    x = np.ones((ITEMS, WIDTH), np.float32)
    spans = []
    for _ in range(10):
        with accel.DeviceTime() as spent:
            await model(x)
        spans.append(spent.seconds or 0.0)
    await device.aclose()
    os.environ["REPLICAS_PRODUCTS"] = str(round(count * BATCH_SECONDS / min(spans)))


async def rate(service: ModelService, clients: int, seconds: float) -> float:
    """Return the items a second that clients get which each await an answer before the next request."""
    item, count, until = np.ones(WIDTH, np.float32), 0, time.perf_counter() + seconds

    async def client() -> None:
        nonlocal count
        while time.perf_counter() < until:
            await service.submit(item)
            count += 1

    began = time.perf_counter()
    await asyncio.gather(*[client() for _ in range(clients)])
    return count / (time.perf_counter() - began)


async def p99(service: ModelService, per_second: float, seconds: float) -> float:
    """Return the latency, in ms, of requests that come at random times, whatever the service does."""
    item, draw, latencies = np.ones(WIDTH, np.float32), random.Random(0), list[float]()

    async def one() -> None:
        began = time.perf_counter()
        await service.submit(item)
        latencies.append(time.perf_counter() - began)

    tasks, at = [], time.perf_counter()
    until = at + seconds
    while at < until:
        at += draw.expovariate(per_second)
        if (left := at - time.perf_counter()) > 0:
            await asyncio.sleep(left)
        tasks.append(asyncio.create_task(one()))
    await asyncio.gather(*tasks)
    return statistics.quantiles(latencies, n=100)[-1] * 1e3


async def scale(models: Sequence[accel.Model], clients: int, seconds: float, rounds: int = 3) -> dict[str, Any]:
    """Compare all devices with the first one, in turns."""
    one, every = list[float](), list[float]()
    async with accel.serve(models[0]) as alone, accel.serve(models) as together:
        await rate(together, clients, 0.3)
        for _ in range(rounds):
            one.append(await rate(alone, clients, seconds))
            every.append(await rate(together, clients, seconds))
    ratio = statistics.median(b / a for a, b in zip(one, every, strict=True))
    return {"one": round(statistics.median(one)), "all": round(statistics.median(every)), "ratio": round(ratio, 3)}


async def slow(models: Sequence[accel.Model], slow_model: accel.Model, clients: int, seconds: float, rounds: int = 3) -> dict[str, Any]:
    """Compare the last percentile of requests with a slow device and without it, in turns."""
    without, beside = list[float](), list[float]()
    async with accel.serve(models) as fast, accel.serve([*models, slow_model]) as mixed:
        per_second = 0.6 * await rate(fast, clients, seconds)
        await rate(mixed, clients, 0.5)  # it gets to know what takes long
        for _ in range(rounds):
            without.append(await p99(fast, per_second, seconds))
            beside.append(await p99(mixed, per_second, seconds))
        taken = [replica.batches for replica in mixed.statistics().replicas]
    ratio = statistics.median(b / a for a, b in zip(without, beside, strict=True))
    p99s = {"p99_ms": round(statistics.median(without), 2), "with_slow_ms": round(statistics.median(beside), 2)}
    return {"per_second": round(per_second), **p99s, "ratio": round(ratio, 3), "batches": taken}


async def killed(models: Sequence[accel.Model], clients: int, seconds: float) -> dict[str, Any]:
    """Kill the process of the last device under load."""
    device, item = models[-1].device, np.ones(WIDTH, np.float32)
    answered, failed, until = list[float](), list[BaseException](), time.perf_counter() + seconds
    pid = device.info().pid
    assert pid is not None, "its context is in a child"

    async def client() -> None:
        while time.perf_counter() < until:
            try:
                await service.submit(item)
            except accel.AccelError as error:
                failed.append(error)
            else:
                answered.append(time.perf_counter())

    async with accel.serve(models) as service:
        await rate(service, clients, 0.3)
        tasks = [asyncio.create_task(client()) for _ in range(clients)]
        await asyncio.sleep(seconds / 3)
        killed_at = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        await asyncio.gather(*tasks)
        again = [at for at in answered if at > killed_at]
        gap = max(after - before for before, after in itertools.pairwise(answered))
    return {
        "answered": len(answered),
        "failed": len(failed),
        "first_error": repr(failed[0]) if failed else None,
        "longest_gap_ms": round(gap * 1e3, 1),
        "first_answer_ms": round((again[0] - killed_at) * 1e3, 1),
        "generation": device.generation,
    }


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all that was asked for."""
    found: dict[str, Any] = {"device": arguments.device, "replicas": arguments.replicas}
    clients, seconds, wanted = arguments.clients, arguments.seconds, arguments.only.split(",")
    async with accel.System() as system:
        if arguments.device == "cuda":
            await choose_products(system)
            found["products"] = int(os.environ["REPLICAS_PRODUCTS"])
        pool = await system.open_pool(arguments.device, count=arguments.replicas, host="process")
        found["links"] = [f"{link.source} to {link.target}: {link.way}, peer {link.peer}" for link in await pool.links()]
        if arguments.device == "cpu" and "small" in wanted:
            models = [await load(device, seconds=0.0) for device in pool]
            found["small"] = {**await scale(models, clients, seconds), "must": MUST["small"]}
            for model in models:
                await model.aclose()
        models = list(await asyncio.gather(*(load(device, seconds=BATCH_SECONDS) for device in pool)))
        if "scale" in wanted:
            found["scale"] = {**await scale(models, clients, seconds), "must": MUST["scale"] * len(pool)}
        if "killed" in wanted:
            found["killed"] = {**await killed(models, clients, seconds), "must": {"failed": 0, "longest_gap_ms": MUST["gap"] * 1e3}}
            async for generation in pool[-1].generations():
                if generation == 2:
                    break
        if "slow" in wanted:
            await models[-1].aclose()
            slow_model = await load(pool[-1], seconds=BATCH_SECONDS, is_slow=True)
            found["slow"] = {**await slow(models[:-1], slow_model, clients, seconds), "must": MUST["slow"]}
    return found


def main() -> None:
    """Measure, and print what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each pass")
    parser.add_argument("--only", default="scale,small,slow,killed", help="what is measured, with commas")
    print(json.dumps(asyncio.run(measure(parser.parse_args())), indent=2))


if __name__ == "__main__":
    main()
