"""What the demo does to the model: many clients with one image each at a time, a fault in the middle, and a witness who notes when it happened.

Each client sends its image to both services: the request in the middle kills both.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import numpy as np

from accel.errors import AccelError, StaleRefError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from accel.cli.demo_screen import DemoScreen, Tally
    from accel.cli.digits import Digits, Model
    from accel.cli.plain import PlainService
    from accel.patterns import DynamicBatcher

__all__ = ["Traffic", "Witness"]


class Witness:
    """The batcher's handler: the model's own, with a fault for the batch that holds a certain request, and the times noted.

    Parameters
    ----------
    model
        Who classifies.
    strike
        Brings the fault about, and says what it did; ``None`` for none.
    at
        Number of the request whose batch is to meet the fault, from 1.
    note
        Told in a line what happens.

    Attributes
    ----------
    launched : int
        Requests handed over so far, retries included.
    struck : str or None
        What brought the fault about.
    standby : str or None
        What there was of a spare child then.
    fault_at : int or None
        What ``launched`` was when the fault surfaced.
    seconds_to_answer : float or None
        From when the fault surfaced to the first good answer of the next generation.
    """

    def __init__(self, model: Model, strike: Callable[[], str] | None, at: int, note: Callable[[str], None]) -> None:
        self._model = model
        self._strike = strike
        self._planned = strike is not None
        self._at = at
        self._note = note
        self._surfaced = 0.0
        self._lost = 0
        self.launched = 0
        self.struck: str | None = None
        self.standby: str | None = None
        self.fault_at: int | None = None
        self.seconds_to_answer: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing is to come: no fault was planned, or it surfaced and was survived."""
        return self._strike is None and (not self._planned or self.seconds_to_answer is not None)

    async def classify(self, images: list[NDArray[np.float32]]) -> Sequence[int]:
        """Classify a batch of single images."""
        self.launched += len(images)
        generation = self._model.device.generation
        if self._strike is not None and self.launched >= self._at:
            self.standby = self._model.device.info().standby
            self.struck = self._strike()
            self._strike = None
        try:
            labels = await self._model.classify(images)
        except AccelError as error:
            self._failed(error, generation)
            raise
        if self.fault_at is not None and self.seconds_to_answer is None and self._model.device.generation > self._lost:
            self._answered()
        return labels

    def _failed(self, error: AccelError, generation: int) -> None:
        # A child that is killed between two ops of a batch shows itself by what it had: its refs are stale.
        if self.fault_at is None and (error.is_fault or isinstance(error, StaleRefError)):
            self._surfaced = time.perf_counter()
            self.fault_at = self.launched
            self._lost = generation
            self._note(
                f"fault at request {self.launched:,}, by {self.struck}: {type(error).__name__} in generation {generation}, "
                "the context is being rebuilt"
            )

    def _answered(self) -> None:
        self.seconds_to_answer = time.perf_counter() - self._surfaced
        self._note(f"generation {self._model.device.generation} answers, {self.seconds_to_answer * 1e3:.1f} ms after the fault")


class Traffic:
    """Requests for held-out digits, every digit about equally often, in random order.

    Parameters
    ----------
    digits
        Where the images come from.
    requests
        How many to send.
    seed
        Of the order.

    Attributes
    ----------
    chosen, answers, latencies : numpy.ndarray
        Per request: which held-out image; the label that came, or -1; seconds that it took, or NaN.
    errors : list of Exception
        What requests ended with that got no label.
    seconds : float
        From the first request to the last answer.
    """

    def __init__(self, digits: Digits, requests: int, seed: int) -> None:
        self._images = list(digits.held_out_images)
        self.chosen = np.random.default_rng(seed).permutation(np.arange(requests) % len(self._images))
        self.answers = np.full(requests, -1, np.int64)
        self.latencies = np.full(requests, np.nan)
        self.errors: list[Exception] = []
        self.seconds = 0.0

    async def run(
        self,
        batcher: DynamicBatcher[NDArray[np.float32], int],
        clients: int,
        tally: Tally,
        screen: DemoScreen,
        plain: PlainService | None,
        kill_plain_at: int | None,
    ) -> None:
        """Send all requests from ``clients`` tasks, each with one request at a time.

        Parameters
        ----------
        batcher
            The service.
        clients
            Tasks.
        tally, screen
            Told how each request ended.
        plain
            The service beside it, which gets the same requests.
        kill_plain_at
            Number of the request that kills it, from 1.
        """
        numbers = iter(range(len(self.chosen)))

        async def client() -> None:
            for number in numbers:
                image = self._images[self.chosen[number]]
                beside = None if plain is None else plain.ask(image)
                if plain is not None and number + 1 == kill_plain_at:
                    plain.kill()
                    screen.note(
                        f"request {number + 1:,} kills the plain service: SIGKILL to process {plain.pid}, which nothing starts again"
                    )
                began = time.perf_counter()
                try:
                    self.answers[number] = await batcher.submit(image)
                except Exception as error:
                    self.errors.append(error)
                    tally.on_failure()
                else:
                    self.latencies[number] = time.perf_counter() - began
                    tally.on_answer()
                if beside is not None:
                    await beside
                screen.update()

        tally.begin()
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for index in range(clients):
                group.create_task(client(), name=f"accel-demo-client-{index}")
        self.seconds = time.perf_counter() - began
