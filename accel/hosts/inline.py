"""The host that is this process: no hand-over, no copy, and the process's fate is the context's."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any, ClassVar

from accel.actors import Directive, RestartStrategy
from accel.actors.supervision import default_decision
from accel.errors import AccelError, FaultScope

if TYPE_CHECKING:
    from accel.actors import Actor, ActorContext, ActorRef

__all__ = ["InlineHost"]


class InlineHost:
    """Keeps the context in this process.

    A fault of scope CONTEXT is survived by a new context. One of scope PROCESS is not: every context this process could make would fail too, so
    the device is lost.

    Parameters
    ----------
    context_actor
        The actor class that makes contexts; called with ``core`` and a function that publishes the context.
    core
        What the device keeps over all generations.
    restart
        How often contexts are rebuilt.
    """

    kind: ClassVar[str] = "inline"

    def __init__(self, context_actor: type[Actor[Any, Any]], core: Any, restart: RestartStrategy) -> None:
        self.pid = os.getpid()
        self.context: Any = None
        self._context_actor = context_actor
        self._core = core
        self._restart = restart if restart.decide is not None else dataclasses.replace(restart, decide=decide)

    async def start(self, owner: ActorContext) -> ActorRef[Any, Any]:
        """See :meth:`accel.hosts.Host.start`."""
        return await owner.spawn(self._context_actor, self._core, self._publish, name="context", restart=self._restart)

    def _publish(self, context: Any) -> None:
        self.context = context


def decide(error: BaseException) -> Directive:
    """Decide as everywhere, but that this process cannot outlive a fault of scope PROCESS."""
    if isinstance(error, AccelError) and error.scope >= FaultScope.PROCESS:
        return Directive.STOP
    return default_decision(error)
