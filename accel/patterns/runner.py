"""Runs one batch: calls the handler, answers the callers, and retries once what a rebuild interrupted or a neighbour may have failed."""

from __future__ import annotations

import time
from itertools import repeat
from typing import TYPE_CHECKING, Any

from accel.errors import ClosedError
from accel.patterns.calling import call, until_ready
from accel.patterns.outcome import is_of_an_item, is_suspicious, is_worth_a_retry, own_instance

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from accel.patterns.calling import Recovering
    from accel.patterns.isolation import Isolation
    from accel.patterns.requests import Counters, Request

__all__ = ["BatchRunner"]


class BatchRunner:
    """Calls a handler with batches.

    Parameters
    ----------
    handler
        As given to the batcher.
    device
        Awaited before a retry.
    counters
        Where the outcomes are counted.
    isolation
        Takes the idempotent requests that were on the device at a fault; without it they are retried like the others.

    Attributes
    ----------
    seconds_per_item : float
        Moving average of the handler's time for one item of a batch.
    """

    __slots__ = ("_counters", "_device", "_handler", "_isolation", "seconds_per_item")

    def __init__(
        self,
        handler: Callable[[list[Any]], Awaitable[Sequence[Any]]],
        device: Recovering | None,
        counters: Counters,
        isolation: Isolation | None = None,
    ) -> None:
        self._handler = handler
        self._device = device
        self._counters = counters
        self._isolation = isolation
        self.seconds_per_item = 1e-3

    async def run(self, batch: list[Request]) -> None:
        """Run a batch to its end. If this is cancelled, requests stay unanswered: then call :meth:`fail`."""
        while batch:
            again = await self._attempt(batch)
            if again and self._device is not None:
                await self._recovered(self._device, again)
            batch = again

    def fail(self, batch: Iterable[Request], error: Exception) -> None:
        """Fail all requests that are not answered yet."""
        given: set[int] = set()
        for request in batch:
            if not request.future.done():
                self._counters.failed += 1
                request.future.set_exception(own_instance(error, given))

    async def _attempt(self, batch: list[Request]) -> list[Request]:
        """Call the handler, answer the callers, and return the requests to retry."""
        wanted = [request for request in batch if not request.future.done()]
        if not wanted:
            return []
        counters, items = self._counters, 0
        for request in wanted:
            items += request.size
            if request.is_launched:
                counters.retried += 1
            request.is_launched = True
        counters.batches += 1
        counters.items += items
        began = time.perf_counter()
        results = await call(self._handler, [request.item for request in wanted])
        if isinstance(results, Exception):
            if len(wanted) > 1 and is_of_an_item(results):
                return await self._singly(wanted, results)
            return self._settle(wanted, repeat(results, len(wanted)))
        self.seconds_per_item += 0.2 * ((time.perf_counter() - began) / items - self.seconds_per_item)
        return self._settle(wanted, results)

    async def _singly(self, batch: list[Request], error: Exception) -> list[Request]:
        """Hand the idempotent items of a batch that raised to the handler one by one, and return the requests to retry after a rebuild."""
        self.fail((request for request in batch if not request.is_idempotent), error)
        again: list[Request] = []
        for request in batch:
            again += await self._attempt([request])  # which does nothing for one that has failed
        return again

    def _settle(self, batch: list[Request], results: Iterable[Any]) -> list[Request]:
        """Answer the callers, and return the requests to retry."""
        again: list[Request] = []
        suspects: list[Request] = []
        isolation = self._isolation
        given: set[int] = set()
        answered = 0
        for request, result in zip(batch, results, strict=True):
            future = request.future
            if isolation is not None and request.is_idempotent and isinstance(result, Exception) and is_suspicious(result):
                request.fault = result
                suspects.append(request)
            elif future.done():
                continue
            elif not isinstance(result, Exception):
                answered += 1
                future.set_result(result)
            elif request.is_idempotent and not request.is_retried and is_worth_a_retry(result):
                request.is_retried = True
                again.append(request)
            else:
                self._counters.failed += 1
                future.set_exception(own_instance(result, given))
        self._counters.answered += answered
        if suspects and isolation is not None:
            isolation.take(suspects)
        return again

    async def _recovered(self, device: Recovering, batch: list[Request]) -> None:
        """Wait until the device is ready; fail the batch if it will not be."""
        try:
            await until_ready(device)
        except StopAsyncIteration:
            self.fail(batch, ClosedError("the device was closed before the item could be tried again"))
        except Exception as error:
            self.fail(batch, error)
