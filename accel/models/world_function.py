"""A coroutine function of refs that runs on all ranks of a world at the same time, and where its ranks meet."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from accel.errors import InvalidArgumentError
from accel.models.runner import FunctionRunner, deadline_of, left, warm_of
from accel.models.world_runner import RanksRunner, together

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from accel.actors.system import ActorSystem
    from accel.models.adapters.base import ModelSource
    from accel.models.outputs import OutputSpecs
    from accel.models.runner import Array, ModelWorld, Operand
    from accel.models.split import Split
    from accel.models.tensor_spec import Buckets
    from accel.models.weights import Told
    from accel.ops import Spec
    from accel.ops.collective import Reduction
    from accel.ref import AccelRef

__all__ = ["RefGroup", "WorldFunctionRunner"]

T = TypeVar("T")


class _Arrival(NamedTuple):
    """What one rank asks for in a collective."""

    kind: str
    options: dict[str, Any]
    ref: AccelRef
    result: asyncio.Future[AccelRef]


class _Meeting:
    """Where the ranks of one call wait for each other: a collective is sent when all have come to it."""

    def __init__(self, world: ModelWorld) -> None:
        self._world = world
        self._arrived: dict[int, _Arrival] = {}
        self._left: int | None = None  # a rank on which the function has returned

    async def collective(self, rank: int, kind: str, ref: AccelRef, **options: Any) -> AccelRef:
        """Return a rank's result of a collective."""
        if rank in self._arrived:
            raise InvalidArgumentError(
                f"rank {rank} awaits two collectives at a time", remedy="Await one after the other: all ranks meet in each."
            )
        if self._left is not None:
            raise self._uneven(kind)
        mine = self._arrived[rank] = _Arrival(kind, options, ref, asyncio.get_running_loop().create_future())
        if len(self._arrived) == len(self._world.devices):
            arrived, self._arrived = [arrival for _, arrival in sorted(self._arrived.items())], {}
            for number, result in enumerate(await self._sent(arrived)):
                arrived[number].result.set_result(result)
        return await mine.result

    def leave(self, rank: int) -> None:
        """End all waits: the function has ended on this rank."""
        self._left = rank
        for arrival in self._arrived.values():
            if not arrival.result.done():
                arrival.result.set_exception(self._uneven(arrival.kind))
        self._arrived.clear()

    def _uneven(self, kind: str) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"the function has ended on rank {self._left}, and awaits {kind} on another one",
            remedy="Have all ranks await the same collectives.",
        )

    async def _sent(self, arrived: Sequence[_Arrival]) -> Sequence[AccelRef]:
        kind, options, *_ = arrived[0]
        other = next((number for number, arrival in enumerate(arrived) if arrival[:2] != (kind, options)), None)
        if other is not None:
            raise InvalidArgumentError(
                f"rank 0 awaits {kind} with {options}, and rank {other} {arrived[other].kind} with {arrived[other].options}",
                remedy="Have all ranks await the same collectives in the same order.",
            )
        refs = [arrival.ref for arrival in arrived]
        if kind == "broadcast":
            return await self._world.broadcast(refs[options["root"]], **options)
        results: Sequence[AccelRef] = await getattr(self._world, kind)(refs, **options)
        return results


