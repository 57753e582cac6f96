"""One batch after it was formed: the handler is called, its callers are told, and what a rebuild cut short is tried once more."""

from __future__ import annotations

import time
from collections.abc import Sequence
from inspect import isawaitable
from itertools import repeat
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from accel.errors import ClosedError, InvalidArgumentError
from accel.patterns.outcome import is_worth_a_retry, own_instance

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

    from accel.patterns.requests import Counters, Request

__all__ = ["BatchRunner", "Recovering"]


class Recovering(Protocol):
    """What a batcher needs of a device: to learn when its next context is ready. :class:`accel.Device` is one."""

    def generations(self) -> AsyncIterator[int]:
        """Yield the generation as soon as the device is ready, then every new one."""


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

    Attributes
    ----------
    seconds_per_item : float
        How long the handler takes for one item of a batch, of late.
    """

    __slots__ = ("_counters", "_device", "_handler", "seconds_per_item")

    def __init__(self, handler: Callable[[list[Any]], Awaitable[Sequence[Any]]], device: Recovering | None, counters: Counters) -> None:
        self._handler = handler
        self._device = device
        self._counters = counters
        self.seconds_per_item = 1e-3

    async def run(self, batch: list[Request]) -> None:
        """Carry a batch to its end. If this is cancelled, those who still wait are the caller's to tell; see :meth:`fail`."""
        while batch:
            again = await self._attempt(batch)
            if again and self._device is not None:
                await self._recovered(self._device, again)
            batch = again

    def fail(self, batch: Iterable[Request], error: Exception) -> None:
        """Answer with an error all who still wait."""
        given: set[int] = set()
        for request in batch:
            if not request.future.done():
                self._counters.failed += 1
                request.future.set_exception(own_instance(error, given))

    async def _attempt(self, batch: list[Request]) -> list[Request]:
        """Call the handler, answer, and return what is to be tried again."""
        wanted = [request for request in batch if not request.future.done()]
        if not wanted:
            return []
        counters, items = self._counters, 0
        for request in wanted:
            items += request.size
            request.is_launched = True
            if request.is_retried:
                counters.retried += 1
        counters.batches += 1
        counters.items += items
        began = time.perf_counter()
        try:
            answer: Any = self._handler([request.item for request in wanted])
            results: Any = await answer if isawaitable(answer) else _not_awaitable(answer)
        except Exception as error:
            return self._settle(wanted, repeat(error, len(wanted)))
        self.seconds_per_item += 0.2 * ((time.perf_counter() - began) / items - self.seconds_per_item)
        wrong = results if isinstance(results, InvalidArgumentError) else _mismatch(results, len(wanted))
        return self._settle(wanted, results if wrong is None else repeat(wrong, len(wanted)))

    def _settle(self, batch: list[Request], results: Iterable[Any]) -> list[Request]:
        """Tell the callers, and return the requests that are to be tried again."""
        again: list[Request] = []
        given: set[int] = set()
        answered = 0
        for request, result in zip(batch, results, strict=True):
            future = request.future
            if future.done():
                continue
            if not isinstance(result, Exception):
                answered += 1
                future.set_result(result)
            elif request.is_idempotent and not request.is_retried and is_worth_a_retry(result):
                request.is_retried = True
                again.append(request)
            else:
                self._counters.failed += 1
                future.set_exception(own_instance(result, given))
        self._counters.answered += answered
        return again

    async def _recovered(self, device: Recovering, batch: list[Request]) -> None:
        """Wait until the device is ready; if that will not happen any more, fail the batch."""
        generations = device.generations()
        try:
            await anext(generations)
        except StopAsyncIteration:
            self.fail(batch, ClosedError("the device was closed before the item could be tried again"))
        except Exception as error:
            self.fail(batch, error)
        finally:
            # An iterator dropped in the middle would be closed by a task that nobody waits for.
            close = getattr(generations, "aclose", None)
            if close is not None:
                await close()


def _mismatch(results: object, wanted: int) -> InvalidArgumentError | None:
    """Return the error for a handler that did not give one result per item."""
    # Mappings and texts have lengths too, but their keys and letters are no results.
    if isinstance(results, np.ndarray):
        given = len(results) if results.ndim else None
    else:
        given = len(results) if isinstance(results, Sequence) and not isinstance(results, (str, bytes, bytearray, memoryview)) else None
    if given == wanted:
        return None
    what = f"a {type(results).__name__}" if given is None else f"{given} results"
    return InvalidArgumentError(
        f"the handler returned {what} for {wanted} items", remedy="Return a list with one result, or exception, per item, in order."
    )


def _not_awaitable(answer: object) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the handler returned a {type(answer).__name__} that cannot be awaited", remedy="Define the handler with 'async def'."
    )
