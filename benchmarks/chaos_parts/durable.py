"""Durable data under fire: what is not written must stay as it is, what is written must hold what was answered, or say that it is torn."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np

import accel
from benchmarks.chaos_parts.clients import ask
from benchmarks.chaos_parts.oracle import WrongAnswerError

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.chaos_parts.oracle import Ledger
    from benchmarks.chaos_parts.subject import Subject

__all__ = ["DurableCounter", "DurableData"]

_PAUSE = 0.1
_TORN = frozenset({"torn"})


class DurableData:
    """An array that is put once and read until the end.

    Parameters
    ----------
    subject
        The device.
    seed
        What the array is drawn from.
    tamper
        See :class:`~benchmarks.chaos_parts.requests.Asker`.
    """

    def __init__(self, subject: Subject, seed: list[int], tamper: Callable[[Any], Any]) -> None:
        self.subject = subject
        self._array = np.random.default_rng(seed).standard_normal(1 << 18)
        self.nbytes = self._array.nbytes
        self._tamper = tamper
        self._ref: accel.AccelRef | None = None

    async def put(self) -> None:
        """Put it on the device, before any fault."""
        self._ref = await self.subject.device.put(self._array, durable=True)

    async def is_intact(self) -> None:
        """Read it, and raise unless it is what was put."""
        assert self._ref is not None, "it was put"
        if not np.array_equal(self._tamper(await self.subject.device.get(self._ref)), self._array):
            raise WrongAnswerError("durable data has changed")

    async def read(self, ledger: Ledger, stop: asyncio.Event) -> None:
        """Read it from time to time."""
        while not stop.is_set():
            await ask(ledger, ledger.begin("durable", self.subject), self.is_intact())
            await asyncio.sleep(_PAUSE)


class DurableCounter:
    """A buffer that is counted up in place, over all generations.

    Parameters
    ----------
    subject
        The device.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._ref: accel.AccelRef | None = None
        self._count = self._unsure = 0
        self._is_torn = False

    async def run(self, ledger: Ledger, stop: asyncio.Event) -> None:
        """Count, and begin anew where a fault has torn the buffer."""
        while not stop.is_set():
            if self._is_torn:
                await ask(ledger, ledger.begin("durable rewrite", self.subject), self._rewrite())
            else:
                await ask(ledger, ledger.begin("durable counter", self.subject, allows=_TORN), self._step())
            await asyncio.sleep(_PAUSE / 10)
        self._ref = None

    async def _step(self) -> None:
        device = self.subject.device
        if self._ref is None:
            self._ref = await device.zeros((64,), "float64", durable=True)
        one = await device.full((64,), 1.0, "float64")
        try:
            self._unsure += 1
            await device.elementwise.binary("add", self._ref, one, out=self._ref)
            self._unsure -= 1
            self._count += 1
            value = await device.get(self._ref)
        except accel.StaleRefError as error:
            self._is_torn = error.reason == "torn"
            raise
        if not (np.all(value == value[0]) and self._count <= value[0] <= self._count + self._unsure):
            raise WrongAnswerError(f"counted {value[:4]}, after {self._count} answers and {self._unsure} that were not told")

    async def _rewrite(self) -> None:
        await self.subject.device.put(np.zeros(64), out=self._ref)
        self._count = self._unsure = 0
        self._is_torn = False
