"""How a future learns that a stream has reached an event: the interfaces, and what every strategy does alike."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

from accel.errors import AccelError, ClosedError, DriverError, FaultScope

if TYPE_CHECKING:
    import threading
    from collections import deque
    from collections.abc import Hashable
    from contextlib import AbstractContextManager

    from accel.backend import AccelDevice

__all__ = [
    "Attended",
    "CompletionStatistics",
    "CompletionStrategy",
    "Ended",
    "LaneWatcher",
    "Looks",
    "Pending",
    "Watcher",
    "look",
    "put_in_line",
    "take_ended",
    "thread_end",
]


class Pending(Protocol):
    """A mark that is watched. Exactly one of :meth:`complete` and :meth:`fail` is called, exactly once, on the loop's thread."""

    @property
    def event(self) -> Any:
        """The recorded event. It is not recorded again before the mark has ended."""

    @property
    def lane(self) -> Hashable:
        """Marks of one lane complete in the order in which they were recorded, which :attr:`enqueued_at` tells."""

    @property
    def stream(self) -> Any:
        """The stream that the mark is in."""

    @property
    def kind(self) -> Hashable:
        """What the duration is predicted by: marks of one kind take about as long as each other."""

    @property
    def enqueued_at(self) -> float:
        """When the mark was recorded, after its work (``time.perf_counter()``, seconds)."""

    def complete(self) -> None:
        """Take note that the stream has passed the mark; called only after ``query()`` of its event, or of a later one in its lane, returned ``True``."""

    def fail(self, error: AccelError) -> None:
        """Take note that the stream will never pass the mark; ``error`` is what the query raised, an instance of the mark's own."""


class Attended(Pending, Protocol):
    """A mark whose waiter looks itself."""

    @property
    def nap(self) -> asyncio.Future[None] | None:
        """What the waiter waits for before it looks again; ``None``: a turn of the loop. Set where :meth:`Watcher.attend_once` says so.

        Who ends the mark has to end this too. A waiter may look before.
        """

    @nap.setter
    def nap(self, nap: asyncio.Future[None] | None) -> None: ...

    def is_overtaken(self) -> bool:
        """Return whether a later mark of its lane is known, or found, to be passed. Never raises."""


@dataclass(frozen=True, slots=True)
class CompletionStatistics:
    """What a watcher has done.

    Parameters
    ----------
    pending
        Marks being watched now.
    completed, failed
        Marks that have ended.
    looks
        How often the loop was woken, or took a turn, to look at the marks. Does not grow while nothing is pending.
    """

    pending: int
    completed: int
    failed: int
    looks: int


class Looks(Protocol):
    """Who looks for ends together with those who wait for them; see :class:`Watcher`."""

    def attend(self, pending: Any) -> None:
        """See :meth:`Watcher.attend`."""

    def attend_once(self, pending: Any) -> bool:
        """See :meth:`Watcher.attend_once`."""


class Watcher(ABC):
    """Watches the marks of one device's context on one event loop. Used on the loop's thread only."""

    @abstractmethod
    def watch(self, pending: Pending) -> None:
        """Watch a mark until it ends. Never blocks.

        Raises
        ------
        ClosedError
            After :meth:`aclose`; the mark is not watched then.
        """

    def attend(self, pending: Pending) -> None:
        """Complete a mark at once if it is found to be passed, else watch it. Called when its waiter has let the loop take a turn since it was recorded.

        May look for some microseconds, where the mark is about to be passed: that takes less than to wait for it. Raises as :meth:`watch` does.
        """
        self.watch(pending)

    def attend_once(self, pending: Attended) -> bool:
        """Do what :meth:`attend` does, or return ``False``: its waiter, which runs now, is to call again, or :meth:`attend`, after another turn of the loop.

        That is so where the mark is about to be passed and is the only one: then it takes less to wait like this than to be told. Where that is still
        far, ``pending.nap`` is set to what tells when it is not.
        """
        self.attend(pending)
        return True

    def attend_at_once(self, pending: Attended) -> bool:
        """Complete a mark that was recorded just now, if it is known, or found, to be passed within microseconds; else return ``False``.

        Then its waiter is to call :meth:`attend_once` after a turn of the loop; or after ``pending.nap``, where that is set because the end is known to be far.
        """
        return False

    def expecting(self) -> AbstractContextManager[object]:
        """Return a block during which something on another thread is about to end, and the loop should be quick to take note."""
        return _AT_EASE

    @abstractmethod
    async def aclose(self, *, abandon: bool = False) -> None:
        """Wait until every watched mark has ended, then stop the threads and timers of this watcher. Idempotent.

        Parameters
        ----------
        abandon
            Wait for nothing: marks that have not ended fail with :class:`~accel.ClosedError`, now. A later ``aclose(abandon=True)`` cuts an
            earlier ``aclose()`` short; cancelling ``aclose()`` abandons too.
        """

    @abstractmethod
    def statistics(self) -> CompletionStatistics:
        """Return counters."""


