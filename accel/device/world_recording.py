"""Recorders of a world: batches of collectives, and graphs with collectives."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar, cast

from accel.device.collectives import Collectives, Refs, ops_at, picked
from accel.device.rank import RankBatch, RankGraph
from accel.errors import ClosedError, InvalidArgumentError, NotInitializedError, WorldChangedError
from accel.ops.collective import check_rank
from accel.ref import AccelRef

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from types import TracebackType

    from accel.device.collectives import Makers
    from accel.device.epochs import Epochs, Place, Start
    from accel.device.rank import DeviceRank

__all__ = ["WorldBatch", "WorldGraph"]

R = TypeVar("R", RankBatch, RankGraph)


class _WorldRecorder(Collectives[Refs, AccelRef, None], Generic[R]):
    """Records collectives in its ``async with`` block, by a recorder for each rank.

    Parameters
    ----------
    epochs
        The world's.
    timeout
        Seconds of waiting at the beginning of the block, and as many at its end.
    """

    what: ClassVar[str]
    """The word for it in errors: ``"batch"`` or ``"graph"``."""

    def __init__(self, epochs: Epochs, timeout: float | None) -> None:
        self._epochs = epochs
        self._timeout = timeout
        # Of the next collective, in the epoch in which the block has begun. Its number is 0, as that
        # of collectives without a number; in a batch it counts those that are recorded, from 0.
        self._place: Place | None = None
        self._recorders: list[tuple[DeviceRank, R]] = []  # by rank

    def _recorder(self, rank: DeviceRank) -> R:
        """Return a new recorder for the ops of one rank."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        """Wait until the world is READY, and begin to record, in its present epoch."""
        if self._place is not None:
            raise ClosedError(f"a {self.what} is recorded once", remedy=f"Call world.{self.what}() for each block.")
        await self._epochs.wait_ready(self._timeout)
        self._place, ranks = self._epochs.place(0), cast("list[DeviceRank]", self._epochs.ranks)
        self._recorders = [(rank, self._recorder(rank)) for rank in ranks]
        for _, recorder in self._recorders:
            await recorder.__aenter__()
        return self

    def _send(self, what: str, makers: Callable[[int], Makers], timeout: float | None, result: int | None) -> Any:
        """See :meth:`Collectives._send`."""
        place = self._place
        if place is None or not self._recorders[0][1].is_recording:
            remedy = f"Use `async with world.{self.what}() as {self.what}:`."
            raise NotInitializedError(f"the {self.what} records inside its block only", remedy=remedy)
        if timeout is not None:
            raise InvalidArgumentError(
                f"a collective of a {self.what} has no timeout of its own", remedy=f"Use world.{self.what}(timeout=...)."
            )
        parts = list(zip(self._recorders, ops_at(place, makers(place.size)), strict=True))
        for (rank, recorder), op in parts:  # all of them, before the first is recorded
            if op is not None:
                rank.check(op, recorder)
        return picked([None if op is None else recorder.collective(op) for (_, recorder), op in parts], result)

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Send the recorded ops to all ranks, and await their end; send none if the body has raised."""
        is_sent = False

        def start(place: Place) -> Sequence[Coroutine[Any, Any, None]]:
            """End the block of each rank's recorder, which sends its ops; see :data:`.epochs.Start`."""
            nonlocal is_sent
            self._check_epoch(place)
            for rank, _ in self._recorders:
                rank.sender.guard()
            self._set_place(place)
            is_sent = True
            return [recorder.__aexit__(None, None, None) for _, recorder in self._recorders]

        try:
            if error is None:
                await self._run(start)
        except BaseException as raised:
            kind, error = type(raised), raised
            raise
        finally:
            if not is_sent:  # have the recorders drop their ops
                for _, recorder in self._recorders:
                    await recorder.__aexit__(kind, error, trace)
            del error

    async def _run(self, start: Start) -> None:
        """Have :meth:`Epochs.run` call ``start``, and wait for the end of all ranks."""
        raise NotImplementedError

    def _set_place(self, place: Place) -> None:
        """Set the numbers of recorded collectives, of which ``place`` has the first, if they have any."""

    def _check_epoch(self, place: Place) -> None:
        """Raise unless the block has begun, in the epoch of ``place``: nothing is sent."""
        if self._place is None:
            raise NotInitializedError(
                f"the {self.what} is not recorded yet", remedy=f"Use `async with world.{self.what}() as {self.what}:` before."
            )
        if place.epoch != self._place.epoch:
            raise WorldChangedError(f"the world has changed since the {self.what} was recorded", executed="no", op=self.what)


