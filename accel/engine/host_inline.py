"""The host that is this process: no hand-over, no copy, and the process's fate is the context's."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from accel.actors import Directive, RestartStrategy
from accel.actors.supervision import default_decision
from accel.engine.host import KEEPER, not_resumed
from accel.errors import AccelError, FaultScope, UnsupportedError

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
    pid: ClassVar[None] = None

    def __init__(self, context_actor: type[Actor[Any, Any]], core: Any, restart: RestartStrategy) -> None:
        self.context: Any = None
        self._context_actor = context_actor
        self._core = core
        self._decide_otherwise = restart.decide
        self._restart = dataclasses.replace(restart, decide=self._decide)
        core.survives = self.survives

    async def start(self, owner: ActorContext) -> ActorRef[Any, Any]:
        """See :meth:`accel.engine.host.Host.start`."""
        return await owner.spawn(self._context_actor, self._core, self._publish, name=KEEPER, restart=self._restart)

    def check_reopen(self) -> None:
        """See :meth:`accel.engine.host.Host.check_reopen`."""
        if self._core.is_poisoned:
            raise UnsupportedError(
                f"device {self._core.name} with host='inline' cannot be reopened: its fault has poisoned this process",
                device=self._core.name,
                remedy="Restart the process, or open the device with host='auto' or 'process', which go on in a child.",
            )

    def survives(self, error: BaseException) -> bool:
        """Return whether a new context can follow ``error``, as far as it can be known: a ``decide`` of the user's own is not asked twice."""
        return self._decide_otherwise is not None or not (isinstance(error, AccelError) and error.scope >= FaultScope.PROCESS)

    def _publish(self, context: Any) -> None:
        self.context = context

    def _decide(self, error: BaseException) -> Directive:
        """Decide as everywhere, but that this process cannot outlive a fault of scope PROCESS."""
        if self._core.lifecycle.is_final:
            return Directive.STOP  # who waited has been told so
        if self._decide_otherwise is not None:
            return not_resumed(self._decide_otherwise(error), error)
        return default_decision(error) if self.survives(error) else Directive.STOP
