"""A world under load: sums over its ranks, which are killed, stopped and made to fault while the others go on."""

from __future__ import annotations

import asyncio
import random
import signal
from typing import TYPE_CHECKING, Any

import numpy as np

import accel
from benchmarks.chaos_parts.clients import ask
from benchmarks.chaos_parts.oracle import WrongAnswerError
from benchmarks.chaos_parts.processes import send_signal
from benchmarks.chaos_parts.requests import check

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.chaos_parts.oracle import Ledger
    from benchmarks.chaos_parts.schedule import Fault
    from benchmarks.chaos_parts.subject import Subject

__all__ = ["Ranked"]

Array = np.ndarray[Any, Any]

_PAUSE = 0.02
_PATIENCE = 30.0
"""Seconds in which a client has its sum, however often the world changes."""


class Ranked:
    """The clients of one world.

    Parameters
    ----------
    subjects
        The devices, by their ranks.
    world
        The world of them.
    ledger
        Where requests are entered.
    seed
        Of the run.
    """

    def __init__(self, subjects: Sequence[Subject], world: accel.World, ledger: Ledger, seed: int) -> None:
        self.subjects = subjects
        self._world = world
        self._ledger = ledger
        self._seed = seed
        self._lost = 0

    async def run(self, number: int, stop: asyncio.Event) -> None:
        """Be one client, until told to stop."""
        draw, rng = random.Random(f"{self._seed} ranks {number}"), np.random.default_rng([self._seed, 1 << 26, number])
        while not stop.is_set():
            given = rng.integers(0, 1000, (len(self.subjects), 60)).astype(np.float32)
            entry = self._ledger.begin("world", self.subjects[number % len(self.subjects)])
            await ask(self._ledger, entry, self._sum(given, in_batch=draw.random() < 0.5))
            await asyncio.sleep(_PAUSE * draw.random())

    async def harm(self, fault: Fault) -> bool:
        """Kill, stop or poison a rank; return whether there was one."""
        subject = self.subjects[int(fault.luck * len(self.subjects))]
        if fault.kind == "rank_fault":
            subject.plan.poison_at(subject.plan.count + 1)
        elif (pid := subject.device.info().pid) is None or not send_signal(
            pid, signal.SIGKILL if fault.kind == "rank_kill" else signal.SIGSTOP
        ):
            return False
        self._lost += 1
        subject.faulted()
        return True

    async def close(self) -> None:
        """End the world, whose epochs must each be explained by a fault."""
        if self._world.state is not accel.DeviceState.READY or self._world.epoch - 1 > self._lost:
            self._ledger.violation(f"{self._world!r} after {self._lost} faults")
        await self._world.aclose()

    async def _sum(self, given: Array, *, in_batch: bool) -> None:
        """Sum over all ranks; again where the world changes, as a client would."""
        async with asyncio.timeout(_PATIENCE):
            while True:
                lost = self._lost
                try:
                    seen = await self._once(given, in_batch=in_batch)
                    break
                except (accel.ContextPoisonedError, accel.StaleRefError) as error:
                    if not lost and not self._lost:
                        raise WrongAnswerError(f"a world without faults changed: {error!r}") from error
        for rank in range(len(given)):
            check(seen[rank], given.sum(0), "world")

    async def _once(self, given: Array, *, in_batch: bool) -> tuple[Array, ...]:
        refs = await self._world.each(lambda device, rank: device.put(given[rank]))
        if in_batch:
            async with self._world.batch() as batch:
                total = batch.all_gather(batch.reduce_scatter(refs))
        else:
            total = await self._world.all_reduce(refs)
        return await self._world.each(lambda device, rank: device.get(total[rank]))
