"""Runs one batch: calls the handler, answers the callers, and retries once what a rebuild interrupted or a neighbour may have failed."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from itertools import repeat
from typing import TYPE_CHECKING, Any

from accel.errors import ClosedError
from accel.patterns.outcome import is_by_work, is_of_an_item, is_suspicious, is_worth_a_retry, own_instance
from accel.patterns.recovering import until_ready
from accel.patterns.requests import call, end, launch
from accel.telemetry import DeviceTime, ServedBatch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from accel.patterns.isolation import Isolation
    from accel.patterns.recovering import Attribution, Recovering
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

    __slots__ = ("_attribution", "_counters", "_device", "_handler", "_isolation", "seconds_per_item")

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
        # Without quarantine nothing is examined, and each death is the device's own.
        self._attribution: Callable[[], AbstractContextManager[Attribution | None]] = getattr(
            None if isolation is None else device, "attribution", nullcontext
        )
        self.seconds_per_item = 1e-3

    async def run(self, batch: list[Request]) -> None:
        """Run a batch to its end. If this is cancelled, requests stay unanswered: then call :meth:`fail`."""
        with self._attribution() as attribution:
            while batch:
                again = await self._attempt(batch, attribution)
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

    async def _attempt(self, batch: list[Request], attribution: Attribution | None) -> list[Request]:
        """Call the handler, answer the callers, and return the requests to retry."""
        wanted = [request for request in batch if not request.future.done()]
        isolation = self._isolation
        if isolation is not None and (isolation.memory.errors or isolation.lines):
            wanted = await isolation.sift(wanted)
        if not wanted:
            return []
        counters, items = self._counters, 0
        for request in wanted:
            items += request.size
            if request.is_launched:
                counters.retried += 1
            request.is_launched = True
            request.launches += 1
        counters.batches += 1
        counters.items += items
        began, deaths = time.perf_counter(), 0 if attribution is None else attribution.deaths
        served = ServedBatch(wanted[0].service, wanted, items)
        results = await self._called(served, wanted)
        if isinstance(results, Exception):
            if len(wanted) > 1 and is_of_an_item(results):
                end(served)
                return await self._singly(wanted, results, attribution)
            results = repeat(results, len(wanted))
        else:
            seconds = time.perf_counter() - began
            self.seconds_per_item += 0.2 * (seconds / items - self.seconds_per_item)
            counters.batch_seconds += 0.2 * (seconds - counters.batch_seconds) if counters.batch_seconds else seconds
        died = attribution is not None and attribution.deaths > deaths
        again, suspects, served.answered = self._settle(wanted, results, died=died)
        end(served)
        if suspects and self._isolation is not None:
            await self._isolation.take(suspects, attribution)
        return again

    async def _called(self, batch: ServedBatch, requests: list[Request]) -> Any:
        """Return what the handler gives, as :func:`call` does; the device time is charged."""
        launch(batch)
        try:
            with DeviceTime() as spent:
                results = await call(self._handler, [request.item for request in requests])
        except BaseException as error:
            batch.error = type(error).__name__
            end(batch)
            raise
        finally:
            batch.device_seconds = spent.seconds
            self._counters.device_seconds += spent.seconds or 0.0
        batch.error = type(results).__name__ if isinstance(results, Exception) else ""
        return results

    async def _singly(self, batch: list[Request], error: Exception, attribution: Attribution | None) -> list[Request]:
        """Hand the idempotent items of a batch that raised to the handler one by one, and return the requests to retry after a rebuild."""
        self.fail((request for request in batch if not request.is_idempotent), error)
        again: list[Request] = []
        for request in batch:
            again += await self._attempt([request], attribution)  # which does nothing for one that has failed
        return again

    def _settle(self, batch: list[Request], results: Iterable[Any], *, died: bool) -> tuple[list[Request], list[Request], list[Request]]:
        """Answer the callers, and return the requests to retry, those to examine, and those with results: the table is in ``docs/recovery.md``.

        Parameters
        ----------
        died
            Whether a context died meanwhile that is charged to no item yet. Work that was not on the device then may be retried after each such death.
        """
        again: list[Request] = []
        suspects: list[Request] = []
        examines = self._isolation is not None
        given: set[int] = set()
        answered: list[Request] = []
        for request, result in zip(batch, results, strict=True):
            future = request.future
            if examines and request.is_idempotent and isinstance(result, Exception) and is_suspicious(result):
                is_first, request.fault = request.fault is None, result
                if is_by_work(result) or not is_first:
                    suspects.append(request)
                elif not future.done():
                    again.append(request)
            elif future.done():
                continue
            elif not isinstance(result, Exception):
                answered.append(request)
                future.set_result(result)
            elif request.is_idempotent and is_worth_a_retry(result) and (died or not request.is_retried):
                request.is_retried = True
                again.append(request)
            else:
                self._counters.failed += 1
                future.set_exception(own_instance(result, given))
        self._counters.answered += len(answered)
        return again, suspects, answered

    async def _recovered(self, device: Recovering, batch: list[Request]) -> None:
        """Wait until the device is ready; fail the batch if it will not be."""
        try:
            await until_ready(device)
        except StopAsyncIteration:
            self.fail(batch, ClosedError("the device was closed before the item could be tried again"))
        except Exception as error:
            self.fail(batch, error)
