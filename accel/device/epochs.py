"""The controller of a world: forms its communicators, sends collectives to all ranks, replaces lost ones.

It runs on the loop of the service. An *epoch* is the life of one communicator. It ends when a rank is
lost, when one fails what others may have begun, when the ranks hang, or when the world closes. Then,
in this order: the world is REBUILDING, and what was sent fails; each rank that is left revokes the
communicator, while lost devices come back by their own supervision, or an extra one takes the rank of
one that does not; all join a new communicator, also before the last one is quite left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from accel._log import get_logger
from accel.engine.lifecycle import DeviceState, Lifecycle
from accel.errors import (
    AccelError,
    ClosedError,
    DeadlineExceededError,
    DeviceLostError,
    FaultScope,
    HostDiedError,
    MailboxFullError,
    WorldChangedError,
)
from accel.values import check_timeout

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from accel.telemetry.probe import Probes

__all__ = ["Epochs", "Flight", "Membership", "Place", "Rank"]

logger = get_logger()

_REVOKE_TIMEOUT = 3.0
"""Seconds in which a rank must answer that it has revoked an epoch; else its child is killed."""

_MOST_FAILURES = 3
"""Joins that fail one after the other, with no device lost meanwhile, until the world is lost."""

_WAITERS = 16
"""Limit of the collectives that wait for room, in lengths of the queue."""


class Membership(Protocol):
    """What a context does as a rank: :class:`accel.world.member.Members`, here or in a child."""

    async def unique_id(self) -> str:
        """See :meth:`accel.world.member.Members.unique_id`."""

    async def join(self, world: int, epoch: int, unique_id: str, rank: int, size: int, seconds: float, /) -> None:
        """See :meth:`accel.world.member.Members.join`."""

    async def revoke(self, world: int, epoch: int) -> int:
        """See :meth:`accel.world.member.Members.revoke`."""


class Rank(Protocol):
    """A device as the controller sees it."""

    @property
    def name(self) -> str:
        """The name of the device."""

    @property
    def state(self) -> DeviceState:
        """The state of the device."""

    @property
    def fault(self) -> AccelError | None:
        """What has ended its last context."""

    @property
    def listeners(self) -> list[Callable[[], object]]:
        """What is called after each change of the state."""

    @property
    def members(self) -> Membership:
        """What the present context does as a rank; raises an :class:`AccelError` if there is none."""

    async def wait_ready(self) -> None:
        """Wait until the device is READY; raises if that will not happen."""

    def kill(self, why: str) -> None:
        """End the present context, which does not do what it must; another one follows."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a collective goes: what its ops say, but for the rank.

    Attributes
    ----------
    world, epoch, number, size
        See :class:`accel.ops.collective.Collective`.
    """

    world: int
    epoch: int
    number: int
    size: int


@dataclass(slots=True, eq=False)
class Flight:
    """A collective, or a batch of them, that was sent to its ranks.

    Attributes
    ----------
    numbers : range
        The numbers of its collectives.
    what : str
        What it is called in reports: ``"all_reduce"``.
    future : Future
        Ends with the results of all ranks, or with the error.
    tasks : dict of int to Task
        Rank -> what awaits its op.
    began : float
        When it was sent, in the loop's time.
    on_lost : callable
        Called if the epoch ends before it.
    grace : float
        More seconds that it may take until it counts as hung.
    is_work : bool
        Whether it is more than a collective, so that what an op of it raises is its own error.
    """

    numbers: range
    what: str
    future: asyncio.Future[list[Any]]
    began: float
    on_lost: Callable[[], object]
    grace: float = 0.0
    is_work: bool = False
    tasks: dict[int, asyncio.Task[Any]] = field(default_factory=dict)


Start: TypeAlias = "Callable[[Place], Sequence[Coroutine[Any, Any, Any] | None]]"
"""Checks the operands of a collective, and returns for each rank what sends and awaits its op, or
``None`` where it takes no part. Called in the loop iteration in which they are sent."""


class Epochs:
    """The communicators of one world, one after the other.

    Parameters
    ----------
    number
        Of the world, in its system.
    ranks
        The devices, which are READY.
    probes
        Told of changes of the state.
    on_loss
        Whether a lost rank is replaced, or the others go on without it.
    hang_timeout
        Seconds that a collective may take before the ranks that have not come to it are killed.
    join_timeout
        Seconds in which all ranks must join.
    limit
        How many collectives may be in flight.
    waits
        Whether further ones wait for room, or are refused.
    extras
        Devices that stand by: the first takes the rank of one that is LOST, and so on.

    Attributes
    ----------
    lifecycle : Lifecycle
        The state; its generation is the number of the epoch.
    ranks, extras : list of Rank
    shrinks : bool
        Whether the world goes on without ranks that are lost.
    takeovers : list of callable
        Called with the number of a rank, before the first of ``extras`` takes it: they make ready
        there what the rank needs.
    """

    def __init__(
        self,
        number: int,
        ranks: Sequence[Rank],
        probes: Probes,
        *,
        on_loss: Literal["replace", "shrink"] = "replace",
        hang_timeout: float | None = None,
        join_timeout: float = 10.0,
        limit: int = 256,
        waits: bool = True,
        extras: Sequence[Rank] = (),
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.number = number
        self.ranks, self.extras = list(ranks), list(extras)
        self.takeovers: list[Callable[[int], Awaitable[object]]] = []
        self.lifecycle = Lifecycle(f"{number}", self._loop, probes, kind="world")
        self.shrinks = on_loss == "shrink"
        self._hang_timeout, self._join_timeout = hang_timeout, join_timeout
        self._room, self._waits, self._limit, self._waiting = asyncio.Semaphore(limit), waits, limit, 0
        self._communicator = 0  # the number of the newest, formed or not
        self._sent = 0  # collectives so far
        self._flights: list[Flight] = []  # that have not ended, in the order of sending
        self._settled_at = 0.0  # when the last one ended
        self._disturbed = asyncio.Event()  # while ranks join: one of them was lost
        self._leaving: asyncio.Future[Any] = self._loop.create_future()  # the ranks' end of the last communicator
        self._leaving.set_result(None)
        self._reforming: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._hang_timer: asyncio.TimerHandle | None = None
        self._lost: set[str] = set()  # names of devices that were, while the world was READY
        self._all = (*ranks, *extras)
        for rank in self._all:
            rank.listeners.append(self._on_device_changed)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.ranks)

    # -- collectives

    async def run(
        self,
        what: str,
        start: Start,
        timeout: float | None,
        count: int = 1,
        *,
        on_lost: Callable[[], object] = lambda: None,
        grace: Callable[[], float] | None = None,
    ) -> list[Any]:
        """Send a collective to all ranks, once the world is READY and has room, and return the results.

        Parameters
        ----------
        what
            Its name in reports.
        start
            See :data:`Start`.
        timeout
            Seconds until waiting ends. What was sent then runs on, on all ranks.
        count
            How many collectives it is.
        on_lost
            Called if the epoch ends before all ranks have: what they were to write is not whole.
        grace
            Given for work that is more than a collective; called after ``start``: returns more seconds
            that it may take until it counts as hung.

        Raises
        ------
        WorldChangedError
            The epoch has ended before all ranks had.
        DeadlineExceededError, MailboxFullError, DeviceLostError, ClosedError
        AccelError
            What ``start`` raises: nothing was sent.
        """
        check_timeout(timeout)
        if timeout is not None and timeout <= 0:
            raise DeadlineExceededError(f"{what} had no time to run", op=what)
        try:
            async with asyncio.timeout(timeout) as limit:
                await self._wait_for_room()
                try:
                    flight = self._send(what, start, count, on_lost)
                except BaseException:
                    self._room.release()
                    raise
                if grace is not None:  # from here on the end of the flight releases its place
                    flight.is_work = True
                    flight.grace = grace()
                return await asyncio.shield(flight.future)
        except TimeoutError as error:
            if isinstance(error, AccelError) or not limit.expired():
                raise
            raise DeadlineExceededError(f"{what} did not end within {timeout:g} s", op=what) from None

    async def _wait_for_room(self) -> None:
        """Take a place among the collectives in flight, in a world that is READY.

        :meth:`_settle` gives it back. At the limit a caller waits for its turn, or is refused.
        """
        if self._room.locked() and not (self._waits and self._waiting < _WAITERS * self._limit):
            raise MailboxFullError(f"world {self.number} has {self._limit} collectives in flight", retry_after=self._retry_after())
        self._waiting += 1
        try:
            await self._room.acquire()
        finally:
            self._waiting -= 1
        try:
            await self.lifecycle.wait_ready()
        except BaseException:
            self._room.release()
            raise

    async def wait_ready(self, timeout: float | None) -> None:
        """Wait until the world is READY, some seconds at most."""
        check_timeout(timeout)
        try:
            async with asyncio.timeout(timeout):
                await self.lifecycle.wait_ready()
        except TimeoutError as error:
            raise DeadlineExceededError(f"world {self.number} was not ready within {timeout:g} s") from error

    def _retry_after(self) -> float:
        return max(0.001, (self._loop.time() - self._flights[0].began) / 2 if self._flights else 0.0)

    def place(self, number: int) -> Place:
        """Return where a collective of this number goes now."""
        return Place(self.number, self._communicator, number, self.size)

    def _send(self, what: str, start: Start, count: int, on_lost: Callable[[], object]) -> Flight:
        """Send a collective to all ranks of a world that is READY.

        Nothing is awaited here, so that no other collective comes between the ranks. What ``start``
        raises is raised before anything is sent.
        """
        number = self._sent + 1
        running = start(self.place(number))
        self._sent += count
        flight = Flight(range(number, number + count), what, self._loop.create_future(), self._loop.time(), on_lost)
        flight.future.add_done_callback(lambda future: future.cancelled() or future.exception())  # no caller may be left
        self._flights.append(flight)
        # Tasks that are made together take their first step, which sends, in one loop iteration.
        flight.tasks = {rank: self._loop.create_task(op) for rank, op in enumerate(running) if op is not None}
        for rank, task in flight.tasks.items():
            task.add_done_callback(lambda task, rank=rank: self._on_op_ended(flight, rank, task))  # type: ignore[misc]
        if self._hang_timeout is not None and self._hang_timer is None:
            self._hang_timer = self._loop.call_later(self._hang_timeout, self._check_hang)
        return flight

    def _on_op_ended(self, flight: Flight, rank: int, task: asyncio.Task[Any]) -> None:
        """End a collective when its last rank has ended, or the epoch when one has failed."""
        error = ClosedError("the collective was cancelled") if task.cancelled() else task.exception()
        if flight.future.done():
            return
        if error is not None:
            if flight.is_work and isinstance(error, AccelError) and not (error.is_fault or isinstance(error, WorldChangedError)):
                self._settle(flight, error.clone())  # as when a model raises
            self._end_epoch((rank,), f"rank {rank} failed {flight.what} {flight.numbers.start}: {error}", error)
        elif self.lifecycle.state is DeviceState.READY and all(other.done() for other in flight.tasks.values()):
            self._settle(flight, [flight.tasks[index].result() if index in flight.tasks else None for index in range(self.size)])

    def _settle(self, flight: Flight, outcome: list[Any] | AccelError) -> None:
        """End a flight, and give its place to the next one.

        The tasks of its ranks may run on: what ends them later finds the future done.
        """
        self._flights.remove(flight)
        self._settled_at = self._loop.time()
        self._room.release()
        if isinstance(outcome, AccelError):
            flight.future.set_exception(outcome)
        else:
            flight.future.set_result(outcome)

    # -- the end of an epoch

    def _on_device_changed(self) -> None:
        """End the epoch if a device of it is not READY any more."""
        lost = tuple(index for index, rank in enumerate(self.ranks) if rank.state is not DeviceState.READY)
        if lost:
            self._disturbed.set()
            self._lost.update(self.ranks[index].name for index in lost)
            self._end_epoch(lost, f"{self._named(lost)} was lost", self.ranks[lost[0]].fault)

    def _named(self, indices: Sequence[int]) -> str:
        return ", ".join(f"rank {index} ({self.ranks[index].name})" for index in indices) or "no rank"

    def _end_epoch(self, lost: tuple[int, ...], why: str, cause: BaseException | None) -> None:
        """Fail what was sent, and begin the next epoch; does nothing while that has begun.

        Called where a rank's op has failed, or its device is not READY any more.
        """
        if self.lifecycle.state is not DeviceState.READY:
            return
        error = self._changed_error(lost, why, cause)
        self.lifecycle.enter_rebuilding(error)
        logger.warning("world_changed", world=self.number, epoch=self.lifecycle.generation, why=why)
        self._fail_flights(error)
        self._begin_reforming(None)

    def _changed_error(self, lost: tuple[int, ...], why: str, cause: BaseException | None) -> WorldChangedError:
        epoch = self.lifecycle.generation
        error = WorldChangedError(f"epoch {epoch} of world {self.number} has ended: {why}", ranks=lost, epoch=epoch)
        error.__cause__ = cause
        return error

    def _fail_flights(self, error: AccelError) -> None:
        for flight in tuple(self._flights):
            flight.on_lost()
            self._settle(flight, error.clone(op=flight.what))

    def _begin_reforming(self, hung: Flight | None) -> None:
        self._reforming = self._loop.create_task(self._reform(hung))

    def _check_hang(self) -> None:
        """End the epoch if its oldest collective takes too long; the timer's callback.

        Which ranks are late is known only once all have revoked: see :meth:`_report_hang`.
        """
        self._hang_timer, timeout = None, self._hang_timeout
        if not self._flights or timeout is None:
            return
        oldest = self._flights[0]
        left = max(oldest.began, self._settled_at) + timeout + oldest.grace - self._loop.time()
        if left > 0:
            self._hang_timer = self._loop.call_later(left, self._check_hang)
        elif self.lifecycle.state is DeviceState.READY:
            self.lifecycle.enter_rebuilding(None)
            self._begin_reforming(oldest)

    def _report_hang(self, hung: Flight, reached: dict[int, int]) -> None:
        """Fail what was sent with the names of the ranks that have not come as far as others; kill these."""
        furthest = max((*reached.values(), hung.numbers.start))
        late = tuple(index for index in range(self.size) if index in hung.tasks and reached.get(index, 0) < furthest)
        others = ", ".join(str(index) for index in hung.tasks if index not in late)
        seconds = self._loop.time() - hung.began
        why = f"{self._named(late)} did not reach {hung.what} {hung.numbers.start}; {others or 'none'} waited {seconds:.1f} s there"
        logger.error("world_hung", world=self.number, epoch=self.lifecycle.generation, why=why)
        hang = HostDiedError(why, hung=True, scope=FaultScope.CONTEXT)
        self._fail_flights(self._changed_error(late, why, hang))
        # Where nothing tells which of them it is, all that have not ended.
        for index in late or [index for index, task in hung.tasks.items() if not task.done()]:
            self.ranks[index].kill(f"is a rank of world {self.number}, and did not reach {hung.what} {hung.numbers.start}")

    # -- the next epoch

    async def open(self) -> None:
        """Form the first communicator; raises what keeps the ranks from it."""
        try:
            await self._form()
        except BaseException:
            await self.aclose()
            raise

    async def _reform(self, hung: Flight | None) -> None:
        """Form the next communicator, or declare the world LOST: the body of a task.

        Meanwhile ranks leave the last one, in which a collective may wait for a rank that is gone.
        """
        self._leaving = self._loop.create_task(self._revoke(self._communicator))
        try:
            if hung is not None:
                self._report_hang(hung, await asyncio.shield(self._leaving))
            await self._form()
        except Exception as error:
            if self.lifecycle.state is not DeviceState.CLOSED:
                logger.error("world_lost", world=self.number, epoch=self.lifecycle.generation, error=error)  # noqa: TRY400
                self.lifecycle.enter_lost(error if isinstance(error, AccelError) else DeviceLostError(str(error)))
                self._fail_flights(self.lifecycle.final_error())
        finally:
            await asyncio.wait((self._leaving,))

    async def _form(self) -> None:
        """Have all ranks join a communicator, as often as one is lost meanwhile; then be READY."""
        failures = 0
        while True:
            await self._wait_for_ranks()
            self._disturbed.clear()
            try:
                await self._join()
                if self._disturbed.is_set():
                    raise WorldChangedError("a rank was lost when the ranks had joined")
                break
            except AccelError as error:
                failures += not self._disturbed.is_set()
                logger.warning("world_not_joined", world=self.number, communicator=self._communicator, error=error)
                await self._revoke(self._communicator)
                if failures == _MOST_FAILURES:
                    raise
        self.lifecycle.enter_ready()
        logger.info("world_ready", world=self.number, epoch=self.lifecycle.generation, ranks=self.size)

    async def _wait_for_ranks(self) -> None:
        """Wait until all devices are READY, and replace those that are LOST; or, in a world that shrinks, leave out those that are not."""
        if self.shrinks and self.lifecycle.generation:
            self.ranks = [rank for rank in self.ranks if rank.name not in self._lost]
            if not self.ranks:
                raise DeviceLostError(f"world {self.number} has lost all ranks")
        while waiting := [rank for rank in self.ranks if rank.state is not DeviceState.READY]:
            # Those that never will be READY come first.
            rank = min(waiting, key=lambda rank: rank.state is DeviceState.REBUILDING)
            try:
                await rank.wait_ready()
            except DeviceLostError:
                if not self.extras:
                    raise
                await self._replace(rank, self.extras[0])
        self._lost.clear()

    async def _replace(self, lost: Rank, extra: Rank) -> None:
        """Give the rank of a device that is LOST to one that stands by."""
        index = self.ranks.index(lost)
        await extra.wait_ready()
        done: list[Callable[[int], Awaitable[object]]] = []
        while left := [take_over for take_over in self.takeovers if take_over not in done]:  # others may come meanwhile
            await left[0](index)
            done.append(left[0])
        self.ranks[index] = extra
        self.extras.remove(extra)
        logger.warning("rank_replaced", world=self.number, rank=index, lost=lost.name, device=extra.name)

    async def _join(self) -> None:
        """Have all ranks join the next communicator; raises if one does not.

        Joining waits for every rank. So the loss of one ends the wait at once, not its timeout. It
        returns when they have left the last communicator too: a stream goes on then, and there is
        more memory for a further attempt.
        """
        self._communicator += 1
        members = [rank.members for rank in self.ranks]
        disturbed = self._loop.create_task(self._disturbed.wait())
        joining = self._loop.create_task(self._join_all(members, self._communicator))
        try:
            await asyncio.wait((disturbed, joining), return_when=asyncio.FIRST_COMPLETED)
            if not joining.done():
                raise WorldChangedError("a rank was lost while the ranks joined")
            await joining
        finally:
            for task in (disturbed, joining):
                task.cancel()
            await asyncio.wait((disturbed, joining, self._leaving))

    async def _join_all(self, members: Sequence[Membership], communicator: int) -> None:
        """Have members join, all at the same time; raises the first error, without waiting for others."""
        world, seconds, size = self.number, self._join_timeout, len(members)
        try:
            async with asyncio.timeout(seconds + 1.0):  # a stopped process does not even say that it is late
                unique_id = await members[0].unique_id()
                joins = [member.join(world, communicator, unique_id, index, size, seconds) for index, member in enumerate(members)]
                await asyncio.gather(*joins)
        except TimeoutError as error:
            raise DeadlineExceededError(f"not all ranks of world {world} have joined in {seconds:g} s") from error

    async def _revoke(self, communicator: int) -> dict[int, int]:
        """Have each rank that is left revoke a communicator; return how far each has come.

        A rank that does not answer is killed, and not among them.
        """
        answers = await asyncio.gather(*(self._revoke_at(rank, communicator) for rank in self.ranks))
        return {index: reached for index, reached in enumerate(answers) if reached is not None}

    async def _revoke_at(self, rank: Rank, communicator: int) -> int | None:
        if rank.state is not DeviceState.READY:
            return None
        try:
            async with asyncio.timeout(_REVOKE_TIMEOUT):
                return await rank.members.revoke(self.number, communicator)
        except TimeoutError:
            rank.kill(f"is a rank of world {self.number}, and has not left epoch {self.lifecycle.generation} in {_REVOKE_TIMEOUT:g} s")
        except AccelError as error:  # its context has faulted
            logger.debug("epoch_not_revoked", world=self.number, device=rank.name, error=error)
        return None

    async def aclose(self) -> None:
        """End the world: what was sent fails, and the ranks leave the communicator. Idempotent, and may be cancelled."""
        if self._closing is None:
            self._closing = self._loop.create_task(self._close())
            self._enter_closed()
        await asyncio.shield(self._closing)

    def _enter_closed(self) -> None:
        self.lifecycle.enter_closed()
        for rank in self._all:
            rank.listeners.remove(self._on_device_changed)
        self._fail_flights(self.lifecycle.final_error())
        if self._hang_timer is not None:
            self._hang_timer.cancel()
        if self._reforming is not None:
            self._reforming.cancel()

    async def _close(self) -> None:
        """Have the ranks leave the communicator: the body of a task."""
        if self._reforming is not None:
            await asyncio.wait((self._reforming,))
        await self._revoke(self._communicator)
