"""What a device's actor needs of the place where its context lives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from accel.actors import Directive
from accel.errors import AccelError

if TYPE_CHECKING:
    from accel.actors import ActorContext, ActorRef

__all__ = ["KEEPER", "Host", "not_resumed"]

KEEPER = "context"
"""Name of the actor that keeps a device's context up, a child of the device's own."""


def not_resumed(directive: Directive, error: BaseException) -> Directive:
    """Return what a user's decision comes to: a context that has faulted cannot be resumed, so it is made anew."""
    is_over = isinstance(error, AccelError) and error.is_fault
    return Directive.RESTART if is_over and directive is Directive.RESUME else directive


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
    def pid(self) -> int | None:
        """The child that holds the context; ``None`` while there is none, and where the context is in this process."""

    def check_reopen(self) -> None:
        """Choose where a lost device gets its next context, which is never this process once a fault has poisoned it.

        Raises
        ------
        UnsupportedError
            If this process is the only place.
        """

    async def start(self, owner: ActorContext) -> ActorRef[Any, Any]:
        """Bring up a context under ``owner`` and return the actor that keeps it up: the first one, and the next after each that has stopped.

        Raises
        ------
        AccelError
            If there is no context to be had.
        """
