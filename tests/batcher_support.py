"""A handler that can be held, and what else the tests of the batcher share."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accel.patterns import BatcherStatistics

__all__ = ["Handler", "settled", "turns"]


class Handler:
    """Doubles ints; holds each batch until it is told to go on."""

    def __init__(self, *, is_open: bool = True) -> None:
        self.batches: list[list[int]] = []
        self.gates: list[asyncio.Event] = []
        self.is_open = is_open
        self.called = asyncio.Event()

    async def __call__(self, items: list[int]) -> list[int | Exception]:
        self.batches.append(items)
        gate = asyncio.Event()
        self.gates.append(gate)
        self.called.set()
        if not self.is_open:
            await gate.wait()
        return [2 * item for item in items]

    def release(self) -> None:
        self.is_open = True
        for gate in self.gates:
            gate.set()

    async def until_called(self, times: int) -> None:
        while len(self.batches) < times:
            self.called.clear()
            await self.called.wait()


async def turns(n: int = 5) -> None:
    """Let everything that can run now run."""
    for _ in range(n):
        await asyncio.sleep(0)


def settled(statistics: BatcherStatistics) -> bool:
    done = statistics.answered + statistics.failed + statistics.expired + statistics.dropped + statistics.abandoned
    return statistics.submitted == done and not (statistics.queued or statistics.waiting or statistics.in_flight)
