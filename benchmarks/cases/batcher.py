"""Many clients, few batches: the dynamic batcher against the same batches called in a bare loop."""

from __future__ import annotations

import asyncio
import time
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np

from accel import System
from accel.cli.bench.measure import awaited, called
from accel.cli.bench.suite import Bench, BenchCase
from accel.patterns import DynamicBatcher
from benchmarks.measures import add_overlapped

if TYPE_CHECKING:
    from accel import AccelRef, Device
    from accel.cli.bench.measure import Meter, Samples

__all__ = ["CASES"]

_CLIENTS = 256
_FEATURES, _HIDDEN, _CLASSES = 784, 1024, 10

Array = np.ndarray[Any, Any]


class _Model:
    """A classifier of small images with one hidden layer, on the device and in numpy."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.first = (rng.standard_normal((_FEATURES, _HIDDEN)) / _FEATURES**0.5).astype(np.float32)
        self.last = (rng.standard_normal((_HIDDEN, _CLASSES)) / _HIDDEN**0.5).astype(np.float32)
        self.device: Device
        self.weights: tuple[AccelRef, AccelRef]

    async def load(self, device: Device) -> None:
        self.device = device
        self.weights = await device.put(self.first), await device.put(self.last)

    async def on_device(self, items: list[Array]) -> list[int]:
        """Classify a batch as a service does."""
        first, last = self.weights
        async with self.device.batch() as batch:
            h = batch.blas.gemm(batch.put(np.stack(items)), first)
            batch.elementwise.unary("relu", h, out=h)
            scores = batch.blas.gemm(h, last)
        return (await self.device.get(scores)).argmax(axis=1).tolist()  # type: ignore[no-any-return]

    def bare(self, items: list[Array]) -> list[int]:
        """Classify a batch without actors, devices or awaits."""
        h = np.stack(items) @ self.first
        np.maximum(h, 0, out=h)
        return (h @ self.last).argmax(axis=1).tolist()  # type: ignore[no-any-return]


def _clients(batcher: DynamicBatcher[Array, int], images: list[Array], requests: int) -> Meter:
    """Return a round in which a client per image sends it ``requests`` times."""

    async def client(image: Array) -> None:
        for _ in range(requests):
            await batcher.submit(image)

    async def timed_client(image: Array, times: array[float]) -> None:
        for _ in range(requests):
            began = time.perf_counter()
            await batcher.submit(image)
            times.append(time.perf_counter() - began)

    async def meter(samples: Samples) -> None:
        times: array[float] = array("d")
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number, image in enumerate(images):
                # The clock costs a tenth of a request: a sample of the clients tells the latencies.
                group.create_task(client(image) if number % 16 else timed_client(image, times))
        add_overlapped(samples, times, time.perf_counter() - began, len(images) * requests)

    return meter


async def _batcher(bench: Bench) -> None:
    requests = bench.scale(20, 5)
    model = _Model(bench.rng)
    images = list(bench.rng.random((_CLIENTS, _FEATURES), dtype=np.float32))
    async with System("bench") as system:
        await model.load(await system.open_device(bench.spec))
        if await model.on_device(images) != model.bare(images):
            raise AssertionError("the device and numpy classify differently")
        async with DynamicBatcher(model.on_device, max_items=_CLIENTS, max_pending=2 * _CLIENTS) as batcher:
            subjects = {
                "batcher": _clients(batcher, images, requests),
                "bare loop, device": awaited(lambda: model.on_device(images), requests, _CLIENTS),
                "bare loop, numpy": called(lambda: model.bare(images), requests, _CLIENTS),
            }
            results = await bench.compare(f"classify one image, {_CLIENTS} clients", subjects)
            mean = batcher.statistics().mean_batch
    rates = {name: samples.rate for name, samples in results.items()}
    against_device = round(rates["batcher"] / rates["bare loop, device"], 3)
    bench.report.hold(
        "batcher", rates["batcher"] / rates["bare loop, numpy"], against_device_loop=against_device, mean_batch=round(mean, 1)
    )


CASES = (BenchCase("batcher", "DynamicBatcher at 256 clients against a bare loop", _batcher, ("batcher",)),)
