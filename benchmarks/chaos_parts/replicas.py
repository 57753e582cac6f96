"""A pool under load: one model on all of its devices, served as one, and work of its own, while members are killed, stopped, drained and added."""

from __future__ import annotations

import asyncio
import random
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

import accel
from benchmarks.chaos_parts.clients import ask
from benchmarks.chaos_parts.models import OUTPUTS, CpuModel, build, expected, weights
from benchmarks.chaos_parts.oracle import WrongAnswerError
from benchmarks.chaos_parts.processes import send_signal
from benchmarks.chaos_parts.requests import check
from benchmarks.chaos_parts.suspects import KILLERS
from benchmarks.model_service import LENGTH, VOCABULARY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.chaos_parts.oracle import Ledger
    from benchmarks.chaos_parts.subject import Subject

__all__ = ["Replicated"]

Array = np.ndarray[Any, Any]

_PAUSE = 0.02
_EVERY = 1.0
"""Seconds between two things that happen to a member, on average. The next one waits until all members serve."""
_PATIENCE = 30.0
"""Seconds for a request, and for a drain, which no member's absence may take."""


class Replicated:
    """The clients of one pool.

    Nothing may fail while one member is gone and the others serve: so each thing happens when all do.

    Parameters
    ----------
    subjects
        The devices; their contexts are in children.
    pool
        The pool of them.
    ledger
        Where requests are entered.
    seed
        Of the run.
    faults
        Kinds of faults that the run sends to others.

    Attributes
    ----------
    batcher : ModelService
        What they ask; entered and closed by what made this.
    """

    batcher: accel.ModelService

    def __init__(self, subjects: Sequence[Subject], pool: accel.Pool, ledger: Ledger, seed: int, faults: tuple[str, ...]) -> None:
        self.subjects = subjects
        self._pool = pool
        self._ledger = ledger
        self._seed = seed
        self._is_hunted = bool(KILLERS & set(faults))
        self._weights = weights(seed, 1)
        self._models: list[accel.Model] = []

    async def load(self) -> None:
        """Load the model on all devices, and make what serves it."""
        target = build if self._pool[0].name.startswith("cuda") else CpuModel
        takes: dict[str, Any] = {"inputs": {"input_ids": accel.TensorSpec(("batch", LENGTH), "int64")}, "buckets": {"batch": (1, 8, 64)}}
        self._models = await self._pool.load_model(target, weights=self._weights, **takes)
        self.batcher = accel.serve(self._models, check_finite=True)

    async def forget(self) -> None:
        """Give back what the models have on the devices."""
        for model in self._models:
            await model.aclose()

    # -- the tasks

    async def run(self, number: int, stop: asyncio.Event) -> None:
        """Be one client, until told to stop."""
        draw, rng = random.Random(f"{self._seed} replicas {number}"), np.random.default_rng([self._seed, 1 << 25, number])
        while not stop.is_set():
            key = number if draw.random() < 0.3 else None
            subject = self.subjects[number % len(self.subjects)]  # which one answers is not known yet
            if draw.random() < 0.5:
                asking = self._request(rng.integers(0, VOCABULARY, LENGTH), key)
                await ask(self._ledger, self._ledger.begin("replicas", subject), asking)
            else:
                asking = self._work(rng.standard_normal((16, 16)), key)
                await ask(self._ledger, self._ledger.begin("pool", subject), asking)
            await asyncio.sleep(_PAUSE * draw.random())

    async def change(self, stop: asyncio.Event) -> None:
        """Kill, stop, drain and add members, one at a time, until told to stop."""
        draw = random.Random(f"{self._seed} members")
        while not stop.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(_EVERY * draw.uniform(0.5, 1.5)):
                    await stop.wait()
            if not self._pool.health("all").is_ready:
                continue
            number = draw.randrange(len(self.subjects))
            subject, kind = self.subjects[number], draw.choice(("kill", "kill", "stop", "poison", "drain"))
            if kind == "drain":
                await self._drain_and_add(number)
                continue
            subject.faulted()
            if kind == "poison":
                subject.plan.poison_at(subject.plan.count + 1)
            elif (pid := subject.device.info().pid) is not None:
                send_signal(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)

    async def _drain_and_add(self, number: int) -> None:
        device = self.subjects[number].device
        await self.batcher.drain(device, timeout=_PATIENCE)
        await self._pool.drain(device, timeout=_PATIENCE)
        if device in self._pool or device in self.batcher.devices:
            self._ledger.violation(f"{device.name} was drained, and is there")
        await self._pool.add(device)
        await self.batcher.add(self._models[number])

    async def _request(self, ids: Array, key: int | None) -> None:
        """Ask the service; no member's end may be seen."""
        try:
            answer = await self.batcher.submit(ids, key=key, timeout=_PATIENCE)
        except accel.PoisonedInputError as error:
            if self._is_hunted:
                return  # the children in which it was tried alone were killed from outside
            raise WrongAnswerError(f"a clean request was taken for poison: {error}") from error
        except accel.AccelError as error:
            raise WrongAnswerError(f"a request of replicas failed: {error!r}") from error
        check(answer[:OUTPUTS], expected(self._weights, ids), "replicas")

    async def _work(self, a: Array, key: int | None) -> None:
        """Compute on a member; on the next one if it faults."""

        async def square(device: accel.Device) -> Array:
            x = await device.put(a)
            made: Array = await device.get(await device.blas.gemm(x, x))
            return made

        try:
            made = await self._pool.run(square, key=key, idempotent=True, timeout=_PATIENCE)
        except accel.ContextPoisonedError as error:
            if self._is_hunted:
                return  # a second member was killed, which the run takes for one that serves nothing
            raise WrongAnswerError(f"work on a pool failed: {error!r}") from error
        check(made, a @ a, "pool")
