"""What runs one model over the ranks of a world: a library in the context of each, which has its parts of the weights."""

from __future__ import annotations

import asyncio
import traceback
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from accel.errors import AccelError, InvalidArgumentError, WorldChangedError
from accel.models.adapters.group import ModelGroup
from accel.models.library import Describe, Forward
from accel.models.runner import DeviceRunner, LibraryRunner, deadline_of, left
from accel.models.weights import Collected, tell_nothing
from accel.ref import AccelRef

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence

    from accel.actors.system import ActorSystem
    from accel.models.adapters.base import ModelSource
    from accel.models.outputs import OutputSpecs
    from accel.models.runner import Array, ModelDevice, ModelWorld, Operand, Place
    from accel.models.split import Split
    from accel.models.tensor_spec import Buckets
    from accel.models.weights import Told
    from accel.ops import Spec

__all__ = ["RanksRunner", "WorldRunner", "together"]

T = TypeVar("T")
R = TypeVar("R", bound=DeviceRunner)

_PREPARING = 300.0
"""Seconds that the first forward of an epoch may take besides the world's ``hang_timeout``: it makes the graphs of all buckets."""


class RanksRunner(Generic[R]):
    """What a :class:`~accel.models.runner.Runner` has that runs a model over a world; base class.

    Inputs go to all ranks. Outputs are those of the first one, on its device: the model returns the
    same on each, or what only the first one has.

    Parameters
    ----------
    world
        Where.
    make
        Returns what runs the part of a rank, given its device and number.
    split
        Which weights each rank has.
    """

    def __init__(self, world: ModelWorld, make: Callable[[ModelDevice, int], R], split: Split) -> None:
        self._world = world
        self._make = make
        self._split = split
        self._devices = list(world.devices)
        self._ranks = [make(device, number) for number, device in enumerate(self._devices)]
        # Of each rank, where an extra device may take it: where its weights are from, and their checksums.
        self._sources: list[tuple[Collected, dict[str, int]]] = []

    @property
    def weights(self) -> dict[str, tuple[AccelRef, ...]]:
        """Their durable refs, by name, one a rank."""
        return {name: tuple([rank.weights[name] for rank in self._ranks]) for name in self._ranks[0].weights}

    @property
    def nbytes(self) -> int:
        """See :class:`~accel.models.runner.Runner`."""
        return self._ranks[0].nbytes

    @property
    def is_torn(self) -> bool:
        """See :class:`~accel.models.runner.Runner`."""
        return any(rank.is_torn for rank in self._ranks)

    async def load(self, weights: Collected, on_weights: Told, on_buckets: Told) -> None:
        """See :class:`~accel.models.runner.Runner`."""
        told, parts = _Sum(on_weights, len(self._ranks)), self._split.parts(weights)
        await together(rank.put(part, told.of(number)) for number, (rank, part) in enumerate(zip(self._ranks, parts, strict=True)))
        await self.open(on_buckets)
        checksums = await together(rank.checksums() for rank in self._ranks if self._world.extras)
        if self._devices != list(self._world.devices):
            raise WorldChangedError(f"a device of {self._world.name} was replaced while the model was loaded", remedy="Load it again.")
        if checksums:
            self._sources = list(zip(parts, checksums, strict=True))
            self._world.takeovers.append(self._take_over)

    async def _take_over(self, number: int) -> None:
        """Load a rank's weights on the extra device that takes the rank; they are read from their source again."""
        device = self._world.extras[0]
        lost, rank = self._ranks[number], self._make(device, number)
        self._devices[number], self._ranks[number], rank.outputs = device, rank, lost.outputs
        source, checksums = self._sources[number]
        await rank.put(source, tell_nothing)
        if await rank.checksums() != checksums:
            raise InvalidArgumentError(
                f"the weights of rank {number} are others than before {device.name} took it",
                remedy="Change no array or file that a model was loaded from, and have its builder make the same weights each time.",
            )
        await self._open_rank(rank)
        if self._take_over not in self._world.takeovers:  # it was closed meanwhile
            await rank.close()

    async def _open_rank(self, rank: R) -> None:
        """Make one rank ready, which has its weights."""
        await rank.open(tell_nothing)

    async def open(self, on_buckets: Told) -> None:
        """Make the model ready on all ranks, which have their weights."""
        await together(rank.open(on_buckets if rank is self._ranks[0] else tell_nothing) for rank in self._ranks)

    async def changed_weight(self) -> str | None:
        """See :class:`~accel.models.runner.Runner`."""
        return next((name for name in await together(rank.changed_weight() for rank in self._ranks) if name is not None), None)

    async def copied(self) -> Collected:
        """See :class:`~accel.models.runner.Runner`."""
        return Collected(ranks=await together(rank.copied() for rank in self._ranks))

    async def close(self) -> None:
        """See :class:`~accel.models.runner.Runner`. What a device had that was replaced is gone with it."""
        if self._take_over in self._world.takeovers:
            self._world.takeovers.remove(self._take_over)
        present = {*self._world.devices, *self._world.extras}
        await together(rank.close() for device, rank in zip(self._devices, self._ranks, strict=True) if device in present)

    async def on_all(self, operands: Sequence[Operand], timeout: float | None) -> list[list[Operand]]:
        """Return what each rank gets: an array of the host as it is, and of a ref of the first one a copy."""
        deadline = deadline_of(timeout)
        of_ranks: list[list[Operand]] = [[] for _ in self._ranks]
        for operand in operands:
            given: Sequence[Operand] = [operand] * len(of_ranks)
            if isinstance(operand, AccelRef):
                given = await self._world.broadcast(operand, timeout=left(deadline))
            for of_rank, copy in zip(of_ranks, given, strict=True):
                of_rank.append(copy)
        return of_ranks


