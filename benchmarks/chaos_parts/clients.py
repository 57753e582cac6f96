"""The clients: tasks that send one request after the other, wait for each, cancel some, and give some a deadline."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import numpy as np

import accel
from accel.patterns import DynamicBatcher
from benchmarks.chaos_parts.oracle import WrongAnswerError
from benchmarks.chaos_parts.requests import KINDS, Asker, check

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from benchmarks.chaos_parts.oracle import Ledger
    from benchmarks.chaos_parts.subject import Entry, Subject

__all__ = ["Client", "Scoring", "ask"]

Array = np.ndarray[Any, Any]

_BACK_OFF = 0.02
_FEATURES, _CLASSES = 24, 6


async def ask(ledger: Ledger, entry: Entry, asking: Awaitable[None]) -> bool:
    """Await one request and note how it ended; return whether its answer was right."""
    try:
        await asking
    except asyncio.CancelledError:
        ledger.cancelled(entry)
        raise
    except Exception as error:
        ledger.failed(entry, error)
        return False
    ledger.right(entry)
    return True


class Scoring:
    """A small service on one device: rows are scored in batches, by weights that are put there once in each generation."""

    def __init__(self, ledger: Ledger, subject: Subject, seed: int) -> None:
        self.subject = subject
        self.weights = np.random.default_rng([seed, 1 << 20]).standard_normal((_FEATURES, _CLASSES)).astype(np.float32)
        self._ledger = ledger
        self._on_device: accel.AccelRef | None = None
        self.batcher: DynamicBatcher[Array, Array] = DynamicBatcher(self._handle, max_items=16, idempotent=True, device=subject.device)

    async def _handle(self, rows: list[Array]) -> Sequence[Array | Exception]:
        subject = self.subject
        device = subject.device
        entry = self._ledger.begin("handler", subject)
        scores: list[Array] = []

        async def score() -> None:
            weights = self._on_device
            if weights is None or weights.is_stale:
                weights = self._on_device = await device.put(self.weights)
            x = await device.put(np.stack(rows))
            scores.extend(await device.get(await device.blas.gemm(x, weights)))

        try:
            await score()
        except asyncio.CancelledError:
            self._ledger.cancelled(entry)
            raise
        except Exception as error:
            subject.handler_failures[type(error)] += 1
            self._ledger.failed(entry, error)
            raise
        self._ledger.right(entry)
        return scores

    async def score(self, row: Array) -> None:
        """Have a row scored, and check the scores."""
        check(await self.batcher.submit(row), row.astype(np.float64) @ self.weights, "score")

    async def forget(self) -> None:
        """Drop the weights."""
        self._on_device = None


class Client:
    """One client.

    Parameters
    ----------
    number, seed
        What its requests are drawn from.
    ledger
        Where they are entered.
    subjects, weights
        Whom it asks, and how often in proportion.
    services
        Label of a device -> its service.
    tamper
        See :class:`~benchmarks.chaos_parts.requests.Asker`.
    """

    def __init__(
        self,
        number: int,
        seed: int,
        ledger: Ledger,
        subjects: Sequence[Subject],
        weights: Sequence[float],
        services: dict[str, Scoring],
        tamper: Callable[[Array], Array],
    ) -> None:
        self._draw = random.Random(f"{seed} client {number}")
        self._asker = Asker(number, seed, self._draw, tamper)
        self._ledger = ledger
        self._subjects = subjects
        self._weights = weights
        self._services = services
        self._kinds = [*KINDS, "score"]
        self._often = [KINDS[kind][0] if kind in KINDS else 4.0 for kind in self._kinds]

    async def run(self, stop: asyncio.Event) -> None:
        """Send requests until told to stop, and wait for the last one."""
        while not stop.is_set():
            subject = self._draw.choices(self._subjects, self._weights)[0]
            if subject.device.state is accel.DeviceState.LOST and self._draw.random() < 0.95:
                await asyncio.sleep(_BACK_OFF)
                continue
            if not await self._request(subject):
                # As a client would, who must not make an outage worse.
                await asyncio.sleep(_BACK_OFF * self._draw.random())
        self._asker.forget()

    async def _request(self, subject: Subject) -> bool:
        kind = self._draw.choices(self._kinds, self._often)[0]
        if kind == "score":
            row = np.array([self._draw.gauss(0, 1) for _ in range(_FEATURES)], np.float32)
            entry = self._ledger.begin(kind, subject, allows=frozenset({"batcher"}))
            return await ask(self._ledger, entry, self._services[subject.label].score(row))
        _, method, allows = KINDS[kind]
        luck = self._draw.random()
        if luck < 0.06:
            return await self._cancelled(subject, kind, method(self._asker, subject), allows)
        if luck < 0.1:
            return await self._hurried(subject)
        return await ask(self._ledger, self._ledger.begin(kind, subject, allows=allows), method(self._asker, subject))

    async def _hurried(self, subject: Subject) -> bool:
        """Give a request little time."""
        timeout = self._draw.choice((0.0005, 0.005, 0.05, 1.0))
        entry = self._ledger.begin("hurried", subject, timeout=timeout)

        async def zeros() -> None:
            ref = await subject.device.zeros((1000,), "float32", timeout=timeout)
            if ref.shape != (1000,):
                raise WrongAnswerError(f"zeros gave {ref!r}")

        return await ask(self._ledger, entry, zeros())

    async def _cancelled(self, subject: Subject, kind: str, asking: Any, allows: frozenset[str]) -> bool:
        """Send a request, and think better of it some time later."""
        entry = self._ledger.begin(f"cancelled {kind}", subject, allows=allows)
        task = asyncio.ensure_future(ask(self._ledger, entry, asking))
        if self._draw.random() < 0.5:
            for _ in range(self._draw.randrange(1, 12)):  # once at least: a task that never began answers no request
                await asyncio.sleep(0)
        else:
            await asyncio.sleep(self._draw.random() * 0.02)
        task.cancel()
        await asyncio.wait({task})
        return not task.cancelled() and task.result()
