"""The interfaces of completion, and the skeleton of all strategies: how marks are kept and end."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar

from accel.errors import AccelError, ClosedError, DriverError, FaultScope

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from accel.backend import AccelDevice

__all__ = [
    "CompletionStrategy",
    "Ended",
    "LaneMarks",
    "LaneWatcher",
    "Mark",
    "Watcher",
    "pop_ended",
]


class Mark(Protocol):
    """A recorded event, and the work that ends with it.

    Its end is one call of :meth:`complete` or :meth:`fail`, on the loop's thread.
    """

    @property
    def event(self) -> Any:
        """The recorded event. It is not recorded again before the mark has ended."""

    @property
    def lane(self) -> Hashable:
        """Marks of one lane are watched, and complete, in the order in which they were recorded."""

    @property
    def stream(self) -> Any:
        """The stream in which the event was recorded."""

    @property
    def kind(self) -> Hashable:
        """The key by which the duration is predicted: marks of one kind take about as long.

        Not asked of a mark that was passed when it was first queried.
        """

    @property
    def enqueued_at(self) -> float:
        """When the event was recorded, after its work (``time.perf_counter()``, seconds)."""

    def complete(self) -> None:
        """Retire the work.

        Called only after ``query()`` of the event, or of a later one of the lane, returned
        ``True``.
        """

    def fail(self, error: AccelError) -> None:
        """Report that the stream will never pass the event; ``error`` is the mark's own."""


class Watcher(ABC):
    """Watches the marks of one device's context on one event loop.

    Used on the loop's thread only.
    """

    @abstractmethod
    def watch(self, mark: Mark) -> None:
        """Watch a mark until it ends.

        Never blocks, and ends no mark before the next loop iteration.

        Raises
        ------
        ClosedError
            After :meth:`aclose`; the mark is not watched then.
        """

    @abstractmethod
    async def aclose(self, *, abandon: bool = False) -> None:
        """Wait until every watched mark has ended, then stop threads and timers. Idempotent.

        Parameters
        ----------
        abandon
            Do not wait: marks that have not ended fail with :class:`~accel.ClosedError`. A later
            ``aclose(abandon=True)`` cuts an earlier ``aclose()`` short; cancelling ``aclose()``
            abandons too.
        """


class CompletionStrategy(ABC):
    """A way of waiting.

    Instances are configuration: frozen, comparable, usable for any number of devices.

    Attributes
    ----------
    name : str
        The value of ``open_device(completion=...)`` that selects it.
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
            A dictionary that lives as long as the system. It holds what the watchers of several
            devices share.
        """


_BISECT_ABOVE = 2
"""Up to this many marks are queried one by one, more by bisection."""

Ended: TypeAlias = "tuple[Mark, AccelError | None]"
"""A mark that has ended, and the error if it failed."""


def _query_error(raised: Exception) -> AccelError:
    """Return the error for a mark whose event's query raised: another exception is a fault."""
    if isinstance(raised, AccelError):
        # The traceback holds the frames of the watcher, and they hold the mark and its waiter.
        return raised.with_traceback(None)
    # A backend's bug must not lose a waiter.
    fault = DriverError(f"querying an event raised {type(raised).__name__}: {raised}", scope=FaultScope.CONTEXT)
    fault.__cause__ = raised
    return fault


class LaneMarks:
    """The queue of the watched marks of one lane of the engine, oldest first."""

    __slots__ = ("marks",)

    def __init__(self) -> None:
        self.marks: deque[Mark] = deque()


L = TypeVar("L", bound=LaneMarks)


