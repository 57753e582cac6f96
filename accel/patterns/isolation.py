"""Quarantine: items that were on the device at a fault run there, apart, while the device serves others."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from accel._log import get_logger
from accel.errors import AccelError, ClosedError, PoisonedInputError
from accel.patterns.outcome import is_fault, is_of_an_item, is_same_fault, is_worth_a_retry, kind_of_fault, own_instance
from accel.patterns.poison_memory import Line
from accel.patterns.quarantine import UnusableError
from accel.patterns.recovering import until_ready
from accel.patterns.requests import Request, call, trial_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence

    from accel.patterns.poison_memory import PoisonMemory
    from accel.patterns.quarantine import QuarantineHandler
    from accel.patterns.recovering import Attribution
    from accel.patterns.requests import Counters
    from accel.patterns.root import RootTask

__all__ = ["Isolation", "IsolationOptions"]

logger = get_logger()

_INCONCLUSIVE = 3
"""How many times a trial is made whose error does not concern its items, such as a ref of an earlier context."""

_UNWANTED = 10.0
"""Seconds that a trial may go on after its last caller has left, to find out whether the item is poison: it may hang."""

_MANY, _SHORTLY = 6, 3.0
"""Batches that have died within some seconds, so that the next ones are kept small."""

_REBUILD = 0.5
"""Seconds until another context is there, before it was measured."""

_MOST_NUMBERS = 64
"""Numbers of requests in a line of the log."""

_SLICE = 0.002
"""Seconds of making fingerprints between two turns of the loop."""


class IsolationOptions(NamedTuple):
    """How a batcher examines suspects.

    Parameters
    ----------
    limit
        Requests that may be examined or wait for it.
    most
        The largest size of a batch.
    idle
        Seconds that the quarantine stays open, with a handler ready, after the last trial; with infinity it is opened ahead.
    name
        Returns what serves, for the log.
    """

    limit: int
    most: int
    idle: float
    name: Callable[[], str]


@dataclass(slots=True)
class _Death:
    """A context's death, with what may be its cause.

    Attributes
    ----------
    left
        How many of those that were in flight have not passed since; 0 once a part of them has ended a context alone.
    """

    left: int


@dataclass(slots=True)
class _Group:
    """Suspects that are tried together.

    Attributes
    ----------
    requests
        What they are.
    arrival
        The number of the fault that brought them.
    death
        The last death that they were in, if any.
    """

    requests: list[Request]
    arrival: int
    death: _Death | None = None


class Isolation:
    """Answers each request that was on a device when it faulted: with its result, or with :class:`~accel.PoisonedInputError`.

    A batch that has ended a context runs again in parts. There are as many parts as can run in the time that one more death costs, and at least two, so that
    a long forward is not repeated for each item, and an expensive context does not die once for each halving. A part that passes is answered; one that faults
    is split again. An item that faults alone, as its batch did, is poison. If its fault may have come from outside, it runs once more behind the others.

    Parameters
    ----------
    device
        The :class:`accel.Device` that serves. The search begins when it is ready, so that it does not slow the recovery.
    quarantine
        Makes the handler on the other device.
    counters
        Where the outcomes are counted.
    memory
        Remembers what is found. Without it a suspect whose caller has left is not tried.
    options
        How to do it.
    ended
        Called when the quarantine is closed.
    interrupted
        Makes the error for requests that are left over when the batcher closes.

    Attributes
    ----------
    memory : PoisonMemory
    suspects : dict
        Requests that wait for a trial, or are being tried, in the order in which they came.
    besieged_until : float
        Until then contexts have died so fast one after the other that most batches have poison: small ones pass more often.
    """

    def __init__(
        self,
        device: Any,
        quarantine: QuarantineHandler,
        counters: Counters,
        memory: PoisonMemory,
        options: IsolationOptions,
        ended: Callable[[], None],
        interrupted: Callable[[], Exception],
    ) -> None:
        self._device = device
        self._quarantine = quarantine
        self._counters = counters
        self.memory = memory
        self._options = options
        self._ended = ended
        self._interrupted = interrupted
        self.suspects: dict[Request, None] = {}
        self.besieged_until = 0.0
        self._groups: deque[_Group] = deque()
        self._repeats: deque[Request] = deque()  # alone, and behind the groups: they are poison, most likely
        self._arrived = 0  # faults, since the isolation was made
        self._faults: deque[float] = deque(maxlen=_MANY)  # when they came
        self._bound = 0  # groups up to this fault run before the next repeat; those that come later run behind it
        self._is_bound_last = False
        self._is_running = False
        self._is_closing = False
        self._wake = asyncio.Event()
        self._idling: asyncio.Timeout | None = None
        self._faulted: set[Hashable] = set()
        self._forward = self._dying = 0.0  # moving averages of the seconds of a trial that passes, and of one that does not
        self._root: RootTask

    def open(self, root: RootTask) -> None:
        """Make the trials in tasks of ``root``, which is open."""
        self._root = root
        if self._options.idle == math.inf:
            self._begin()

    def close(self) -> None:
        """Close the quarantine as soon as nothing is pending. Idempotent."""
        self._is_closing = True
        if self._idling is not None:
            self._idling.reschedule(self._root.loop.time())

    @property
    def is_idle(self) -> bool:
        """Whether nothing is tried, and the quarantine is closed if it has to be."""
        return not (self.suspects or (self._is_closing and self._is_running))

    # -- suspects

    async def take(self, batch: list[Request], attribution: Attribution | None) -> None:
        """Add requests that were on the device together at a fault, which is set. From now on their items are known as suspects."""
        await self._make_keys(batch)
        self._arrived += 1
        self._faults.append(self._root.loop.time())
        if len(self._faults) == _MANY:
            self.besieged_until = self._faults[0] + _SHORTLY
        suspects = [request for request in batch if self._is_wanted(request)]
        if len(self.suspects) + len(suspects) > self._options.limit:
            if attribution is not None:  # not being examined is no proof against the device
                attribution.hold()
                attribution.release(found=True)
            self._fail(suspects, f"{len(self.suspects)} items wait already to be tried in quarantine")
            return
        group: list[Request] = []
        for request in suspects:
            request.attribution = attribution
            if attribution is not None:
                attribution.hold()
            line = None if request.key is None else self.memory.lines.get(request.key)
            if line is not None:  # an equal item is tried already
                line.isolation.follow(line, request)
                continue
            self._suspect(request)
            group.append(request)
            if request.key is not None:
                self.memory.lines[request.key] = Line(request, self)
        self._counters.isolated += len(suspects)
        if not suspects:
            return
        told = {"items": len(suspects), "requests": _numbers(suspects), "pending": len(self.suspects)}
        logger.info("isolation_began", model=self._options.name(), **told, error=suspects[0].fault)
        if group:
            self._groups.extend(self._split(group, self._arrived))
        self._wake.set()
        if not self._is_running:
            self._begin()

    async def sift(self, batch: list[Request]) -> list[Request]:
        """Return what may run on the device that serves: what is known to be poison is refused, and what is a suspect waits for what is found.

        Items that were queued, or wait for a rebuild, may have been found since: where ``memory`` has something.
        """
        await self._make_keys([request for request in batch if request.key is None])
        left: list[Request] = []
        for request in batch:
            found = self.memory.recall_by(request.key, request.item)
            if found is not None and not request.future.done():
                self._counters.failed += 1
                request.future.set_exception(found)
            else:
                line = self.memory.lines.get(request.key) if request.is_idempotent else None
                if line is None or not line.isolation.join(request, request.key):
                    left.append(request)
        return [request for request in left if not request.future.done()]

    def join(self, request: Request, key: Hashable) -> bool:
        """Have a request of an item that is tried here wait for what is found; return whether there is room."""
        if len(self.suspects) >= self._options.limit:
            return False
        line = self.memory.lines[key]
        request.key, request.fault = key, line.leader.fault
        request.is_launched = True
        self.follow(line, request)
        self._counters.isolated += 1
        return True

    def follow(self, line: Line, request: Request) -> None:
        """Have a request wait for what is found of an equal item, which is tried here."""
        self._suspect(request)
        line.followers.append(request)

    async def _make_keys(self, batch: list[Request]) -> None:
        if not (self.memory.limit and batch):
            return
        loop = asyncio.get_running_loop()
        until = loop.time() + _SLICE
        for request in batch:
            request.key = self.memory.key(request.item)
            if loop.time() >= until:
                await asyncio.sleep(0)
                until = loop.time() + _SLICE

    def _suspect(self, request: Request) -> None:
        request.is_suspect = True
        self.suspects[request] = None
        probes = request.service.probes
        if probes.request_quarantined:
            probes.tell(probes.request_quarantined, request)

    def _is_wanted(self, request: Request) -> bool:
        # Of one whose caller has left, only whether it is to be remembered is of interest.
        return not request.future.done() or (self.memory.limit > 0 and not self._is_closing)

    # -- the task

    def _begin(self) -> None:
        # Set first: an eager task runs before create_task returns.
        self._is_running = True
        if not self._root.start(self._run(), "accel-isolation", self._done):
            self._interrupt()

    def _done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._interrupt()
        self._is_running = False
        if self.suspects:  # added while the quarantine was being closed
            self._begin()
        self._ended()

    def _interrupt(self) -> None:
        self._is_running = False
        given: set[int] = set()
        error = self._interrupted()
        for request in self._taken():
            self._settle(request, own_instance(error, given))

    def _taken(self) -> list[Request]:
        taken = list(self.suspects)
        for request in taken:
            self.memory.lines.pop(request.key, None)
        for each in (self.suspects, self._groups, self._repeats):
            each.clear()
        self._bound = self._arrived
        return taken

    async def _run(self) -> None:
        try:
            while self.suspects or await self._more():
                await self._try_all()
        except BaseException:
            await self._quarantine.aclose(abandon=True)
            raise
        await self._quarantine.aclose()

    async def _more(self) -> bool:
        """Wait for further suspects for as long as the quarantine may be idle; return whether there are any."""
        self._wake.clear()
        idle = self._options.idle
        is_kept = idle == math.inf or (idle > 0 and self._quarantine.is_open)
        if is_kept and not self._is_closing:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None) as self._idling:
                    await self._get_ready()
                    if idle < math.inf:
                        self._idling.reschedule(self._root.loop.time() + idle)
                    await self._wake.wait()
            self._idling = None
        return bool(self.suspects)

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
        try:
            await until_ready(self._device)
            while self.suspects:
                trials += 1
                await self._try_next()
        except UnusableError as error:
            await self._quarantine.aclose(abandon=True)
            self._fail(self._taken(), f"the quarantine could not be used: {error.__cause__}")
        except StopAsyncIteration:
            self._fail(self._taken(), "the device was closed", ClosedError("the device was closed before the item could be tried again"))
        except AccelError as error:
            self._fail(self._taken(), f"the device did not come back: {error}", error)
        found, seconds = counters.poisoned - poisoned, round(loop.time() - began, 3)
        logger.info("isolation_ended", model=self._options.name(), trials=trials, poisoned=found, seconds=seconds)

    async def _try_next(self) -> None:
        """Run the next group, or the next item alone that has faulted before, and answer what is known by that."""
        if not (self._groups or self._is_bound_last):
            await self._quarantine.handler()  # it may take seconds, in which others may come
            self._bound, self._is_bound_last = self._arrived, True
        is_repeat = bool(self._repeats) and all(group.arrival > self._bound for group in self._groups)
        group = _Group([self._repeats[0]], self._arrived) if is_repeat else self._next_group()
        tried = self._left(group)
        with trial_of(tried, self._counters, str(getattr(self._device, "name", ""))) if tried else contextlib.nullcontext():
            await self._try(group, tried, is_repeat=is_repeat)

    async def _try(self, group: _Group, tried: list[Request], *, is_repeat: bool) -> None:
        """Run what is left of a group, and answer what is known by that."""
        results = await self._results(tried)
        if is_repeat:
            self._repeats.popleft()
        if is_repeat or not self._repeats:  # what is next there lets those pass that are there now
            self._bound, self._is_bound_last = self._arrived, False
        died = any(map(is_fault, results.values()))
        if group.death is not None and group.death.left:  # the fewer are left, the more likely it is one of them
            group.death.left = 0 if died else max(1, group.death.left - len(group.requests))
        again = [request for request in group.requests if request in self.suspects and is_fault(results.get(request))]
        for request in group.requests:
            if request in self.suspects and request not in again:
                self._settle(request, results.get(request))
        if again and len(tried) > 1:
            self._groups.extendleft(reversed(self._split(again, group.arrival)))
        for request in again if len(tried) == 1 else ():
            if self._is_confirmed(request, results[request]):
                self._settle(request, self._poisoned(request, results[request]))
            else:
                self._repeats.append(request)

    def _learn(self, seconds: float, *, died: bool) -> None:
        """Take how long a trial took, by which groups are split."""
        known = self._dying if died else self._forward
        seconds += self._quarantine.seconds if died else 0.0
        seconds = known + 0.2 * (seconds - known) if known else seconds
        if died:
            self._dying = seconds
        else:
            self._forward = seconds

    def _next_group(self) -> _Group:
        """Take the group whose trial saves the most waiting for its time; long waits count most.

        So callers of innocent items wait least when poison comes faster than it can be found: that is alone, mostly, and costs a context. The fewer are left
        of those that were in flight at a death, the more likely each is its cause, and the later it runs.
        """
        now, forward = self._root.loop.time(), self._seconds()

        def gain(group: _Group) -> float:
            waited = sum((now - request.since + _SLICE) ** 2 for request in group.requests if not request.future.done())
            left = 0 if group.death is None else group.death.left
            innocent = 1.0 - 1.0 / (left + 1) if left else 1.0
            guilty = min(1.0, len(group.requests) / left) if left else 0.0
            return waited * innocent**2 / (forward + guilty * self._death())

        group = max(self._groups, key=gain)
        self._groups.remove(group)
        return group

    def _split(self, requests: list[Request], arrival: int) -> list[_Group]:
        """Split requests of which a context has died together."""
        count, fault = len(requests), requests[0].fault
        is_hang = fault is not None and kind_of_fault(fault) == "hang"  # which takes longer than any forward
        parts = count if count < 3 or is_hang else self._parts(count)
        edges = [count * n // parts for n in range(parts + 1)]
        death = _Death(count)
        return [_Group(requests[a:b], arrival, death) for a, b in pairwise(edges)]

    def _parts(self, count: int) -> int:
        """Return into how many parts ``count`` requests are split: trials of all parts that pass take about as long as one death."""
        return max(2, min(count, int(self._death() / self._seconds())))

    def _seconds(self) -> float:
        """Return how long a trial takes that passes."""
        return self._forward or self._counters.batch_seconds or 0.01

    def _death(self) -> float:
        """Return how long one takes that does not, until the next one can begin."""
        return self._dying or self._quarantine.seconds or _REBUILD

    def _left(self, group: _Group) -> list[Request]:
        """Settle what need not be tried any more, and return the others."""
        left = []
        for request in group.requests:
            if request not in self.suspects:
                continue
            found = self.memory.recall_by(request.key, request.item)
            if found is None and self._is_wanted(request):
                left.append(request)
            else:
                self._settle(request, found)
        return left

    def _is_confirmed(self, request: Request, fault: AccelError) -> bool:
        """Note that a context died of an item, and return whether the item is poison: equal items count as one."""
        key = request if request.key is None else request.key
        is_again = key in self._faulted
        self._faulted.add(key)  # until it is settled
        return is_again or (isinstance(request.fault, AccelError) and is_same_fault(fault, request.fault))

    async def _results(self, requests: list[Request]) -> dict[Request, Any]:
        """Return what the handler in quarantine gives for some items; nothing for those that nothing can be said of."""
        results: Any = None
        for _ in range(_INCONCLUSIVE if requests else 0):
            handler = await self._quarantine.handler()
            began = time.perf_counter()
            results = await self._while_wanted(requests, handler)
            seconds = time.perf_counter() - began
            each = [results] if results is None or isinstance(results, Exception) else results
            self._quarantine.check_usable(each)
            is_unclear = any(isinstance(result, Exception) and is_worth_a_retry(result) and not is_fault(result) for result in each)
            died = any(map(is_fault, each))
            self._learn(seconds, died=died)
            if not is_unclear or died:
                break
        if results is None:
            return {}
        if not isinstance(results, Exception):
            return dict(zip(requests, results, strict=True))
        if len(requests) > 1 and is_of_an_item(results):
            return {request: found for request in requests for found in (await self._results([request])).values()}
        return dict.fromkeys(requests, results)

    async def _while_wanted(self, requests: list[Request], handler: Callable[[list[Any]], Awaitable[Sequence[Any]]]) -> Any:
        """Return the outcome of a call; ``None`` if it has not ended soon after the last caller has left."""
        loop, patience = asyncio.get_running_loop(), _UNWANTED if self.memory.limit else 0.0
        is_over = False

        def left(_: object) -> None:
            if not is_over and all(request.future.done() for request in requests):
                deadline.reschedule(loop.time() + patience)

        for request in requests:
            request.future.add_done_callback(left)
        try:
            async with asyncio.timeout(None) as deadline:
                return await call(handler, [request.item for request in requests])
        except TimeoutError:
            await self._quarantine.aclose(abandon=True)
            return None
        finally:
            is_over = True
            for request in requests:
                request.future.remove_done_callback(left)

    # -- the answers

    def _poisoned(self, request: Request, fault: AccelError) -> PoisonedInputError:
        """Return the error for a request whose item is poison, and remember the item."""
        kind = kind_of_fault(fault)
        what = "hung" if kind == "hang" else "faulted the context"
        device = getattr(self._device, "name", fault.device)
        error = PoisonedInputError(
            f"the item was tried alone, in quarantine, and {what} again: {fault.message}",
            item=request.item,
            kind=kind,
            code=fault.code,
            library=fault.library,
            device=device,
            op=fault.op,
        )
        error.__cause__ = fault
        self.memory.remember(error)
        key = request.key.hex() if isinstance(request.key, bytes) else request.key
        told = {"model": self._options.name(), "request": request.number, "fingerprint": key, "device": device, "op": fault.op}
        logger.warning("poisoned_item", **told, code=fault.code, kind=kind, error=fault)
        return error

    def _fail(self, requests: Iterable[Request], why: str, error: Exception | None = None) -> None:
        """Fail requests whose trials ended early, with ``error`` or with the fault that they were in."""
        given: set[int] = set()
        failed: list[Request] = []
        for request in requests:
            own = error or request.fault
            if not request.future.done() and own is not None:
                failed.append(request)
                own = own_instance(own, given)
                own.add_note(f"The item may be what faulted the context; this was not found out, because {why}")
            self._settle(request, own)
        if failed:
            logger.error("isolation_left_out", model=self._options.name(), items=len(failed), requests=_numbers(failed), reason=why)

    def _settle(self, request: Request, result: Any) -> None:
        """Answer a request, and let those that wait for it know; with ``None`` nothing was found out."""
        self.suspects.pop(request, None)
        self._faulted.discard(request if request.key is None else request.key)
        request.fault, request.is_suspect = None, False
        is_poison = isinstance(result, PoisonedInputError)
        attribution, request.attribution = request.attribution, None
        if attribution is not None:
            attribution.release(found=is_poison)
        line = self.memory.lines.get(request.key)
        if line is not None and line.leader is request:
            del self.memory.lines[request.key]
            self._settle_followers(line.followers, is_poison=is_poison)
        self._counters.poisoned += is_poison
        if request.future.done():
            return
        if isinstance(result, Exception):
            self._counters.failed += 1
            request.future.set_exception(own_instance(result, set()))
        else:
            self._counters.answered += 1
            request.future.set_result(result)

    def _settle_followers(self, followers: list[Request], *, is_poison: bool) -> None:
        """Answer the requests of equal items, or have them tried next: if the first one passed, so will they."""
        group: list[Request] = []
        groups: list[_Group] = []
        for request in followers:
            found = self.memory.recall_by(request.key, request.item) if is_poison else None
            if found is not None:
                self._settle(request, found)
                continue
            if sum(each.size for each in group) + request.size > self._options.most:
                groups.append(_Group(group, 0))
                group = []
            group.append(request)
        self._groups.extendleft(reversed([*groups, _Group(group, 0)]) if group else ())


def _numbers(requests: list[Request]) -> list[int]:
    """Return the numbers of the first requests, by which traces name them too, for a line of the log."""
    return [request.number for request in requests[:_MOST_NUMBERS]]
