"""Fields of ops that a caller may write in several ways, and that kernels read in one.

Such a field is annotated with all that a caller may write, ``op: UnaryName | UnaryOp``. It is
converted when the op is made, by what the class names: ``@op("sort", convert={"axis": to_axis})``.
What depends on several fields is a ``__post_init__``.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from accel.dtype import DType
from accel.errors import InvalidArgumentError

__all__ = [
    "AXIS",
    "Conversion",
    "Convert",
    "convert_fields",
    "converting",
    "flag",
    "integer",
    "member",
    "set_fields",
    "to_axis",
    "to_dtype",
    "to_flag",
    "to_int",
    "to_integer",
    "to_member",
    "unless_none",
]

E = TypeVar("E", bound=enum.Enum)


class Conversion(NamedTuple):
    """How a field is converted.

    Attributes
    ----------
    function
        Given the name of a field and what a caller wrote, returns what kernels read, or raises
        :class:`InvalidArgumentError`.
    plain
        Types of what kernels read as it is: the function is not called for these.
    """

    function: Callable[[str, Any], Any]
    plain: frozenset[type] = frozenset()

    def __call__(self, name: str, value: Any) -> Any:
        return value if type(value) in self.plain else self.function(name, value)


Convert: TypeAlias = Conversion | Callable[[str, Any], Any]
"""A conversion, or its function alone."""

AXIS = "Give numbers of dimensions, from 0 or, counted from the end, from -1."


def set_fields(frozen: object, /, **values: object) -> None:
    """Set fields of a frozen op to the form that kernels read; for ``__post_init__`` only."""
    for name, value in values.items():
        object.__setattr__(frozen, name, value)


def convert_fields(frozen: Any) -> None:
    """Convert the fields of an op as its class says; the ``__post_init__`` of most."""
    for name, convert, plain in frozen.conversions:
        value = getattr(frozen, name)
        if type(value) not in plain:
            object.__setattr__(frozen, name, convert(name, value))


def integer(name: str, value: Any, remedy: str) -> int:
    """Return ``value`` as an int, if it is one of Python's or numpy's.

    Raises
    ------
    InvalidArgumentError
        If it is not.
    """
    if type(value) is int:
        return value
    try:
        return operator.index(value)
    except Exception as error:  # a class of the caller's may raise anything
        raise InvalidArgumentError(f"{name} is {value!r}", remedy=remedy) from error


def to_integer(remedy: str) -> Conversion:
    """Return what converts to an int; ``remedy`` says what else a caller is told."""
    return Conversion(partial(integer, remedy=remedy), frozenset({int}))


to_int = to_integer("Give an int.")
to_axis = to_integer(AXIS)
to_dtype = Conversion(lambda name, value: DType.of(value), frozenset({DType}))


def to_member(enumeration: type[enum.Enum]) -> Conversion:
    """Return what converts to members of an enumeration."""
    members = _members(enumeration)

    def convert(name: str, value: Any) -> enum.Enum:
        return members[value] if type(value) is str and value in members else member(enumeration, value)

    return Conversion(convert, frozenset({enumeration}))


def converting(given: Convert) -> Conversion:
    """Return how a field is converted, given that or a function alone."""
    return given if isinstance(given, Conversion) else Conversion(given)


def unless_none(given: Convert) -> Conversion:
    """Return what converts as ``given`` does, and leaves ``None``."""
    convert = converting(given)
    return convert._replace(plain=convert.plain | {type(None)})


def flag(name: str, value: object) -> bool:
    """Return an option that is true or false.

    Raises
    ------
    InvalidArgumentError
        If it is neither.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidArgumentError(f"{name} is {value!r}", remedy="Give True or False.")
    return bool(value)


to_flag = Conversion(flag, frozenset({bool}))


def member(enumeration: type[E], value: object) -> E:
    """Return the member that ``value`` is or names.

    Raises
    ------
    InvalidArgumentError
        If there is no such member.
    """
    if type(value) is enumeration:
        return value
    members = _members(enumeration)
    if isinstance(value, str) and value in members:
        found: E = members[value]
        return found
    raise InvalidArgumentError(f"{value!r} is not a {enumeration.__name__}", remedy=f"Use one of {', '.join(map(repr, members))}.")


@lru_cache(maxsize=64)
def _members(enumeration: Any) -> dict[str, Any]:
    return {each.value: each for each in enumeration}