class RefGroup:
    """One rank of a world, as a coroutine function of refs that runs on all of them gets it, in the place of the device.

    Each collective waits for the function on the other ranks: all await the same ones, in the same order.

    Attributes
    ----------
    rank, size : int
        The number of this rank, from 0, and how many there are.
    device : Device
        Its device.
    """

    def __init__(self, meeting: _Meeting, rank: int, size: int, device: Any) -> None:
        self._meeting = meeting
        self.rank = rank
        self.size = size
        self.device = device

    async def all_reduce(self, ref: AccelRef, op: Reduction = "sum") -> AccelRef:
        """Return the arrays of all ranks, reduced; see :meth:`accel.World.all_reduce`."""
        return await self._meeting.collective(self.rank, "all_reduce", ref, op=op)

    async def reduce_scatter(self, ref: AccelRef, op: Reduction = "sum") -> AccelRef:
        """Return this rank's part of that, along axis 0."""
        return await self._meeting.collective(self.rank, "reduce_scatter", ref, op=op)

    async def all_gather(self, ref: AccelRef) -> AccelRef:
        """Return the arrays of all ranks, one behind the other along axis 0."""
        return await self._meeting.collective(self.rank, "all_gather", ref)

    async def all_to_all(self, ref: AccelRef) -> AccelRef:
        """Return the part for this rank, along axis 0, of each rank's array."""
        return await self._meeting.collective(self.rank, "all_to_all", ref)

    async def broadcast(self, ref: AccelRef, root: int = 0) -> AccelRef:
        """Return the array of one rank."""
        return await self._meeting.collective(self.rank, "broadcast", ref, root=root)


class WorldFunctionRunner(RanksRunner[FunctionRunner]):
    """Runs a coroutine function of refs for each rank of a world; see :class:`~accel.models.runner.Runner`.

    The parameters are those of :class:`~accel.models.world_runner.WorldRunner`.
    """

    def __init__(self, world: ModelWorld, source: ModelSource, buckets: Buckets, system: ActorSystem, split: Split) -> None:
        super().__init__(world, lambda device, _: FunctionRunner(device, source, buckets, system), split)
        self._buckets = buckets

    async def open(self, on_buckets: Told) -> None:
        """See :class:`RanksRunner`; raises as :meth:`FunctionRunner.check`."""
        for rank in self._ranks:
            rank.check()
        warm = warm_of(self._buckets)
        on_buckets(0, len(warm))
        for done, inputs in enumerate(warm, 1):
            await self._run(lambda rank, group, _, inputs=inputs: rank.warm(inputs, group), ())  # type: ignore[misc]
            on_buckets(done, len(warm))

    async def _open_rank(self, rank: FunctionRunner) -> None:
        """See :class:`RanksRunner`: the others are not there to warm up with."""
        rank.check()

    async def describe(self, operands: tuple[AccelRef, ...], timeout: float | None = None) -> OutputSpecs:
        """See :class:`~accel.models.runner.Runner`."""
        return await self._run(lambda rank, group, given: rank.describe(given, timeout, group), operands, timeout)

    async def run(self, operands: Sequence[Operand], outputs: tuple[Spec, ...], timeout: float | None) -> Sequence[AccelRef]:
        """See :class:`~accel.models.runner.Runner`."""
        return await self._run(lambda rank, group, given: rank.run(given, outputs, timeout, group), operands, timeout)

    async def fetch(
        self, operands: Sequence[Operand], outputs: tuple[Spec, ...], rows: Sequence[int | None], timeout: float | None
    ) -> Sequence[Array]:
        """See :class:`~accel.models.runner.Runner`."""
        deadline, device = deadline_of(timeout), self._world.devices[0]
        made = await self.run(operands, outputs, timeout)
        wanted = [ref if count is None else ref[:count] for ref, count in zip(made, rows, strict=True)]
        return [await device.get(ref, timeout=left(deadline)) for ref in wanted]

    async def _run(
        self,
        call: Callable[[FunctionRunner, RefGroup, Any], Coroutine[Any, Any, T]],
        operands: Sequence[Operand],
        timeout: float | None = None,
    ) -> T:
        """Call the function for each rank at the same time, and return what the first one's call returns."""
        meeting, devices = _Meeting(self._world), self._world.devices
        operands_of = await self.on_all(operands, timeout)
        groups = [RefGroup(meeting, rank, len(devices), device) for rank, device in enumerate(devices)]

        async def called(rank: FunctionRunner, group: RefGroup, given: list[Operand]) -> T:
            try:
                return await call(rank, group, tuple(given))
            finally:
                meeting.leave(group.rank)

        made = await together(called(*part) for part in zip(self._ranks, groups, operands_of, strict=True))
        return made[0]
