"""The items of an actor's mailbox, and how a message runs in its sender's context variables."""

from __future__ import annotations

import contextlib
import copy
import enum
import types
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from accel.errors import AccelError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Generator
    from contextvars import Context

__all__ = ["FAILED", "HANDLED", "Envelope", "Failure", "Stop", "own_instance", "relay"]


class Envelope(tuple[Any, "asyncio.Future[Any] | None", "Context | None", "float | None"]):
    """A message with the sender's data: ``(message, reply, context, deadline)``.

    A tuple, because one is made for each message.

    message
        The message itself.
    reply
        The future of the answer; ``None`` for a message without one. Once it is done, the message
        is not delivered.
    context
        The sender's context variables; ``None`` to run in the actor's own.
    deadline
        The loop's time after which the message is not delivered.
    """

    __slots__ = ()


class Stop(enum.IntEnum):
    """Levels of a request to stop."""

    NO = 0
    DRAIN = 1
    """Stop after the queued messages."""
    NOW = 2
    """Refuse the queued messages, cancel the one in progress."""
    KILL = 3
    """Cancel the hooks too."""


class Failure(NamedTuple):
    """A failure reported from outside, for one incarnation of the actor only."""

    error: Exception
    incarnation: int


HANDLED: Final = object()
"""Yielded by an actor's handler when it is done with a message."""

FAILED: Final = object()
"""Yielded by an actor's handler when the actor failed over a message."""


@types.coroutine
def relay(context: Context | None, handler: Generator[Any, Any, None], waits_for: Any) -> Generator[Any, Any, Any]:
    """Relay between a handler and the event loop until the handler is done with a message.

    What the handler awaits is yielded, and the result is sent to the handler.

    Parameters
    ----------
    context
        Entered for each step of the handler, so that ``receive`` reads and sets its variables there
        and not in the task's own context.
    handler
        The handler, suspended in the middle of a message.
    waits_for
        What the handler yielded.

    Returns
    -------
    object
        :data:`HANDLED` or :data:`FAILED`. Cancellation (and closing) is thrown into the handler
        like any other exception.
    """
    step: Callable[[Any], Any]
    argument: Any
    while True:
        try:
            sent = yield waits_for
        except BaseException as thrown:
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
    """Return the error for one waiter, so that no other waiter has the same instance.

    Parameters
    ----------
    error
        As caught. An :class:`~accel.errors.AccelError` is always cloned, because the code that made
        it may keep it and raise it again. Any other exception is copied if this function returned
        it before and its class can be copied.
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
