"""The check of a number of seconds, as actors, supervision and hosts take it."""

from __future__ import annotations

import sys

from accel.errors import InvalidArgumentError

__all__ = ["check_seconds"]


def check_seconds(name: str, value: object) -> None:
    """Raise unless ``value`` is a number of seconds; it may be infinite or negative.

    Raises
    ------
    InvalidArgumentError
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or value != value or (isinstance(value, int) and abs(value) > sys.float_info.max):
        raise InvalidArgumentError(f"{name} is {value!r:.80}, which is not a number of seconds", remedy="Give an int or a float.")
