"""The batcher: callers await one item each, a handler gets lists."""

from __future__ import annotations

import asyncio
import math
from asyncio import _get_running_loop
from contextvars import Context
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Generic, Literal, Self, TypeVar

from accel.errors import (
    AccelError,
    ActorStoppedError,
    ClosedError,
    DeadlineExceededError,
    InvalidArgumentError,
    MailboxFullError,
    NotInitializedError,
)
from accel.hints import AsyncOnly
from accel.patterns.isolation import IsolationOptions
from accel.patterns.poison_memory import PoisonMemory, content_fingerprint
from accel.patterns.requests import BatcherStatistics, Counters, Receipt, Request, RequestQueue
from accel.patterns.root import RootTask
from accel.patterns.shares import Shares
from accel.patterns.takers import Taker, Takers
from accel.telemetry import Probes, Service
from accel.values import check_choice, check_count, check_flag, check_seconds, check_timeout

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
    from types import TracebackType

    from accel.device import Device
    from accel.patterns.recovering import Recovering
    from accel.rendezvous import Key

__all__ = ["DynamicBatcher"]

T = TypeVar("T")
R = TypeVar("R")

_WAITERS = 16
"""Bound of the queue of waiters, as a multiple of the queue's length."""

_AGES = 1e9
"""The longest timer, in seconds: event loops count in 64 bits."""


