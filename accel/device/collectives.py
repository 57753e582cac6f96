"""The collectives of a world, as its users call them: methods that make an op for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from accel.errors import InvalidArgumentError
from accel.ops import collective
from accel.ops.base import operand
from accel.ops.collective import check_rank
from accel.ref import AccelRef

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.device.epochs import Place
    from accel.ops.collective import Collective, Reduction

__all__ = ["Collectives", "Makers", "Refs", "check_refs", "ops_at", "picked"]

Refs: TypeAlias = tuple[AccelRef, ...]
"""One ref a rank, in the order of the ranks."""
Many = TypeVar("Many")
One = TypeVar("One")
Nothing = TypeVar("Nothing")

Makers: TypeAlias = "list[Callable[..., Collective] | None]"
"""For each rank a function that makes its op, given the five fields of
:class:`~accel.ops.collective.Collective`; ``None`` where it takes no part."""


class Collectives(Generic[Many, One, Nothing]):
    """The collectives of a world: awaited, or recorded by a batch or a graph.

    The type parameters are what methods return that have a result for each rank, for one rank, and
    none.

    Operands are sequences of refs, one for each rank, in the order of ``world.devices``; and so are
    results, as tuples. ``out=`` takes refs to write, as many as there are results.
    """

    def _send(self, what: str, makers: Callable[[int], Makers], timeout: float | None, result: int | None) -> Any:
        """Send a collective of one op a rank.

        Parameters
        ----------
        what
            Its name in reports.
        makers
            Given the number of ranks, checks operands and returns :data:`Makers`.
        timeout
            Seconds of waiting.
        result
            The rank whose result alone is returned; -1 for those of all; ``None`` for none.
        """
        raise NotImplementedError

    def all_reduce(
        self, source: Sequence[AccelRef], op: Reduction = "sum", *, out: Sequence[AccelRef] | None = None, timeout: float | None = None
    ) -> Many:
        """Give every rank the elements of all ranks, reduced.

        Parameters
        ----------
        source
            Arrays of one shape and dtype.
        op
            ``"sum"``, ``"prod"``, ``"min"``, ``"max"`` or ``"avg"``.
        out
            May be ``source``.
        """
        return self._everywhere(collective.AllReduce, source, out, timeout, reduction=op)  # type: ignore[no-any-return]

    def reduce_scatter(
        self, source: Sequence[AccelRef], op: Reduction = "sum", *, out: Sequence[AccelRef] | None = None, timeout: float | None = None
    ) -> Many:
        """Give each rank its part, along axis 0, of the elements of all ranks, reduced."""
        return self._everywhere(collective.ReduceScatter, source, out, timeout, reduction=op)  # type: ignore[no-any-return]

    def all_gather(self, source: Sequence[AccelRef], *, out: Sequence[AccelRef] | None = None, timeout: float | None = None) -> Many:
        """Give every rank the arrays of all ranks, one behind the other along axis 0."""
        return self._everywhere(collective.AllGather, source, out, timeout)  # type: ignore[no-any-return]

    def all_to_all(self, source: Sequence[AccelRef], *, out: Sequence[AccelRef] | None = None, timeout: float | None = None) -> Many:
        """Give rank ``i`` part ``i``, along axis 0, of each rank's array, in the order of the ranks."""
        return self._everywhere(collective.AllToAll, source, out, timeout)  # type: ignore[no-any-return]

    def reduce(
        self, source: Sequence[AccelRef], op: Reduction = "sum", *, root: int = 0, out: AccelRef | None = None, timeout: float | None = None
    ) -> One:
        """Give rank ``root`` the elements of all ranks, reduced; the result is its ref."""
        return self._to_root(collective.Reduce, source, root, out, timeout, reduction=op)  # type: ignore[no-any-return]

    def gather(self, source: Sequence[AccelRef], *, root: int = 0, out: AccelRef | None = None, timeout: float | None = None) -> One:
        """Give rank ``root`` the arrays of all ranks, one behind the other along axis 0."""
        return self._to_root(collective.Gather, source, root, out, timeout)  # type: ignore[no-any-return]

    def broadcast(self, source: AccelRef, *, root: int = 0, out: Sequence[AccelRef] | None = None, timeout: float | None = None) -> Many:
        """Give every rank the array of rank ``root``."""
        return self._from_root(collective.Broadcast, source, root, out, timeout)  # type: ignore[no-any-return]

    def scatter(self, source: AccelRef, *, root: int = 0, out: Sequence[AccelRef] | None = None, timeout: float | None = None) -> Many:
        """Give each rank its part, along axis 0, of the array of rank ``root``."""
        return self._from_root(collective.Scatter, source, root, out, timeout)  # type: ignore[no-any-return]

    def send(self, ref: AccelRef, *, source: int, target: int, out: AccelRef | None = None, timeout: float | None = None) -> One:
        """Send an array of rank ``source`` to rank ``target``, and return the ref there."""
        array = operand("ref", ref)

        def makers(size: int) -> Makers:
            check_rank("source", source, size)
            check_rank("target", target, size)
            if source == target:
                raise InvalidArgumentError("source and target are one rank", remedy="Use device.copy.")
            made: Makers = [None] * size
            made[source] = partial(collective.Send, source=array, peer=target)
            made[target] = partial(collective.Receive, shape=array.shape, dtype=array.dtype, peer=source, out=out)
            return made

        return self._send("send", makers, timeout, target)  # type: ignore[no-any-return]

    def barrier(self, *, timeout: float | None = None) -> Nothing:
        """Wait until all collectives that were sent before have ended on all ranks."""
        return self._send("barrier", lambda size: [collective.Barrier] * size, timeout, None)  # type: ignore[no-any-return]

    def _everywhere(
        self, kind: Any, source: Sequence[AccelRef], out: Sequence[AccelRef] | None, timeout: float | None, **options: Any
    ) -> Any:
        """Send a collective of which all ranks have a source and a result."""

        def makers(size: int) -> Makers:
            sources, outs = check_refs("source", source, size), _outs(out, size)
            return [partial(kind, source=ref, out=target, **options) for ref, target in zip(sources, outs, strict=True)]

        return self._send(kind.kind, makers, timeout, -1)

    def _to_root(
        self, kind: Any, source: Sequence[AccelRef], root: int, out: AccelRef | None, timeout: float | None, **options: Any
    ) -> Any:
        """Send a collective of which all ranks have a source, and ``root`` the result."""

        def makers(size: int) -> Makers:
            check_rank("root", root, size)
            sources = check_refs("source", source, size)
            return [partial(kind, source=ref, root=root, out=out if rank == root else None, **options) for rank, ref in enumerate(sources)]

        return self._send(kind.kind, makers, timeout, root)

    def _from_root(self, kind: Any, source: AccelRef, root: int, out: Sequence[AccelRef] | None, timeout: float | None) -> Any:
        """Send a collective of which ``root`` has the source, and all ranks have a result."""
        array = operand("source", source)

        def makers(size: int) -> Makers:
            check_rank("root", root, size)
            known = partial(kind, shape=array.shape, dtype=array.dtype, root=root)
            return [partial(known, source=array if rank == root else None, out=ref) for rank, ref in enumerate(_outs(out, size))]

        return self._send(kind.kind, makers, timeout, -1)


