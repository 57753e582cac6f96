"""The host that is a child process: a fault costs the child, and the next one goes on."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from accel.actors import Directive, RestartStrategy
from accel.engine.host import KEEPER, not_resumed
from accel.errors import AccelError, FaultScope

if TYPE_CHECKING:
    from accel.actors import Actor, ActorContext, ActorRef

__all__ = ["ProcessHost"]


class ProcessHost:
    """Keeps the context in a child, which is replaced when it faults, dies or hangs. Only what the device itself has lost is not survived.

    Parameters
    ----------
    context_actor
        The actor class that keeps a context in a child; called with ``core`` and a function that publishes the context.
    core
        What the device keeps over all generations.
    restart
        How often contexts are rebuilt.
    """

    kind: ClassVar[str] = "process"

    def __init__(self, context_actor: type[Actor[Any, Any]], core: Any, restart: RestartStrategy) -> None:
        self.context: Any = None
        self._context_actor = context_actor
        self._core = core
        self._decide_otherwise = restart.decide
        self._restart = dataclasses.replace(restart, decide=self._decide)
        core.survives = self.survives

    @property
    def pid(self) -> int | None:
        """The child's process; ``None`` while there is none, or it is being ended."""
        context = self.context
        return None if context is None or context.fault is not None else int(context.pid)

    def check_reopen(self) -> None:
        """See :meth:`accel.engine.host.Host.check_reopen`: a child can always be tried."""

    async def start(self, owner: ActorContext) -> ActorRef[Any, Any]:
        """See :meth:`accel.engine.host.Host.start`."""
        room = self._core.options.max_in_flight + 1024  # of what may have to be copied when much comes back at once
        return await owner.spawn(self._context_actor, self._core, self._publish, name=KEEPER, mailbox_size=room, restart=self._restart)

    def survives(self, error: BaseException) -> bool:
        """Return whether a new context can follow ``error``."""
        return self._decide_otherwise is not None or not (isinstance(error, AccelError) and error.scope >= FaultScope.DEVICE)

    def _publish(self, context: Any) -> None:
        self.context = context

    def _decide(self, error: BaseException) -> Directive:
        if self._core.lifecycle.is_final:
            return Directive.STOP
        if self._decide_otherwise is not None:
            return not_resumed(self._decide_otherwise(error), error)
        return Directive.RESTART if self.survives(error) else Directive.STOP
