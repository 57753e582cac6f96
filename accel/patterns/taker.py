"""A taker: one device with a handler, which takes batches from the queue that several share.

It runs a batch: calls the handler, answers the callers, and retries once what a rebuild interrupted or a neighbour may have failed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from itertools import repeat
from time import perf_counter
from typing import TYPE_CHECKING, Any

from accel.device import DeviceState
from accel.errors import ClosedError
from accel.models import Rows
from accel.patterns.outcome import is_by_work, is_of_an_item, is_of_the_device, is_suspicious, is_worth_a_retry, own_instance
from accel.patterns.recovering import until_ready
from accel.patterns.requests import ReplicaStatistics, call, end
from accel.telemetry import DeviceTime, ServedBatch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from accel.patterns.isolation import Isolation
    from accel.patterns.recovering import Attribution, Recovering
    from accel.patterns.requests import Counters, Request

__all__ = ["Taker"]

_COMING = frozenset((DeviceState.STARTING, DeviceState.REBUILDING))

_KNOWN = 5.0
"""Seconds after which a taker that took nothing gets one more batch: it may have become faster since."""

_TRUSTED = 1.0
"""Seconds for which a taker that failed comes behind the others."""

_FAILURES = 5
"""Batches in a row without an answer, after which a taker comes behind the others: fewer may have had wrong items."""


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
        Whether a task waits until its device is ready.
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
        self.seconds = 0.0
        self.seconds_per_item = 1e-3
        self._began: deque[float] = deque()  # of the calls of the handler that run now
        self._ended_at = 0.0  # of the last one
        self._busy = 0.0  # seconds of the last one in which no earlier one ran
        self._failures = 0  # batches in a row without an answer
        self._idled = asyncio.Event()

    @property
    def state(self) -> DeviceState:
        """The state of its device; READY without one."""
        return getattr(self.device, "state", DeviceState.READY)

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
