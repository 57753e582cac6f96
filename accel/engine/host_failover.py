"""The host that begins in this process and moves to a child when this process has lost the device."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from accel._log import get_logger
from accel.actors import Actor, ActorContext, Directive, RestartStrategy
from accel.actors.supervision import default_decision
from accel.engine.host import KEEPER, not_resumed
from accel.errors import AccelError, FaultScope

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.actors import ActorRef

__all__ = ["FailoverHost"]

logger = get_logger()


class FailoverHost:
    """Keeps the context in this process, at the lowest latency, until a fault takes the device from the process for good; then in a child.

    Parameters
    ----------
    inline, remote
        The actor classes that keep a context here, and in a child; called with ``core`` and a function that publishes the context.
    core
        What the device keeps over all generations.
    restart
        How often contexts are rebuilt.

    Attributes
    ----------
    kind : str
        ``"inline"``, and ``"process"`` once it has moved.
    """

    def __init__(self, inline: type[Actor[Any, Any]], remote: type[Actor[Any, Any]], core: Any, restart: RestartStrategy) -> None:
        self.kind = "inline"
        self.context: Any = None
        self._classes = {"inline": inline, "process": remote}
        self._core = core
        self._decide_otherwise = restart.decide
        self._restart = dataclasses.replace(restart, decide=self._decide)
        core.survives = self.survives

    @property
    def pid(self) -> int | None:
        """The child that holds the context; ``None`` while there is none, or it is being ended, or the context is in this process."""
        context = self.context
        return None if context is None or context.fault is not None else getattr(context, "pid", None)

    def check_reopen(self) -> None:
        """See :meth:`accel.engine.host.Host.check_reopen`."""
        if self.kind == "inline" and self._core.is_poisoned:
            self._move(self._core.lifecycle.cause)

    async def start(self, owner: ActorContext) -> ActorRef[Any, Any]:
        """See :meth:`accel.engine.host.Host.start`."""
        room = self._core.options.max_in_flight + 1024  # of what may have to be copied when much comes back at once
        return await owner.spawn(_Keeper, self._make, name=KEEPER, mailbox_size=room, restart=self._restart)

    def survives(self, error: BaseException) -> bool:
        """Return whether a new context can follow ``error``, here or in a child."""
        return self._decide_otherwise is not None or not (isinstance(error, AccelError) and error.scope >= FaultScope.DEVICE)

    def _make(self) -> Actor[Any, Any]:
        """Make the actor that keeps the next context, where it can be kept."""
        made: Actor[Any, Any] = self._classes[self.kind](self._core, self._publish)  # type: ignore[call-arg]
        return made

    def _publish(self, context: Any) -> None:
        self.context = context

    def _decide(self, error: BaseException) -> Directive:
        if self._core.lifecycle.is_final:
            return Directive.STOP
        directive = default_decision(error) if self._decide_otherwise is None else not_resumed(self._decide_otherwise(error), error)
        if not self.survives(error):
            return directive if self._decide_otherwise is not None else Directive.STOP
        if self.kind == "inline" and isinstance(error, AccelError) and error.scope >= FaultScope.PROCESS:
            self._move(error)
        return Directive.RESTART if self._decide_otherwise is None else directive

    def _move(self, error: AccelError | None) -> None:
        self.kind = "process"
        logger.warning("device_moves_to_a_child", device=self._core.name, generation=self._core.lifecycle.generation, error=error)


class _Keeper(Actor[Any, Any]):
    """Is, for each generation, the actor that the host has made for it."""

    carries_context: ClassVar[bool] = False

    def __init__(self, make: Callable[[], Actor[Any, Any]]) -> None:
        self._actor = make()

    async def started(self, context: ActorContext) -> None:
        """Bring up the context."""
        await self._actor.started(context)

    async def receive(self, message: Any, context: ActorContext) -> Any:
        """Hand the message on."""
        return await self._actor.receive(message, context)

    async def restarting(self, error: BaseException, context: ActorContext) -> None:
        """Give the dead context back."""
        await self._actor.restarting(error, context)

    async def stopped(self, context: ActorContext) -> None:
        """Give the context back."""
        await self._actor.stopped(context)
