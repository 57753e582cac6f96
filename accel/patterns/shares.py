"""Fair shares of device time: start-time fair queueing over the tenants of a batcher."""

from __future__ import annotations

import math
from asyncio import get_running_loop
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

from accel.errors import DeadlineExceededError, InvalidArgumentError, UnknownTenantError
from accel.patterns.requests import KeyedHeap, Request, RequestQueue, TenantStatistics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from accel.patterns.requests import Counters
    from accel.telemetry import ServedBatch

__all__ = ["OUTCOMES", "Shares"]

_MOST = 1000
"""Tenants of a service: each one has metrics of its own."""

_NAMED = 20
"""Tenants that an error lists."""

_HEAVIEST = 1e9

OUTCOMES = ("answered", "failed", "expired", "dropped", "abandoned", "rejected")
"""How a request of a tenant may end: fields of :class:`TenantStatistics`."""

_TURNS = 8
"""Parts in which a batch is filled: the next one is given to the tenant with the smallest virtual time."""

_RECENT = 5.0
"""Seconds in which the fastest batch is looked for. A cold start's slow one counts no longer."""


@dataclass(eq=False, slots=True)
class _Tenant:
    """A tenant, with its queue.

    Attributes
    ----------
    clock : float
        Its virtual time: the device seconds that it was charged, over its weight. The smallest is served next.
    place : tuple or None
        What the backlog has it under, while it has something queued.
    """

    number: int
    name: str
    weight: float
    queue: RequestQueue
    clock: float = 0.0
    place: tuple[float, int] | None = None
    device_seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)