class WorldRunner(RanksRunner[LibraryRunner]):
    """Runs a model on all ranks of a world at the same time; see :class:`~accel.models.runner.Runner`.

    Parameters
    ----------
    world
        Where.
    source
        Makes the model's adapter on each rank, with its group.
    buckets
        The model's inputs.
    system
        Runs what blocks.
    split
        Which weights each rank has.
    """

    def __init__(self, world: ModelWorld, source: ModelSource, buckets: Buckets, system: ActorSystem, split: Split) -> None:
        size = len(world.devices)
        self._epoch = 0  # the last one that was prepared

        def make(device: ModelDevice, number: int) -> LibraryRunner:
            return LibraryRunner(device, source, buckets, system, ModelGroup(number, size), world.number)

        super().__init__(world, make, split)

    async def describe(self, operands: tuple[AccelRef, ...], timeout: float | None = None) -> OutputSpecs:
        """See :class:`~accel.models.runner.Runner`."""

        def record(rank: LibraryRunner, batch: Any, given: Sequence[Operand], at: tuple[int, int]) -> Array:
            told: Array = batch.get(rank.record_describe(batch, given, at))
            return told

        told = await self._run(Describe.kind, record, operands, timeout)
        found = [rank.described(told) for rank in self._ranks]
        return found[0]

    async def run(self, operands: Sequence[Operand], outputs: tuple[Spec, ...], timeout: float | None) -> Sequence[AccelRef]:
        """See :class:`~accel.models.runner.Runner`."""

        def record(rank: LibraryRunner, batch: Any, given: Sequence[Operand], at: tuple[int, int]) -> Sequence[AccelRef]:
            return rank.record(batch, given, outputs, at)

        return await self._run(Forward.kind, record, operands, timeout)

    async def fetch(
        self, operands: Sequence[Operand], outputs: tuple[Spec, ...], rows: Sequence[int | None], timeout: float | None
    ) -> Sequence[Array]:
        """See :class:`~accel.models.runner.Runner`. That is one message to each rank, and one back."""

        def record(rank: LibraryRunner, batch: Any, given: Sequence[Operand], at: tuple[int, int]) -> Sequence[Array]:
            made = rank.record(batch, given, outputs, at)
            if rank is not self._ranks[0]:
                return []
            return [batch.get(ref if count is None else ref[:count]) for ref, count in zip(made, rows, strict=True)]

        return await self._run(Forward.kind, record, operands, timeout)

    async def _run(
        self,
        what: str,
        record: Callable[[LibraryRunner, Any, Sequence[Operand], tuple[int, int]], T],
        operands: Sequence[Operand],
        timeout: float | None,
    ) -> T:
        """Send a batch to each rank, as ``record`` makes it, and return what it returns for the first.

        The first ones of an epoch make the graphs before.
        """
        deadline, prepares = deadline_of(timeout), False
        of_ranks = await self.on_all(operands, timeout)

        def work(device: ModelDevice, place: Place) -> Coroutine[Any, Any, T]:
            nonlocal prepares
            number = self._devices.index(device)
            if not number:  # the first rank is asked before the others
                prepares, self._epoch = place.epoch != self._epoch, place.epoch
            return send(device, self._ranks[number], of_ranks[number], (place.epoch, place.number))

        async def send(device: ModelDevice, rank: LibraryRunner, given: Sequence[Operand], at: tuple[int, int]) -> T:
            async with device.batch(name=what) as batch:
                if prepares:
                    rank.record_prepare(batch, at)
                return record(rank, batch, given, at)

        try:
            made = await self._world.lockstep(what, work, timeout=left(deadline), grace=lambda: _PREPARING if prepares else 0.0)
            return made[0]
        except AccelError:
            if prepares:
                self._epoch = 0
            raise


class _Sum:
    """Tells how far all ranks have come together."""

    def __init__(self, told: Told, ranks: int) -> None:
        self._told = told
        self._counts = [(0, 0)] * ranks

    def of(self, rank: int) -> Told:
        """Return what one rank tells."""

        def tell(done: int, total: int) -> object:
            self._counts[rank] = done, total
            done, total = map(sum, zip(*self._counts, strict=True))
            return self._told(done, total)

        return tell


async def together(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await calls at the same time. If one raises, the others are cancelled, and its error is raised."""
    errors: tuple[BaseException, ...] = ()
    tasks: list[asyncio.Task[T]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks += [group.create_task(call) for call in calls]
        return [task.result() for task in tasks]
    except BaseExceptionGroup as raised:
        errors = raised.exceptions
    finally:
        # Errors keep the frames that they were raised in, and these would keep refs: this one, and those of all calls.
        tasks.clear()
        del group
    for error in errors:
        traceback.clear_frames(error.__traceback__)
    try:
        raise errors[0]
    finally:
        del error, errors  # their tracebacks hold this frame
