"""The address of an actor: the only way to reach it.

It is valid over restarts, and may be kept after the actor's end.
"""

from __future__ import annotations

import asyncio
import enum
from asyncio import Future, _get_running_loop, current_task
from contextvars import copy_context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, Self, TypeVar

from accel.actors.envelope import Envelope, Stop
from accel.actors.mailbox import Mailbox, MailboxStatistics
from accel.errors import DeadlineExceededError, InvalidArgumentError
from accel.hints import hinted
from accel.values import check_timeout

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.actors.home import Home
    from accel.actors.supervision import Directive, RestartBudget

__all__ = ["ActorRef", "ActorState", "ActorStatistics", "RefTarget", "Terminated"]

M_contra = TypeVar("M_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)


class ActorState(enum.Enum):
    """The phases of an actor."""

    STARTING = "starting"
    """An instance was made, and its ``started`` runs."""
    RUNNING = "running"
    """It handles messages."""
    RESTARTING = "restarting"
    """The failed instance is being replaced, or the delay before that runs; messages queue."""
    DRAINING = "draining"
    """It was asked to stop, accepts no messages, and handles those that are queued."""
    STOPPING = "stopping"
    """It stops its children and runs ``stopped``."""
    STOPPED = "stopped"
    """It has ended; only its ref remains."""


@dataclass(frozen=True, slots=True)
class ActorStatistics:
    """The state and the counters of an actor.

    Attributes
    ----------
    state
        Where it is in its life.
    restarts
        How often it was replaced by a fresh instance.
    failures
        How often it failed, whatever the directive was.
    mailbox
        Its mailbox's counters.
    """

    state: ActorState
    restarts: int
    failures: int
    mailbox: MailboxStatistics


@dataclass(frozen=True, slots=True)
class Terminated:
    """The message to a watching actor's ``receive`` when another actor has stopped.

    Attributes
    ----------
    ref
        The actor that stopped.
    error
        The error that stopped it; ``None`` after a request to stop.
    """

    ref: ActorRef[Any, Any]
    error: BaseException | None


class RefTarget(Protocol):
    """The members of an actor that its ref uses: see :class:`accel.actors.cell.ActorCell`."""

    name: str
    path: str
    home: Home
    loop: asyncio.AbstractEventLoop
    mailbox: Mailbox[Any]
    carries_context: bool
    state: ActorState
    error: BaseException | None
    task: asyncio.Task[Any] | None
    interruptible: Stop
    stopped: asyncio.Event
    watchers: dict[RefTarget, None]
    watched: dict[RefTarget, None]
    budget: RestartBudget

    def statistics(self) -> ActorStatistics:
        """Return the actor's counters."""

    def hand_over(self, message: Any) -> bool:
        """See :meth:`ActorRef.hand_over`."""

    def request_stop(self, level: Stop) -> None:
        """Ask the actor to stop."""

    def fail(self, error: Exception, verdict: Directive | None) -> bool:
        """See :meth:`ActorRef.fail`."""

    def is_ancestor_of(self, task: asyncio.Task[Any] | None) -> bool:
        """Whether ``task`` runs the actor or one of its descendants."""

    def add_watcher(self, watcher: RefTarget) -> None:
        """See :meth:`ActorRef.watch`."""

    def remove_watcher(self, watcher: RefTarget) -> None:
        """See :meth:`ActorRef.unwatch`."""

    def notify(self, message: Terminated) -> None:
        """Queue a message from the system."""


@hinted(
    {
        **dict.fromkeys(("receive", "call", "request"), "Use await ref.ask(message)."),
        **dict.fromkeys(("post", "put", "cast"), "Use ref.tell(message), or await ref.send(message)."),
        **dict.fromkeys(("close", "aclose", "kill", "terminate"), "Use await ref.stop()."),
        "join": "Use await ref.wait_stopped().",
    }
)
class ActorRef(Generic[M_contra, R_co]):
    """The address of an actor, made by ``spawn``.

    All methods are for the system's loop and its thread. Elsewhere they raise
    :class:`~accel.errors.ClosedError`; other threads go through ``system.portal``.
    """

    __slots__ = ("__weakref__", "_cell")

    def __init__(self, cell: RefTarget) -> None:
        self._cell = cell

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} is an address within one process and event loop: it does not pickle")

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __repr__(self) -> str:
        return f"<ActorRef {self._cell.path!r} {self._cell.state.value}>"

    @property
    def name(self) -> str:
        """Its name, unique among its siblings."""
        return self._cell.name

    @property
    def path(self) -> str:
        """Names from the outermost ancestor to the actor, joined by ``/``."""
        return self._cell.path

    @property
    def is_alive(self) -> bool:
        """Whether it has not stopped; one that restarts or drains is alive."""
        return self._cell.state is not ActorState.STOPPED

    @property
    def state(self) -> ActorState:
        """Where it is in its life."""
        return self._cell.state

    @property
    def mailbox(self) -> Mailbox[Any]:
        """The actor's mailbox, for layers built upon actors.

        It takes plain messages, which run in an empty context, and envelopes.
        """
        return self._cell.mailbox

    def statistics(self) -> ActorStatistics:
        """Return the counters as they are now."""
        return self._cell.statistics()

    # -- messages

    def tell(self, message: M_contra) -> None:
        """Queue a message, and expect no answer.

        Raises
        ------
        MailboxFullError
            There is no room, or other senders wait for it.
        ActorStoppedError
            The actor takes no more messages.
        ClosedError
            Called outside the system's loop.
        """
        cell = self._cell
        if _get_running_loop() is not cell.loop:
            raise cell.home.wrong_place_error()
        cell.mailbox.put_nowait(Envelope((message, None, copy_context(), None)) if cell.carries_context else message)

    def hand_over(self, message: M_contra) -> bool:
        """Deliver a message without an answer now, if the actor is idle and accepts it.

        See :meth:`Actor.receive_now`.

        Returns
        -------
        bool
            Whether it was handled. If not, the actor is unchanged, and the caller queues the
            message.

        Raises
        ------
        ClosedError
            Called outside the system's loop.
        """
        cell = self._cell
        if _get_running_loop() is not cell.loop:
            raise cell.home.wrong_place_error()
        return cell.hand_over(message)

    @property
    def hand_over_here(self) -> Callable[[M_contra], bool]:
        """:meth:`hand_over` without the check of the loop, for callers that have checked it."""
        return self._cell.hand_over

    async def send(self, message: M_contra) -> None:
        """Queue a message without an answer, once there is room; senders are served in order.

        If this is cancelled while it waits, the message is not sent.

        Raises
        ------
        ActorStoppedError
            The actor takes no more messages, or stopped while this waited for room.
        ClosedError
            Called outside the system's loop.
        """
        cell = self._cell
        if _get_running_loop() is not cell.loop:
            raise cell.home.wrong_place_error()
        await cell.mailbox.put(Envelope((message, None, copy_context(), None)) if cell.carries_context else message)

    async def ask(self, message: M_contra, timeout: float | None = None) -> R_co:
        """Queue a message once there is room, and wait for the answer.

        Parameters
        ----------
        message
            The message.
        timeout
            Seconds to wait, for room and answer together. The deadline travels with the message:
            after it, the message is not delivered.

        Returns
        -------
        R
            What ``receive`` returned.

        Raises
        ------
        Exception
            What ``receive`` raised.
        DeadlineExceededError
            ``timeout`` has passed. If the message was already being handled, that goes on.
        ActorStoppedError
            The actor stopped, or was stopped, before it answered.
        InvalidArgumentError
            The actor asks itself, which could never be answered, or ``timeout`` is not a number.
        ClosedError
            Called outside the system's loop.

        Notes
        -----
        Cancelling removes the message if it is still queued; a message that is being handled is
        handled to its end.
        """
        cell = self._cell
        loop = cell.loop
        if _get_running_loop() is not loop:
            raise cell.home.wrong_place_error()
        if cell.interruptible and current_task() is cell.task:
            raise InvalidArgumentError(
                f"actor {cell.path!r} asks itself and would wait for ever", remedy="Call the method directly, or tell()."
            )
        if timeout is not None:
            return await self._ask_by(message, timeout)  # type: ignore[no-any-return]
        reply: asyncio.Future[Any] = Future(loop=loop)
        envelope = Envelope((message, reply, copy_context() if cell.carries_context else None, None))
        mailbox = cell.mailbox
        try:
            if not mailbox.offer(envelope):
                await mailbox.put(envelope)
            return await reply  # type: ignore[no-any-return]
        except asyncio.CancelledError:
            mailbox.discard(envelope)
            reply.cancel()
            raise
        finally:
            # An error's traceback keeps this frame, and the reply keeps the error: without this,
            # only the collector frees them.
            del reply, envelope

    async def _ask_by(self, message: Any, timeout: float) -> Any:
        """Do what :meth:`ask` does, with a timeout."""
        cell = self._cell
        check_timeout(timeout)
        if timeout <= 0:
            raise _late(cell, message, timeout)
        deadline = cell.loop.time() + timeout
        reply: asyncio.Future[Any] = Future(loop=cell.loop)
        envelope = Envelope((message, reply, copy_context() if cell.carries_context else None, deadline))
        if not cell.mailbox.offer(envelope):
            await self._put_by(deadline, envelope, timeout)
        timer = cell.loop.call_at(deadline, _expire, envelope, cell, timeout)
        try:
            return await reply
        except asyncio.CancelledError:
            cell.mailbox.discard(envelope)
            reply.cancel()
            raise
        finally:
            timer.cancel()
            del reply, envelope, timer

    async def _put_by(self, deadline: float, envelope: Envelope, timeout: float) -> None:
        """Queue a message once there is room; raise after the deadline."""
        try:
            async with asyncio.timeout_at(deadline):
                await self._cell.mailbox.put(envelope)
        except TimeoutError:
            raise _late(self._cell, envelope[0], timeout) from None

    # -- life

    async def stop(self, drain: bool = True) -> None:
        """Stop the actor, and wait until it has stopped.

        Idempotent; a stopped actor is left as it is.

        Parameters
        ----------
        drain
            ``True``: accept no messages, handle those that are queued, then stop. ``False``: fail
            the queued ones with :class:`~accel.errors.ActorStoppedError` at once, and cancel the
            ``receive`` in progress. A second call with ``False`` ends a drain.

        Raises
        ------
        ClosedError
            Called outside the system's loop.

        Notes
        -----
        Cancelling ends the wait, not the stop. Called by the actor itself, or by one of its
        descendants, it requests the stop and does not wait for it.
        """
        cell = self._cell
        if _get_running_loop() is not cell.loop:
            raise cell.home.wrong_place_error()
        cell.request_stop(Stop.DRAIN if drain else Stop.NOW)
        if not cell.is_ancestor_of(current_task()):
            await cell.stopped.wait()

    async def wait_stopped(self) -> BaseException | None:
        """Wait until the actor has stopped; restarts do not count.

        Returns
        -------
        BaseException or None
            The error that stopped it; ``None`` after a request to stop. Cancelling only ends the
            wait.
        """
        await self._cell.stopped.wait()
        return self._cell.error

    def fail(self, error: Exception, verdict: Directive | None = None) -> bool:
        """Fail the actor as if its ``receive`` had raised ``error`` now.

        For code on the loop that detects a failure first.

        The failure overtakes all messages, and cancels a ``receive`` (or ``started``) in progress;
        the sender's ``ask`` of that message raises ``error``.

        Parameters
        ----------
        error
            The input of the restart strategy.
        verdict
            What happens to the actor; ``None``: its restart strategy decides.

        Returns
        -------
        bool
            Whether the actor fails; one that is restarting, stopping or stopped does not.

        Raises
        ------
        InvalidArgumentError
            ``error`` is not an instance of :class:`Exception`.
        ClosedError
            Called outside the system's loop.
        """
        if not isinstance(error, Exception):
            raise InvalidArgumentError(f"error is {error!r}", remedy="Give the exception that the actor shall fail with.")
        cell = self._cell
        if _get_running_loop() is not cell.loop:
            raise cell.home.wrong_place_error()
        return cell.fail(error, verdict)

    def restarts_left(self) -> int:
        """Return how many restarts the budget allows now."""
        return self._cell.budget.left()

    def charge_restart(self) -> None:
        """Charge the budget for one restart that :attr:`Directive.RENEW` made free."""
        self._cell.budget.charge()

    def watch(self, watcher: ActorRef[Any, Any]) -> None:
        """Send ``watcher`` a :class:`Terminated` message when this actor stops.

        If it has stopped, at once.
        """
        self._cell.add_watcher(self._cell_of(watcher))

    def unwatch(self, watcher: ActorRef[Any, Any]) -> None:
        """Undo :meth:`watch`. A message that is already queued is still delivered."""
        self._cell.remove_watcher(self._cell_of(watcher))

    @staticmethod
    def _cell_of(watcher: ActorRef[Any, Any]) -> RefTarget:
        """Return the actor behind a watcher's ref; raise if that is none."""
        if not isinstance(watcher, ActorRef):
            raise InvalidArgumentError(f"watcher is {watcher!r}", remedy="Give the ActorRef of the actor that shall be told.")
        return watcher._cell


def _expire(envelope: Envelope, cell: RefTarget, timeout: float) -> None:
    """Fail an ``ask`` whose deadline has passed, and remove its message. A timer's callback."""
    message, reply, _, _ = envelope
    if reply is not None and not reply.done():
        reply.set_exception(_late(cell, message, timeout))
        cell.mailbox.discard(envelope)


def _late(cell: RefTarget, message: object, timeout: float) -> DeadlineExceededError:
    """Return the error for a message that was not answered in time."""
    return DeadlineExceededError(f"actor {cell.path!r} did not answer {type(message).__name__} within {timeout:g} s")
