"""Collectives: ops that all ranks of a world run together. Only a world sends them.

Each op says which communicator it is for: the world's number and its epoch, and which rank of how
many this one is. ``number`` counts the collectives of the world; reports of hangs name it.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from accel.dtype import DType
from accel.errors import InvalidArgumentError, UnsupportedError
from accel.ops.base import KernelOp, Plan, Shape, checked_spec, in_place_or_apart, not_aliased, op, operand, result_in
from accel.ref import AccelRef
from accel.values import check_choice, check_count

__all__ = [
    "REDUCED_DTYPES",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Barrier",
    "Broadcast",
    "Call",
    "Collective",
    "Gather",
    "Receive",
    "Reduce",
    "ReduceScatter",
    "Reduction",
    "Scatter",
    "Send",
]

Reduction: TypeAlias = Literal["sum", "prod", "min", "max", "avg"]
"""How elements of the ranks become one; ``avg`` of integers is rounded towards zero."""

REDUCED_DTYPES = frozenset(
    {
        *(DType.INT8, DType.INT32, DType.INT64, DType.UINT8, DType.UINT32, DType.UINT64),
        *(DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64, DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2),
    }
)
"""Those that can be reduced: NCCL's. Elements of every dtype can be moved."""


def check_rank(name: str, rank: int, size: int) -> None:
    """Raise unless it is the number of a rank, of ``size`` ranks."""
    if check_count(name, rank, 0) >= size:
        raise InvalidArgumentError(f"{name} is {rank}, and there are {size} ranks", remedy="Ranks are counted from 0.")


