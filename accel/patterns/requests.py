"""The requests of a batcher, their bounded queue, and the call of a handler with some of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from inspect import isawaitable
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from accel.errors import InvalidArgumentError
from accel.patterns.recovering import Attribution
from accel.telemetry import DeviceTime, Probe, ServedBatch, Service

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

__all__ = ["BatcherStatistics", "Counters", "Request", "RequestQueue", "call", "end", "launch", "trial_of"]


@dataclass(frozen=True, slots=True)
class BatcherStatistics:
    """What a batcher has done, and what is queued and in flight. A field counts requests, whatever their size, unless it says items.

    ``submitted`` is the sum of ``answered``, ``failed``, ``expired``, ``dropped``, ``abandoned``, and the requests that wait or run now.

    Parameters
    ----------
    submitted
        Requests taken.
    answered
        Requests that got a result.
    failed
        Requests that got an error from the handler, from the device, or from closing.
    expired
        Requests whose ``timeout`` ran out, before they were launched or after.
    dropped
        Requests whose caller was cancelled before they were launched; the handler never saw them.
    abandoned
        Requests whose caller was cancelled while the handler had them; what it gave was thrown away.
    rejected
        Requests refused because there was no room; not part of ``submitted``.
    refused
        Requests refused because their item was remembered as poison; not part of ``submitted``.
    retried
        How often a request was handed to the handler again: after a rebuild, or alone, because its batch had raised.
    batches
        Calls of the handler, those for retries included.
    mean_batch
        Mean size of those calls, in items; 0 before the first.
    queued
        Items in the queue now.
    waiting
        Items that wait for room in the queue now.
    in_flight
        Batches that the handler has now.
    isolated
        Requests that went to quarantine: they were on the device at a fault, or their item equals one that is tried there.
    poisoned
        Requests of which quarantine found that they fault the context by themselves.
    isolating
        Requests in quarantine now.
    device_seconds
        Device time of the handler's calls: see :class:`accel.DeviceTime`.
    """

    submitted: int
    answered: int
    failed: int
    expired: int
    dropped: int
    abandoned: int
    rejected: int
    refused: int
    retried: int
    batches: int
    mean_batch: float
    queued: int
    waiting: int
    in_flight: int
    isolated: int
    poisoned: int
    isolating: int
    device_seconds: float


@dataclass(slots=True)
class Counters:
    """The running totals behind :class:`BatcherStatistics`.

    Attributes
    ----------
    batch_seconds : float
        Moving average of the handler's time for a batch, once there was one.
    """

    submitted: int = 0
    answered: int = 0
    failed: int = 0
    expired: int = 0
    dropped: int = 0
    abandoned: int = 0
    rejected: int = 0
    refused: int = 0
    retried: int = 0
    isolated: int = 0
    poisoned: int = 0
    batches: int = 0
    items: int = 0
    batch_seconds: float = 0.0
    device_seconds: float = 0.0


@dataclass(eq=False, slots=True)
class Request:
    """One item with the future of its caller; see :class:`accel.telemetry.ServedRequest` too.

    Attributes
    ----------
    item, size, future
        The item, how many items it counts for, and the future that the caller awaits.
    since : float
        Loop time at which it was submitted.
    is_idempotent, is_retried : bool
        Whether it may be sent again after a rebuild, and whether it was.
    is_launched : bool
        Whether the handler was called with it, or it waits for what is found of an equal item.
    is_suspect : bool
        Whether it is in quarantine, or waits for it.
    timer : asyncio.TimerHandle or None
        What ends the caller's wait at the deadline.
    number : int
        Its place among all that were submitted, from 1.
    key : Hashable
        The fingerprint of a suspect's item, if it has one.
    fault : Exception or None
        The last fault at which it was on the device.
    attribution : Attribution or None
        What the contexts that died under a suspect are charged to.
    """

    item: Any
    size: int
    future: asyncio.Future[Any]
    since: float
    is_idempotent: bool
    service: Service
    begun_at: float = 0.0
    launches: int = 0
    is_launched: bool = False
    is_retried: bool = False
    is_suspect: bool = False
    number: int = 0
    key: Hashable = None
    attribution: Attribution | None = None
    timer: asyncio.TimerHandle | None = None
    fault: Exception | None = None


class RequestQueue:
    """A queue bounded in items, and the requests that wait for room in it, in order. Removing a request takes constant time.

    Parameters
    ----------
    limit
        Items that fit.
    waiting_limit
        Items that may wait for room; 0 refuses at once.

    Attributes
    ----------
    queued, waiting : int
        Items inside, and items that wait for room.
    """

    __slots__ = ("_limit", "_queue", "_waiters", "_waiting_limit", "queued", "waiting")

    def __init__(self, limit: int, waiting_limit: int) -> None:
        self._limit = limit
        self._waiting_limit = waiting_limit
        # Ordered dictionaries: taking from the middle (a cancelled request) costs as little as taking from the front.
        self._queue: OrderedDict[Request, None] = OrderedDict()
        self._waiters: OrderedDict[Request, None] = OrderedDict()
        self.queued = 0
        self.waiting = 0

    def offer(self, request: Request) -> bool:
        """Add a request to the queue, or to those that wait for room; return whether there was space in either."""
        size = request.size
        if self.queued + size <= self._limit and not self._waiters:
            self._queue[request] = None
            self.queued += size
            return True
        if self.waiting + size <= self._waiting_limit:
            self._waiters[request] = None
            self.waiting += size
            return True
        return False

    def discard(self, request: Request) -> None:
        """Remove a request whose caller has left; does nothing if it is not here."""
        if request in self._queue:
            del self._queue[request]
            self.queued -= request.size
        elif request in self._waiters:
            del self._waiters[request]
            self.waiting -= request.size
        else:
            return
        self._admit()

    def take(self, limit: int) -> list[Request]:
        """Take requests from the front, as many as fit into ``limit`` items; requests whose caller has left are dropped."""
        queue = self._queue
        taken: list[Request] = []
        while queue:
            request, _ = queue.popitem(last=False)
            size = request.size
            # The future of a cancelled caller is done one iteration before the caller discards its request.
            if request.future.done():
                self.queued -= size
            elif size > limit:
                queue[request] = None
                queue.move_to_end(request, last=False)
                break
            else:
                self.queued -= size
                limit -= size
                taken.append(request)
        if self._waiters:
            self._admit()
        return taken

    def clear(self) -> list[Request]:
        """Take all requests, also those that wait for room."""
        left = [*self._queue, *self._waiters]
        self._queue.clear()
        self._waiters.clear()
        self.queued = self.waiting = 0
        return left

    def oldest(self) -> float | None:
        """Return the loop time at which the first request in the queue was submitted; ``None`` if there is none."""
        for request in self._queue:
            return request.since
        return None

    def _admit(self) -> None:
        waiters = self._waiters
        while waiters:
            request = next(iter(waiters))
            if self.queued + request.size > self._limit:
                return
            del waiters[request]
            self.waiting -= request.size
            self._queue[request] = None
            self.queued += request.size


def launch(batch: ServedBatch) -> None:
    """Tell probes of a batch that is launched."""
    if batch.service.probes.batch_launched:
        batch.service.probes.tell(Probe.batch_launched, batch)


def end(batch: ServedBatch) -> None:
    """Tell probes of a batch that has ended."""
    batch.ended_at = perf_counter()
    if batch.service.probes.batch_ended:
        batch.service.probes.tell(Probe.batch_ended, batch)


@contextlib.contextmanager
def trial_of(requests: list[Request], counters: Counters) -> Iterator[None]:
    """Tell probes of a trial in quarantine, which the block makes and whose results it gives, and charge its device time."""
    for request in requests:
        request.launches += 1
    batch = ServedBatch(requests[0].service, requests, sum([request.size for request in requests]))
    waiting = [request for request in requests if not request.future.done()]
    launch(batch)
    try:
        with DeviceTime() as spent:
            yield
        batch.answered = [request for request in waiting if request.future.done() and _is_answered(request.future)]
    except BaseException as error:
        batch.error = type(error).__name__
        raise
    finally:
        batch.device_seconds = spent.seconds
        counters.device_seconds += spent.seconds or 0.0
        end(batch)


def _is_answered(future: asyncio.Future[Any]) -> bool:
    return not future.cancelled() and future.exception() is None


async def call(handler: Callable[[list[Any]], Awaitable[Sequence[Any]]], items: list[Any]) -> Any:
    """Call ``handler`` with the items of some requests; return one result for each, or one exception for all of them.

    An error's traceback holds this frame, which therefore must not hold the requests: their futures hold the error.
    """
    try:
        answer: Any = handler(items)
        if not isawaitable(answer):
            return InvalidArgumentError(
                f"the handler returned a {type(answer).__name__} that cannot be awaited", remedy="Define the handler with 'async def'."
            )
        results = await answer
        # A sequence of the user's own class may raise in any method.
        return _mismatch(results, len(items)) or list(results)
    except Exception as error:
        return error


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
