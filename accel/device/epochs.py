"""The controller of a world: forms communicators, sends collectives to all ranks, replaces ranks.

It runs on the loop of the service. An *epoch* is the time in which a world uses one communicator. It
ends when a device is lost, when the op of one rank fails while those of other ranks may run, when
the ranks hang, or when the world is closed. Then all collectives in flight fail. Unless the world is
closed, it is REBUILDING: each rank whose device is READY revokes the communicator, and the other
devices are rebuilt, or an extra device takes the rank of one that is LOST. All ranks join a new
communicator, for which they do not wait until all have revoked the last one.
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
"""Failed joins after which the world is LOST. A join in which a device was lost does not count."""

_WAITERS = 16
"""Limit of the callers that wait for room, as a multiple of the limit of collectives in flight."""


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
        """The fault that has ended the last context; ``None`` while the device is READY."""

    @property
    def listeners(self) -> list[Callable[[], object]]:
        """Functions that are called after each change of the state."""

    @property
    def members(self) -> Membership:
        """The present context, as a rank; raises an :class:`AccelError` if there is none."""

    async def wait_ready(self) -> None:
        """Wait until the device is READY; raises if that will not happen."""

    def kill(self, why: str) -> None:
        """Report a fault of the present context, if there is one: "the context of {name} {why}"."""


@dataclass(frozen=True, slots=True)
class Place:
    """The fields of :class:`~accel.ops.collective.Collective` that the ops of all ranks have alike."""

    world: int
    epoch: int
    number: int
    size: int


@dataclass(slots=True, eq=False)
class Flight:
    """A collective in flight, or a batch, a graph's replay, or other work with collectives.

    Attributes
    ----------
    numbers : range
        The numbers of its collectives.
    what : str
        Its name in reports: ``"all_reduce"``.
    future : Future
        Ends with the results in the order of the ranks, or with the error.
    began : float
        When it was sent, in the loop's time.
    on_lost : callable
        Called if the epoch ends before it.
    grace : float
        Seconds that it may take besides the ``hang_timeout``.
    is_work : bool
        Whether :meth:`accel.World.lockstep` sent it, whose caller gets errors that are no faults.
    tasks : dict of int to Task
        Rank -> the task that sends and awaits its op; without the ranks that take no part.
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
    number, ranks, probes
        The number of the world in its system, the devices that are its first ranks, and the probes
        that are notified of changes of its state.
    on_loss
        Whether a lost rank is replaced, or the others go on without it.
    hang_timeout
        Seconds that a collective may take before the contexts of ranks that have not reached it are
        killed; ``None``: as long as it takes.
    join_timeout
        Seconds in which all ranks must join a communicator.
    limit, waits
        How many flights there may be at once, and whether further callers wait for room; if not,
        they get a :class:`MailboxFullError`.
    extras
        Devices that stand by. The first one that does not end takes the rank of a device that is
        LOST, and is no extra any more.

    Attributes
    ----------
    lifecycle : Lifecycle
        The state; its generation is the number of the epoch.
    ranks, extras : list of Rank
        The devices that are ranks now, in their order, and those that stand by.
    shrinks : bool
        Whether ``on_loss`` is ``"shrink"``.
    takeovers : list of callable
        Called with the number of a rank, before the first of ``extras`` takes it, to make ready on
        that device what the rank needs.
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
        self._limit, self._waits = limit, waits
        self._room = asyncio.Semaphore(limit)  # one permit for each flight
        self._waiting = 0  # callers that wait for a permit
        self._communicator = 0  # the number of the newest, formed or not; failed joins count too
        self._sent = 0  # collectives so far, whose numbers begin at 1
        self._flights: list[Flight] = []  # that have not ended, in the order of sending
        self._settled_at = 0.0  # when the last one ended, in the loop's time
        self._disturbed = asyncio.Event()  # a device of a rank was lost since the last join began
        # The task of _revoke() for the last communicator; there was none yet.
        self._leaving: asyncio.Future[Any] = self._loop.create_future()
        self._leaving.set_result(None)
        self._forming: asyncio.Task[None] | None = None  # the last task of _form() or _reform()
        self._closing: asyncio.Task[None] | None = None  # the task of _close(), from aclose() on
        self._hang_timer: asyncio.TimerHandle | None = None
        self._lost: set[str] = set()  # names of devices of ranks that were lost since all were READY
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
            Called if the epoch ends before the ops of all ranks have: their writes are incomplete.
        grace
            As in :meth:`accel.World.lockstep`; for other collectives ``None``.

        Raises
        ------
        WorldChangedError
            The epoch has ended before the ops of all ranks had.
        DeadlineExceededError, MailboxFullError, DeviceLostError, ClosedError
        AccelError
            What ``start`` raises: nothing was sent.
        """
        check_timeout(timeout)
        if timeout is not None and timeout <= 0:
            raise DeadlineExceededError(f"{what} had no time to run", op=what)
        try:
            async with asyncio.timeout(timeout) as deadline:
                await self._acquire_room()
                try:
                    flight = self._send(what, start, count, on_lost)
                except BaseException:
                    self._room.release()
                    raise
                # It is in flight now, and _settle() releases its room, also if `grace` raises.
                if grace is not None:
                    flight.is_work = True
                    flight.grace = grace()
                return await asyncio.shield(flight.future)
        except TimeoutError as error:
            if isinstance(error, AccelError) or not deadline.expired():
                raise
            raise DeadlineExceededError(f"{what} did not end within {timeout:g} s", op=what) from None

    async def _acquire_room(self) -> None:
        """Acquire room for a flight, which :meth:`_settle` releases, and wait until the world is READY.

        Raises :class:`MailboxFullError` where callers do not wait for room, or too many do.
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
        """Return the seconds until there may be room: half of what the oldest flight has taken so far."""
        return max(0.001, (self._loop.time() - self._flights[0].began) / 2 if self._flights else 0.0)

    def place(self, number: int) -> Place:
        """Return the place of a collective with this number in the present epoch."""
        return Place(self.number, self._communicator, number, self.size)

    def _send(self, what: str, start: Start, count: int, on_lost: Callable[[], object]) -> Flight:
        """Send a collective to all ranks of a READY world; the parameters are those of :meth:`run`.

        Nothing is awaited here, so that all ranks get collectives in one order. What ``start`` raises
        is raised before anything is sent.
        """
        number = self._sent + 1
        running = start(self.place(number))
        self._sent += count
        flight = Flight(range(number, number + count), what, self._loop.create_future(), self._loop.time(), on_lost)
        # Its error counts as retrieved, also where its caller was cancelled.
        flight.future.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._flights.append(flight)
        # These tasks take their first step, which sends the op, in the same loop iteration.
        flight.tasks = {rank: self._loop.create_task(op) for rank, op in enumerate(running) if op is not None}
        for rank, task in flight.tasks.items():
            task.add_done_callback(lambda task, rank=rank: self._on_op_ended(flight, rank, task))  # type: ignore[misc]
        if self._hang_timeout is not None and self._hang_timer is None:
            self._hang_timer = self._loop.call_later(self._hang_timeout, self._check_hang, self._hang_timeout)
        return flight

    def _on_op_ended(self, flight: Flight, rank: int, task: asyncio.Task[Any]) -> None:
        """End a flight when the op of its last rank has ended, or the epoch when one op has failed."""
        error = ClosedError("the collective was cancelled") if task.cancelled() else task.exception()
        if flight.future.done():
            return
        if error is not None:
            if flight.is_work and isinstance(error, AccelError) and not (error.is_fault or isinstance(error, WorldChangedError)):
                self._settle(flight, error.clone())  # such as the error that a model raises
            self._end_epoch((rank,), f"rank {rank} failed {flight.what} {flight.numbers.start}: {error}", error)
        elif self.lifecycle.state is DeviceState.READY and all(other.done() for other in flight.tasks.values()):
            self._settle(flight, [flight.tasks[index].result() if index in flight.tasks else None for index in range(self.size)])

    def _settle(self, flight: Flight, outcome: list[Any] | AccelError) -> None:
        """End a flight, and release its room. The tasks of its ranks may run on."""
        self._flights.remove(flight)
        self._settled_at = self._loop.time()
        self._room.release()
        if isinstance(outcome, AccelError):
            flight.future.set_exception(outcome)
        else:
            flight.future.set_result(outcome)

    # -- the end of an epoch

    def _on_device_changed(self) -> None:
        """End the epoch if the device of a rank is not READY any more; listens to all devices."""
        lost = tuple(index for index, rank in enumerate(self.ranks) if rank.state is not DeviceState.READY)
        if lost:
            self._disturbed.set()
            self._lost.update(self.ranks[index].name for index in lost)
            self._end_epoch(lost, f"{self._named(lost)} was lost", self.ranks[lost[0]].fault)

    def _named(self, indices: Sequence[int]) -> str:
        return ", ".join(f"rank {index} ({self.ranks[index].name})" for index in indices) or "no rank"

    def _end_epoch(self, lost: tuple[int, ...], why: str, cause: BaseException | None) -> None:
        """Fail all flights, and begin to form the next epoch; does nothing unless the world is READY.

        ``lost`` are the ranks whose device is not READY any more, or whose op has failed.
        """
        if self.lifecycle.state is not DeviceState.READY:
            return
        error = self._changed_error(lost, why, cause)
        self.lifecycle.enter_rebuilding(error)
        logger.warning("world_changed", world=self.number, epoch=self.lifecycle.generation, why=why)
        self._fail_flights(error)
        self._forming = self._loop.create_task(self._reform(None))

    def _changed_error(self, lost: tuple[int, ...], why: str, cause: BaseException | None) -> WorldChangedError:
        epoch = self.lifecycle.generation
        error = WorldChangedError(f"epoch {epoch} of world {self.number} has ended: {why}", ranks=lost, epoch=epoch)
        error.__cause__ = cause
        return error

    def _fail_flights(self, error: AccelError) -> None:
        """End all flights, each with a copy of ``error``."""
        for flight in tuple(self._flights):
            flight.on_lost()
            self._settle(flight, error.clone(op=flight.what))

    def _check_hang(self, timeout: float) -> None:
        """End the epoch if its oldest flight takes too long, counted from the end of the one before.

        The timer's callback. Which ranks are late is known only once all ranks have revoked the
        communicator: :meth:`_report_hang` then fails the flights.
        """
        self._hang_timer = None
        if not self._flights:
            return
        oldest = self._flights[0]
        left = max(oldest.began, self._settled_at) + timeout + oldest.grace - self._loop.time()
        if left > 0:
            self._hang_timer = self._loop.call_later(left, self._check_hang, timeout)
        elif self.lifecycle.state is DeviceState.READY:
            self.lifecycle.enter_rebuilding(None)
            self._forming = self._loop.create_task(self._reform(oldest))

    def _report_hang(self, hung: Flight, reached: dict[int, int]) -> None:
        """Fail all flights, and kill the contexts of the late ranks, which the error names.

        ``hung`` is the flight that takes too long, and ``reached`` what :meth:`_revoke` has returned.
        """
        furthest = max((*reached.values(), hung.numbers.start))
        late = tuple(index for index in range(self.size) if index in hung.tasks and reached.get(index, 0) < furthest)
        others = ", ".join(str(index) for index in hung.tasks if index not in late)
        seconds = self._loop.time() - hung.began
        why = f"{self._named(late)} did not reach {hung.what} {hung.numbers.start}; {others or 'none'} waited {seconds:.1f} s there"
        logger.error("world_hung", world=self.number, epoch=self.lifecycle.generation, why=why)
        hang = HostDiedError(why, hung=True, scope=FaultScope.CONTEXT)
        self._fail_flights(self._changed_error(late, why, hang))
        # If all have come equally far, any rank may be to blame whose op has not ended.
        for index in late or [index for index, task in hung.tasks.items() if not task.done()]:
            self.ranks[index].kill(f"is a rank of world {self.number}, and did not reach {hung.what} {hung.numbers.start}")

    # -- the next epoch

    async def open(self) -> None:
        """Form the first communicator; raises why the ranks do not join, or that the world was closed."""
        forming = self._forming = self._loop.create_task(self._form())
        try:
            await asyncio.wait((forming,))
            if not forming.cancelled():
                forming.result()
                return
        except BaseException:
            await self.aclose()
            raise
        raise self.lifecycle.final_error()  # another task has called aclose(), which cancels `forming`

    async def _reform(self, hung: Flight | None) -> None:
        """Form the next communicator, or declare the world LOST: the body of a task.

        Meanwhile ranks revoke the last one, in which a collective may wait for a rank that is lost.
        ``hung`` is the flight whose late ranks are killed before; ``None`` if there was no hang.
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
        """Have all ranks join a communicator, anew if a rank is lost meanwhile, and enter READY."""
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
        """Wait until the devices of all ranks are READY; extra devices replace those that are LOST.

        A world that shrinks leaves out the ranks that were lost instead, except in its first epoch.
        Raises if a device is LOST and there is no extra one, or CLOSED, or if no rank is left.
        """
        if self.shrinks and self.lifecycle.generation:
            self.ranks = [rank for rank in self.ranks if rank.name not in self._lost]
            if not self.ranks:
                raise DeviceLostError(f"world {self.number} has lost all ranks")
        while waiting := [rank for rank in self.ranks if rank.state is not DeviceState.READY]:
            # LOST and CLOSED ones first: whether the world goes on does not wait for a rebuild.
            rank = min(waiting, key=lambda rank: rank.state is DeviceState.REBUILDING)
            try:
                await rank.wait_ready()
            except DeviceLostError:
                if not self.extras:
                    raise
                await self._replace(rank)
        self._lost.clear()

    async def _replace(self, lost: Rank) -> None:
        """Give the rank of a LOST device to the first extra device; raises what a takeover raises.

        If the extra device ends itself before it has the rank, it is no extra any more, and nothing
        is replaced: the caller tries the next one.
        """
        index, extra = self.ranks.index(lost), self.extras[0]
        try:
            await extra.wait_ready()
            done: list[Callable[[int], Awaitable[object]]] = []
            # A model that is loaded meanwhile adds its takeover.
            while left := [take_over for take_over in self.takeovers if take_over not in done]:
                await left[0](index)
                done.append(left[0])
            self.ranks[index] = extra
        except AccelError as error:
            if extra.state not in (DeviceState.LOST, DeviceState.CLOSED):
                raise
            logger.warning("extra_device_ended", world=self.number, device=extra.name, error=error)
        else:
            logger.warning("rank_replaced", world=self.number, rank=index, lost=lost.name, device=extra.name)
        self.extras.remove(extra)

    async def _join(self) -> None:
        """Have all ranks join the next communicator; raises if one does not.

        A join waits for every rank, so the loss of one ends the wait at once, before its timeout.
        This also waits until all ranks have revoked the last communicator: its collectives block
        their streams no more then, and a further attempt has its memory.
        """
        self._communicator += 1
        disturbed = self._loop.create_task(self._disturbed.wait())
        joining = self._loop.create_task(self._join_all(self._communicator))
        try:
            await asyncio.wait((disturbed, joining), return_when=asyncio.FIRST_COMPLETED)
            if not joining.done():
                raise WorldChangedError("a rank was lost while the ranks joined")
            await joining
        finally:
            for task in (disturbed, joining):
                task.cancel()
            await asyncio.wait((disturbed, joining, self._leaving))

    async def _join_all(self, communicator: int) -> None:
        """Have all ranks join at the same time; raises the first error, without waiting for others."""
        members = [rank.members for rank in self.ranks]
        world, seconds, size = self.number, self._join_timeout, len(members)
        try:
            # Each member itself raises after these seconds, unless its process is stopped.
            async with asyncio.timeout(seconds + 1.0):
                unique_id = await members[0].unique_id()
                joins = [member.join(world, communicator, unique_id, index, size, seconds) for index, member in enumerate(members)]
                await asyncio.gather(*joins)
        except TimeoutError as error:
            raise DeadlineExceededError(f"not all ranks of world {world} have joined in {seconds:g} s") from error

    async def _revoke(self, communicator: int) -> dict[int, int]:
        """Have each rank whose device is READY revoke a communicator.

        Return rank -> number of the last collective that it has reached, for those that answer.
        """
        answers = await asyncio.gather(*(self._revoke_at(rank, communicator) for rank in self.ranks))
        return {index: reached for index, reached in enumerate(answers) if reached is not None}

    async def _revoke_at(self, rank: Rank, communicator: int) -> int | None:
        """Have one rank revoke a communicator, or kill it; return ``None`` unless it has revoked it."""
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
        """End the world, also if this is cancelled: flights fail, and ranks revoke. Idempotent."""
        if self._closing is None:
            self._closing = self._loop.create_task(self._close())
            self.lifecycle.enter_closed()
            for rank in self._all:
                rank.listeners.remove(self._on_device_changed)
            self._fail_flights(self.lifecycle.final_error())
            if self._hang_timer is not None:
                self._hang_timer.cancel()
            if self._forming is not None:  # at once: it must not enter READY any more
                self._forming.cancel()
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        """Have the ranks revoke the communicator, formed or not: the body of a task."""
        if self._forming is not None:
            await asyncio.gather(self._forming, return_exceptions=True)
        await self._revoke(self._communicator)
