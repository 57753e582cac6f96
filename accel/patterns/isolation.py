"""Quarantine: each item that was on the device at a fault runs there alone, while the device serves others."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from typing import TYPE_CHECKING, Any

from accel._log import get_logger
from accel.errors import AccelError, ClosedError, PoisonedInputError
from accel.patterns.calling import call, until_ready
from accel.patterns.outcome import is_fault, is_same_fault, is_worth_a_retry, kind_of_fault, own_instance
from accel.patterns.quarantine import QuarantineHandler, UnusableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence

    from accel.device import Device
    from accel.patterns.poison_memory import PoisonMemory
    from accel.patterns.requests import Counters, Request
    from accel.patterns.root import RootTask

__all__ = ["Isolation"]

logger = get_logger()

_INCONCLUSIVE = 3
"""How many times a trial is made whose error does not concern its item, such as a ref of an earlier context."""

_UNWANTED = 10.0
"""Seconds that a trial may go on after its caller has left, to find out whether the item is poison: it may hang."""


class Isolation:
    """Answers each request that was on a device when it faulted: with its result, or with :class:`~accel.PoisonedInputError`.

    The suspects run one at a time. One whose kernel faults with the status that ended the batch's context is poison. Another fault, such as the death of
    the process, may have come from outside: the item runs again when all others have run, so that these wait for one new child and not for two; if it faults
    again, in another child, it is poison. So a poisonous item costs one child or two, and any other item none.

    Parameters
    ----------
    device
        The :class:`accel.Device` that serves. Trials are made while it is ready, so that they do not slow its recovery.
    make
        ``await make(device)`` returns the handler for the quarantined device.
    counters
        Where the outcomes are counted.
    memory
        Remembers what is found. Without it a suspect whose caller has left is not tried.
    limit
        Requests that may wait for their trial.
    idle
        Seconds that the quarantine stays open, with a handler ready, after the last trial; with infinity it is opened ahead.
    ended
        Called when the quarantine is closed.
    interrupted
        Makes the error for requests that are left over when the batcher closes.
    """

    def __init__(
        self,
        device: Any,
        make: Callable[[Device], Awaitable[Any]],
        counters: Counters,
        memory: PoisonMemory,
        limit: int,
        idle: float,
        ended: Callable[[], None],
        interrupted: Callable[[], Exception],
    ) -> None:
        self._device = device
        self._quarantine = QuarantineHandler(device, make)
        self._counters = counters
        self._memory = memory
        self._limit = limit
        self._idle = idle
        self._ended = ended
        self._interrupted = interrupted
        self._suspects: deque[Request] = deque()
        self._repeats: deque[Request] = deque()
        self._arrived = self._tried = 0  # suspects, since the isolation was made
        self._bound = 0  # how many of them run before the first repeat; those that come later run behind it
        self._is_bound_last = False
        self._is_running = False
        self._is_closing = False
        self._wake = asyncio.Event()
        self._idling: asyncio.Timeout | None = None
        self._faulted: set[Hashable] = set()
        self._root: RootTask

    @property
    def pending(self) -> int:
        """Requests that wait for a trial, or are being tried."""
        return len(self._suspects) + len(self._repeats)

    def open(self, root: RootTask) -> None:
        """Make the trials in tasks of ``root``, which is open."""
        self._root = root
        if self._idle == math.inf:
            self._begin()

    def close(self) -> None:
        """Close the quarantine as soon as nothing is pending. Idempotent."""
        self._is_closing = True
        if self._idling is not None:
            self._idling.reschedule(self._root.loop.time())

    def take(self, batch: list[Request]) -> None:
        """Add requests, which have their ``fault`` set."""
        suspects = [request for request in batch if self._is_wanted(request)]
        if self.pending + len(suspects) > self._limit:
            self._fail(suspects, f"{self.pending} items wait already to be tried in quarantine")
            return
        self._counters.isolated += len(suspects)
        self._suspects.extend(suspects)
        self._arrived += len(suspects)
        self._wake.set()
        if suspects and not self._is_running:
            self._begin()

    def _is_wanted(self, request: Request) -> bool:
        # Of one whose caller has left, only whether it is to be remembered is of interest.
        return not request.future.done() or (self._memory.limit > 0 and not self._is_closing)

    def _begin(self) -> None:
        # Set first: an eager task runs before create_task returns.
        self._is_running = True
        if not self._root.start(self._run(), "accel-isolation", self._done):
            self._interrupt()

    def _done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._interrupt()
        self._is_running = False
        if self.pending:  # added while the quarantine was being closed
            self._begin()
        self._ended()

    def _interrupt(self) -> None:
        self._is_running = False
        given: set[int] = set()
        error = self._interrupted()
        for request in self._taken():
            self._settle(request, own_instance(error, given))

    def _taken(self) -> list[Request]:
        taken = [*self._suspects, *self._repeats]
        self._suspects.clear()
        self._repeats.clear()
        self._tried = self._arrived
        return taken

    async def _run(self) -> None:
        try:
            while self.pending or await self._more():
                await self._try_all()
        except BaseException:
            await self._quarantine.aclose(abandon=True)
            raise
        await self._quarantine.aclose()

    async def _more(self) -> bool:
        """Wait for further suspects for as long as the quarantine may be idle; return whether there are any."""
        self._wake.clear()
        is_kept = self._idle == math.inf or (self._idle > 0 and self._quarantine.is_open)
        if is_kept and not self._is_closing:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None) as self._idling:
                    await self._get_ready()
                    if self._idle < math.inf:
                        self._idling.reschedule(self._root.loop.time() + self._idle)
                    await self._wake.wait()
            self._idling = None
        return bool(self._suspects)

    async def _get_ready(self) -> None:
        """Make the handler ahead of the next suspect: the context of the last one may have died of it."""
        try:
            await self._quarantine.handler()
        except UnusableError as error:  # which the next suspect will be told, if it is still so
            logger.warning("quarantine_not_ready", error=error.__cause__)
            await self._quarantine.aclose(abandon=True)

    # -- the trials

    async def _try_all(self) -> None:
        counters, loop = self._counters, asyncio.get_running_loop()
        began, poisoned, trials = loop.time(), counters.poisoned, 0
        while self.pending:
            trials += 1
            await self._try_next()
        self._faulted.clear()
        logger.info("isolation_ended", trials=trials, poisoned=counters.poisoned - poisoned, seconds=round(loop.time() - began, 3))

    async def _try_next(self) -> None:
        """Run one suspect alone, and answer it; one that faults for the first time is repeated behind the others that are there."""
        try:
            await until_ready(self._device)
            if not (self._suspects or self._is_bound_last):
                await self._quarantine.handler()  # it may take seconds, in which others may come
                self._bound, self._is_bound_last = self._arrived, True
            queue = self._next_queue()
            request = queue[0]
            result = self._memory.recall(request.item) or await self._outcome(request)
        except UnusableError as error:
            await self._quarantine.aclose(abandon=True)
            self._fail(self._taken(), f"the quarantine could not be used: {error.__cause__}")
        except StopAsyncIteration:
            self._fail(self._taken(), "the device was closed", ClosedError("the device was closed before the item could be tried again"))
        except AccelError as error:
            self._fail(self._taken(), f"the device did not come back: {error}", error)
        else:
            queue.popleft()
            is_repeat = queue is self._repeats
            if not is_repeat:
                self._tried += 1
            if is_repeat or not self._repeats:  # what is next there lets those pass that are there now
                self._bound, self._is_bound_last = self._arrived, False
            if is_fault(result) and not self._is_confirmed(request, result):
                self._repeats.append(request)
                return
            self._settle(request, self._poisoned(request, result) if is_fault(result) else result)

    def _next_queue(self) -> deque[Request]:
        """Return where the next request is. Without the bound a repeat would wait for as long as suspects keep coming."""
        if self._repeats and (not self._suspects or self._tried >= self._bound):
            return self._repeats
        return self._suspects

    def _is_confirmed(self, request: Request, fault: AccelError) -> bool:
        """Note that a context died of an item, and return whether the item is poison: equal items count as one."""
        found = self._memory.key(request.item)
        key = request if found is None else found
        is_again = key in self._faulted
        self._faulted.add(key)
        return is_again or (isinstance(request.fault, AccelError) and is_same_fault(fault, request.fault))

    async def _outcome(self, request: Request) -> Any:
        """Return what the handler in quarantine gives for an item alone."""
        result: Any = None
        for _ in range(_INCONCLUSIVE):
            if not self._is_wanted(request):
                return None
            result = await self._while_wanted(request, await self._quarantine.handler())
            self._quarantine.check_usable([result])
            if is_fault(result) or not (isinstance(result, Exception) and is_worth_a_retry(result)):
                break
        return result

    async def _while_wanted(self, request: Request, handler: Callable[[list[Any]], Awaitable[Sequence[Any]]]) -> Any:
        """Return the outcome of a call; ``None`` if it has not ended soon after its caller has left."""
        loop, patience = asyncio.get_running_loop(), _UNWANTED if self._memory.limit else 0.0
        is_over = False

        def left(_: object) -> None:
            if not is_over:
                deadline.reschedule(loop.time() + patience)

        request.future.add_done_callback(left)
        try:
            async with asyncio.timeout(None) as deadline:
                results = await call(handler, [request.item])
        except TimeoutError:
            await self._quarantine.aclose(abandon=True)
            return None
        finally:
            is_over = True
            request.future.remove_done_callback(left)
        return results if isinstance(results, Exception) else results[0]

    # -- the answers

    def _poisoned(self, request: Request, fault: AccelError) -> PoisonedInputError:
        """Return the error for a request whose item is poison, and remember the item."""
        kind = kind_of_fault(fault)
        what = "hung" if kind == "hang" else "faulted the context"
        error = PoisonedInputError(
            f"the item was tried alone, in quarantine, and {what} again: {fault.message}",
            item=request.item,
            kind=kind,
            code=fault.code,
            library=fault.library,
            device=fault.device,
            op=fault.op,
        )
        error.__cause__ = fault
        self._memory.remember(error)
        logger.warning("poisoned_item", device=fault.device, op=fault.op, code=fault.code, kind=kind, error=fault)
        return error

    def _fail(self, requests: Iterable[Request], why: str, error: Exception | None = None) -> None:
        """Fail requests whose trials ended early, with ``error`` or with the fault that they were in."""
        given: set[int] = set()
        count = 0
        for request in requests:
            own = error or request.fault
            if request.future.done() or own is None:
                continue
            count += 1
            own = own_instance(own, given)
            own.add_note(f"The item may be what faulted the context; this was not found out, because {why}")
            self._settle(request, own)
        if count:
            logger.error("isolation_left_out", items=count, reason=why)

    def _settle(self, request: Request, result: Any) -> None:
        request.fault = None
        if isinstance(result, PoisonedInputError):
            self._counters.poisoned += 1
        if request.future.done():
            return
        if isinstance(result, Exception):
            self._counters.failed += 1
            request.future.set_exception(own_instance(result, set()))
        else:
            self._counters.answered += 1
            request.future.set_result(result)