class DynamicBatcher(AsyncOnly, Generic[T, R]):
    """Gathers items from many tasks and hands them to a handler in batches: ``async with DynamicBatcher(handler) as batcher``.

    While no batch runs, an item starts a batch in the same event loop iteration, together with the other items of that iteration. While batches
    run, later items gather until there are ``max_items``, or until the first of them has waited ``max_delay``.

    Parameters
    ----------
    handler
        ``await handler(items)`` returns one result per item, in order. An exception in the place of a result fails that item alone; one that is
        raised fails the batch, but see ``idempotent``. It runs in a task of the batcher's own, with empty context variables, up to ``max_in_flight``
        times at once.
    max_items
        Items in a batch; 1 turns batching off, and nothing else changes.
    max_delay
        Seconds that an item may wait for others while batches run; with none running it never does.
    max_pending
        Items that may be queued; ``None``: enough for eight times all batches in flight.
    overload
        With the queue full, ``"wait"`` for room in order, or ``"reject"`` with :class:`~accel.MailboxFullError` and its ``retry_after``. At most
        16 times ``max_pending`` items wait for room; further ones are rejected.
    max_in_flight
        Batches that the handler may have at once.
    size
        ``size(item)`` says how many items a request counts for, from 1 to ``max_items``; ``None``: one each. A batch's sizes sum up to ``max_items``
        at most.
    idempotent
        Whether the handler may get an item a second time: once after a rebuild, which is a retryable error of scope CONTEXT or PROCESS or a ref of an
        earlier generation; and alone, after an exception of scope OP that failed the batch, so that it fails only the items that raise it alone.
    device
        Awaited before a retry, until it is ready again; ``None`` retries at once.
    quarantine
        ``await quarantine(other)`` puts the weights on another device, and returns the handler for it. With it, idempotent items that were on
        ``device`` when their work ended its context, or twice when anything else did, are not retried there, but in ever smaller groups on
        ``device.quarantine()``, while ``device`` serves the others. An item that ends a context there alone, as its batch did, or two in any way, fails with
        :class:`~accel.PoisonedInputError`; the others are answered. ``docs/recovery.md`` has the rules as a table.
    quarantine_idle
        Seconds that the quarantine stays open after its last item, with the weights put again after a fault there, so that the next poison finds it
        ready. ``0`` closes it at once; ``math.inf`` opens it with the batcher and keeps it, so that the first fault finds it ready too.
    remember_poison
        How many poisonous items are remembered; 0: none. One that is submitted again is refused at once, and never reaches the device. While none
        is remembered, this costs nothing.
    fingerprint
        ``fingerprint(item)`` returns a hashable value that is equal for equal items, or ``None`` for an item that is not to be remembered. ``None``: a
        hash of the content of numpy arrays, bytes, texts, numbers, and tuples, lists and dicts of these, up to 1 MiB; other items have none.
    close_timeout
        Seconds that closing waits for what was submitted.
    shares
        Name of each tenant -> its weight: the device time goes to the tenants that want it by their weights, twice as much for twice the weight. Each
        item is charged its part, by size, of the measured device time of its batch. ``max_pending`` is then the bound of each tenant. Of a tenant's
        items the one with the earliest deadline goes first, and one that has less time left than the fastest batch of the last seconds took fails at once.

    Raises
    ------
    InvalidArgumentError
        An option is out of its range.

    Attributes
    ----------
    service : Service
        What probes know it by, with their list: that of the device's system, or its own.

    Notes
    -----
    All methods are for the loop on which it was entered; enter and exit may happen in different tasks.
    """

    def __init__(
        self,
        handler: Callable[[list[T]], Awaitable[Sequence[R | Exception]]],
        *,
        max_items: int = 64,
        max_delay: float = 0.002,
        max_pending: int | None = None,
        overload: Literal["wait", "reject"] = "wait",
        max_in_flight: int = 2,
        size: Callable[[T], int] | None = None,
        idempotent: bool = False,
        device: Recovering | None = None,
        quarantine: Callable[[Device], Awaitable[Callable[[list[T]], Awaitable[Sequence[R | Exception]]]]] | None = None,
        quarantine_idle: float = 10.0,
        remember_poison: int = 1024,
        fingerprint: Callable[[T], Hashable] | None = None,
        close_timeout: float = 10.0,
        shares: Mapping[str, float] | None = None,
    ) -> None:
        most = check_count("max_items", max_items) * check_count("max_in_flight", max_in_flight)
        max_pending = 8 * most if max_pending is None else check_count("max_pending", max_pending, max_items)
        check_count("remember_poison", remember_poison, 0)
        check_seconds("max_delay", max_delay)
        check_seconds("close_timeout", close_timeout)
        check_seconds("quarantine_idle", quarantine_idle, or_endless=True)
        check_choice("overload", overload, "wait", "reject")
        check_flag("idempotent", idempotent)
        _check_functions(size, fingerprint, quarantine)
        self._max_items = max_items
        self._max_delay = max_delay
        self._max_pending = max_pending
        self._max_in_flight = max_in_flight
        self._size = size
        self._convert: Callable[[T], T] | None = None  # what the handler gets of an item
        self._idempotent = idempotent
        self._close_timeout = close_timeout
        self._counters = Counters()
        bounds = max_pending, _WAITERS * max_pending if overload == "wait" else 0
        self._shares = None if shares is None else Shares(shares, *bounds, self._counters)
        self._queue = self._shares or RequestQueue(*bounds)
        self._poison = PoisonMemory(remember_poison, content_fingerprint if fingerprint is None else fingerprint)
        options = IsolationOptions(max_pending, max_items, quarantine_idle, self._name)
        self._takers = Takers(max_in_flight, options, self._poison, self._queue, self._launch, self._interrupted)
        self._in_flight = self._most_in_flight = 0
        self._state: Literal["new", "open", "closing", "closed"] = "new"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._root: RootTask | None = None
        self._now = self._begun_at = 0.0
        self._launching: asyncio.Handle | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._handler = handler
        self.add_handler(handler, device=device, quarantine=quarantine)
        self.service = Service(self._name(), self._takers.first.name, getattr(device, "probes", None) or Probes(), self.statistics)

    def __repr__(self) -> str:
        return f"<DynamicBatcher {self._state} queued={self._queue.queued} in_flight={self._in_flight}>"

    # -- entering and leaving

    async def __aenter__(self) -> Self:
        if self._state != "new":
            raise ClosedError(f"the batcher is {self._state}: a batcher is entered once", remedy="Make a new one.")
        self._root = RootTask("accel-batcher", self._ended)
        self._loop = self._root.loop
        self._state = "open"
        await self._root.open()
        self._takers.open(self._root)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close: take nothing new, answer all that was submitted, end all tasks. Idempotent; all callers wait for the end.

        After ``close_timeout`` handlers are cancelled, and callers that still wait get :class:`~accel.ClosedError`.

        Raises
        ------
        ClosedError
            Called on another loop.

        Notes
        -----
        Cancelling does not stop the close: handlers are cancelled at once, and the cancellation is raised when they have ended, or a second later.
        In a forked child this does nothing.
        """
        if self._root is None or self._root.is_inherited:
            self._state = "closed"
            return
        if _get_running_loop() is not self._loop:
            raise self._not_open()
        if self._state == "open":
            self._state = "closing"
            for isolation in self._takers.isolations:
                isolation.close()
            self._launch()
        await self._root.join(self._close_timeout)

    def _ended(self) -> None:
        """Fail what is queued: the tasks of the batcher are gone."""
        self._state = "closed"
        for handle in (self._launching, self._alarm):
            if handle is not None:
                handle.cancel()
        error = ClosedError("the batcher was closed before the item was launched", remedy="Allow more close_timeout.")
        self._takers.first.fail(self._queue.clear(), error)
        self._takers.tell_idle()

    # -- requests

    async def submit(
        self, item: T, *, timeout: float | None = None, idempotent: bool | None = None, key: Key | None = None, tenant: str | None = None
    ) -> R:
        """Have one item handled in some batch, and return its result.

        Parameters
        ----------
        item
            What the handler gets.
        timeout
            Seconds, from now, for room, queue, handler and retry together; then the wait ends with :class:`~accel.DeadlineExceededError`. An item
            that has expired is not launched.
        idempotent
            Whether this item may be retried after a rebuild; ``None``: the batcher's own setting.
        key
            Items with one key go to one device, for as long as it is there: a text, bytes, or an int. It is chosen by a hash, which moves one of ``n`` keys
            when one of ``n`` devices goes. ``None``: to the device that is expected to end it first.
        tenant
            The share that is charged: one of ``shares``, and needed with them.

        Raises
        ------
        Exception
            What the handler raised, or put in this item's place. Each caller gets its own instance, where the exception can be copied.
        PoisonedInputError
            The item faults the context, or hangs; only with ``quarantine=``. With ``.remembered`` it was found before, and has not run again.
        DeadlineExceededError
            ``timeout`` ran out.
        MailboxFullError
            There is no room, and the batcher rejects, or too many items wait already.
        InvalidArgumentError
            The item is larger than a batch, or the handler did not return one result per item, or there is a tenant and there are no shares.
        UnknownTenantError
            There are shares, and the tenant has none.
        ClosedError
            The batcher is closing or closed, or belongs to another loop; or it was closed before the item was answered.

        Notes
        -----
        Cancelling detaches the caller at once. An item that was not launched is dropped; the result of a launched one is discarded.
        """
        answer, _ = await self._answered(item, timeout, idempotent, key, tenant, is_timed=False)
        return answer

    __call__ = submit

    async def timed(
        self, item: T, *, timeout: float | None = None, idempotent: bool | None = None, key: Key | None = None, tenant: str | None = None
    ) -> tuple[R, Receipt]:
        """Have one item handled, as :meth:`submit` does, and return its result and what it took: see :class:`Receipt`."""
        answer, receipt = await self._answered(item, timeout, idempotent, key, tenant, is_timed=True)
        assert receipt is not None, "what is timed has a receipt"
        return answer, receipt

    async def _answered(
        self, item: T, timeout: float | None, idempotent: bool | None, key: Key | None, tenant: str | None, *, is_timed: bool
    ) -> tuple[R, Receipt | None]:
        loop, shares = self._loop, self._shares
        if loop is None or self._state != "open" or _get_running_loop() is not loop:
            raise self._not_open()
        if self._convert is not None:
            item = self._convert(item)
        poison, fingerprint = self._poison, None
        if poison.errors or poison.lines:
            fingerprint = poison.key(item)
            if (poisoned := poison.recall_by(fingerprint, item)) is not None:
                self._counters.refused += 1
                raise poisoned
        size = 1 if self._size is None else self._measure(self._size(item))
        if self._launching is None:
            # One reading for all submissions of this event loop iteration.
            self._now, self._begun_at = loop.time(), perf_counter()
        if idempotent is not None and not isinstance(idempotent, bool):
            raise InvalidArgumentError(f"idempotent is {idempotent!r:.80}", remedy="Give True, False or None.")
        is_idempotent = self._idempotent if idempotent is None else idempotent
        request = Request(item, size, loop.create_future(), self._now, is_idempotent, self.service, self._begun_at)
        if timeout is not None and not (isinstance(timeout, (int, float)) and timeout > 0):
            raise self._no_time(timeout)
        request.number = self._counters.submitted + 1
        if key is not None or tenant is not None or shares is not None:
            self._address(request, key, tenant, timeout)
        line = poison.lines.get(fingerprint) if fingerprint is not None and is_idempotent else None
        if not (self._queue.offer(request) if line is None else line.isolation.join(request, fingerprint)):
            raise self._full(request)
        self._counters.submitted, request.key = request.number, fingerprint
        probes = self.service.probes
        if probes.request_begun:
            probes.tell(probes.request_begun, request)
        if timeout is not None:
            request.timer = loop.call_later(min(timeout, _AGES), self._expire, request, timeout)
        if self._launching is None and self._in_flight < self._most_in_flight:
            # At the end of the iteration, so that the batch has all of its submissions.
            self._launching = loop.call_soon(self._launch, context=Context())
        try:
            answer: R = await request.future
            return answer, request.receipt() if is_timed else None
        except asyncio.CancelledError:
            self._withdraw(request)
            raise
        finally:
            if request.timer is not None:
                request.timer.cancel()
            if shares is not None:
                shares.count(request)
            # An error's traceback holds this frame, and the future holds the error: a cycle that would keep the item alive.
            request.batch = None
            del request

    def _address(self, request: Request, key: Key | None, tenant: str | None, timeout: float | None) -> None:
        """Say which device takes a request, and which tenant is charged."""
        if self._shares is not None:
            request.tenant = self._shares.check(tenant)
            request.deadline = math.inf if timeout is None else self._now + timeout
        elif tenant is not None:
            raise InvalidArgumentError(f"tenant is {tenant!r:.80}, and there are no shares", remedy="Give shares= where it is made, too.")
        if key is not None:
            request.routing_key, request.home = key, self._takers.home(key)

    def forget_poison(self) -> None:
        """Forget the poisonous items that are remembered, for instance because the handler serves other weights now."""
        self._poison.clear()

    def statistics(self) -> BatcherStatistics:
        """Return the counters as they are now."""
        counters = Counters()
        for each in (self._counters, *[taker.counters for taker in self._takers.all]):
            counters.add(each)
        return BatcherStatistics(
            **counters.totals(),
            mean_batch=counters.items / counters.batches if counters.batches else 0.0,
            queued=self._queue.queued,
            waiting=self._queue.waiting,
            in_flight=self._in_flight,
            isolating=sum([len(isolation.suspects) for isolation in self._takers.isolations]),
            replicas=tuple([taker.statistics() for taker in self._takers.all]),
            tenants=() if self._shares is None else self._shares.statistics(),
        )

    # -- takers

    def add_handler(
        self,
        handler: Callable[[list[T]], Awaitable[Sequence[R | Exception]]],
        *,
        device: Recovering | None,
        quarantine: Callable[[Device], Awaitable[Callable[[list[T]], Awaitable[Sequence[R | Exception]]]]] | None = None,
    ) -> None:
        """Have another device take batches from the same queue, through a handler of its own.

        A batch goes to the device that is expected to end it first, of those that are READY and answer. What a fault of
        one interrupts is retried first, on any. ``max_in_flight`` is the bound of each.

        Parameters
        ----------
        handler, device, quarantine
            As for the batcher.

        Raises
        ------
        InvalidArgumentError
            The device has a handler already, or an argument is not what it has to be.
        ClosedError
            The batcher is closing or closed.
        """
        self._check_home()
        if any(taker.device is device for taker in self._takers.all):
            raise InvalidArgumentError(f"{device!r} takes batches already", remedy="Give a handler of another device.")
        self._takers.add(handler, device, quarantine)
        self._most_in_flight += self._max_in_flight
        if self._root is not None:
            self._launch()

    async def drain(self, device: Recovering, *, timeout: float | None = None) -> None:
        """Let a device take no more batches, and return when those that it has are answered; the device stays open.

        Parameters
        ----------
        timeout
            Seconds.

        Raises
        ------
        InvalidArgumentError
            The device takes no batches here, or is the only one that does.
        DeadlineExceededError
            ``timeout`` ran out. The device takes nothing more; call again to wait for what it has.
        ClosedError
            The batcher is closing or closed.

        Notes
        -----
        Cancelling ends the wait, as ``timeout`` does.
        """
        self._check_home()
        taker = self._takers.of(device)
        if taker is None:
            raise InvalidArgumentError(f"{device!r} takes no batches here", remedy="Give a device of this service.")
        if not any(other is not taker and not other.is_draining for other in self._takers.all):
            raise InvalidArgumentError(f"{device!r} is the only one that takes batches", remedy="Add another first, or close the service.")
        self._takers.drain(taker)
        if taker.isolation is not None:
            taker.isolation.close()
        if self._root is not None:
            self._launch()
        try:
            async with asyncio.timeout(timeout):
                await taker.idle()
        except TimeoutError:
            raise DeadlineExceededError(
                f"{taker.name} has {taker.in_flight} batches after {timeout:g} s", remedy="Drain it again to wait longer."
            ) from None
        if self._takers.remove(taker):
            self._most_in_flight -= self._max_in_flight
            self._counters.add(taker.counters)

    def _name(self) -> str:
        """Return what serves, for the log."""
        return str(getattr(self._handler, "__qualname__", self._handler))

    def _measure(self, size: int) -> int:
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= self._max_items:
            raise InvalidArgumentError(
                f"the request counts for {size!r} items, and a batch takes 1 to {self._max_items}", remedy="Split it."
            )
        return size

    def _no_time(self, timeout: float) -> AccelError:
        check_timeout(timeout)
        return DeadlineExceededError(f"an item that may take {timeout:g} s has no time to run")

    def _full(self, request: Request) -> MailboxFullError:
        self._counters.rejected += 1
        whose, queue, part = ("the batcher", self._queue, 1.0) if self._shares is None else self._shares.rejected(request)
        return MailboxFullError(
            f"{whose} has {queue.queued} items queued and {queue.waiting} waiting for room",
            retry_after=max(0.001, self._takers.first.seconds_per_item / self._most_in_flight * self._max_pending / 2 / part),
            remedy="Try again after .retry_after seconds, or make the batcher with a larger max_pending.",
        )

    def _check_home(self) -> None:
        """Raise where it is closing or closed, or this is another loop; before it is entered all is well."""
        if self._state not in ("new", "open") or (self._loop is not None and _get_running_loop() is not self._loop):
            raise self._not_open()

    def _not_open(self) -> AccelError:
        if self._state == "new":
            return NotInitializedError("the batcher was not entered", remedy="Use `async with DynamicBatcher(...) as batcher:`.")
        if _get_running_loop() is not self._loop:
            return ClosedError(
                "the batcher belongs to another event loop", remedy="Call it from its own loop; from other threads use system.portal."
            )
        return ClosedError(f"the batcher is {self._state}", remedy="Make a new one.")

    def _withdraw(self, request: Request) -> None:
        future = request.future
        if future.cancel() or future.cancelled():
            if request.is_launched:
                self._counters.abandoned += 1
            else:
                self._counters.dropped += 1
            self._queue.discard(request)
        else:
            future.exception()  # the answer came in the same iteration as the cancellation: mark it as retrieved

    def _expire(self, request: Request, timeout: float) -> None:
        if request.future.done():
            return
        self._counters.expired += 1
        self._queue.discard(request)
        what = "it was launched" if request.is_launched else "it was not launched and will not be"
        error = DeadlineExceededError(f"the item was not answered within {timeout:g} s; {what}")
        if request.is_suspect:
            error = DeadlineExceededError(
                f"the item was not answered within {timeout:g} s; it may be what faulted the device, and is tried in quarantine",
                retryable=False,
                remedy="Do not send it again before that is known: it would wait there too.",
            )
        request.future.set_exception(error)

    # -- batches

    def _launch(self) -> None:
        """Start as many batches as may start now; runs at the end of an iteration, and when the oldest item has waited ``max_delay``."""
        if self._launching is not None:
            self._launching.cancel()
            self._launching = None
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        queue, root = self._queue, self._root
        assert root is not None, "a batcher that takes items has a root"
        while queue.queued:
            taker = self._takers.next(root)
            most = 0 if taker is None else taker.room
            if taker is None or not most:
                if (again := self._takers.soon(taker)) is not None:  # this one ends first although it is busy; if it is late, another will
                    self._launch_at(root.loop.time() + again)
                break
            if taker.in_flight and queue.queued < most and self._state == "open" and self._waits():
                break
            batch = queue.take(most, taker)
            if batch:
                # Counted first: an eager task runs before create_task returns.
                self._in_flight += 1
                taker.in_flight += 1
                # The only taker has no other one to hand a batch to.
                running = taker.run(batch) if len(self._takers.all) == 1 else self._takers.run(taker, batch)
                if not root.start(running, "accel-batch", partial(self._served, taker, batch)):
                    self._in_flight -= 1
                    taker.in_flight -= 1
                    taker.fail(batch, self._interrupted())
                    if self._shares is not None:
                        self._shares.release(batch)
        if self._state == "closing" and not (queue.queued or self._in_flight or any(each.suspects for each in self._takers.isolations)):
            root.finish()
        if len(self._takers.all) > 1:
            self._takers.tell_idle()

    def _waits(self) -> bool:
        assert self._loop is not None, "a batch needs a loop"
        oldest = self._queue.oldest()
        if oldest is None or self._loop.time() >= oldest + self._max_delay:
            return False
        self._launch_at(oldest + self._max_delay)
        return True

    def _launch_at(self, when: float) -> None:
        """Launch then, if nothing does before: :meth:`_launch` cancels this."""
        assert self._loop is not None, "a batch needs a loop"
        self._alarm = self._loop.call_at(when, self._launch, context=Context())

    def _served(self, taker: Taker, batch: list[Request], task: asyncio.Task[None]) -> None:
        """Count a batch out; runs after its callers have run, which may have submitted their next items."""
        self._in_flight -= 1
        taker.in_flight -= 1
        if task.cancelled() or task.exception() is not None:
            # Cancelled by the close or by the handler itself, or the program ends.
            taker.fail(batch, self._interrupted())
        if self._shares is not None:
            self._shares.release(batch)
        self._launch()

    def _interrupted(self) -> AccelError:
        if self._state == "open":
            return ActorStoppedError("the batch's handler was cancelled before it answered", remedy="Send the item again.")
        return ClosedError("the batcher was closed before the item was answered", remedy="Allow more close_timeout.")


def _check_functions(size: object, fingerprint: object, quarantine: object) -> None:
    if size is not None and not callable(size):
        raise InvalidArgumentError(f"size is {size!r}", remedy="Give a function of one item, or None.")
    if fingerprint is not None and (quarantine is None or not callable(fingerprint)):
        without = "" if callable(quarantine) else f", and quarantine {quarantine!r}"
        raise InvalidArgumentError(f"fingerprint is {fingerprint!r}{without}", remedy="Give a function of one item, and quarantine= too.")
