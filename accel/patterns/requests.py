"""The requests of a batcher, their bounded queue, and the call of a handler with some of them."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields
from heapq import heappop, heappush
from inspect import isawaitable
from time import perf_counter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from accel.errors import InvalidArgumentError
from accel.models import Rows
from accel.patterns.recovering import Attribution
from accel.telemetry import DeviceTime, ServedBatch, Service

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable, Iterator

__all__ = [
    "BatcherStatistics",
    "Counters",
    "KeyedHeap",
    "Receipt",
    "ReplicaStatistics",
    "Request",
    "RequestQueue",
    "TenantStatistics",
    "call",
    "end",
    "trial_of",
]

T = TypeVar("T")


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
    replicas
        What each device has done that takes batches now; those that were drained count in the other fields alone.
    tenants
        What was done for each tenant; empty without shares.
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
    replicas: tuple[ReplicaStatistics, ...]
    tenants: tuple[TenantStatistics, ...]


@dataclass(frozen=True, slots=True)
class ReplicaStatistics:
    """What one device of a batcher has done, and does now.

    Parameters
    ----------
    device
        Its name; empty for a handler without one.
    state
        Of the device, such as ``"ready"``.
    is_draining
        Whether it takes no more batches.
    in_flight
        Batches that it has now.
    batches, items, answered, failed, device_seconds
        As in :class:`BatcherStatistics`.
    seconds
        Moving average of the time that it is busy with one batch; 0 before the first.
    """

    device: str
    state: str
    is_draining: bool
    in_flight: int
    batches: int
    items: int
    answered: int
    failed: int
    device_seconds: float
    seconds: float


@dataclass(frozen=True, slots=True)
class TenantStatistics:
    """What a batcher has done for one tenant, and what is queued of it; only with shares.

    Parameters
    ----------
    tenant, weight
        As in the shares.
    queued, waiting
        Items in its queue, and items that wait for room in it.
    device_seconds
        Device time that it was charged; wall time where a device does not measure.
    answered, failed, expired, dropped, abandoned, rejected
        As in :class:`BatcherStatistics`, counted when the caller goes on. An error of the handler that is a
        :class:`~accel.DeadlineExceededError` counts as expired.
    """

    tenant: str
    weight: float
    queued: int
    waiting: int
    device_seconds: float
    answered: int
    failed: int
    expired: int
    dropped: int
    abandoned: int
    rejected: int


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one answer took: from :meth:`DynamicBatcher.timed`.

    Parameters
    ----------
    queued
        Seconds from the submission of the item to the batch that answered it, retries included.
    device_seconds
        Device time of that batch, as measured; ``None`` where the device does not measure. The item's share of it is not measured.
    batch_items
        Items in that batch.
    device
        Name of the device that it ran on; empty for a handler without one.
    version
        Of the weights that answered; ``None`` for a handler without any, and in quarantine.
    tenant
        The share that was charged; empty without shares.
    """

    queued: float
    device_seconds: float | None
    batch_items: int
    device: str
    version: int | None
    tenant: str


