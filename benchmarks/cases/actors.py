"""Actors alone: tell and spawn."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from accel import Actor, ActorContext, System
from accel.cli.bench.cases import Echo
from accel.cli.bench.measure import awaited
from accel.cli.bench.suite import Bench, BenchCase

if TYPE_CHECKING:
    from accel.cli.bench.measure import Samples

__all__ = ["CASES"]


class Counter(Actor[int, None]):
    """Counts messages down, and says when the last has come."""

    def __init__(self, finished: asyncio.Event) -> None:
        self._finished = finished

    async def receive(self, message: int, context: ActorContext) -> None:
        """Note the last one, which is 0."""
        if not message:
            self._finished.set()


async def _tell(bench: Bench) -> None:
    messages, count = 1000, bench.scale(20, 5)
    async with System("bench") as system:
        finished = asyncio.Event()
        counter = await system.spawn(Counter, finished)

        async def tell(samples: Samples) -> None:
            for _ in range(count):
                finished.clear()
                began = time.perf_counter()
                for message in range(messages - 1, -1, -1):
                    counter.tell(message)
                await finished.wait()
                samples.add(time.perf_counter() - began, messages)

        queue: asyncio.Queue[int] = asyncio.Queue(messages)

        async def reader() -> None:
            while await queue.get():
                pass

        async def plain(samples: Samples) -> None:
            for _ in range(count):
                task = asyncio.create_task(reader())
                await asyncio.sleep(0)
                began = time.perf_counter()
                for message in range(messages - 1, -1, -1):
                    queue.put_nowait(message)
                await task
                samples.add(time.perf_counter() - began, messages)

        await bench.compare("mailbox hop, 1000 tells", {"accel": tell, "asyncio.Queue": plain})


async def _spawn(bench: Bench) -> None:
    count = bench.scale(200, 50)
    async with System("bench") as system:

        async def actor() -> None:
            await (await system.spawn(Echo)).stop()

        async def nothing() -> None: ...

        async def task() -> Any:
            return await asyncio.create_task(nothing())

        await bench.compare("spawn and stop", {"accel": awaited(actor, count), "create_task": awaited(task, count)})


CASES = (
    BenchCase("tell", "mailbox hop by tell", _tell),
    BenchCase("spawn", "spawn and stop an actor", _spawn),
)
