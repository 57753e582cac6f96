"""How the classes of ops are made: frozen dataclasses whose instances are made quickly, for one is made on the way of every op."""

from __future__ import annotations

import sys
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar, cast, dataclass_transform

__all__ = ["frozen_op"]

T = TypeVar("T")


@dataclass_transform(eq_default=False, frozen_default=True)
def frozen_op(kind: type[T]) -> type[T]:
    """Make a class ``@dataclass(frozen=True, eq=False, slots=True)``, and its instances in half the time.

    What ``dataclass`` writes sets each field of a frozen instance by way of ``object.__setattr__``, which looks the slot up by its name. This writes an
    ``__init__`` of the same signature that calls the slots themselves.
    """
    made = dataclass(frozen=True, eq=False, slots=True)(kind)
    slow: Any = made.__init__
    given = [field for field in fields(cast("Any", made)) if field.init]
    assert not any(field.kw_only or field.default_factory is not MISSING for field in given), "only what ops need is written here"
    names = [field.name for field in given]
    setters = [f"_set_{name}" for name in names]
    body = [f"{setter}(self, {name})" for setter, name in zip(setters, names, strict=True)]
    if hasattr(made, "__post_init__"):
        body.append("self.__post_init__()")
    source = f"def make({', '.join(setters)}):\n def __init__(self, {', '.join(names)}):\n  {'; '.join(body)}\n return __init__"
    namespace: dict[str, Any] = {}
    exec(source, vars(sys.modules[made.__module__]), namespace)  # of names alone, in the class's module: as dataclass does it
    quick = namespace["make"](*[getattr(made, name).__set__ for name in names])
    quick.__defaults__ = tuple([field.default for field in given if field.default is not MISSING])
    quick.__annotations__ = slow.__annotations__
    quick.__module__, quick.__qualname__ = made.__module__, f"{made.__qualname__}.__init__"
    made.__init__ = quick  # type: ignore[method-assign]
    return made
