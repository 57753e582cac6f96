"""A world: several devices as ranks, whose collectives one controller orders."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Self, TypeAlias, TypeVar, cast

import numpy as np

from accel.device.pool import all_or_nothing
from accel.dtype import native
from accel.engine.attribution import Attribution
from accel.errors import (
    ClosedError,
    InvalidArgumentError,
    NotInitializedError,
    UnsupportedError,
    WorldChangedError,
)
from accel.hints import NotEntered
from accel.models import Model
from accel.ops import collective
from accel.ops.base import operand
from accel.ref import AccelRef
from accel.values import check_count

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
    from types import TracebackType

    from accel.device.device import Device
    from accel.device.epochs import Epochs, Place
    from accel.device.rank import DeviceRank, RankBatch
    from accel.engine.lifecycle import DeviceState
    from accel.ops.collective import Collective, Reduction

__all__ = ["World", "WorldBatch"]

T = TypeVar("T")
Refs: TypeAlias = tuple[AccelRef, ...]
"""One ref a rank, in the order of the ranks."""
Many = TypeVar("Many")
One = TypeVar("One")
Nothing = TypeVar("Nothing")

Makers: TypeAlias = "list[Callable[..., Collective] | None]"
"""For each rank, what makes its op, given its place; ``None`` where it takes no part."""


class Collectives(Generic[Many, One, Nothing]):
    """The collectives of a world: awaited, or recorded by a batch.

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
            Given the number of ranks, checks operands and returns what makes each op.
        timeout
            Of the await.
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
            _check_rank("source", source, size)
            _check_rank("target", target, size)
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
        def makers(size: int) -> Makers:
            sources, outs = _refs("source", source, size), _outs(out, size)
            return [partial(kind, source=ref, out=target, **options) for ref, target in zip(sources, outs, strict=True)]

        return self._send(kind.kind, makers, timeout, -1)

    def _to_root(
        self, kind: Any, source: Sequence[AccelRef], root: int, out: AccelRef | None, timeout: float | None, **options: Any
    ) -> Any:
        def makers(size: int) -> Makers:
            _check_rank("root", root, size)
            sources = _refs("source", source, size)
            return [partial(kind, source=ref, root=root, out=out if rank == root else None, **options) for rank, ref in enumerate(sources)]

        return self._send(kind.kind, makers, timeout, root)

    def _from_root(self, kind: Any, source: AccelRef, root: int, out: Sequence[AccelRef] | None, timeout: float | None) -> Any:
        array = operand("source", source)

        def makers(size: int) -> Makers:
            _check_rank("root", root, size)
            known = partial(kind, shape=array.shape, dtype=array.dtype, root=root)
            return [partial(known, source=array if rank == root else None, out=ref) for rank, ref in enumerate(_outs(out, size))]

        return self._send(kind.kind, makers, timeout, -1)


Later: TypeAlias = Coroutine[Any, Any, T]


