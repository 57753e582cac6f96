"""A bounded FIFO queue from any number of tasks to one reader, on one event loop.

It differs from :class:`asyncio.Queue` where actors need more: a newcomer never overtakes a waiting
putter, a queued message can be taken back, system messages overtake, closing fails the waiting
putters and ends the reader, and everything is counted.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from accel.errors import ActorStoppedError, MailboxFullError
from accel.values import check_count

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ENDED", "NOTHING", "Mailbox", "MailboxStatistics"]

M = TypeVar("M")

NOTHING: Final[Any] = object()
"""Returned by :meth:`Mailbox.take` when nothing is queued: ``None`` may be a message."""

ENDED: Final[Any] = object()
"""Returned by :meth:`Mailbox.take` when nothing is queued and the mailbox is closed."""


@dataclass(frozen=True, slots=True)
class MailboxStatistics:
    """The counters of a mailbox.

    Attributes
    ----------
    depth, capacity
        Queued messages, and the most that may be queued. A message that was taken does not count,
        nor do system messages.
    waiting_putters
        Tasks that wait for room in :meth:`Mailbox.put`.
    accepted, rejected, discarded, high_water
        Messages accepted, refused for lack of room, and removed with :meth:`Mailbox.discard`, and
        the largest depth, since the start.
    oldest_age
        Seconds for which the message at the head has been waiting; 0 when there is none.
    """

    depth: int
    capacity: int
    waiting_putters: int
    accepted: int
    rejected: int
    discarded: int
    high_water: int
    oldest_age: float


class Mailbox(Generic[M]):
    """A bounded FIFO of messages for one reader on one event loop. Not thread-safe.

    Parameters
    ----------
    capacity
        The most messages that may be queued, at least 1. System messages do not count.
    name
        Named in errors.
    clock
        Seconds, monotonic; measures the age of messages.
    loop
        The loop of the reader; ``None``: the running one, looked up each time.

    Raises
    ------
    InvalidArgumentError
        ``capacity`` is no integer of at least 1.
    """

    __slots__ = (
        "_capacity",
        "_cause",
        "_clock",
        "_closed",
        "_discarded",
        "_getter",
        "_granted",
        "_high_water",
        "_items",
        "_limit",
        "_loop",
        "_name",
        "_putters",
        "_putters_ahead",
        "_rejected",
        "_system",
        "_taken",
        "_times",
    )

    def __init__(
        self,
        capacity: int = 1024,
        *,
        name: str = "mailbox",
        clock: Callable[[], float] = time.monotonic,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._capacity = check_count("the mailbox's capacity", capacity)
        self._limit = capacity  # 0 once closed: puts then fail the same one check that guards against a full mailbox
        self._loop = loop
        self._name = name
        self._clock = clock
        self._items: deque[M] = deque()
        self._times: deque[float] = deque()  # the clock's reading when each of _items was queued
        self._system: deque[M] = deque()
        self._getter: asyncio.Future[None] | None = None
        self._putters: OrderedDict[asyncio.Future[None], None] = OrderedDict()  # waiting, in order
        self._granted = 0  # putters that were woken and hold a reserved place, but have not run yet
        self._putters_ahead = 0  # len(_putters) + _granted: while there are any, newcomers queue behind them
        self._closed = False
        self._cause: BaseException | None = None
        self._taken = self._rejected = self._discarded = self._high_water = 0

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<Mailbox {self._name!r} {state} {len(self._items)}/{self._capacity} waiting_putters={self._putters_ahead}>"

    def __len__(self) -> int:
        return len(self._items)

    @property
    def capacity(self) -> int:
        """The most messages that may be queued."""
        return self._capacity

    @property
    def is_closed(self) -> bool:
        """Whether puts are refused for good."""
        return self._closed

    @property
    def has_room(self) -> bool:
        """Whether :meth:`put_nowait` would succeed now."""
        return not self._putters_ahead and len(self._items) < self._limit

    @property
    def is_awaited(self) -> bool:
        """Whether the reader waits, and nothing can be taken without a further put."""
        return self._getter is not None and not (self._items or self._system or self._putters_ahead or self._closed)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is queued."""
        return not (self._items or self._system)

    # -- putting

    def put_nowait(self, message: M) -> None:
        """Append a message.

        Raises
        ------
        MailboxFullError
            There is no room, or others are already waiting for it.
        ActorStoppedError
            The mailbox is closed.
        """
        if not self.offer(message):
            if self._closed:
                raise self._stopped_error()
            self._rejected += 1
            raise MailboxFullError(
                f"the mailbox of {self._name!r} is full ({self._capacity} messages, {self._putters_ahead} waiting for room)"
            )

    def offer(self, message: M) -> bool:
        """Append a message if there is room now; return whether there was.

        A refusal is not counted.
        """
        items = self._items
        depth = len(items)
        if depth >= self._limit or self._putters_ahead:
            return False
        items.append(message)
        self._times.append(self._clock())
        if depth >= self._high_water:
            self._high_water = depth + 1
        if self._getter is not None:
            self._wake()
        return True

    async def put(self, message: M) -> None:
        """Append a message, once there is room and all earlier putters have appended theirs.

        If the wait is cancelled, the message is not in the mailbox, and the next putter gets the
        place.

        Raises
        ------
        ActorStoppedError
            The mailbox is closed, or was closed while this waited.
        """
        if not self.offer(message):
            await self._wait_for_room()
            self._append(message)
            self._wake_putters()  # after the append: a putter woken before it could run first

    def put_system(self, message: M) -> None:
        """Queue a system message: it overtakes all ordinary ones, and needs no room.

        System messages keep their order.

        A closed mailbox accepts them too: its reader may still be draining it.
        """
        self._system.append(message)
        self._wake()

    def _append(self, message: M) -> None:
        """Append a message for which a place is reserved, and wake the reader."""
        self._items.append(message)
        self._times.append(self._clock())
        self._high_water = max(self._high_water, len(self._items))
        self._wake()

    async def _wait_for_room(self) -> None:
        """Wait behind earlier putters for a place, which is reserved until this has run on."""
        if self._closed:
            raise self._stopped_error()
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._putters[place] = None
        self._putters_ahead += 1
        try:
            await place
        except BaseException:
            if place.done() and not place.cancelled():
                self._granted -= 1  # it was already woken: its place is free for the next
            else:
                self._putters.pop(place, None)
            self._putters_ahead -= 1
            self._wake_putters()
            raise
        self._granted -= 1
        self._putters_ahead -= 1
        if self._closed:
            raise self._stopped_error()

    def _wake_putters(self) -> None:
        """Wake as many waiting putters as there are places that are not reserved."""
        while self._putters and len(self._items) + self._granted < self._limit:
            place, _ = self._putters.popitem(last=False)
            if not place.done():  # otherwise it was cancelled, and its task will count itself out
                self._granted += 1
                place.set_result(None)

    def _stopped_error(self) -> ActorStoppedError:
        """Return the error for a put to a closed mailbox."""
        error = ActorStoppedError(f"{self._name!r} takes no more messages")
        error.__cause__ = self._cause
        return error

    # -- taking

    def take(self) -> M | Any:
        """Take the next message, or return :data:`NOTHING` or :data:`ENDED`."""
        if self._system:
            return self._system.popleft()
        if self._items:
            self._taken += 1
            self._times.popleft()
            message = self._items.popleft()
            if self._putters:
                self._wake_putters()
            return message
        return ENDED if self._closed else NOTHING

    def waiter(self) -> asyncio.Future[None]:
        """Return a future for the next message or the close.

        Ask for it when :meth:`take` returned :data:`NOTHING`; the one before is forgotten.
        """
        self._getter = asyncio.Future(loop=self._loop)
        return self._getter

    def _wake(self) -> None:
        """Wake the reader, if it waits."""
        getter, self._getter = self._getter, None
        if getter is not None and not getter.done():  # done: the reader was cancelled, and finds the message later
            getter.set_result(None)

    # -- discard, close, statistics

    def discard(self, message: M) -> bool:
        """Remove a queued message, and give its place to the next putter.

        Parameters
        ----------
        message
            Compared by identity. If the same object is queued several times, the first is removed.

        Returns
        -------
        bool
            Whether it was still queued.
        """
        for index, queued in enumerate(self._items):
            if queued is message:
                del self._items[index]
                del self._times[index]
                self._discarded += 1
                self._wake_putters()
                return True
        return False

    def close(self, cause: BaseException | None = None) -> None:
        """Refuse all later puts, and fail those that wait for room.

        Queued messages can still be taken. Idempotent.

        Parameters
        ----------
        cause
            Becomes the ``__cause__`` of each :class:`~accel.errors.ActorStoppedError`.
        """
        self._cause = self._cause or cause
        if self._closed:
            return
        self._closed = True
        self._limit = 0
        for place in self._putters:
            if not place.done():
                self._granted += 1
                place.set_result(None)
        self._putters.clear()
        self._wake()

    def drain(self) -> list[M]:
        """Remove and return all queued messages, system messages first."""
        left = [*self._system, *self._items]
        self._taken += len(self._items)
        self._system.clear()
        self._items.clear()
        self._times.clear()
        self._wake_putters()
        return left

    def oldest_age(self) -> float:
        """Seconds for which the message at the head has been waiting; 0 when there is none."""
        return max(0.0, self._clock() - self._times[0]) if self._times else 0.0

    def statistics(self) -> MailboxStatistics:
        """Return the counters as they are now."""
        return MailboxStatistics(
            depth=len(self._items),
            capacity=self._capacity,
            waiting_putters=self._putters_ahead,
            accepted=self._taken + self._discarded + len(self._items),
            rejected=self._rejected,
            discarded=self._discarded,
            high_water=self._high_water,
            oldest_age=self.oldest_age(),
        )
