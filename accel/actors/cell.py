"""The part of an actor that outlives its instances.

Users reach it only through its ref and its context.

One task (:mod:`accel.actors.life`) runs everything that touches the actor's instance. Other code
acts on it in three ways: the mailbox, :meth:`ActorCell.request_stop` and :meth:`ActorCell.fail`.
The latter two may cancel what the task awaits; ``_interrupts`` counts these cancellations, so that
the task can tell them from one that comes from outside.
"""

from __future__ import annotations

import asyncio
from asyncio import current_task
from typing import TYPE_CHECKING, Any, NamedTuple

from accel._log import get_logger
from accel.actors.actor import Actor, ActorContext
from accel.actors.envelope import Envelope, Failure, Stop
from accel.actors.mailbox import Mailbox
from accel.actors.ref import ActorRef, ActorState, ActorStatistics, Terminated
from accel.actors.supervision import RestartBudget, RestartStrategy
from accel.actors.tree import ActorTree
from accel.errors import ActorStoppedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from accel.actors.actor import ActorSystemLike
    from accel.actors.home import Home
    from accel.actors.ref import RefTarget
    from accel.actors.supervision import Directive

__all__ = ["ActorCell", "ActorPlace"]

logger = get_logger()


class ActorPlace(NamedTuple):
    """The system and the level of the tree to which an actor belongs.

    Parameters
    ----------
    system, home
        The system, and its loop, thread and process.
    parent
        The actor above; ``None`` at the top.
    siblings
        The running actors at its level, by name; the actor removes itself when it has stopped.
    running
        The actors of the system by their tasks; the actor adds and removes itself.
    spawn
        ``await spawn(parent, actor, args, kwargs, **options)`` starts an actor below ``parent``.
    """

    system: ActorSystemLike
    home: Home
    parent: ActorCell | None
    siblings: dict[str, ActorCell]
    running: dict[asyncio.Task[Any], ActorCell]
    spawn: Callable[..., Awaitable[ActorRef[Any, Any]]]


