"""Families: a namespace of ops, and the kernels that run them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from accel.backend import Kernel
from accel.errors import InvalidArgumentError
from accel.family import BackendPart
from accel.ops.namespace import OpNamespace, ops_of

if TYPE_CHECKING:
    from accel.backend import AccelStream
    from accel.ops.base import FamilyOp

__all__ = ["Family", "KernelLane"]


class KernelLane(Protocol):
    """What a kernel is given of the stream that it enqueues into."""

    @property
    def stream(self) -> AccelStream:
        """The stream."""


@dataclass(frozen=True, eq=False)
class Family:
    """A family of ops: all that the layers above need to know of it.

    Parameters
    ----------
    namespace
        The ops: a subclass of :class:`OpNamespace`, with one method for each.
    kernels
        Kind of an op -> its kernel on any backend, by what every stream has. Ops without one need a backend's own.
    parts
        Name of a backend -> what it has of this family. Families of ``accel`` leave it out: their parts are in the backends.
    uses
        Names of the families of ``accel`` whose ops compute its composed ones: ``open_device(libraries=)`` makes these ready.

    Raises
    ------
    InvalidArgumentError
        If an op is of another family already, or a kernel is for no op.
    """

    namespace: type[OpNamespace[Any]]
    kernels: Mapping[str, Kernel] = field(default_factory=dict)
    parts: Mapping[str, BackendPart] = field(default_factory=dict)
    uses: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check it, and let the classes of its ops know it."""
        kinds = set()
        for op in self.ops:
            if op.library != self.name:
                raise InvalidArgumentError(
                    f"{op.__name__} is of library {op.library!r}, and the family is {self.name!r}",
                    remedy=f'Set `library = "{self.name}"` in it.',
                )
            if op.family is not None:
                raise InvalidArgumentError(f"{op.__name__} is an op of {op.family!r} already", remedy="Make one family of a namespace.")
            kinds.add(op.kind)
        for kernels in (self.kernels, *(part.kernels for part in self.parts.values())):
            if unknown := set(kernels) - kinds:
                raise InvalidArgumentError(
                    f"{self.name} has kernels for {', '.join(sorted(unknown))}, and no such op", remedy="Use ops' kinds."
                )
        for op in self.ops:
            op.family = self

    def __repr__(self) -> str:
        return f"<Family {self.name}>"

    @property
    def name(self) -> str:
        """The family's name."""
        return self.namespace.library

    @property
    def ops(self) -> tuple[type[FamilyOp[Any]], ...]:
        """The ops, by the names of their methods."""
        return tuple(ops_of(self.namespace).values())

    def part(self, backend: str) -> BackendPart | None:
        """See :meth:`accel.family.OpFamily.part`."""
        return self.parts.get(backend)

    def kernel(self, kind: str, backend: str) -> Kernel | None:
        """See :meth:`accel.family.OpFamily.kernel`."""
        part = self.parts.get(backend)
        return (None if part is None else part.kernels.get(kind)) or self.kernels.get(kind)
