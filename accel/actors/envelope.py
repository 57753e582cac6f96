"""What travels through an actor's mailbox beside plain messages, and how a message's context is entered."""

from __future__ import annotations

import contextlib
import copy
import enum
import types
from typing import TYPE_CHECKING, Any, Final

from accel.errors import AccelError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Generator
    from contextvars import Context

__all__ = ["FAILED", "HANDLED", "Envelope", "Failure", "Stop", "own_instance", "relay"]


class Envelope(tuple[Any, "asyncio.Future[Any] | None", "Context | None", "float | None"]):
    """A message with what its sender attached to it: ``(message, reply, context, deadline)``. One is made for each message; tuples are fast.

    message
        The message itself.
    reply
        Where the answer goes; ``None`` if nobody waits. Once it is done, the message is not delivered any more.
    context
        The sender's context variables; ``None`` to run in the actor's own.
    deadline
        The loop's time after which the message is not delivered.
    """

    __slots__ = ()


class Stop(enum.IntEnum):
    """How firmly an actor was asked to stop."""

    NO = 0
    DRAIN = 1
    """After what is queued."""
    NOW = 2
    """Refuse what is queued, cancel the work in progress."""
    KILL = 3
    """Cancel its hooks too."""


class Failure:
    """A failure reported from outside, meant for one incarnation of the actor: a later one did not fail."""

    __slots__ = ("error", "incarnation")

    def __init__(self, error: Exception, incarnation: int) -> None:
        self.error = error
        self.incarnation = incarnation


HANDLED: Final = object()
"""Yielded by an actor's handler when it is done with a message."""

FAILED: Final = object()
"""Yielded by an actor's handler when the actor failed over a message."""


@types.coroutine
def relay(context: Context | None, handler: Generator[Any, Any, None], waits_for: Any) -> Generator[Any, Any, Any]:
    """Pass what a handler waits for on to the loop, and what comes back to the handler, until it is done with its message.

    Parameters
    ----------
    context
        Entered for each of the handler's steps, so that ``receive`` sees and sets its variables there and not in the task's own context.
    handler
        Suspended in the middle of a message.
    waits_for
        What it yielded then.

    Returns
    -------
    object
        :data:`HANDLED` or :data:`FAILED`. Cancellation (and closing) is thrown into the handler like any other exception.
    """
    step: Callable[[Any], Any]
    argument: Any
    while True:
        try:
            sent = yield waits_for
        except BaseException as thrown:  # the handler decides what to do with it
            step, argument = handler.throw, thrown
        else:
            step, argument = handler.send, sent
        try:
            waits_for = step(argument) if context is None else context.run(step, argument)
        finally:
            # An exception's traceback keeps this frame, so the frame must not keep the exception.
            sent = argument = None
        if waits_for is HANDLED or waits_for is FAILED:
            return waits_for


_MARK: Final = "_accel_handed_out"


def own_instance(error: BaseException) -> BaseException:
    """Return the error to hand to one waiter, such that no other waiter has the same instance.

    Parameters
    ----------
    error
        As caught. An :class:`~accel.errors.AccelError` is always cloned (it may be kept and raised again by whoever made it); any
        other exception is copied if this function has seen it before and its class allows that.
    """
    if isinstance(error, AccelError):
        own: BaseException = error.clone()
    elif not hasattr(error, _MARK):
        with contextlib.suppress(TypeError):  # a class with __slots__
            vars(error)[_MARK] = True
        return error
    else:
        try:
            own = copy.copy(error)
        except Exception:  # a class whose constructor does not take its own args back
            return error
        own.__cause__ = error.__cause__
    return own.with_traceback(error.__traceback__)
