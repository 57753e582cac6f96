"""An actor from inside: the base class that users subclass, and the context of its methods."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, ClassVar, Generic, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    import asyncio
    import random
    from collections.abc import Awaitable, Callable, Mapping

    from accel.actors.portal import Portal
    from accel.actors.ref import ActorRef
    from accel.actors.supervision import RestartStrategy
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

    Subclass it with the types of the messages and of the answers; ``super().__init__()`` need not
    be called. The constructor runs on the event loop and must not block. It runs again for every
    restart, with the arguments given to ``spawn``: acquire resources in :meth:`started`.

    Attributes
    ----------
    carries_context : bool
        Class attribute. ``True`` (default): :meth:`receive` runs inside a copy of the sender's
        context variables. ``False``: it runs in the actor's own, which start empty; this is faster,
        for internal actors with much traffic.
    """

    carries_context: ClassVar[bool] = True

    @abc.abstractmethod
    async def receive(self, message: M_contra, context: ActorContext) -> R_co:
        """Handle one message. The next one is delivered when this returns.

        Parameters
        ----------
        message
            The message; also :class:`~accel.actors.Terminated`, if the actor watches others.
        context
            The actor's context, the same object for all messages.

        Returns
        -------
        R
            The result of the sender's ``ask``.

        Notes
        -----
        If it raises, the sender's ``ask`` raises the exception, and the message is not delivered
        again. The restart strategy decides what happens to the actor: by default a fresh instance
        replaces it, and the attributes of this one are lost
        (``RestartStrategy(on_exception=Directive.RESUME)`` keeps them). ``stop(drain=False)``,
        :meth:`ActorRef.fail` and the end of the system's ``close_timeout`` cancel it; a sender that
        stops waiting does not.
        """

    def receive_now(self, message: M_contra, context: ActorContext) -> bool:
        """Handle a message without waiting, or change nothing and return ``False``.

        :meth:`ActorRef.hand_over` calls it in the sender's task, only while the actor is idle (no
        message in progress, none queued): messages keep their order, and one message at a time
        touches the actor's state. If it raises, the actor fails as if :meth:`receive` had raised.
        """
        return False

    def owned(self) -> tuple[ActorTree, ...]:
        """Return what :meth:`ActorSystem.tree` shows below the actor besides its children.

        These are objects that it owns. Must not raise.
        """
        return ()

    def refused(self, message: M_contra) -> None:
        """Dispose of a message of ``tell`` or ``send`` that the actor will not handle: it stops.

        Must not raise. Of an actor without a method of its own for it the log has how many messages
        were lost.
        """

    async def started(self, context: ActorContext) -> None:
        """Run once for each instance, before its first message.

        If it raises in the first start, ``spawn`` raises that. In a restart it counts as one more
        failure; a new instance is tried after a delay while the budget lasts. :meth:`stopped` and
        :meth:`restarting` are not called for an instance that did not start.
        """

    async def stopped(self, context: ActorContext) -> None:
        """Run when the actor stops: its mailbox is closed, its children have stopped.

        If it raises, that is logged, and the actor stops all the same. Not called when an instance
        is replaced; see :meth:`restarting`.
        """

    async def restarting(self, error: BaseException, context: ActorContext) -> None:
        """Run on the failed instance before it is replaced: release its resources here.

        Its children still run.

        Parameters
        ----------
        error
            The failure.
        context
            The actor's context; the next instance gets the same one.

        Notes
        -----
        If it raises, that is logged, and the restart goes on.
        """


class ActorSystemLike(Protocol):
    """The members of a system that an actor's context offers.

    See :class:`~accel.actors.ActorSystem`.
    """

    name: str
    clock: Callable[[], float]
    sleep: Callable[[float], Awaitable[Any]]
    random: random.Random

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of the system."""

    @property
    def state(self) -> str:
        """``"open"``, ``"closing"`` or ``"closed"``."""

    @property
    def portal(self) -> Portal:
        """Runs calls from other threads."""

    async def spawn(
        self,
        actor: Callable[..., Actor[M, R]],
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
    """The members of an actor that its context uses: see :class:`accel.actors.cell.ActorCell`."""

    path: str
    ref: ActorRef[Any, Any]
    loop: asyncio.AbstractEventLoop
    deadline: float | None

    @property
    def system(self) -> ActorSystemLike:
        """The system."""

    @property
    def parent(self) -> ContextTarget | None:
        """The actor that spawned this one."""

    @property
    def children(self) -> Mapping[str, ContextTarget]:
        """The living actors that this one spawned, by name."""

    async def spawn_child(self, actor: Callable[..., Actor[Any, Any]], args: Any, kwargs: Any, **options: Any) -> ActorRef[Any, Any]:
        """See :meth:`ActorContext.spawn`."""


class ActorContext:
    """An actor's access to itself and its system: an argument of ``receive`` and the hooks.

    It stays the same over restarts.
    """

    __slots__ = ("_cell",)

    def __init__(self, cell: ContextTarget) -> None:
        self._cell = cell

    def __repr__(self) -> str:
        return f"<ActorContext {self._cell.path!r}>"

    @property
    def self_ref(self) -> ActorRef[Any, Any]:
        """The actor's own address, to send to others."""
        return self._cell.ref

    @property
    def system(self) -> ActorSystemLike:
        """The system that runs the actor."""
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
        """The event loop of the system."""
        return self._cell.loop

    @property
    def deadline(self) -> float | None:
        """Loop time by which the sender needs the answer; ``None`` if it set no ``timeout``."""
        return self._cell.deadline

    async def spawn(
        self,
        actor: Callable[..., Actor[M, R]],
        *args: Any,
        name: str | None = None,
        mailbox_size: int = 1024,
        restart: RestartStrategy | None = None,
        **kwargs: Any,
    ) -> ActorRef[M, R]:
        """Start a child, as :meth:`ActorSystem.spawn` starts an actor.

        The child stops when this actor stops or restarts, and escalates to it.

        Raises
        ------
        ActorStoppedError
            This actor is itself stopping.
        """
        return await self._cell.spawn_child(actor, args, kwargs, name=name, mailbox_size=mailbox_size, restart=restart)

    def watch(self, ref: ActorRef[Any, Any]) -> None:
        """Have a :class:`~accel.actors.Terminated` message queued when ``ref`` stops.

        If it has stopped, at once. Watching twice sends one message.
        """
        ref.watch(self._cell.ref)

    def unwatch(self, ref: ActorRef[Any, Any]) -> None:
        """Stop watching ``ref``. A message that is already queued is still delivered."""
        ref.unwatch(self._cell.ref)