class CompletionStrategy(ABC):
    """A way of waiting. Instances are configuration: frozen, comparable, usable for any number of devices.

    Attributes
    ----------
    name : str
        What ``open_device(completion=...)`` calls it.
    """

    name: ClassVar[str]

    @abstractmethod
    def open(self, device: AccelDevice, loop: asyncio.AbstractEventLoop, shared: dict[Any, Any]) -> Watcher:
        """Return a watcher for the marks of ``device`` on ``loop``.

        Parameters
        ----------
        device
            The context whose events are watched.
        loop
            The loop on which the marks' methods are called.
        shared
            A dictionary that lives as long as the system: what watchers of several devices have in common is found there.
        """


_AT_EASE = contextlib.nullcontext()

_FEW = 2
"""So many marks are cheaper looked at one by one."""

Ended: TypeAlias = "tuple[Pending, AccelError | None]"
"""A mark that has ended, and the error if it failed."""


def look(pending: Pending) -> Ended | None:
    """Query a mark's event once and return how the mark has ended, or ``None`` if it has not."""
    try:
        return (pending, None) if pending.event.query() else None
    except AccelError as error:
        # Its traceback holds this frame and the watcher's, which hold the mark and so the waiter, whose own error comes from this one.
        return pending, error.with_traceback(None)
    except Exception as error:  # a backend's bug must not lose a waiter
        fault = DriverError(f"querying an event raised {type(error).__name__}: {error}", scope=FaultScope.CONTEXT)
        fault.__cause__ = error
        return pending, fault


class LaneWatcher(Watcher):
    """A watcher that keeps marks in one queue per lane and looks at the heads; strategies add when to look.

    Parameters
    ----------
    loop
        The loop on which marks end.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pending = 0
        self._completed = 0
        self._failed = 0
        self._looks = 0
        self._closing = False
        self._released = False
        self._drained: asyncio.Future[None] | None = None

    def statistics(self) -> CompletionStatistics:
        """Return counters."""
        return CompletionStatistics(self._pending, self._completed, self._failed, self._looks)

    async def aclose(self, *, abandon: bool = False) -> None:
        """Wait until every watched mark has ended; see :meth:`Watcher.aclose`."""
        self._closing = True
        if not abandon and self._pending:
            if self._drained is None:
                self._drained = self._loop.create_future()
            try:
                await asyncio.shield(self._drained)
            except BaseException:
                self._abandon()
                raise
        if self._pending:
            self._abandon()
        await self._release_once(abandon=abandon)

    async def _release_once(self, *, abandon: bool) -> None:
        if not self._released:
            self._released = True
            await self._release(abandon=abandon)

    def _admit(self) -> None:
        if self._closing:
            raise ClosedError("this device's completion watcher is closed")
        self._pending += 1

    def _settle(self, ended: list[Ended]) -> None:
        """Tell marks, which were already taken out of their queues, how they ended."""
        for pending, error in ended:
            self._pending -= 1
            try:
                if error is None:
                    self._completed += 1
                    pending.complete()
                else:
                    self._failed += 1
                    pending.fail(error)
            except Exception as raised:  # one mark's trouble is not the next one's
                self._loop.call_exception_handler({"message": f"{pending!r} raised when told that it ended", "exception": raised})
        if not self._pending and self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def _abandon(self) -> None:
        # A last look: what has passed is not failed.
        self._settle([look(pending) or (pending, ClosedError("the device was closed before this ended")) for pending in self._take_all()])

    @abstractmethod
    def _take_all(self) -> list[Pending]:
        """Take every watched mark out of the queues, in order."""

    @abstractmethod
    async def _release(self, *, abandon: bool) -> None:
        """Give threads and timers back; called once, when nothing is pending."""


def put_in_line(queue: deque[Pending], pending: Pending) -> None:
    """Add a mark to those of its lane, by when they were recorded: one that is attended may come after a later one, which was watched at once."""
    at = len(queue)
    while at and queue[at - 1].enqueued_at > pending.enqueued_at:
        at -= 1
    queue.insert(at, pending)


def take_ended(queue: deque[Pending], ended: list[Ended]) -> None:
    """Move the marks at the head of ``queue`` that have ended to ``ended``.

    A stream passes its marks in order, so of many it is enough to find the last that was passed.
    """
    while queue:
        answer = look(queue[0])
        if answer is None:
            return
        ended.append(answer)
        queue.popleft()
        if answer[1] is None and len(queue) > _FEW:
            for _ in range(_passed(queue)):
                ended.append((queue.popleft(), None))  # noqa: PERF401 - one at a time


def _passed(queue: deque[Pending]) -> int:
    """Return how many marks at the head of ``queue`` are known to be passed, by halves; after a fault the marks themselves are asked, one by one."""
    passed, unknown = 0, len(queue)
    probe = unknown - 1  # nearly always all are passed, or nearly all
    while passed < unknown:
        answer = look(queue[probe])
        if answer is None:
            unknown = probe
        elif answer[1] is None:
            passed = probe + 1
        else:
            return passed
        probe = (passed + unknown) // 2
    return passed


async def thread_end(thread: threading.Thread) -> None:
    """Wait for a thread that is about to return. ``join`` would block the loop; this takes a turn or two."""
    while thread.is_alive():  # noqa: ASYNC110 - a thread sets no event after its last instruction
        await asyncio.sleep(0)
