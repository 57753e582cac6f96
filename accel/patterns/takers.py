"""The takers of a batcher: each takes batches from the queue that they share, for one device; and which of them gets the next batch.

A taker runs a batch: calls the handler, answers the callers, and retries once what a rebuild interrupted or a neighbour may have failed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import repeat
from time import perf_counter
from typing import TYPE_CHECKING, Any

from accel.device import DeviceState
from accel.errors import AccelError, ClosedError, InvalidArgumentError
from accel.models import Rows
from accel.patterns.isolation import Isolation
from accel.patterns.outcome import is_by_work, is_of_an_item, is_of_the_device, is_suspicious, is_worth_a_retry, own_instance
from accel.patterns.quarantine import QuarantineHandler
from accel.patterns.recovering import until_ready
from accel.patterns.requests import Counters, ReplicaStatistics, call, end
from accel.patterns.shares import Shares
from accel.rendezvous import rendezvous
from accel.telemetry import DeviceTime, ServedBatch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from accel.patterns.isolation import IsolationOptions
    from accel.patterns.poison_memory import PoisonMemory
    from accel.patterns.recovering import Attribution, Recovering
    from accel.patterns.requests import Request, RequestQueue
    from accel.patterns.root import RootTask
    from accel.rendezvous import Key

__all__ = ["Taker", "Takers"]

_COMING = frozenset((DeviceState.STARTING, DeviceState.REBUILDING))

_KNOWN = 5.0
"""Seconds after which a taker that took nothing gets one more batch: it may have become faster since."""

_TRUSTED = 1.0
"""Seconds for which a taker that failed comes behind the others."""

_FAILURES = 5
"""Batches in a row without an answer, after which a taker comes behind the others: fewer may have had wrong items."""

_AGAIN, _SOON = 0.05, 0.001
"""The most and the fewest seconds until a taker is looked for again: one that is late, stalled or not ready tells nothing."""

_SAME = 0.001
"""Seconds that two ends may differ and count as one: while one taker suffices it is always the first, and the others sleep."""


class Taker:
    """Takes batches from the queue of a batcher, and calls the handler of one device with them.

    Parameters
    ----------
    handler
        As given to the batcher.
    device
        Awaited before a retry.
    counters
        Where the outcomes of its requests are counted.
    isolation
        Takes the idempotent requests that were on the device at a fault; without it they are retried like the others.
    hand_over
        ``hand_over(taker, requests)`` gives requests that are to be retried, if any, to another taker, if one is ready, and returns whether one is.
    max_items, max_in_flight
        Items in a batch, and batches that it may have at once.

    Attributes
    ----------
    name : str
        Of its device; empty without one.
    in_flight : int
        Batches that it runs.
    is_draining : bool
        Whether it takes no more.
    is_paused : bool
        Whether it takes no more while another one is ready.
    is_awaited : bool
        Whether a task waits until its device is ready, or has what its handler needs again.
    is_torn : callable
        Returns whether what its handler needs of the device is gone, such as a model's weights: it counts as lost, and takes nothing.
    seconds : float
        Moving average of the time that it is busy with one batch: what overlaps counts once. 0 before the first.
    seconds_per_item : float
        Moving average of the handler's time for one item of a batch.
    """

    __slots__ = (
        "_attribution",
        "_began",
        "_busy",
        "_ended_at",
        "_failures",
        "_hand_over",
        "_idled",
        "_max_in_flight",
        "_max_items",
        "counters",
        "device",
        "handler",
        "in_flight",
        "is_awaited",
        "is_draining",
        "is_paused",
        "is_torn",
        "isolation",
        "name",
        "seconds",
        "seconds_per_item",
    )

    def __init__(
        self,
        handler: Callable[[list[Any]], Awaitable[Sequence[Any]]],
        device: Recovering | None,
        counters: Counters,
        isolation: Isolation | None = None,
        hand_over: Callable[[Taker, list[Request]], bool] = lambda taker, requests: False,
        *,
        max_items: int = 1,
        max_in_flight: int = 1,
    ) -> None:
        self.handler = handler
        self.device = device
        self.name = str(getattr(device, "name", ""))
        self.counters = counters
        self.isolation = isolation
        self._hand_over = hand_over
        self._max_items, self._max_in_flight = max_items, max_in_flight
        # Without quarantine nothing is examined, and each death is the device's own.
        self._attribution: Callable[[], AbstractContextManager[Attribution | None]] = getattr(
            None if isolation is None else device, "attribution", nullcontext
        )
        self.in_flight = 0
        self.is_draining = self.is_paused = self.is_awaited = False
        self.is_torn: Callable[[], bool] = lambda: False
        self.seconds = 0.0
        self.seconds_per_item = 1e-3
        self._began: deque[float] = deque()  # of the calls of the handler that run now
        self._ended_at = 0.0  # of the last one
        self._busy = 0.0  # seconds of the last one in which no earlier one ran
        self._failures = 0  # batches in a row without an answer
        self._idled = asyncio.Event()

    @property
    def state(self) -> DeviceState:
        """The state of its device, READY without one; LOST also where the device is ready, and what the handler needs of it is gone."""
        state = getattr(self.device, "state", DeviceState.READY)
        return DeviceState.LOST if state is DeviceState.READY and self.is_torn() else state

    @property
    def is_away(self) -> bool:
        """Whether its device is not ready, and will be."""
        return self.is_awaited or getattr(self.device, "state", None) in _COMING

    @property
    def is_gone(self) -> bool:
        """Whether its device is lost or closed."""
        return self.state in (DeviceState.LOST, DeviceState.CLOSED)

    @property
    def is_stalled(self) -> bool:
        """Whether its device is ready and does not answer."""
        health = getattr(self.device, "health", None)
        return health is not None and health().is_stalled

    @property
    def room(self) -> int:
        """The most items of a batch that it may take now; 0 if it has enough of them.

        While most batches have poison it takes small ones, one at a time.
        """
        until = 0.0 if self.isolation is None else self.isolation.besieged_until
        if until and asyncio.get_running_loop().time() < until:
            return 0 if self.in_flight else max(1, self._max_items // 8)
        return self._max_items if self.in_flight < self._max_in_flight else 0

    @property
    def is_idle(self) -> bool:
        """Whether it runs nothing, and examines nothing."""
        return not self.in_flight and (self.isolation is None or self.isolation.is_idle)

    async def idle(self) -> None:
        """Wait until it runs nothing; for one that is draining or paused."""
        while not self.is_idle:
            self._idled.clear()
            await self._idled.wait()

    def tell_idle(self) -> None:
        """End :meth:`idle`, which looks again."""
        self._idled.set()

    def statistics(self) -> ReplicaStatistics:
        """Return what it has done, and does now."""
        counters = self.counters
        return ReplicaStatistics(
            device=self.name,
            state=self.state.value,
            is_draining=self.is_draining,
            in_flight=self.in_flight,
            batches=counters.batches,
            items=counters.items,
            answered=counters.answered,
            failed=counters.failed,
            device_seconds=counters.device_seconds,
            seconds=self.seconds,
        )

    def expected_end(self, now: float, usual: float) -> float:
        """Return when a batch would end that it takes now: see :func:`time.perf_counter`.

        Parameters
        ----------
        usual
            Seconds that a batch takes on a taker that took none for a while; on one that never did it takes none, so that it is tried.
        """
        is_known = self.in_flight or now - self._ended_at < _KNOWN
        seconds = self.seconds if is_known else min(self.seconds, usual)
        ran = now - self._began[0] if self._began else 0.0
        # What is late is expected to take as long again.
        left = self.in_flight * seconds - ran if ran < seconds else (self.in_flight - 1) * seconds + ran - seconds
        return now + left + seconds

    def is_failing(self, now: float) -> bool:
        """Return whether its last batches had errors alone; once it took none for a while it is tried again."""
        return self._failures >= _FAILURES and now - self._ended_at < _TRUSTED

    async def run(self, batch: list[Request]) -> None:
        """Run a batch to its end. If this is cancelled, requests stay unanswered: then call :meth:`fail`."""
        answered, failed = self.counters.answered, self.counters.failed
        with self._attribution() as attribution:
            while batch:
                again = await self._attempt(batch, attribution)
                if again and self._hand_over(self, again):
                    return
                if again and self.device is not None:
                    await self._recovered(self.device, again)
                batch = again
        if self.counters.answered > answered:
            self._failures = 0
        elif self.counters.failed > failed:
            self._failures += 1

    def fail(self, batch: Iterable[Request], error: Exception) -> None:
        """Fail all requests that are not answered yet."""
        given: set[int] = set()
        for request in batch:
            if not request.future.done():
                self.counters.failed += 1
                request.future.set_exception(own_instance(error, given))

    async def _attempt(self, batch: list[Request], attribution: Attribution | None) -> list[Request]:
        """Call the handler, answer the callers, and return the requests to retry."""
        wanted = [request for request in batch if not request.future.done()]
        isolation = self.isolation
        if isolation is not None and (isolation.memory.errors or isolation.memory.lines):
            wanted = await isolation.sift(wanted)
        if not wanted:
            return []
        counters, given = self.counters, []
        served = ServedBatch(wanted[0].service, wanted, 0, self.name)
        for request in wanted:
            served.items += request.size
            given.append(request.item)
            request.batch = served
            if request.is_launched:
                counters.retried += 1
            request.is_launched = True
            request.launches += 1
        counters.batches += 1
        counters.items += served.items
        began, deaths = perf_counter(), 0 if attribution is None else attribution.deaths
        results = await self._called(served, given)
        if isinstance(results, Exception):
            if len(wanted) > 1 and is_of_an_item(results):
                end(served)
                return await self._singly(wanted, results, attribution)
            results = repeat(results, len(wanted))
        else:
            self.seconds += 0.2 * (self._busy - self.seconds) if self.seconds else self._busy
            seconds = self._ended_at - began
            self.seconds_per_item += 0.2 * (seconds / served.items - self.seconds_per_item)
            counters.batch_seconds += 0.2 * (seconds - counters.batch_seconds) if counters.batch_seconds else seconds
        died = attribution is not None and attribution.deaths > deaths
        again, suspects, served.answered = self._settle(wanted, results, died=died)
        end(served)
        if suspects and self.isolation is not None:
            await self.isolation.take(suspects, attribution)
        return again

    async def _called(self, batch: ServedBatch, items: list[Any]) -> Any:
        """Return what the handler gives for the items of a batch, as :func:`call` does; the device time is charged."""
        probes = batch.service.probes
        if probes.batch_launched:
            probes.tell(probes.batch_launched, batch)
        self._began.append(batch.launched_at)
        try:
            with DeviceTime() as spent:
                results = await call(self.handler, items)
        except BaseException as error:
            batch.error = type(error).__name__
            end(batch)
            raise
        finally:
            self._began.popleft()
            ended_before, self._ended_at = self._ended_at, perf_counter()
            self._busy = self._ended_at - max(batch.launched_at, ended_before)
            if batch.launched_at - ended_before > _KNOWN:
                self.seconds = 0.0  # what is known of it is old
            batch.device_seconds = spent.seconds
            self.counters.device_seconds += spent.seconds or 0.0
            if self.counters.charge is not None:
                self.counters.charge(batch)
        if isinstance(results, Rows):
            batch.version = results.version
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
        examines = self.isolation is not None
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
            elif request.is_idempotent and (
                (is_worth_a_retry(result) and (died or not request.is_retried))
                or (self.is_gone and not request.is_retried and is_of_the_device(result) and self._hand_over(self, []))
            ):
                request.is_retried = True
                again.append(request)
            else:
                self.counters.failed += 1
                future.set_exception(own_instance(result, given))
        self.counters.answered += len(answered)
        return again, suspects, answered

    async def _recovered(self, device: Recovering, batch: list[Request]) -> None:
        """Wait until the device is ready; fail the batch if it will not be."""
        try:
            await until_ready(device)
        except StopAsyncIteration:
            self.fail(batch, ClosedError("the device was closed before the item could be tried again"))
        except Exception as error:
            self.fail(batch, error)


class Takers:
    """Several takers of one queue, or one.

    Parameters
    ----------
    max_in_flight
        Batches that each may have at once.
    options
        Of the isolation of each.
    poison
        What they all know to be poison.
    queue
        What they take from.
    launch
        Called when a taker is ready again, or its quarantine is closed.
    interrupted
        Makes the error for requests that are left over when the batcher closes.

    Attributes
    ----------
    all : list of Taker
        In the order in which they were added.
    """

    def __init__(
        self,
        max_in_flight: int,
        options: IsolationOptions,
        poison: PoisonMemory,
        queue: RequestQueue | Shares,
        launch: Callable[[], None],
        interrupted: Callable[[], Exception],
    ) -> None:
        self._max_in_flight = max_in_flight
        self._options = options
        self._poison = poison
        self._queue = queue
        self._launch = launch
        self._interrupted = interrupted
        self._root: RootTask | None = None
        self.all: list[Taker] = []

    @property
    def first(self) -> Taker:
        """The one that has been there longest."""
        return self.all[0]

    @property
    def isolations(self) -> list[Isolation]:
        """Those of the takers that have one."""
        return [taker.isolation for taker in self.all if taker.isolation is not None]

    def of(self, device: Recovering) -> Taker | None:
        """Return the taker of a device, if it has one."""
        return next((taker for taker in self.all if taker.device is device), None)

    def open(self, root: RootTask) -> None:
        """Have quarantines run in tasks of ``root``."""
        self._root = root
        for isolation in self.isolations:
            isolation.open(root)

    def add(self, handler: Any, device: Recovering | None, quarantine: Any) -> None:
        """Add a taker; for the arguments see :class:`accel.patterns.DynamicBatcher`."""
        _check(handler, device, quarantine)
        counters, isolation = Counters(charge=self._queue.charge if isinstance(self._queue, Shares) else None), None
        if quarantine is not None:
            made = QuarantineHandler(device, quarantine)
            isolation = Isolation(device, made, counters, self._poison, self._options, self._launch, self._interrupted)
            if self._root is not None:
                isolation.open(self._root)
        self.all.append(
            Taker(handler, device, counters, isolation, self._hand_over, max_items=self._options.most, max_in_flight=self._max_in_flight)
        )

    async def run(self, taker: Taker, batch: list[Request]) -> None:
        """Run a batch on one of several takers. If its device has faulted since it was chosen, another one that is ready takes the batch."""
        if not (taker.is_away and self._hand_over(taker, batch)):
            await taker.run(batch)

    def drain(self, taker: Taker) -> None:
        """Let a taker take no more; the keyed items that wait for it, also for room, go to others."""
        taker.is_draining = True
        self._queue.rehome(taker, self.home)

    def remove(self, taker: Taker) -> bool:
        """Remove a taker, and return whether it was there."""
        is_here = taker in self.all
        if is_here:
            self.all.remove(taker)
        return is_here

    def tell_idle(self) -> None:
        """Wake those that wait for takers to be drained, where nothing runs any more."""
        for taker in self.all:
            if (taker.is_draining or taker.is_paused) and taker.is_idle:
                taker.tell_idle()

    def next(self, root: RootTask) -> Taker | None:
        """Return the taker that is expected to end the next batch first, even if it is busy; ``None`` if items have to wait until one is ready, or has room.

        Of those that would end it at about the same time it is the one with the fewest batches, and the first
        in the list. Where it is busy, one that has room is returned if there are items that it alone may take.
        One that fails whatever it is given comes last: it would be the first always, sooner than others
        answer. A device that is being rebuilt, does not answer or is drained takes nothing. Where none will be
        ready again one is returned all the same: what keeps it from that is told to each item by the handler.
        One that is paused takes what no other one may take now.
        """
        if len(self.all) == 1 and not self.all[0].is_draining:
            taker = self.all[0]
            return None if taker.is_away and self._await(self.all, root) else taker
        if not self._has_room:
            return None
        self._rehome()
        takers = [taker for taker in self.all if not taker.is_draining and self._queue.has(taker)]
        ready = [taker for taker in takers if not taker.is_awaited and taker.state is DeviceState.READY]
        if not ready:
            away = [taker for taker in takers if taker.is_away]
            return None if (away and self._await(away, root)) or not takers else takers[0]
        now, usual = perf_counter(), min([taker.seconds for taker in ready if taker.seconds], default=0.0)

        def rank(taker: Taker) -> tuple[bool, bool, float, int]:
            pauses = taker.is_paused and not self._queue.has_own(taker)
            return pauses, taker.is_failing(now), (taker.expected_end(now, usual) - now) // _SAME, taker.in_flight

        answering = (taker for taker in sorted(ready, key=rank) if not taker.is_stalled)
        first = next(answering, None)
        if first is None or first.room:
            return first
        return next((taker for taker in answering if self._queue.has_own(taker) and taker.room), first)

    def soon(self, taker: Taker | None) -> float | None:
        """Return in how many seconds to look again which of several takers is :meth:`next`, where that is ``taker``, and it is busy.

        ``None``: not before a batch ends, because none has room, or there are no others.
        """
        if len(self.all) == 1 or not self._has_room:
            return None
        has_room = any(other.room for other in self.all if other is not taker and other.state is DeviceState.READY)
        return min(_AGAIN, max(taker.seconds, _SOON)) if taker is not None and taker.seconds and has_room else _AGAIN

    @property
    def _has_room(self) -> bool:
        return any(taker.room for taker in self.all)

    def home(self, key: Key) -> Taker | None:
        """Return the taker of all items with this key: another one only if it is lost, closed or drained. ``None``: any."""
        there = {taker.name: taker for taker in self.all if not (taker.is_draining or taker.is_gone)}
        name = rendezvous(key, there)
        return None if name is None else there[name]

    def _rehome(self) -> None:
        """Give the keyed items of takers that are gone to others."""
        for taker in self.all:
            if self._queue.has_own(taker) and (taker.is_draining or taker.is_gone):
                self._queue.rehome(taker, self.home)

    def _await(self, takers: list[Taker], root: RootTask) -> bool:
        """Have items gather until a device is ready, instead of being launched one by one to wait there; return whether they do."""
        for taker in takers:
            if not taker.is_awaited:
                taker.is_awaited = root.start(self._until_ready(taker), "accel-gather", partial(self._awaited, taker))
        return any(taker.is_awaited for taker in takers)

    async def _until_ready(self, taker: Taker) -> None:
        # What keeps it from becoming ready is told to each item by the handler.
        with contextlib.suppress(AccelError, StopAsyncIteration):
            await until_ready(taker.device)  # type: ignore[arg-type]

    def _awaited(self, taker: Taker, task: asyncio.Task[None]) -> None:
        taker.is_awaited = False
        if not task.cancelled():
            self._launch()

    def _hand_over(self, taker: Taker, requests: list[Request]) -> bool:
        """Put requests that a taker has to retry back to the front of the queue, if another one can do that now; return whether it can."""
        can = any(other is not taker and not other.is_draining and other.state is DeviceState.READY for other in self.all)
        if can:
            self._queue.put_back(requests)
        return can


def _check(handler: object, device: object, quarantine: object) -> None:
    """Raise unless the functions can be called, and the device is a device."""
    if not callable(handler):
        raise InvalidArgumentError(f"handler is {handler!r}", remedy="Give a function defined with 'async def'.")
    if device is not None and not callable(getattr(device, "generations", None)):
        raise InvalidArgumentError(f"device is {device!r}", remedy="Give an accel.Device, or None.")
    if quarantine is None:
        return
    if not callable(quarantine):
        raise InvalidArgumentError(
            f"quarantine is {quarantine!r}",
            remedy="Give a function defined with 'async def' that takes a Device and returns a handler, or None.",
        )
    if not callable(getattr(device, "quarantine", None)):
        raise InvalidArgumentError(f"quarantine= with device={device!r}", remedy="Give the accel.Device that the handler uses, too.")