class World(Collectives[Later[Refs], Later[AccelRef], Later[None]], NotEntered):
    """Several devices as the ranks of one communicator; made by :meth:`accel.System.open_world`.

    Collectives are sent to all ranks together, when all are READY, and run in the order of sending.
    A deadline or a cancellation before that drops one everywhere; after it the caller detaches, and
    all ranks run it.

    When a rank is lost, what was sent raises :class:`~accel.WorldChangedError`, and the world goes on
    in its next epoch: the others keep their generation, their refs and their weights.
    """

    def __init__(
        self,
        epochs: Epochs,
        devices: Sequence[Device],
        ranks: Sequence[DeviceRank],
        form: Callable[[Sequence[Device]], Awaitable[World]],
        *,
        owns_devices: bool,
    ) -> None:
        self._epochs = epochs
        self._form = form  # another world with the options of this one
        self._devices = dict(zip(ranks, devices, strict=True))
        self._owns_devices = owns_devices

    def __repr__(self) -> str:
        return f"<World {self._epochs.number} of {self.size} ranks {self.state.value} epoch {self.epoch}>"

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices, by their ranks."""
        return tuple(self._devices[rank] for rank in self._ranks)

    @property
    def name(self) -> str:
        """What logs and metrics call it: ``"world:1"``."""
        return self._epochs.lifecycle.name

    @property
    def number(self) -> int:
        """Of the world, among those of its system, from 1."""
        return self._epochs.number

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._epochs.size

    @property
    def epoch(self) -> int:
        """Number of the newest communicator, from 1."""
        return self._epochs.lifecycle.generation

    @property
    def state(self) -> DeviceState:
        """STARTING, READY, REBUILDING while the ranks join anew, LOST or CLOSED."""
        return self._epochs.lifecycle.state

    def generations(self) -> AsyncIterator[int]:
        """Iterate over epochs: the present one once it is READY, then the newest after each change.

        Ends when the world is closed; raises :class:`~accel.DeviceLostError` when it is lost.
        """
        return self._epochs.lifecycle.generations()

    @property
    def _ranks(self) -> list[DeviceRank]:
        return cast("list[DeviceRank]", self._epochs.ranks)

    async def each(self, work: Callable[[Device, int], Awaitable[T]]) -> tuple[T, ...]:
        """Run ``work(device, rank)`` for each rank at the same time, and return the results.

        If one raises, the others are cancelled, and the first error is raised when they have ended.
        """

        async def run(device: Device, rank: int) -> T:
            return await work(device, rank)

        async def keep(_: T) -> None:
            """Undo nothing: what was made is dropped."""

        return tuple(await all_or_nothing([run(device, rank) for rank, device in enumerate(self.devices)], keep))

    async def lockstep(
        self, what: str, work: Callable[[Device, Place], Coroutine[Any, Any, T]], *, timeout: float | None = None
    ) -> tuple[T, ...]:
        """Run work on all ranks as one collective, and return the results: for ops that have collectives in them.

        It is sent when all ranks are READY, at the same place among the collectives on each, and it
        fails with the epoch.

        Parameters
        ----------
        what
            Its name in reports.
        work
            ``work(device, place)`` returns a coroutine for each rank, which sends one op, or one
            batch, before it waits for anything.
        timeout
            Seconds of waiting. What was sent then runs on.
        """

        def start(place: Place) -> list[Coroutine[Any, Any, T] | None]:
            return [work(device, place) for device in self.devices]

        return tuple(await self._epochs.run(what, start, timeout))

    async def broadcast(self, source: Any, *, root: int = 0, out: Sequence[AccelRef] | None = None, timeout: float | None = None) -> Refs:
        """Give every rank the array of rank ``root``: a ref there, or a host array, which is put there."""
        return await self._with_source(super().broadcast, source, root, out, timeout)

    async def scatter(
        self, source: Any, *, root: int = 0, axis: int = 0, out: Sequence[AccelRef] | None = None, timeout: float | None = None
    ) -> Refs:
        """Give each rank its part of the array of rank ``root``: a ref there, or a host array, which is put there.

        Parameters
        ----------
        source
            The array; its length along ``axis`` is a multiple of the number of ranks.
        axis
            Along which it is cut: 0 for a ref.
        """
        if axis == 0:
            return await self._with_source(super().scatter, source, root, out, timeout)
        if isinstance(source, AccelRef):
            raise InvalidArgumentError(
                f"axis is {axis!r}, and a ref is cut along axis 0", remedy="Give a host array, or transpose it before."
            )
        try:
            parts = np.stack(np.split(native(source), self.size, axis))
        except (ValueError, TypeError, IndexError) as error:
            raise InvalidArgumentError(f"source cannot be cut into {self.size} equal parts along axis {axis!r}: {error}") from error
        shares = await self._with_source(
            super().scatter, parts, root, None if out is None else [ref.reshape(1, *ref.shape) for ref in out], timeout
        )
        return tuple(share[0] for share in shares)

    async def load_model(self, target: Any, *, split: Mapping[str, int] | None = None, **options: Any) -> Model:
        """Load a model that all ranks run together, and return it, ready.

        Parameters
        ----------
        target
            As for :meth:`accel.Device.load_model`, but that a function which builds a
            ``torch.nn.Module`` is called with the group of ranks, ``build(group)``, and so is the
            class of an adapter, before its options. ``group.rank`` and ``group.size`` say which part
            to build; ``group.all_reduce(tensor)`` and others are for forwards: see
            :class:`accel.models.ModelGroup`.
        split
            Pattern of names -> dimension along which these weights are divided into equal parts, one a
            rank: ``{"*.up.weight": 0, "*.down.weight": 1}``. Each rank reads its own part of a file
            alone. It has all of the weights that no pattern matches.
        **options
            The other arguments of :meth:`accel.Device.load_model`.

        Raises
        ------
        InvalidArgumentError
            Also if a pattern matches no weight, or a weight cannot be divided so: the message names it.
        UnsupportedError
            Also if the world shrinks: its ranks would have too few parts.
        AccelError
            As :meth:`accel.Device.load_model`; then nothing is left on the devices.

        Notes
        -----
        The inputs are given to all ranks, and the outputs are those of rank 0, on its device. When a
        rank is lost, calls raise :class:`~accel.WorldChangedError`, and a service runs its items again
        in the next epoch: weights stay where they are, and graphs are made anew.
        """
        if self._epochs.shrinks:
            raise UnsupportedError(
                f"{self.name} shrinks, and each of its ranks would have a part of the model",
                remedy='Open it with on_loss="replace".',
            )
        return await Model.load(self, target, split=split, system=self._ranks[0].system, **options)

    async def _with_source(
        self, send: Callable[..., Later[Refs]], source: Any, root: int, out: Sequence[AccelRef] | None, timeout: float | None
    ) -> Refs:
        """Put a source that is no ref on the root's device, then send."""
        _check_rank("root", root, self.size)
        loop = asyncio.get_running_loop()
        began = loop.time()
        if not isinstance(source, AccelRef):
            source = await self.devices[root].put(source, timeout=timeout)
        left = None if timeout is None else timeout - (loop.time() - began)
        return await send(source, root=root, out=out, timeout=left)

    async def _send(self, what: str, makers: Callable[[int], Makers], timeout: float | None, result: int | None) -> Any:
        """See :meth:`Collectives._send`."""

        def start(place: Place) -> list[Coroutine[Any, Any, Any] | None]:
            ranks, ops = self._ranks, _ops_at(place, makers(place.size))
            for rank, op in zip(ranks, ops, strict=True):
                if op is not None:
                    rank.check(op)
            return [None if op is None else rank.sender.run(op, None) for rank, op in zip(ranks, ops, strict=True)]

        return _picked(await self._epochs.run(what, start, timeout), result)

    def batch(self, *, timeout: float | None = None) -> WorldBatch:
        """Return a batch: ``async with world.batch() as batch`` records collectives without awaiting them.

        They are sent when the block ends, as one message to each rank.

        Parameters
        ----------
        timeout
            Seconds of waiting for the block's end.
        """
        return WorldBatch(self._epochs, timeout)

    @contextlib.asynccontextmanager
    async def quarantine(self) -> AsyncIterator[World]:
        """Return a block with a second world like this one, for work that may kill a rank.

        Its devices are those of :meth:`accel.Device.quarantine`, one for each of this world's.
        """
        async with contextlib.AsyncExitStack() as stack:
            world = await self._form([await stack.enter_async_context(device.quarantine()) for device in self.devices])
            try:
                yield world
            except BaseException:
                await world.aclose(timeout=0.0)
                raise
            await world.aclose()

    def attribution(self) -> Attribution:
        """Declare work that is examined if a rank dies while it is on the devices; see :meth:`accel.Device.attribution`."""
        return Attribution(*(rank.attributions for rank in self._ranks))

    async def leave(self) -> None:
        """Close the world, and no device. Idempotent."""
        await self._epochs.aclose()

    async def aclose(self, *, timeout: float | None = None) -> None:
        """Close the world, and the devices that were opened for it. Idempotent.

        Parameters
        ----------
        timeout
            As for :meth:`accel.Device.aclose`.
        """
        await self.leave()
        if self._owns_devices:
            await asyncio.gather(*(device.aclose(timeout=timeout) for device in self._devices.values()))


