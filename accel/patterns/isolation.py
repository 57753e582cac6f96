"""The search for the item that faults contexts: items that were on the device at a fault are tried in halves, in quarantine, while the device serves."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

from accel._log import get_logger
from accel.errors import AccelError, ClosedError, PoisonedInputError
from accel.patterns.calling import call, until_ready
from accel.patterns.outcome import is_fault, is_worth_a_retry, own_instance
from accel.patterns.quarantine import QuarantineHandler, UnusableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from accel.device import Device
    from accel.patterns.requests import Counters, Request
    from accel.patterns.root import RootTask

__all__ = ["Isolation"]

logger = get_logger()

_INCONCLUSIVE = 3
"""How many times a trial is made whose errors do not concern its items, such as a ref of an earlier context."""


class Isolation:
    """Answers each request that was on a device when it faulted: with its result, or with :class:`~accel.PoisonedInputError`.

    It searches one batch after the other, each in trials of its halves. A half that faults costs the quarantine's context, and is halved again.

    Parameters
    ----------
    device
        The :class:`accel.Device` that serves. A search begins when it is ready again, so that the search does not slow its recovery.
    make
        ``await make(device)`` returns the handler for the quarantined device.
    counters
        Where the outcomes are counted.
    limit
        Requests that may wait for their search.
    ended
        Called when no search is left.
    interrupted
        Makes the error for requests that are left over when the batcher closes.

    Attributes
    ----------
    pending : int
        Requests whose search has not ended.
    """

    def __init__(
        self,
        device: Any,
        make: Callable[[Device], Awaitable[Any]],
        counters: Counters,
        limit: int,
        ended: Callable[[], None],
        interrupted: Callable[[], Exception],
    ) -> None:
        self._device = device
        self._quarantine = QuarantineHandler(device, make)
        self._counters = counters
        self._limit = limit
        self._batches: deque[list[Request]] = deque()
        self._is_running = False
        self._trials = 0
        self._ended = ended
        self._interrupted = interrupted
        self._root: RootTask
        self.pending = 0

    def open(self, root: RootTask) -> None:
        """Run the searches in ``root``."""
        self._root = root

    def take(self, batch: list[Request]) -> None:
        """Add a batch, whose requests have their ``fault`` set."""
        if self.pending + len(batch) > self._limit:
            self._fail(batch, f"{self.pending} items wait already to be tried in quarantine")
            return
        self.pending += len(batch)
        self._counters.isolated += len(batch)
        self._batches.append(batch)
        if not self._is_running:
            self._begin()

    def _begin(self) -> None:
        # Set first: an eager task runs before create_task returns.
        self._is_running = True
        if not self._root.start(self._run(), "accel-isolation", self._done):
            self._fail_all()

    def _done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._fail_all()
        self._is_running = False
        if self._batches:  # added while the quarantine was being closed
            self._begin()
        self._ended()

    def _fail_all(self) -> None:
        self._is_running = False
        self.pending = 0
        given: set[int] = set()
        error = self._interrupted()
        while self._batches:
            for request in _wanted(self._batches.popleft()):
                self._settle(request, own_instance(error, given))

    async def _run(self) -> None:
        try:
            while self._batches:
                await self._search(self._batches[0])
                self.pending -= len(self._batches.popleft())
        except BaseException:
            await self._quarantine.aclose(abandon=True)
            raise
        await self._quarantine.aclose()

    # -- the search

    async def _search(self, batch: list[Request]) -> None:
        counters, loop = self._counters, asyncio.get_running_loop()
        began, poisoned, self._trials = loop.time(), counters.poisoned, 0
        try:
            await until_ready(self._device)
            for half in _halves(batch):
                await self._is_clean(half)
        except UnusableError as error:
            await self._quarantine.aclose(abandon=True)
            self._fail(_wanted(batch), f"the quarantine could not be used: {error.__cause__}")
        except StopAsyncIteration:
            self._fail(_wanted(batch), "the device was closed", ClosedError("the device was closed before the item could be tried again"))
        except AccelError as error:
            self._fail(_wanted(batch), f"the device did not come back: {error}", error)
        logger.info(
            "isolation_ended", items=len(batch), poisoned=counters.poisoned - poisoned, trials=self._trials, seconds=round(loop.time() - began, 3)
        )  # fmt: skip

    async def _is_clean(self, group: Sequence[Request]) -> bool:
        """Try a group, answer its requests as far as possible, and return whether the context did not fault."""
        wanted = _wanted(group)
        if not wanted:
            return True
        results = await self._while_wanted(wanted)
        if results is None:  # all its callers have left, and it may hang
            await self._quarantine.aclose(abandon=True)
            return True
        faulted: list[Request] = []
        given: set[int] = set()
        fault: Any = None
        for request, result in zip(wanted, results, strict=True):
            if is_fault(result):
                faulted.append(request)
                fault = result
            elif not request.future.done():
                self._settle(request, own_instance(result, given) if isinstance(result, Exception) else result)
        if not faulted:
            return True
        if len(wanted) == 1:
            self._poisoned(wanted[0], fault)
            return False
        first, *second = _halves(faulted)
        if await self._is_clean(first) and second and len(second[0]) > 1:
            # The cause is in the other half, so that half is not tried as a whole.
            for part in _halves(second[0]):
                await self._is_clean(part)
        elif second:
            await self._is_clean(second[0])
        return False

    async def _while_wanted(self, group: list[Request]) -> Sequence[Any] | None:
        """Return the outcomes of a trial; ``None`` if all its callers have left."""
        loop, left = asyncio.get_running_loop(), len(group)
        is_over = False

        def gone(_: object) -> None:
            nonlocal left
            left -= 1
            if not (left or is_over):
                deadline.reschedule(loop.time())

        for request in group:
            request.future.add_done_callback(gone)
        try:
            async with asyncio.timeout(None) as deadline:
                return await self._trial(group)
        except TimeoutError:
            if not deadline.expired():
                raise
            return None
        finally:
            is_over = True
            for request in group:
                request.future.remove_done_callback(gone)

    async def _trial(self, group: list[Request]) -> Sequence[Any]:
        for attempt in range(_INCONCLUSIVE):
            handler = await self._quarantine.handler()
            self._trials += 1
            results = await call(handler, [request.item for request in group])
            if isinstance(results, Exception):
                results = [results] * len(group)
            self._quarantine.check_usable(results)
            if attempt == _INCONCLUSIVE - 1 or not any(isinstance(each, Exception) and _is_inconclusive(each) for each in results):
                break
        found: Sequence[Any] = results
        return found

    # -- the answers

    def _poisoned(self, request: Request, fault: AccelError) -> None:
        if request.future.done():
            return
        error = PoisonedInputError(
            f"the item was tried alone, in quarantine, and faulted the context: {fault.message}",
            item=request.item,
            code=fault.code,
            library=fault.library,
            device=fault.device,
            op=fault.op,
        )
        error.__cause__ = fault
        self._counters.poisoned += 1
        logger.warning("poisoned_item", device=fault.device, op=fault.op, code=fault.code, trials=self._trials, error=fault)
        self._settle(request, error)

    def _fail(self, batch: Iterable[Request], why: str, error: Exception | None = None) -> None:
        """Fail requests whose search ended early, with ``error`` or with the fault that they were in."""
        given: set[int] = set()
        count = 0
        for request in batch:
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
        if isinstance(result, Exception):
            self._counters.failed += 1
            request.future.set_exception(result)
        else:
            self._counters.answered += 1
            request.future.set_result(result)


def _is_inconclusive(error: Exception) -> bool:
    return is_worth_a_retry(error) and not is_fault(error)


def _wanted(group: Iterable[Request]) -> list[Request]:
    return [request for request in group if not request.future.done()]


def _halves(group: Sequence[Request]) -> list[Sequence[Request]]:
    middle = (len(group) + 1) // 2
    return [half for half in (group[:middle], group[middle:]) if half]