def ops_at(place: Place, makers: Makers) -> list[Collective | None]:
    """Return the op of each rank for a collective at ``place``, or ``None``."""
    made = (place.world, place.epoch, place.number)
    return [None if make is None else make(*made, rank, place.size) for rank, make in enumerate(makers)]


def picked(results: list[Any], result: int | None) -> Any:
    """Return what a caller gets of the results of all ranks; see :meth:`Collectives._send`."""
    return None if result is None else tuple(results) if result < 0 else results[result]


def check_refs(name: str, refs: object, size: int) -> Sequence[AccelRef]:
    """Return ``refs``; raise unless they are one ref a rank, of one shape and dtype."""
    if isinstance(refs, AccelRef) or not isinstance(refs, Sequence) or len(refs) != size:
        raise InvalidArgumentError(
            f"{name} is not a sequence of {size} refs", remedy="Give one ref for each rank, in the order of world.devices."
        )
    for rank, ref in enumerate(refs):
        operand(f"{name}[{rank}]", ref)
        if ref.shape != refs[0].shape or ref.dtype is not refs[0].dtype:
            raise InvalidArgumentError(
                f"{name}[{rank}] is {ref.dtype.value}{list(ref.shape)}, and {name}[0] is {refs[0].dtype.value}{list(refs[0].shape)}",
                remedy="Give arrays of one shape and dtype.",
            )
    return refs


def _outs(out: object, size: int) -> Sequence[AccelRef | None]:
    """Return the ``out`` of each rank; ``None`` where it makes a buffer."""
    return [None] * size if out is None else check_refs("out", out, size)
