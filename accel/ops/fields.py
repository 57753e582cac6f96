"""Fields of ops that a caller may write in several ways, and that kernels read in one.

Such a field is annotated with all that a caller may write, ``op: UnaryName | UnaryOp``. The op's ``__post_init__`` converts it by :func:`set_fields`; who reads
it calls the same function again, which returns what is converted already, and tells a type checker so.
"""

from __future__ import annotations

import enum
import operator
from typing import Any, TypeVar

from accel.errors import InvalidArgumentError

__all__ = ["integer", "member", "set_fields"]

E = TypeVar("E", bound=enum.Enum)


def set_fields(frozen: object, /, **values: object) -> None:
    """Set fields of a frozen op to the form that kernels read; for ``__post_init__`` only."""
    for name, value in values.items():
        object.__setattr__(frozen, name, value)


def integer(name: str, value: Any, remedy: str) -> int:
    """Return ``value`` as an int, if it is one of Python's or numpy's.

    Raises
    ------
    InvalidArgumentError
        If it is not.
    """
    try:
        return operator.index(value)
    except Exception as error:  # a class of the caller's may raise anything
        raise InvalidArgumentError(f"{name} is {value!r}", remedy=remedy) from error


def member(enumeration: type[E], value: object) -> E:
    """Return the member that ``value`` is or names.

    Raises
    ------
    InvalidArgumentError
        If there is no such member.
    """
    if type(value) is enumeration:
        return value
    if isinstance(value, str):
        try:
            return enumeration(value)
        except ValueError:
            pass  # raised below, with the names
    names = ", ".join(repr(each.value) for each in enumeration)
    raise InvalidArgumentError(f"{value!r} is not a {enumeration.__name__}", remedy=f"Use one of {names}.")
