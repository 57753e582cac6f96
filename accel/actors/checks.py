"""What is asked of an actor before it is spawned."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from accel.actors.actor import Actor
from accel.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["check_class", "check_name", "check_seconds"]


def check_class(actor: object) -> None:
    """Raise unless ``actor`` is an actor class.

    Raises
    ------
    InvalidArgumentError
    """
    if isinstance(actor, Actor):
        name = type(actor).__name__
        raise InvalidArgumentError(
            f"spawn takes a class, not an instance of {name}: each restart makes a new one",
            remedy=f"Give the class, and what to make it with: spawn({name}, ...).",
        )
    if not (isinstance(actor, type) and issubclass(actor, Actor)):
        raise InvalidArgumentError(f"spawn takes a subclass of Actor, not {actor!r}", remedy="Subclass accel.Actor, and give the class.")
    if not inspect.iscoroutinefunction(actor.receive):
        raise InvalidArgumentError(
            f"{actor.__name__}.receive is not a coroutine function", remedy="Define it: `async def receive(self, message, context)`."
        )
    try:
        inspect.signature(actor.receive).bind(None, None, None)
    except TypeError as error:
        raise InvalidArgumentError(
            f"{actor.__name__}.receive does not take a message and a context: {error}",
            remedy="Define it: `async def receive(self, message, context)`.",
        ) from None


def check_name(name: object, siblings: Collection[str]) -> None:
    """Raise unless an actor beside ``siblings`` can have this name.

    Raises
    ------
    InvalidArgumentError
    """
    if not isinstance(name, str) or not name:
        raise InvalidArgumentError(
            f"an actor's name is a string that is not empty, not {name!r}", remedy="Leave name out to have one made."
        )
    if "/" in name:
        raise InvalidArgumentError(f"{name!r} has a '/', which separates the names in an actor's path", remedy="Use another character.")
    if name in siblings:
        raise InvalidArgumentError(f"an actor named {name!r} is alive here", remedy="Stop it first, or use another name.")


def check_seconds(name: str, value: object) -> None:
    """Raise unless ``value`` is a number of seconds; it may be infinite or negative.

    Raises
    ------
    InvalidArgumentError
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise InvalidArgumentError(f"{name} is {value!r}, which is not a number of seconds", remedy="Give an int or a float.")