class WorldBatch(Collectives[Refs, AccelRef, None]):
    """Records collectives inside ``async with world.batch() as batch:``.

    They are sent when the block ends, as one message to each rank. Methods return refs at once; in
    the block only later collectives of the batch can use them. If the body raises, nothing is sent.

    Raises
    ------
    WorldChangedError
        At the end of the block: the epoch in which it began is over.
    """

    def __init__(self, epochs: Epochs, timeout: float | None) -> None:
        self._epochs = epochs
        self._timeout = timeout
        self._place: Place | None = None  # once it was entered; the number is that of the next collective, from 0
        self._recorders: list[tuple[DeviceRank, RankBatch]] = []  # during the block

    async def __aenter__(self) -> Self:
        if self._place is not None:
            raise ClosedError("a batch is recorded once", remedy="Call world.batch() for each block.")
        await self._epochs.wait_ready(self._timeout)
        self._place, ranks = self._epochs.place(0), cast("list[DeviceRank]", self._epochs.ranks)
        self._recorders = [(rank, rank.batch()) for rank in ranks]
        for _, batch in self._recorders:
            await batch.__aenter__()
        return self

    def _send(self, what: str, makers: Callable[[int], Makers], timeout: float | None, result: int | None) -> Any:
        """See :meth:`Collectives._send`."""
        place = self._place
        if place is None or not self._recorders:
            raise NotInitializedError("the batch records inside its block only", remedy="Use `async with world.batch() as batch:`.")
        if timeout is not None:
            raise InvalidArgumentError("a collective of a batch has no timeout of its own", remedy="Use world.batch(timeout=...).")
        parts = [(*recorder, op) for recorder, op in zip(self._recorders, _ops_at(place, makers(place.size)), strict=True)]
        for rank, batch, op in parts:  # all before the first is recorded
            if op is not None:
                rank.check(op, batch)
        self._place = dataclasses.replace(place, number=place.number + 1)
        return _picked([None if op is None else batch.run(op) for _, batch, op in parts], result)

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Send what was recorded to all ranks, and wait for its end; send nothing if the body has raised."""
        recorded, (batches, self._recorders) = self._place, ([batch for _, batch in self._recorders], [])
        assert recorded is not None, "it was entered"
        is_sent = False

        def start(place: Place) -> list[Coroutine[Any, Any, Any] | None]:
            nonlocal is_sent
            if place.epoch != recorded.epoch:
                raise WorldChangedError("the world has changed while the batch was recorded", executed="no", op="batch")
            for batch in batches:
                batch.number(place.number)
            is_sent = True
            return [batch.__aexit__(None, None, None) for batch in batches]

        try:
            if error is None and recorded.number:
                await self._epochs.run("batch", start, self._timeout, recorded.number)
        except BaseException as raised:
            kind, error = type(raised), raised
            raise
        finally:
            if not is_sent:
                for batch in batches:
                    await batch.__aexit__(kind, error, trace)
            del error


def _ops_at(place: Place, makers: Makers) -> list[Collective | None]:
    """Return the op of each rank."""
    made = (place.world, place.epoch, place.number)
    return [None if make is None else make(*made, rank, place.size) for rank, make in enumerate(makers)]


def _picked(results: list[Any], result: int | None) -> Any:
    """Return what a caller gets of the results of all ranks."""
    return None if result is None else tuple(results) if result < 0 else results[result]


def _refs(name: str, refs: object, size: int) -> Sequence[AccelRef]:
    """Return one ref a rank, of one shape and dtype."""
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
    """Return where each rank writes its result."""
    return [None] * size if out is None else _refs("out", out, size)


def _check_rank(name: str, rank: int, size: int) -> None:
    if check_count(name, rank, 0) >= size:
        raise InvalidArgumentError(f"{name} is {rank}, and there are {size} ranks", remedy="Ranks are counted from 0.")