class LaneWatcher(Watcher, Generic[L]):
    """The skeleton of all strategies: marks in one queue per lane, of which the oldest are queried.

    A strategy adds when they are queried: :func:`pop_ended`, then :meth:`_end_marks`.

    Parameters
    ----------
    loop
        The loop on which marks end.
    create_lane
        Makes the queue of a lane, at its first mark.
    add
        Appends a mark to its lane, and has it queried later: by a timer, a thread or a signal.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, create_lane: Callable[[], L], add: Callable[[L, Mark], None]) -> None:
        self._loop = loop
        self._create_lane = create_lane
        self._add = add
        self._lanes: dict[Hashable, L] = {}
        self._pending = 0  # marks that are watched
        self._is_closing = False  # aclose() was called
        self._is_released = False  # _release() was called
        self._drained: asyncio.Future[None] | None = None  # ends the wait of aclose(), which makes it

    def watch(self, mark: Mark) -> None:
        """Put a mark into its lane's queue, made at the lane's first mark; see :class:`Watcher`."""
        if self._is_closing:
            raise ClosedError("this device's completion watcher is closed")
        lane = self._lanes.get(mark.lane)
        if lane is None:
            lane = self._lanes[mark.lane] = self._create_lane()
        self._pending += 1
        self._add(lane, mark)

    async def aclose(self, *, abandon: bool = False) -> None:
        """Wait until every watched mark has ended; see :meth:`Watcher.aclose`."""
        self._is_closing = True
        if not abandon and self._pending:
            if self._drained is None:
                self._drained = self._loop.create_future()
            try:
                await asyncio.shield(self._drained)
            except BaseException:  # cancelled: threads and timers are left to the next call
                self._abandon()
                raise
        if self._pending:
            self._abandon()
        if not self._is_released:
            self._is_released = True
            await self._release(abandon=abandon)

    def _end_marks(self, ended: list[Ended]) -> None:
        """Complete or fail marks that were taken out of their queues.

        Called on the loop's thread. When none is watched any more, :meth:`aclose` is woken. What a
        mark raises is reported to the loop's exception handler.
        """
        for mark, error in ended:
            self._pending -= 1
            try:
                if error is None:
                    mark.complete()
                else:
                    mark.fail(error)
            except Exception as raised:  # it must not keep the next mark from ending
                self._loop.call_exception_handler({"message": f"{mark!r} raised when told that it ended", "exception": raised})
        if not self._pending and self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def _abandon(self) -> None:
        """End every watched mark now: those that are not passed fail with :class:`ClosedError`."""
        ended: list[Ended] = []
        for lane in self._lanes.values():
            ended += pop_ended(lane.marks)
            ended += [(mark, ClosedError("the device was closed before this ended")) for mark in lane.marks]
            lane.marks.clear()
        self._end_marks(ended)

    @abstractmethod
    async def _release(self, *, abandon: bool) -> None:
        """Release threads and timers; called once, by :meth:`aclose`, when no mark is watched."""


def pop_ended(marks: deque[Mark]) -> list[Ended]:
    """Remove the marks of a lane that have ended from ``marks``, and return them, oldest first.

    A mark whose query raises has failed: it is returned with that error, and the next one is
    queried. The caller then completes or fails the marks.

    A stream passes its marks in order, so of many it is enough to find the last one that is passed.
    """
    ended: list[Ended] = []
    while marks:
        try:
            if not marks[0].event.query():
                break
        except Exception as raised:
            ended.append((marks.popleft(), _query_error(raised)))
            continue
        ended.append((marks.popleft(), None))
        if len(marks) > _BISECT_ABOVE:
            ended += [(marks.popleft(), None) for _ in range(_count_passed(marks))]
    return ended


def _count_passed(marks: deque[Mark]) -> int:
    """Return how many of the oldest marks are passed, by bisection.

    It stops where a query raises; :func:`pop_ended` goes on from the oldest mark left, and so comes
    to that one.
    """
    passed, unknown = 0, len(marks)
    probe = unknown - 1  # the newest first: usually all have passed, or nearly all
    while passed < unknown:
        try:
            if marks[probe].event.query():
                passed = probe + 1
            else:
                unknown = probe
        except Exception:
            break
        probe = (passed + unknown) // 2
    return passed