class Shares:
    """A queue for each tenant, in place of a :class:`RequestQueue`, and the order in which they are served.

    A batch is filled from the tenant with the smallest virtual time, some items at a time. Each item is charged what it is expected to
    take, which is corrected when the batch has ended: then its part, by size, of the measured device time is known. A
    tenant that had nothing queued comes back at the present virtual time: it cannot save up.

    Parameters
    ----------
    weights
        Name of each tenant -> its weight.
    limit, waiting_limit
        Bounds of each tenant's queue.
    counters
        Where requests are counted that expire here.
    time
        Returns the loop's time.

    Attributes
    ----------
    queued, waiting : int
        Items inside, and items that wait for room, of all tenants.
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        limit: int,
        waiting_limit: int,
        counters: Counters,
        time: Callable[[], float] = lambda: get_running_loop().time(),
    ) -> None:
        self._tenants = {
            name: _Tenant(number, name, weight, RequestQueue(limit, waiting_limit, by_deadline=True))
            for number, (name, weight) in enumerate(_checked(weights).items())
        }
        self._counters = counters
        self._time = time
        self._backlog: KeyedHeap[_Tenant] = KeyedHeap()
        self._virtual = 0.0  # of the tenant that was served last
        self._seconds_per_item = 1e-3
        self._is_measured = False
        self._fastest: deque[tuple[float, float]] = deque()  # when batches ended, and their seconds, which rise
        self.queued = self.waiting = 0

    def check(self, name: object) -> str:
        """Return the name of a tenant.

        Raises
        ------
        UnknownTenantError
            It is none, or none was given.
        """
        if not isinstance(name, str) or name not in self._tenants:
            known = [*self._tenants][:_NAMED]
            more = f", and {len(self._tenants) - _NAMED} more" if len(self._tenants) > _NAMED else ""
            raise UnknownTenantError(
                f"tenant is {name!r:.80}, and the service has shares for {', '.join(known)}{more}", remedy="Give tenant= one of them."
            )
        return name

    # -- as a RequestQueue

    def offer(self, request: Request) -> bool:
        """Add a request to the queue of its tenant, or to those that wait for room in it; return whether there was space in either.

        One that has less time left than the fastest recent batch took fails at once.
        """
        if request.deadline < math.inf and request.deadline < self._soonest(request.since):
            self._refuse(request)
            return True
        tenant = self._tenants[request.tenant]
        queued, waiting = tenant.queue.queued, tenant.queue.waiting
        is_taken = tenant.queue.offer(request)
        self._follow(tenant, queued, waiting)
        return is_taken

    def discard(self, request: Request) -> None:
        """Remove a request whose caller has left, uncharged; does nothing if it is not here."""
        tenant = self._tenants[request.tenant]
        before = tenant.queue.queued, tenant.queue.waiting
        tenant.queue.discard(request)
        self._follow(tenant, *before)

    def take(self, limit: int, taker: Any = None) -> list[Request]:
        """Take requests by the virtual time of their tenants, and those of one by deadline, as many as fit into ``limit`` items.

        Where one does not fit, others fill up the batch that are ahead of its tenant by one batch at most: filled up with small items
        for ever, batches would be of those who send these.
        """
        taken: list[Request] = []
        passed: list[_Tenant] = []  # with nothing for this taker, or nothing that fits
        backlog, latest = self._backlog, math.inf
        batch, turn = limit * self._seconds_per_item, max(1, limit // _TURNS)
        soonest = self._soonest(self._time())
        while limit > 0 and (place := backlog.first()) is not None:
            tenant = backlog.values[place]
            if tenant.clock > latest + batch / tenant.weight:
                break
            queue = tenant.queue
            queued, waiting = queue.queued, queue.waiting
            found = queue.take(min(turn, limit), taker)
            fits = bool(found) and (found[0].size <= limit or not taken)
            if not fits:
                passed.append(tenant)
                if found:
                    queue.put_back(found)
                    latest = min(latest, tenant.clock)
            else:
                self._virtual = tenant.clock
                for request in found:
                    if request.deadline < soonest:
                        self._refuse(request)
                    else:
                        taken.append(request)
                        limit -= request.size
                        request.charged = request.size * self._seconds_per_item
                        tenant.clock += request.charged / tenant.weight
            self._follow(tenant, queued, waiting)
            if not fits:
                self._remove(tenant)
        for tenant in passed:
            self._place(tenant)
        return taken

    def put_back(self, requests: Iterable[Request]) -> None:
        """Add requests that were taken, before all of their tenants' others, whatever the limit."""
        for request in requests:
            tenant = self._tenants[request.tenant]
            before = tenant.queue.queued, tenant.queue.waiting
            tenant.clock -= request.charged / tenant.weight
            request.charged = 0.0
            tenant.queue.put_back((request,))
            self._follow(tenant, *before)

    def has(self, taker: Any) -> bool:
        """Return whether there is a request that this taker may take."""
        return any(tenant.queue.has(taker) for tenant in self._backlog.values.values())

    def has_own(self, taker: Any) -> bool:
        """Return whether there is a request that this taker alone may take."""
        return any(tenant.queue.has_own(taker) for tenant in self._backlog.values.values())

    def rehome(self, taker: Any, choose: Callable[[Any], Any]) -> None:
        """Give the requests of a taker that has gone to others: each to ``choose(routing_key)``, or to all."""
        for tenant in self._tenants.values():
            tenant.queue.rehome(taker, choose)

    def clear(self) -> list[Request]:
        """Take all requests, also those that wait for room."""
        left: list[Request] = []
        for tenant in self._tenants.values():
            before = tenant.queue.queued, tenant.queue.waiting
            left += tenant.queue.clear()
            self._follow(tenant, *before)
        return left

    def oldest(self) -> float | None:
        """Return the loop time at which the oldest request was submitted that is queued; ``None`` if there is none."""
        times = [tenant.queue.oldest() for tenant in self._backlog.values.values()]
        return min([time for time in times if time is not None], default=None)

    # -- charges

    def charge(self, batch: ServedBatch) -> None:
        """Charge what a batch has taken to the tenants of its requests, also if it failed; its own measurement is set."""
        shortest = perf_counter() - batch.launched_at
        seconds = batch.device_seconds
        if seconds is None:
            # A device that measures has none of this batch: it was interrupted, or waited for a rebuild, which was not its fault.
            seconds = batch.items * self._seconds_per_item if self._is_measured else shortest
        else:
            self._is_measured = True
            shortest = min(shortest, seconds)  # a batch that waited for another one would have been faster alone
        per_item = seconds / batch.items
        self._seconds_per_item += 0.2 * (per_item - self._seconds_per_item)
        charges: dict[_Tenant, float] = {}
        requests: Iterable[Any] = batch.requests
        for request in requests:
            tenant = self._tenants[request.tenant]
            cost = per_item * request.size
            tenant.device_seconds += cost
            charges[tenant] = charges.get(tenant, 0.0) + cost - request.charged
            request.charged = 0.0
        self._correct(charges)
        now, fastest = self._time(), self._fastest
        while fastest and fastest[-1][1] >= shortest:
            fastest.pop()
        fastest.append((now, shortest))

    def release(self, batch: Iterable[Request]) -> None:
        """Take back what was charged ahead for the requests of a batch that has ended and have not run in it."""
        charges: dict[_Tenant, float] = {}
        for request in batch:
            # One that is neither answered nor in quarantine was put back, and may have been taken again.
            if request.charged and (request.future.done() or request.is_suspect):
                tenant = self._tenants[request.tenant]
                charges[tenant] = charges.get(tenant, 0.0) - request.charged
                request.charged = 0.0
        self._correct(charges)

    def count(self, request: Request) -> None:
        """Count a request whose caller goes on."""
        future = request.future
        if not future.done():
            return  # the loop was closed
        if future.cancelled():
            outcome = "abandoned" if request.is_launched else "dropped"
        elif (error := future.exception()) is None:
            outcome = "answered"
        else:
            outcome = "expired" if isinstance(error, DeadlineExceededError) else "failed"
        self._tenants[request.tenant].outcomes[outcome] += 1

    def rejected(self, request: Request) -> tuple[str, RequestQueue, float]:
        """Count a request for which there was no room; return its tenant's name, queue, and part of the device time if all want some."""
        tenant = self._tenants[request.tenant]
        tenant.outcomes["rejected"] += 1
        return f"tenant {tenant.name!r}", tenant.queue, tenant.weight / sum([each.weight for each in self._tenants.values()])

    def statistics(self) -> tuple[TenantStatistics, ...]:
        """Return what is known of each tenant, in the order in which they were given."""
        return tuple(
            [
                TenantStatistics(
                    tenant=tenant.name,
                    weight=tenant.weight,
                    queued=tenant.queue.queued,
                    waiting=tenant.queue.waiting,
                    device_seconds=tenant.device_seconds,
                    **{outcome: tenant.outcomes[outcome] for outcome in OUTCOMES},
                )
                for tenant in self._tenants.values()
            ]
        )

    # -- inside

    def _soonest(self, now: float) -> float:
        """Return the loop time at which the fastest batch of the last seconds would end that began now.

        If none has ended for as long as that took, it says nothing: else after one slow batch nothing
        would run that shows faster ones.
        """
        fastest = self._fastest
        while fastest and fastest[0][0] < now - _RECENT:
            fastest.popleft()
        is_told = fastest and now - fastest[-1][0] <= fastest[0][1]
        return now + fastest[0][1] if is_told else -math.inf

    def _refuse(self, request: Request) -> None:
        """Fail a request that has less time left than the fastest recent batch took."""
        self._counters.expired += 1
        left = max(0.0, request.deadline - self._time())
        request.future.set_exception(
            DeadlineExceededError(
                f"the item has {left:.3g} s left, and the fastest recent batch took {self._fastest[0][1]:.3g} s; it will not be launched"
            )
        )

    def _follow(self, tenant: _Tenant, queued: int, waiting: int) -> None:
        """Update the totals and the backlog after a tenant's queue has changed; the counts are those before."""
        queue = tenant.queue
        self.queued += queue.queued - queued
        self.waiting += queue.waiting - waiting
        if queue.queued and not queued:
            place = self._backlog.first()
            tenant.clock = max(tenant.clock, self._virtual if place is None else place[0])
        self._place(tenant)

    def _place(self, tenant: _Tenant) -> None:
        """Put a tenant where it belongs in the backlog; one with nothing queued is not in it."""
        place = (tenant.clock, tenant.number) if tenant.queue.queued else None
        if place != tenant.place:
            self._remove(tenant)
            tenant.place = place
            if place is not None:
                self._backlog.add(place, tenant)

    def _remove(self, tenant: _Tenant) -> None:
        if tenant.place is not None:
            self._backlog.remove(tenant.place)
            tenant.place = None

    def _correct(self, charges: Mapping[_Tenant, float]) -> None:
        """Move the virtual times of tenants by some seconds each."""
        for tenant, seconds in charges.items():
            tenant.clock += seconds / tenant.weight
            self._place(tenant)


def _checked(weights: Mapping[str, float]) -> Mapping[str, float]:
    """Return the weights of some tenants; raise unless they are."""
    if not isinstance(weights, Mapping) or not 1 <= len(weights) <= _MOST:
        raise InvalidArgumentError(
            f"shares is {weights!r:.80}", remedy=f"Give a mapping of 1 to {_MOST} tenants to their weights: {{'gold': 3, 'free': 1}}."
        )
    for name, weight in weights.items():
        if not isinstance(name, str) or not name or not name.isprintable():
            raise InvalidArgumentError(
                f"shares has a tenant {name!r:.80}",
                remedy="Give names that are printable texts, and not empty: metrics have them as labels.",
            )
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight <= _HEAVIEST:
            raise InvalidArgumentError(
                f"the weight of tenant {name!r:.80} is {weight!r:.80}",
                remedy="Give a finite number more than 0: twice the weight is twice the share.",
            )
    return dict(weights)
