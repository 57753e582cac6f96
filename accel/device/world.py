"""A world: several devices as ranks, to which one controller sends collectives in one order."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import numpy as np

from accel.device.collectives import Collectives, Refs, check_refs, ops_at, picked
from accel.device.world_recording import WorldBatch, WorldGraph
from accel.dtype import native
from accel.engine.attribution import Attribution
from accel.errors import InvalidArgumentError, UnsupportedError
from accel.hints import NotEntered
from accel.models import Model
from accel.models.world_runner import together
from accel.ops.collective import check_rank
from accel.ref import AccelRef
from accel.values import check_choice, check_count, check_seconds

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from accel.device.collectives import Makers
    from accel.device.device import Device
    from accel.device.epochs import Epochs, Place
    from accel.device.rank import DeviceRank
    from accel.engine.lifecycle import DeviceState

__all__ = ["World", "check_world"]

T = TypeVar("T")
Later: TypeAlias = Coroutine[Any, Any, T]
"""What a method returns that is awaited."""

_MOST_RANKS = 1024
"""The most ranks that a caller may ask for."""


def check_world(
    ranks: int | None,
    extras: int,
    on_loss: str,
    hang_timeout: float | None,
    join_timeout: float,
    pending_limit: int,
    overload: str,
) -> dict[str, Any]:
    """Return options of :meth:`accel.System.open_world` as those of :class:`Epochs`; raise if one is wrong.

    ``extras`` is how many extra devices there are.
    """
    check_choice("on_loss", on_loss, "replace", "shrink")
    check_choice("overload", overload, "wait", "reject")
    check_count("pending_limit", pending_limit)
    check_seconds("join_timeout", join_timeout, or_zero=False)
    if hang_timeout is not None:
        check_seconds("hang_timeout", hang_timeout, or_zero=False)
    if ranks is not None and check_count("ranks", ranks) > _MOST_RANKS:
        raise InvalidArgumentError(f"ranks is {ranks}", remedy=f"Give at most {_MOST_RANKS}.")
    if extras and on_loss == "shrink":
        raise InvalidArgumentError("a world that shrinks has no use for extra devices", remedy='Leave extra= out, or on_loss="shrink".')
    return {
        "on_loss": on_loss,
        "hang_timeout": hang_timeout,
        "join_timeout": join_timeout,
        "limit": pending_limit,
        "waits": overload == "wait",
    }


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
        devices: Mapping[DeviceRank, Device],
        form: Callable[[Sequence[Device]], Awaitable[World]],
        *,
        owns_devices: bool,
    ) -> None:
        self._epochs = epochs  # the communicators; the caller opens them after this
        # Makes a world of other devices, which it owns: with the options of this one, but for
        # on_loss="replace".
        self._form = form
        self._devices = devices  # all that were a rank or an extra; epochs.ranks are the ranks now
        self._owns_devices = owns_devices  # they were opened for this world, and aclose() closes them
        # Until leave(): a device that is in a world lends another one that is in a world a copy, and
        # not the buffer itself; see Peers.
        for rank in devices:
            rank.core.worlds.add(epochs.number)

    def __repr__(self) -> str:
        return f"<World {self._epochs.number} of {self.size} ranks {self.state.value} epoch {self.epoch}>"

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices, by their ranks."""
        return tuple(self._devices[rank] for rank in self._ranks)

    @property
    def extras(self) -> tuple[Device, ...]:
        """The devices that stand by; the first one takes the next rank whose device is LOST."""
        return tuple(self._devices[rank] for rank in cast("list[DeviceRank]", self._epochs.extras))

    @property
    def takeovers(self) -> list[Callable[[int], Awaitable[object]]]:
        """Functions that are called with the number of a rank, before the first of :attr:`extras` takes it.

        A model loads the rank's weights on that device.
        """
        return self._epochs.takeovers

    @property
    def name(self) -> str:
        """The name in logs and metrics: ``"world:1"``."""
        return self._epochs.lifecycle.name

    @property
    def number(self) -> int:
        """The number of the world, among those of its system, from 1."""
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
        """The present ranks: :class:`Epochs` has the ranks that it was given."""
        return cast("list[DeviceRank]", self._epochs.ranks)

    async def each(self, work: Callable[[Device, int], Awaitable[T]]) -> tuple[T, ...]:
        """Run ``work(device, rank)`` for each rank at the same time, and return the results.

        If one raises, the others are cancelled, and the first error is raised when they have ended.
        """

        async def run(device: Device, rank: int) -> T:
            return await work(device, rank)

        return tuple(await together(run(device, rank) for rank, device in enumerate(self.devices)))

    async def lockstep(
        self,
        what: str,
        work: Callable[[Device, Place], Coroutine[Any, Any, T]],
        *,
        timeout: float | None = None,
        grace: Callable[[], float] = lambda: 0.0,
    ) -> tuple[T, ...]:
        """Run work on all ranks as one collective, and return the results.

        For ops that have collectives in them. The work is sent when all ranks are READY, at the same place among
        the collectives on each. It raises :class:`~accel.WorldChangedError` if the epoch ends before
        all ranks have ended it.

        Parameters
        ----------
        what
            Its name in reports.
        work
            ``work(device, place)`` is called for each rank, in the order of :attr:`devices`, and
            returns a coroutine, which sends one op, or one batch, before it waits for anything. The
            op carries ``place.epoch`` and ``place.number``, by which the ranks' ops find each other.
        timeout
            Seconds of waiting. What was sent then runs on.
        grace
            Called right after it was sent. Returns seconds that it may take besides the ``hang_timeout``.
        """

        def start(place: Place) -> list[Coroutine[Any, Any, T] | None]:
            """Return the work of each rank; see :data:`accel.device.epochs.Start`."""
            with contextlib.ExitStack() as on_error:
                running: list[Any] = []
                for device in self.devices:
                    made: Any = work(device, place)
                    if not asyncio.iscoroutine(made):
                        raise InvalidArgumentError(f"work has returned {made!r:.80}", op=what, remedy="Give an `async def` function.")
                    running.append(on_error.enter_context(contextlib.closing(made)))
                on_error.pop_all()
            return running

        return tuple(await self._epochs.run(what, start, timeout, grace=grace))

    async def broadcast(self, source: Any, *, root: int = 0, out: Sequence[AccelRef] | None = None, timeout: float | None = None) -> Refs:
        """Give every rank the array of rank ``root``: a ref of its device, or a host array, which is put there."""
        return await self._with_source(super().broadcast, source, root, out, timeout)

    async def scatter(
        self, source: Any, *, root: int = 0, axis: int = 0, out: Sequence[AccelRef] | None = None, timeout: float | None = None
    ) -> Refs:
        """Give each rank its part of the array of rank ``root``.

        Parameters
        ----------
        source
            A ref of the device of ``root``, or a host array, which is put there. Its length along
            ``axis`` is a multiple of the number of ranks.
        axis
            The dimension along which it is cut: 0 for a ref.
        """
        if type(axis) is not int:
            raise InvalidArgumentError(f"axis is {axis!r:.80}", remedy="Give the number of a dimension.")
        if axis == 0:
            return await self._with_source(super().scatter, source, root, out, timeout)
        if isinstance(source, AccelRef):
            raise InvalidArgumentError(
                f"axis is {axis!r}, and a ref is cut along axis 0", remedy="Give a host array, or transpose it before."
            )
        check_rank("root", root, self.size)
        rank = self._ranks[root]
        deadline = rank.sender.deadline_after(timeout)
        outs = None if out is None else [ref.reshape(1, *ref.shape) for ref in check_refs("out", out, self.size)]
        try:
            parts = await rank.core.system.run_blocking(_parts, source, self.size, axis)
        except (ValueError, TypeError, IndexError) as error:
            raise InvalidArgumentError(f"source cannot be cut into {self.size} equal parts along axis {axis}: {error}") from error
        left = rank.sender.seconds_left(deadline)
        return tuple(share[0] for share in await self._with_source(super().scatter, parts, root, outs, left))

    async def load_model(self, target: Any, *, split: Mapping[str, int] | None = None, **options: Any) -> Model:
        """Load a model that all ranks run together, and return it, ready.

        Parameters
        ----------
        target
            As for :meth:`accel.Device.load_model`, but that a function which builds a
            ``torch.nn.Module`` is called with the group of ranks, ``build(group)``, and so is the
            class of an adapter, before its options. ``group.rank`` and ``group.size`` say which part
            to build; ``group.all_reduce(tensor)`` and others are for forwards: see
            :class:`accel.models.ModelGroup`. A coroutine function of refs runs for each rank, and gets an
            :class:`accel.models.RefGroup` in the place of the device.
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
        await self._epochs.wait_ready(None)
        return await Model.load(self, target, split=split, system=self._ranks[0].core.system, **options)

    async def _with_source(
        self, send: Callable[..., Later[Refs]], source: Any, root: int, out: Sequence[AccelRef] | None, timeout: float | None
    ) -> Refs:
        """Put a source that is no ref on the root's device, and send the collective within one timeout."""
        check_rank("root", root, self.size)
        sender = self._ranks[root].sender
        deadline = sender.deadline_after(timeout)
        if not isinstance(source, AccelRef):
            source = await self.devices[root].put(source, timeout=timeout)
        return await send(source, root=root, out=out, timeout=sender.seconds_left(deadline))

    async def _send(self, what: str, makers: Callable[[int], Makers], timeout: float | None, result: int | None) -> Any:
        """See :meth:`Collectives._send`."""
        writes: list[tuple[DeviceRank, tuple[AccelRef, ...]]] = []

        def start(place: Place) -> list[Coroutine[Any, Any, Any] | None]:
            """Check all ops before the first is sent."""
            parts = list(zip(self._ranks, ops_at(place, makers(place.size)), strict=True))
            writes.extend((rank, rank.check(op)) for rank, op in parts if op is not None)
            return [None if op is None else rank.sender.run(op, None) for rank, op in parts]

        def on_lost() -> None:
            for rank, refs in writes:
                rank.tear(refs)

        return picked(await self._epochs.run(what, start, timeout, on_lost=on_lost), result)

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
        """Open a second world like this one, for work that may kill a rank, and close it at the end.

        ``async with world.quarantine() as other:``. It has a :meth:`accel.Device.quarantine` of each
        device of this world.
        """
        if self._epochs.lifecycle.is_final:
            raise self._epochs.lifecycle.final_error()
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
        return Attribution(*(rank.core.attributions for rank in self._ranks))

    def graph(self, *, timeout: float | None = None) -> WorldGraph:
        """Return a graph: ``async with world.graph() as graph`` records ops of all ranks without running them.

        ``await graph.replay()`` then runs them all, on all ranks.

        Parameters
        ----------
        timeout
            Seconds of waiting for the block's end.
        """
        return WorldGraph(self._epochs, timeout)

    async def leave(self) -> None:
        """Close the world, and no device. Idempotent."""
        await self._epochs.aclose()
        for rank in self._devices:
            rank.core.worlds.discard(self.number)

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


def _parts(source: Any, count: int, axis: int) -> np.ndarray[Any, Any]:
    """Return a copy of an array, as its equal parts along an axis, which become the first dimension."""
    return np.stack(np.split(native(source), count, axis))