class ActorCell:
    """One actor: its state that outlives an instance, without the code of its task."""

    __slots__ = (
        "__weakref__",
        "_actor",
        "_args",
        "_context",
        "_escalates",
        "_failure",
        "_incarnation",
        "_interrupts",
        "_kwargs",
        "_make",
        "_place",
        "_reason",
        "_stop",
        "_verdict",
        "budget",
        "carries_context",
        "children",
        "deadline",
        "error",
        "failures",
        "home",
        "interruptible",
        "loop",
        "mailbox",
        "name",
        "parent",
        "path",
        "ref",
        "refuse",
        "started",
        "state",
        "stopped",
        "system",
        "task",
        "watched",
        "watchers",
    )

    def __init__(
        self,
        place: ActorPlace,
        factory: tuple[Callable[..., Actor[Any, Any]], tuple[Any, ...], dict[str, Any]],
        name: str,
        mailbox_size: int,
        strategy: RestartStrategy,
    ) -> None:
        self._place = place
        self.system, self.home, self.parent = place.system, place.home, place.parent
        self.loop = self.home.loop
        self.children: dict[str, ActorCell] = {}
        self.name = name
        self.path: str = name if self.parent is None else f"{self.parent.path}/{name}"
        self.mailbox: Mailbox[Any] = Mailbox(mailbox_size, name=self.path, clock=self.system.clock, loop=self.loop)
        self.budget = RestartBudget(strategy, self.system.clock, self.system.random)
        self.ref: ActorRef[Any, Any] = ActorRef(self)
        self.state = ActorState.STARTING
        self.task: asyncio.Task[Any] | None = None
        self.started: asyncio.Future[None] = self.loop.create_future()
        self.stopped = asyncio.Event()
        self.error: BaseException | None = None
        self.failures = 0
        self.deadline: float | None = None
        self.interruptible = Stop.NO  # the lowest level of request that may cancel what the task awaits now; NO: none may
        self._make, self._args, self._kwargs = factory
        self.carries_context = Actor.carries_context  # until there is an instance
        self._actor: Actor[Any, Any] | None = None
        self._context = ActorContext(self)
        # Of the newest instance, also after it failed: messages can be refused between two
        # instances too.
        self.refuse: Callable[[Any], None] | None = None
        self._incarnation = 0
        self._stop = Stop.NO
        self._interrupts = 0  # cancellations of the task made here and not delivered yet
        self._reason: BaseException | None = None  # the failure that the interruption stands for
        self._failure: BaseException | None = None  # from _serve to _recover, so that no suspended frame holds it
        self._verdict: Directive | None = None  # on the next failure, if it was decided when that was reported
        self._escalates = False
        self.watchers: dict[RefTarget, None] = {}
        self.watched: dict[RefTarget, None] = {}

    # -- from outside the actor's task

    def request_stop(self, level: Stop) -> None:
        """Ask the actor to stop; a request of a higher level replaces a lower one."""
        if level <= self._stop or self.state is ActorState.STOPPED:
            return
        self._stop = level
        if self.state is ActorState.RUNNING:
            self.state = ActorState.DRAINING
        if level < Stop.NOW:
            self.mailbox.close()
        else:
            self._refuse_messages(None)
            for child in tuple(self.children.values()):
                child.request_stop(level)
            self._interrupt(level, None)

    def hand_over(self, message: Any) -> bool:
        """Have an idle actor handle a message now; see :meth:`ActorRef.hand_over`."""
        actor = self._actor
        if actor is None or not self.mailbox.is_awaited:
            return False
        try:
            return actor.receive_now(message, self._context)
        except Exception as error:
            self.fail(error, None)
            return True

    def fail(self, error: Exception, verdict: Directive | None) -> bool:
        """Make the actor fail with ``error``; see :meth:`ActorRef.fail`."""
        if self._stop >= Stop.NOW or self.state not in (ActorState.STARTING, ActorState.RUNNING, ActorState.DRAINING):
            return False
        self._verdict = self._verdict or verdict  # of two failures, the first counts
        if not self.interruptible or current_task() is self.task:
            self.mailbox.put_system(Failure(error, self._incarnation))
        elif not self._interrupts:  # of two failures, the first counts
            self._interrupt(Stop.NOW, error)
        return True

    def _interrupt(self, level: Stop, reason: BaseException | None) -> None:
        """Cancel what the task awaits, if a request of this level may; ``reason``: the failure."""
        if self.task is not None and self.interruptible and level >= self.interruptible and current_task() is not self.task:
            self._reason = reason
            self._interrupts += 1
            self.task.cancel()

    def add_watcher(self, watcher: RefTarget) -> None:
        """Send ``watcher`` a message when this actor stops."""
        if self.state is ActorState.STOPPED:
            watcher.notify(Terminated(self.ref, self.error))
        elif watcher.state is not ActorState.STOPPED:
            self.watchers[watcher] = None
            watcher.watched[self] = None

    def remove_watcher(self, watcher: RefTarget) -> None:
        """Take :meth:`add_watcher` back."""
        self.watchers.pop(watcher, None)
        watcher.watched.pop(self, None)

    def notify(self, message: Terminated) -> None:
        """Queue a message from the system, if the actor still handles messages."""
        if self._stop < Stop.NOW and self.state not in (ActorState.STOPPING, ActorState.STOPPED):
            self.mailbox.put_system(message)

    def is_ancestor_of(self, task: asyncio.Task[Any] | None) -> bool:
        """Whether ``task`` runs this actor or one of its descendants."""
        cell = None if task is None else self._place.running.get(task)
        while cell is not None and cell is not self:
            cell = cell.parent
        return cell is self

    def statistics(self) -> ActorStatistics:
        """Return the counters as they are now."""
        return ActorStatistics(self.state, self.budget.restarts, self.failures, self.mailbox.statistics())

    def snapshot(self) -> ActorTree:
        """Return the state of this actor and of all below it."""
        return ActorTree(
            name=self.name,
            state=self.state.value,
            depth=len(self.mailbox),
            oldest_age=self.mailbox.oldest_age(),
            restarts=self.budget.restarts,
            children=(*[child.snapshot() for child in self.children.values()], *(() if self._actor is None else self._actor.owned())),
        )

    async def spawn_child(self, actor: Callable[..., Actor[Any, Any]], args: Any, kwargs: Any, **options: Any) -> ActorRef[Any, Any]:
        """Start a child; see :meth:`ActorContext.spawn`."""
        if self._stop >= Stop.NOW or self.state not in (ActorState.STARTING, ActorState.RUNNING, ActorState.DRAINING):
            raise ActorStoppedError(f"actor {self.path!r} is {self.state.value} and has no more children")
        return await self._place.spawn(self, actor, args, kwargs, **options)

    async def wait_started(self) -> ActorRef[Any, Any]:
        """Wait for the first start.

        If it fails, its error is raised; cancelling the wait stops the actor.
        """
        try:
            await self.started
        except asyncio.CancelledError:
            self.request_stop(Stop.NOW)
            raise
        return self.ref

    # -- the end

    def on_task_done(self, task: asyncio.Task[Any]) -> None:
        """Finish if the task never took its first step; called when the task is done.

        A loop that ends cancels such tasks too.
        """
        if self.state is not ActorState.STOPPED:
            self._finish(None)

    def _finish(self, outcome: BaseException | None) -> None:
        """Run the last part of the end, which needs no waiting."""
        if self.state is not ActorState.STOPPING:
            self._refuse_messages(outcome)
        self.state = ActorState.STOPPED
        self.error = outcome
        if not self.started.done():
            self.started.set_exception(outcome if isinstance(outcome, Exception) else self._stopped_error(outcome))
        self._actor, self._args, self._kwargs, self.refuse = None, (), {}, None
        if self._place.siblings.get(self.name) is self:
            del self._place.siblings[self.name]
        if self.task is not None:
            self._place.running.pop(self.task, None)
        for watched in self.watched:
            watched.watchers.pop(self, None)
        for watcher in self.watchers:
            watcher.watched.pop(self, None)
            watcher.notify(Terminated(self.ref, outcome))
        self.watched.clear()
        self.watchers.clear()
        self.stopped.set()
        if self._escalates and isinstance(outcome, Exception):
            if self.parent is None:
                logger.error("actor_escalated_to_system", actor=self.path, error=outcome)
            else:
                self.parent.fail(outcome, None)

    def _refuse_messages(self, cause: BaseException | None) -> None:
        """Refuse the queued messages, and those that are sent from now on."""
        self.mailbox.close(cause)
        if self.mailbox.is_empty:
            return
        lost = 0
        for item in self.mailbox.drain():
            message, reply = (item[0], item[1]) if type(item) is Envelope else (item, None)
            if reply is None:
                if isinstance(message, (Failure, Terminated)):
                    continue
                if self.refuse is None:
                    lost += 1
                else:
                    self.refuse(message)
            elif not reply.done():
                reply.set_exception(self._stopped_error(cause))
        if lost:
            logger.warning("actor_messages_lost", actor=self.path, count=lost)

    def _stopped_error(self, cause: BaseException | None) -> ActorStoppedError:
        """Return the error for a sender whose message is not handled."""
        error = ActorStoppedError(f"actor {self.path!r} stopped before it answered")
        error.__cause__ = cause
        return error