class WorldBatch(_WorldRecorder[RankBatch]):
    """Records collectives inside ``async with world.batch() as batch:``.

    They are sent when the block ends, as one message to each rank. Methods return refs at once; in
    the block only later collectives of the batch can use them. If the body raises, nothing is sent.

    Raises
    ------
    WorldChangedError
        At the end of the block: the epoch in which it began is over.
    """

    what = "batch"

    def _recorder(self, rank: DeviceRank) -> RankBatch:
        return rank.batch()

    def _send(self, what: str, makers: Callable[[int], Makers], timeout: float | None, result: int | None) -> Any:
        """See :meth:`Collectives._send`; counts the collectives."""
        recorded = super()._send(what, makers, timeout, result)
        assert self._place is not None, "it was entered"
        self._place = dataclasses.replace(self._place, number=self._place.number + 1)
        return recorded

    async def _run(self, start: Start) -> None:
        """See :meth:`_WorldRecorder._run`. An empty batch is not sent."""
        assert self._place is not None, "it was entered"
        if self._place.number:
            await self._epochs.run("batch", start, self._timeout, self._place.number, on_lost=self._tear)

    def _set_place(self, place: Place) -> None:
        """See :meth:`_WorldRecorder._set_place`."""
        for _, batch in self._recorders:
            batch.set_numbers(place.number)

    def _tear(self) -> None:
        """Mark the durable buffers that it writes as torn; called if the epoch ends before it."""
        for rank, batch in self._recorders:
            rank.tear(batch.writes)


class WorldGraph(_WorldRecorder[RankGraph]):
    """Records ops of all ranks inside ``async with world.graph() as graph:``, to be run again and again.

    ``graph.all_reduce(...)`` records a collective, ``graph[rank].blas.gemm(...)`` an op of one rank;
    see :class:`~accel.Graph` for its refs. When the epoch ends, the graph is to be recorded anew.

    Its collectives have no numbers: these would be the same in each replay, and reports of hangs
    compare numbers with those of other collectives.
    """

    what = "graph"

    def _recorder(self, rank: DeviceRank) -> RankGraph:
        return rank.graph()

    def __getitem__(self, rank: int) -> RankGraph:
        """Return the recorder of one rank's ops."""
        if not self._recorders:
            raise NotInitializedError("the graph records inside its block only", remedy="Use `async with world.graph() as graph:`.")
        check_rank("rank", rank, len(self._recorders))
        return self._recorders[rank][1]

    async def _run(self, start: Start) -> None:
        """See :meth:`_WorldRecorder._run`. All ranks capture their graphs; nothing runs."""
        await self._epochs.run("capture", start, self._timeout)

    async def replay(self, *, timeout: float | None = None) -> None:
        """Run the recorded ops on all ranks; returns when they have ended.

        Raises
        ------
        WorldChangedError
            The epoch has ended, before or while they ran: record the graph anew.
        StaleRefError, NotInitializedError, ClosedError
            See :meth:`accel.Graph.replay`.
        """

        def start(place: Place) -> Sequence[Coroutine[Any, Any, None]]:
            """Check the graphs of all ranks before the first replay is sent."""
            self._check_epoch(place)
            for rank, graph in self._recorders:
                rank.sender.guard()
                graph.check()
            return [graph.replay() for _, graph in self._recorders]

        await self._epochs.run("replay", start, timeout)

    async def aclose(self) -> None:
        """Release the graph; see :meth:`accel.Graph.aclose`."""
        for _, graph in self._recorders:
            await graph.aclose()