class Call(NamedTuple):
    """One collective as a backend's group gets it: no refs, so that libraries can make one too.

    Attributes
    ----------
    kind : str
        The kind of an op of this module, such as ``"all_reduce"``.
    elements : int
        How many: of the whole buffer for ``all_reduce``, ``reduce``, ``broadcast``, ``send`` and
        ``receive``; of the part that one rank gives one other one, or gets of it, for
        ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``gather`` and ``scatter``, whose other
        buffer holds ``size`` such parts in the order of the ranks; 0 for ``barrier``.
    dtype : DType
        Of the elements.
    reduction : str
        Of ``all_reduce``, ``reduce`` and ``reduce_scatter``; else ``""``.
    root : int
        The rank that alone gives (``broadcast``, ``scatter``: the others have no source) or gets
        (``reduce``, ``gather``: the others have no target); of ``send`` and ``receive`` the other
        rank.
    number : int
        Of the collective, which :attr:`accel.world.group.Group.reached` says; 0: it has none.
    """

    kind: str
    elements: int
    dtype: DType
    reduction: str = ""
    root: int = 0
    number: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of these elements."""
        return self.elements * self.dtype.itemsize


@op("collective")
class Collective(KernelOp[Any]):
    """One rank's part of a collective.

    Parameters
    ----------
    world, epoch, number
        Which communicator, and which of the world's collectives.
    rank, size
        The number of this rank, from 0, and how many there are.
    """

    world: int
    epoch: int
    number: int
    rank: int
    size: int

    def call(self) -> Call:
        """Return what the group does. The plan was worked out before: operands fit together."""
        raise NotImplementedError

    def _call(self, elements: int, dtype: DType, reduction: str = "", root: int = 0) -> Call:
        return Call(self.kind, elements, dtype, reduction, root, self.number)

    def _share(self, shape: Shape) -> Shape:
        """Return the shape of one rank's part of a buffer that is cut along axis 0."""
        if not shape or shape[0] % self.size:
            raise InvalidArgumentError(
                f"an array of shape {list(shape)} cannot be cut into {self.size} equal parts along axis 0",
                remedy="Give a first dimension that is a multiple of the number of ranks.",
            )
        return (shape[0] // self.size, *shape[1:])

    def _joined(self, shape: Shape) -> Shape:
        """Return the shape of the parts of all ranks, one behind the other along axis 0."""
        return (self.size * shape[0], *shape[1:]) if shape else (self.size,)


def _check_reduction(reduction: str, dtype: DType) -> None:
    check_choice("op", reduction, *get_args(Reduction))
    if dtype not in REDUCED_DTYPES:
        known = ", ".join(sorted(known.value for known in REDUCED_DTYPES))
        raise UnsupportedError(f"{dtype.value} cannot be reduced over ranks", remedy=f"It takes {known}.")


@op()
class _Reduced(Collective):
    source: AccelRef
    reduction: Reduction = "sum"

    def _checked(self) -> AccelRef:
        source = operand("source", self.source)
        _check_reduction(self.reduction, source.dtype)
        return source


@op()
class AllReduce(_Reduced):
    """Every rank gets the elements of all ranks, reduced. ``out`` may be ``source``."""

    out: AccelRef | None = None

    def plan(self) -> Plan:
        source = self._checked()
        in_place_or_apart(self.out, source=source)
        return Plan((source,), *result_in(self.out, source.shape, source.dtype))

    def call(self) -> Call:
        return self._call(self.source.size, self.source.dtype, self.reduction)


@op()
class Reduce(_Reduced):
    """Rank ``root`` gets the elements of all ranks, reduced. Its ``out`` may be ``source``."""

    root: int = 0
    out: AccelRef | None = None

    def plan(self) -> Plan:
        source = self._checked()
        check_rank("root", self.root, self.size)
        if self.rank != self.root:
            return Plan((source,), (), ())
        in_place_or_apart(self.out, source=source)
        return Plan((source,), *result_in(self.out, source.shape, source.dtype))

    def call(self) -> Call:
        return self._call(self.source.size, self.source.dtype, self.reduction, self.root)


@op()
class ReduceScatter(_Reduced):
    """Each rank gets its part, along axis 0, of the elements of all ranks, reduced."""

    out: AccelRef | None = None

    def plan(self) -> Plan:
        source = self._checked()
        not_aliased(self.out, source=source)
        return Plan((source,), *result_in(self.out, self._share(source.shape), source.dtype))

    def call(self) -> Call:
        return self._call(self.source.size // self.size, self.source.dtype, self.reduction)


@op()
class AllGather(Collective):
    """Every rank gets the arrays of all ranks, one behind the other along axis 0."""

    source: AccelRef
    out: AccelRef | None = None

    def plan(self) -> Plan:
        source = operand("source", self.source)
        not_aliased(self.out, source=source)
        return Plan((source,), *result_in(self.out, self._joined(source.shape), source.dtype))

    def call(self) -> Call:
        return self._call(self.source.size, self.source.dtype)


@op()
class AllToAll(Collective):
    """Rank ``i`` gets part ``i``, along axis 0, of each rank's array, in the order of the ranks."""

    source: AccelRef
    out: AccelRef | None = None

    def plan(self) -> Plan:
        source = operand("source", self.source)
        self._share(source.shape)
        not_aliased(self.out, source=source)
        return Plan((source,), *result_in(self.out, source.shape, source.dtype))

    def call(self) -> Call:
        return self._call(self.source.size // self.size, self.source.dtype)


@op()
class Gather(Collective):
    """Rank ``root`` gets the arrays of all ranks, one behind the other along axis 0."""

    source: AccelRef
    root: int = 0
    out: AccelRef | None = None

    def plan(self) -> Plan:
        source = operand("source", self.source)
        check_rank("root", self.root, self.size)
        if self.rank != self.root:
            return Plan((source,), (), ())
        not_aliased(self.out, source=source)
        return Plan((source,), *result_in(self.out, self._joined(source.shape), source.dtype))

    def call(self) -> Call:
        return self._call(self.source.size, self.source.dtype, root=self.root)


@op()
class _FromRoot(Collective):
    """``source`` is that of rank ``root``; other ranks have ``None``, and know its shape and dtype."""

    shape: Shape
    dtype: DType
    source: AccelRef | None = None
    root: int = 0
    out: AccelRef | None = None

    def _reads(self) -> tuple[AccelRef, ...]:
        checked_spec(self.shape, self.dtype)
        check_rank("root", self.root, self.size)
        if self.rank != self.root:
            return ()
        source = operand("source", self.source)
        if source.shape != self.shape or source.dtype is not self.dtype:
            raise InvalidArgumentError(f"source is {source.dtype.value}{list(source.shape)}, not {self.dtype.value}{list(self.shape)}")
        return (source,)


@op()
class Broadcast(_FromRoot):
    """Every rank gets the array of rank ``root``, whose own ``out`` may be ``source``."""

    def plan(self) -> Plan:
        reads = self._reads()
        for source in reads:
            in_place_or_apart(self.out, source=source)
        return Plan(reads, *result_in(self.out, self.shape, self.dtype))

    def call(self) -> Call:
        return self._call(math.prod(self.shape), self.dtype, root=self.root)


@op()
class Scatter(_FromRoot):
    """Each rank gets its part, along axis 0, of the array of rank ``root``."""

    def plan(self) -> Plan:
        reads = self._reads()
        for source in reads:
            not_aliased(self.out, source=source)
        return Plan(reads, *result_in(self.out, self._share(self.shape), self.dtype))

    def call(self) -> Call:
        return self._call(math.prod(self.shape) // self.size, self.dtype, root=self.root)


@op()
class Send(Collective):
    """The array goes to rank ``peer``, which runs :class:`Receive` of the same number."""

    source: AccelRef
    peer: int

    def plan(self) -> Plan:
        check_rank("peer", self.peer, self.size)
        return Plan((operand("source", self.source),), (), ())

    def call(self) -> Call:
        return self._call(self.source.size, self.source.dtype, root=self.peer)


@op()
class Receive(Collective):
    """The array that rank ``peer`` sends."""

    shape: Shape
    dtype: DType
    peer: int
    out: AccelRef | None = None

    def plan(self) -> Plan:
        checked_spec(self.shape, self.dtype)
        check_rank("peer", self.peer, self.size)
        return Plan((), *result_in(self.out, self.shape, self.dtype))

    def call(self) -> Call:
        return self._call(math.prod(self.shape), self.dtype, root=self.peer)


@op()
class Barrier(Collective):
    """No rank passes before all have come."""

    def plan(self) -> Plan:
        return Plan((), (), ())

    def call(self) -> Call:
        return self._call(0, DType.UINT8)