@dataclass(slots=True)
class Counters:
    """The running totals behind :class:`BatcherStatistics`.

    Attributes
    ----------
    batch_seconds : float
        Moving average of the handler's time for a batch, once there was one.
    charge : callable or None
        Called with each batch, and each trial in quarantine, once it is known what it took.
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
    charge: Callable[[ServedBatch], None] | None = None

    def add(self, other: Counters) -> None:
        """Add the totals of another."""
        for name in _TOTALS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def totals(self) -> dict[str, Any]:
        """Return those that are fields of :class:`BatcherStatistics`."""
        return {name: getattr(self, name) for name in _TOTALS if name != "items"}


_TOTALS = [field.name for field in fields(Counters) if field.name not in ("batch_seconds", "charge")]


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
        Its place among all that were submitted, from 1; it is set before the request is queued.
    key : Hashable
        The fingerprint of a suspect's item, if it has one.
    fault : Exception or None
        The last fault at which it was on the device.
    attribution : Attribution or None
        What the contexts that died under a suspect are charged to.
    tenant : str
        The share that its device time is charged to; empty without shares.
    deadline : float
        Loop time at which its caller's timeout ends.
    routing_key : Hashable
        What its caller chose the device by, if by anything.
    home : Any
        The taker that is to take it, and no other; ``None``: any.
    charged : float
        Device seconds that its tenant was charged ahead, while it is in a batch.
    batch : ServedBatch or None
        The last one that it was in, until its caller goes on.
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
    tenant: str = ""
    deadline: float = math.inf
    routing_key: Any = None
    home: Any = None
    charged: float = 0.0
    batch: ServedBatch | None = None

    def receipt(self) -> Receipt:
        """Return what its answer took."""
        batch = self.batch
        assert batch is not None, "what is answered was in a batch"
        return Receipt(
            queued=batch.launched_at - self.begun_at,
            device_seconds=batch.device_seconds,
            batch_items=batch.items,
            device=batch.device,
            version=batch.version,
            tenant=self.tenant,
        )

    def on_end(self, told: Callable[[BaseException | None], object]) -> None:
        """Call a function with the error that its caller gets; see :class:`accel.telemetry.ServedRequest`."""
        self.future.add_done_callback(lambda future: told(asyncio.CancelledError() if future.cancelled() else future.exception()))


class KeyedHeap(Generic[T]):
    """Values in the order of their keys, of which any can be removed in constant time.

    Attributes
    ----------
    keys : list
        A heap of the keys of ``values``, and of some that were removed.
    values : dict
        Key -> value.
    """

    __slots__ = ("keys", "values")

    def __init__(self) -> None:
        self.keys: list[Any] = []
        self.values: dict[Any, T] = {}

    def first(self) -> Any:
        """Return the first key; ``None`` if there is no value."""
        keys = self.keys
        while keys and keys[0] not in self.values:
            heappop(keys)
        return keys[0] if keys else None

    def add(self, key: Any, value: T) -> None:
        """Add a value."""
        self.values[key] = value
        heappush(self.keys, key)

    def remove(self, key: Any) -> bool:
        """Remove a value; return whether it was here."""
        if self.values.pop(key, None) is None:
            return False
        if len(self.keys) > 2 * len(self.values) + _REMOVED:
            self.keys = sorted(self.values)
        return True


_REMOVED = 64
"""Keys of removed values that are kept, besides one for each value."""


class RequestQueue:
    """A queue bounded in items, and the requests that wait for room in it, in order. Removing a request takes constant time.

    Requests with a ``home`` are in a lane of their own, from which that taker takes alone.

    Parameters
    ----------
    limit
        Items that fit.
    waiting_limit
        Items that may wait for room; 0 refuses at once.
    by_deadline
        Take the earliest deadline first, behind what was put back; ``False``: the oldest.

    Attributes
    ----------
    queued, waiting : int
        Items inside, and items that wait for room.
    """

    __slots__ = ("_by_deadline", "_common", "_lanes", "_limit", "_waiters", "_waiting_limit", "queued", "waiting")

    def __init__(self, limit: int, waiting_limit: int, *, by_deadline: bool = False) -> None:
        self._limit = limit
        self._waiting_limit = waiting_limit
        self._by_deadline = by_deadline
        self._common: KeyedHeap[Request] = KeyedHeap()
        self._lanes: dict[Any, KeyedHeap[Request]] = {None: self._common}
        # An ordered dictionary: taking from the middle (a cancelled request) costs as little as taking from the front.
        self._waiters: OrderedDict[Request, None] = OrderedDict()
        self.queued = 0
        self.waiting = 0

    def offer(self, request: Request, *, is_bounded: bool = True) -> bool:
        """Add a request, which has its number, to the queue, or to those that wait for room; return whether there was space in either."""
        size = request.size
        if is_bounded and (self.queued + size > self._limit or self._waiters):
            if self.waiting + size > self._waiting_limit:
                return False
            self._waiters[request] = None
            self.waiting += size
            return True
        lane = self._common if request.home is None else self._lanes.setdefault(request.home, KeyedHeap())
        order = self._order(request) if self._by_deadline else request.number
        lane.values[order] = request  # as KeyedHeap.add: here, and in take, a call would cost as much as the rest
        heappush(lane.keys, order)
        self.queued += size
        return True

    def put_back(self, requests: Iterable[Request]) -> None:
        """Add requests that were taken, before all that were not, whatever the limit."""
        for request in requests:
            self.offer(request, is_bounded=False)

    def discard(self, request: Request) -> None:
        """Remove a request whose caller has left; does nothing if it is not here."""
        lane = self._lanes.get(request.home)
        if lane is not None and lane.remove(self._order(request)):
            self.queued -= request.size
        elif request in self._waiters:
            del self._waiters[request]
            self.waiting -= request.size
        else:
            return
        if self._waiters:
            self._admit()

    def take(self, limit: int, taker: Any = None, most: int = sys.maxsize) -> list[Request]:
        """Take requests from the front, as many as fit into ``limit`` items but at least one; those whose caller has left are dropped.

        Parameters
        ----------
        taker
            Takes from its lane too, in one order with the others.
        most
            Requests that are taken at most.
        """
        common, own = self._common, None if taker is None else self._lanes.get(taker)
        taken: list[Request] = []
        while len(taken) < most:
            lane = common
            if own is not None and own.keys and not (common.keys and common.keys[0] < own.keys[0]):
                lane = own
            if not lane.keys:
                break
            order = lane.keys[0]
            request = lane.values.get(order)
            if request is not None:
                size = request.size
                # The future of a cancelled caller is done one iteration before the caller discards its request.
                if not request.future.done():
                    if size > limit and taken:
                        break
                    limit -= size
                    taken.append(request)
                self.queued -= size
                del lane.values[order]
            heappop(lane.keys)
        if self._waiters:
            self._admit()
        return taken

    def has(self, taker: Any) -> bool:
        """Return whether there is a request that this taker may take."""
        return bool(self._common.values) or self.has_own(taker)

    def has_own(self, taker: Any) -> bool:
        """Return whether there is a request that this taker alone may take."""
        lane = self._lanes.get(taker)
        return lane is not None and bool(lane.values)

    def rehome(self, taker: Any, choose: Callable[[Any], Any]) -> None:
        """Give the requests of a taker that has gone to others: each to ``choose(routing_key)``, or to all."""
        lane = self._lanes.pop(taker, None)
        requests = [] if lane is None else list(lane.values.values())
        for request in (*requests, *self._waiters):
            if request.home is taker:
                request.home = choose(request.routing_key)
        self.queued -= sum([request.size for request in requests])
        self.put_back(requests)

    def clear(self) -> list[Request]:
        """Take all requests, also those that wait for room."""
        left = [*(lane.values[order] for lane in self._lanes.values() for order in sorted(lane.values)), *self._waiters]
        self._common = KeyedHeap()
        self._lanes = {None: self._common}
        self._waiters.clear()
        self.queued = self.waiting = 0
        return left

    def oldest(self) -> float | None:
        """Return the loop time at which the oldest request in the queue was submitted; ``None`` if there is none."""
        if self._by_deadline:
            return min([request.since for lane in self._lanes.values() for request in lane.values.values()], default=None)
        firsts = [lane.values[order].since for lane in self._lanes.values() if (order := lane.first()) is not None]
        return min(firsts, default=None)

    def _order(self, request: Request) -> Any:
        """Return what its lane has the request under. It does not change while it is there."""
        if self._by_deadline:
            return -math.inf if request.is_launched else request.deadline, request.number
        return request.number

    def _admit(self) -> None:
        waiters = self._waiters
        while waiters:
            request = next(iter(waiters))
            if self.queued + request.size > self._limit:
                return
            del waiters[request]
            self.waiting -= request.size
            self.offer(request, is_bounded=False)


def end(batch: ServedBatch) -> None:
    """Tell probes of a batch that has ended."""
    batch.ended_at = perf_counter()
    if batch.service.probes.batch_ended:
        batch.service.probes.tell(batch.service.probes.batch_ended, batch)


@contextlib.contextmanager
def trial_of(requests: list[Request], counters: Counters, device: str) -> Iterator[None]:
    """Tell probes of a trial in quarantine, which the block makes and whose results it gives, and charge its device time."""
    batch = ServedBatch(requests[0].service, requests, sum([request.size for request in requests]), device)
    waiting = [request for request in requests if not request.future.done()]
    for request in requests:
        request.launches += 1
    for request in waiting:
        request.batch = batch
    probes = batch.service.probes
    if probes.batch_launched:
        probes.tell(probes.batch_launched, batch)
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
        if counters.charge is not None:
            counters.charge(batch)
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
        return _mismatch(results, len(items)) or (results if isinstance(results, Rows) else list(results))
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
