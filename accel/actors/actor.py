"""What users write and see of an actor from inside: its base class, and its context."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, ClassVar, Generic, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    import asyncio
    import random
    from collections.abc import Awaitable, Callable, Mapping

    from accel.actors.portal import Portal
    from accel.actors.ref import ActorRef
    from accel.actors.supervision import RestartBudget, RestartStrategy
    from accel.actors.tree import ActorTree

__all__ = ["Actor", "ActorContext", "ActorSystemLike", "ContextTarget"]

M = TypeVar("M")
R = TypeVar("R")
M_contra = TypeVar("M_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)
P = ParamSpec("P")
T = TypeVar("T")


class Actor(abc.ABC, Generic[M_contra, R_co]):
    """Base of all actors: state that only one task touches, changed by one message at a time.

    Subclass it with the type of the messages and of the answers; ``super().__init__()`` need not be called. The constructor runs on the
    loop, must not block, and runs again for every restart with the arguments given to ``spawn``: acquire in :meth:`started`, not in it.

    Attributes
    ----------
    carries_context : bool
        Class attribute. ``True`` (default): :meth:`receive` runs inside a copy of the sender's context variables. ``False``: it runs in
        the actor's own, which start empty; a little faster, for internal actors with much traffic.
    """

    carries_context: ClassVar[bool] = True

    @abc.abstractmethod
    async def receive(self, message: M_contra, context: ActorContext) -> R_co:
        """Handle one message; the next one comes when this returns.

        Parameters
        ----------
        message
            The message; also :class:`~accel.actors.Terminated` for those who watch others.
        context
            The actor's context, the same object for all messages.

        Returns
        -------
        R
            The answer, for those who asked.

        Notes
        -----
        If it raises, the one who asked gets the exception, the message is not delivered again, and the restart strategy decides what becomes of the
        actor: by default a fresh instance takes its place, without what this one kept in attributes (``RestartStrategy(on_exception=Directive.RESUME)``
        keeps it). It is cancelled by ``stop(drain=False)``, by :meth:`ActorRef.fail`, and when the system closes and its patience ends; never because
        the one who asked stopped waiting.
        """

    def receive_now(self, message: M_contra, context: ActorContext) -> bool:
        """Handle a message without waiting, or change nothing and return ``False``.

        A short-cut for actors with much traffic, used by :meth:`ActorRef.hand_over` only: it runs in the sender's turn of the loop instead of one of
        the actor's own, and only while the actor is idle (nothing in hand, nothing queued), so that messages keep their order and the actor's
        state is still touched by one message at a time. If it raises, the actor has failed, as if :meth:`receive` had raised.
        """
        return False

    def refused(self, message: M_contra) -> None:
        """Take note that a message which nobody asked about will never be handled, because the actor stops. Must not raise."""

    async def started(self, context: ActorContext) -> None:
        """Run once for each instance, before its first message.

        If it raises in the first start, ``spawn`` raises that. In a restart it counts as one more failure, and is tried again after a
        delay while the budget lasts. :meth:`stopped` and :meth:`restarting` are not called for an instance that did not start.
        """

    async def stopped(self, context: ActorContext) -> None:
        """Run when the actor stops for good: its mailbox is closed, its children have stopped.

        If it raises, that is logged, and the actor stops all the same. Not called when an instance is replaced; see :meth:`restarting`.
        """

    async def restarting(self, error: BaseException, context: ActorContext) -> None:
        """Run on the failed instance before it is thrown away, while its children still live: release here what it holds.

        Parameters
        ----------
        error
            What it failed with.
        context
            The actor's context; the next instance gets the same one.

        Notes
        -----
        If it raises, that is logged, and the restart goes on.
        """


class ActorSystemLike(Protocol):
    """What an actor sees of the system it lives in; :class:`~accel.actors.ActorSystem` says what each method does."""

    name: str
    clock: Callable[[], float]
    sleep: Callable[[float], Awaitable[Any]]
    random: random.Random

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop on which the system lives."""

    @property
    def state(self) -> str:
        """``"open"``, ``"closing"`` or ``"closed"``."""

    @property
    def portal(self) -> Portal:
        """The door for other threads."""

    async def spawn(
        self,
        actor: type[Actor[M, R]],
        *args: Any,
        name: str | None = None,
        mailbox_size: int = 1024,
        restart: RestartStrategy | None = None,
        **kwargs: Any,
    ) -> ActorRef[M, R]:
        """Start an actor that outlives this one."""

    async def run_blocking(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function that blocks on a worker thread."""

    def tree(self) -> ActorTree:
        """Return a snapshot of all living actors."""


class ContextTarget(Protocol):
    """What a context needs of its actor: :class:`accel.actors.cell.ActorCell`."""

    path: str
    ref: ActorRef[Any, Any]
    loop: asyncio.AbstractEventLoop
    deadline: float | None
    budget: RestartBudget

    @property
    def system(self) -> ActorSystemLike:
        """The system."""

    @property
    def parent(self) -> ContextTarget | None:
        """The actor that spawned this one."""

    @property
    def children(self) -> Mapping[str, ContextTarget]:
        """The living actors that this one spawned, by name."""

    async def spawn_child(self, actor: type[Actor[Any, Any]], args: Any, kwargs: Any, **options: Any) -> ActorRef[Any, Any]:
        """See :meth:`ActorContext.spawn`."""


class ActorContext:
    """What an actor can know and do about itself; handed to ``receive`` and the hooks, valid over restarts."""

    __slots__ = ("_cell",)

    def __init__(self, cell: ContextTarget) -> None:
        self._cell = cell

    def __repr__(self) -> str:
        return f"<ActorContext {self._cell.path!r}>"

    @property
    def self_ref(self) -> ActorRef[Any, Any]:
        """The actor's own address, to hand to others."""
        return self._cell.ref

    @property
    def system(self) -> ActorSystemLike:
        """The system it lives in."""
        return self._cell.system

    @property
    def parent(self) -> ActorRef[Any, Any] | None:
        """The actor that spawned it; ``None`` if the system did."""
        parent = self._cell.parent
        return None if parent is None else parent.ref

    @property
    def children(self) -> tuple[ActorRef[Any, Any], ...]:
        """The actors it spawned that have not stopped, oldest first."""
        return tuple(child.ref for child in self._cell.children.values())

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop on which everything here runs."""
        return self._cell.loop

    @property
    def deadline(self) -> float | None:
        """The loop's time by which the one who asked wants the answer to the message in hand; ``None`` if there is no limit."""
        return self._cell.deadline

    def restarts_left(self) -> int:
        """Return how often the actor could fail now and be restarted, were it for the budget alone."""
        return self._cell.budget.left()

    async def spawn(
        self,
        actor: type[Actor[M, R]],
        *args: Any,
        name: str | None = None,
        mailbox_size: int = 1024,
        restart: RestartStrategy | None = None,
        **kwargs: Any,
    ) -> ActorRef[M, R]:
        """Start a child: like :meth:`ActorSystem.spawn`, but it stops when this actor stops or restarts, and escalates to it.

        Raises
        ------
        ActorStoppedError
            This actor is itself stopping.
        """
        return await self._cell.spawn_child(actor, args, kwargs, name=name, mailbox_size=mailbox_size, restart=restart)

    def watch(self, ref: ActorRef[Any, Any]) -> None:
        """Get a :class:`~accel.actors.Terminated` message when ``ref`` stops; at once if it already has. Watching twice tells once."""
        ref.watch(self._cell.ref)

    def unwatch(self, ref: ActorRef[Any, Any]) -> None:
        """Stop watching ``ref``. A message that is already queued is still delivered."""
        ref.unwatch(self._cell.ref)
