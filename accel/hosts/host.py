"""What a device's actor needs of the place where its context lives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from accel.actors import ActorContext, ActorRef

__all__ = ["Host"]


class Host(Protocol):
    """The place of a device's context, over all generations.

    Attributes
    ----------
    context : object or None
        The context of the present generation; ``None`` while there is none.
    """

    context: Any

    @property
    def kind(self) -> str:
        """``"inline"`` for this process, ``"process"`` for a child."""

    @property
    def pid(self) -> int:
        """The process that holds the context."""

    async def start(self, owner: ActorContext) -> ActorRef[Any, Any]:
        """Bring up the first context under ``owner`` and return the actor that keeps it up.

        Raises
        ------
        AccelError
            If there is no context to be had.
        """
