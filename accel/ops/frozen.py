"""How the classes of ops are made: frozen dataclasses whose instances are made quickly, for one is made on the way of every op."""

from __future__ import annotations

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
    names = [field.name for field in given]
    body = [f"_set_{name}(self, {name})" for name in names]
    if hasattr(made, "__post_init__"):
        body.append("self.__post_init__()")
    namespace: dict[str, Any] = {f"_set_{name}": getattr(made, name).__set__ for name in names}
    exec(f"def __init__(self, {', '.join(names)}):\n " + "\n ".join(body), namespace)
    quick = namespace["__init__"]
    quick.__defaults__ = tuple([field.default for field in given if field.default is not MISSING])
    quick.__annotations__ = slow.__annotations__
    quick.__module__, quick.__qualname__ = made.__module__, f"{made.__qualname__}.__init__"
    made.__init__ = quick  # type: ignore[method-assign]
    return made
