"""The check of a number of seconds, as actors, supervision and hosts take it."""

from __future__ import annotations

from accel.errors import InvalidArgumentError

__all__ = ["check_seconds"]


def check_seconds(name: str, value: object) -> None:
    """Raise unless ``value`` is a number of seconds; it may be infinite or negative.

    Raises
    ------
    InvalidArgumentError
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise InvalidArgumentError(f"{name} is {value!r}, which is not a number of seconds", remedy="Give an int or a float.")
