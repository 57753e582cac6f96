"""The face of one library: what turns a method's arguments into an op, bound to what takes the op."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NoReturn, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from accel.ops import KernelOp

__all__ = ["OpNamespace", "calls_of"]

T_co = TypeVar("T_co", covariant=True)


class OpNamespace(Generic[T_co]):
    """One library, bound to what takes its ops: a device, which gives awaitables, or a batch, which gives refs."""

    __slots__ = ("_submit",)

    aliases: ClassVar[Mapping[str, str]] = {}
    """What users of other libraries call an op -> how it is called here, for errors."""

    def __init__(self, submit: Callable[[KernelOp, float | None], T_co]) -> None:
        self._submit = submit

    if not TYPE_CHECKING:  # for a type checker, an op that is not there is an error

        def __getattr__(self, name: str) -> NoReturn:
            own, calls = _ops_of(type(self)), {}
            for kind in (*OpNamespace.__subclasses__(), type(self)):
                calls |= calls_of(kind)
            has = f"it has {', '.join(own)}" if own else "it is called itself"
            if name in calls:
                remedy = f"Use {calls[name]}."
            elif close := difflib.get_close_matches(name, own):
                remedy = f"Did you mean {' or '.join(close)}?"
            else:
                remedy = "An op of your own comes by device.register or device.compiler."
            raise AttributeError(f"library {type(self).__name__.lower()!r} has no {name!r}; {has}. {remedy}", name=name)


def _ops_of(library: type[OpNamespace[Any]]) -> list[str]:
    return [name for name in dir(library) if not name.startswith("_") and callable(getattr(library, name))]


def calls_of(library: type[OpNamespace[Any]]) -> dict[str, str]:
    """Return the names of a library's ops, and what else they are called -> how they are called."""
    name = library.__name__.lower()
    return {op: f"{name}.{op}(...)" for op in _ops_of(library)} | {alias: name + call for alias, call in library.aliases.items()}
