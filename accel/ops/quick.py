"""Instances of ops are made quickly, for one is made on the way of every op."""

from __future__ import annotations

import sys
from dataclasses import MISSING, fields
from typing import Any, TypeVar, cast

__all__ = ["quick_init"]

T = TypeVar("T")


def quick_init(kind: type[T]) -> type[T]:
    """Give a frozen dataclass with slots an ``__init__`` that does the same in half the time.

    What ``dataclass`` writes sets each field of a frozen instance by way of ``object.__setattr__``, which looks the slot up by its name. This one, of the same
    signature, calls the slots themselves.
    """
    slow: Any = kind.__init__
    given = [field for field in fields(cast("Any", kind)) if field.init]
    assert not any(field.kw_only or field.default_factory is not MISSING for field in given), "only what ops need is written here"
    names = [field.name for field in given]
    setters = [f"_set_{name}" for name in names]
    body = [f"{setter}(self, {name})" for setter, name in zip(setters, names, strict=True)]
    if hasattr(kind, "__post_init__"):
        body.append("self.__post_init__()")
    source = f"def make({', '.join(setters)}):\n def __init__(self, {', '.join(names)}):\n  {'; '.join(body)}\n return __init__"
    namespace: dict[str, Any] = {}
    exec(source, vars(sys.modules[kind.__module__]), namespace)  # of names alone, in the class's module: as dataclass does it
    quick = namespace["make"](*[getattr(kind, name).__set__ for name in names])
    quick.__defaults__ = tuple([field.default for field in given if field.default is not MISSING])
    quick.__annotations__ = slow.__annotations__
    quick.__module__, quick.__qualname__ = kind.__module__, f"{kind.__qualname__}.__init__"
    kind.__init__ = quick  # type: ignore[method-assign]
    return kind
