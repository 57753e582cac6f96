"""The lanes of a context, and which of them an op goes to.

``streams=n`` gives a context a pool of n lanes. Independent ops of the built-in libraries, and
batches, are spread over it; ``put`` and ``get`` have a lane each besides. Replays, captures,
kernels that are compiled, and each library of the user's that does not say that it takes several
streams, have a lane of their own, made at its first use. With one stream everything but captures is
in that one.

An op that is spread goes to the first of these that exists:

1. The lane of its newest unfinished dependency: the last write of an operand. A chain of ops stays
   in one stream and waits for no other stream.
2. An idle lane, in the order of their numbers. A lane is made when all before it are busy: a device
   that runs one op at a time has one.
3. The lane with the fewest unfinished ops.

If operands have unfinished writes in several lanes, the write with the most unfinished ops before
it counts as the newest. A batch is placed once, by its first op. The choice orders nothing:
dependencies across lanes are waited for by events.

The first lane has the workspaces of all libraries that were used, and keeps them. Another one gets
those of a library when an op of that library, or a batch that has one, finds all lanes busy that
have them; no op waits for that. When memory is short, idle lanes but the first give their
workspaces back, and ask for none any more in this generation.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from accel.backend import TakesWorkspace
from accel.engine.kernels import LIBRARIES
from accel.engine.lane import Lane
from accel.errors import AccelError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from accel.backend import AccelDevice, AccelStream
    from accel.engine.lane import LaneContext
    from accel.engine.submission import BatchSubmission
    from accel.memory import Block, Timeline
    from accel.ops import Plan
    from accel.storage.buffers import Held

    Streams: TypeAlias = list[tuple[str, AccelStream]]
    """Name of a lane, and its stream."""

__all__ = ["Lanes", "make_streams"]

_OWN_LANES = frozenset({"graph", "capture", "compiler"})
"""Built-in libraries with a lane of their own.

Replays keep one stream. So do kernels of users, whose modules may have state in device memory.
While a stream is captured, whatever is enqueued there becomes a part of the graph.
"""

_BATCH, _MEMORY = "batch", "memory"
"""The libraries that the streams of the pool, and those of transfers, are made for."""


class Lanes:
    """The lanes of one context.

    Parameters
    ----------
    context
        The context.
    count
        How many streams independent ops are spread over.
    equip
        Asks that a lane gets the workspaces of a library. Returns at once; :meth:`on_equipped`
        follows.

    Attributes
    ----------
    all : list of Lane
    pool : list of Lane
        Those over which ops are spread; one more is made when all are busy.
    unused : list of (str, AccelStream)
        The pool's streams that have no lane yet.
    routes : dict
        Library that is open -> its lane; of those that are spread the pool's first.
    spread : set of str
        Libraries whose ops are spread.
    lending : set of str
        Those that were found to need workspaces.
    transfers : dict
        ``"put"`` and ``"get"`` -> lane.
    equipping : Lane or None
        The lane that is being given workspaces.
    takes_workspaces : bool
        Whether libraries work in memory that stays theirs.
    """

    def __init__(self, context: LaneContext, count: int, equip: Callable[[Lane, str], object]) -> None:
        self.all: list[Lane] = []
        self.pool: list[Lane] = []
        self.unused: Streams = []
        self.routes: dict[str, Lane] = {}
        self.spread = set(LIBRARIES) - _OWN_LANES
        self.lending: set[str] = set()
        self.transfers: dict[str, Lane] = {}
        self.equipping: Lane | None = None
        self.takes_workspaces = False
        self._context = context
        self._count = count
        self._equip = equip
        self._named: dict[str, Lane] = {}
        self._free: list[Lane] = []  # of registered libraries that have left: streams are not closed before their context
        self._is_asking = False
        self._is_short = False

    # -- making lanes

    def adopt(self, streams: Streams) -> None:
        """Make lanes of the streams that were made with the context: the pool, and transfers."""
        first = self._add(*streams[0])
        self.pool.append(first)
        first.provided.add(_MEMORY)
        self.takes_workspaces = isinstance(first.stream, TakesWorkspace)
        self.routes[_MEMORY] = first
        self.transfers = dict.fromkeys(("put", "get"), first)
        for name, stream in streams[1:]:
            if name in self.transfers:
                self.transfers[name] = self._add(name, stream)
            else:
                self.unused.append((name, stream))

    def grow(self) -> Lane:
        """Add a lane with the next unused stream to the pool.

        It takes ops of the open libraries that need no workspace there.
        """
        lane = self._add(*self.unused.pop(0))
        for library in self.spread.intersection(self.routes):
            if not self.takes_workspaces or not lane.needs_workspace(library):
                lane.provided.add(library)
        self.pool.append(lane)
        return lane

    def _add(self, name: str, stream: AccelStream) -> Lane:
        lane = Lane(name, self._context, stream)
        self._context.failures.listen(lane)
        self.all.append(lane)
        return lane

    async def named(self, library: str, *, is_own: bool = False, captures: bool = False) -> Lane:
        """Return the lane of a library that is not spread.

        With one stream that is the only one, unless the library ``captures``.
        """
        lane = self._named.get(library)
        if lane is None:
            if self._count == 1 and not captures:
                return self.pool[0]
            if is_own and self._free:
                lane = self._free.pop()
                lane.name = library
            else:
                context = self._context
                create = partial(context.device.create_stream, library=library)
                lane = self._add(library, await context.core.system.run_blocking(context.offloaded.make, create))
            self._named[library] = lane
        return lane

    def leave(self, library: str) -> None:
        """Send no more ops of a registered library; its lane is kept for the next one."""
        self.routes.pop(library, None)
        self.spread.discard(library)
        lane = self._named.pop(library, None)
        if lane is not None:
            self._free.append(lane)
        for lane in self.all:
            lane.provided.discard(library)

    # -- choosing one

    def choose(self, libraries: Collection[str], plan: Plan, blocks: Mapping[int, Block | Held]) -> Lane:
        """Return where an op of some library, or a batch of several, goes; see the module.

        If no lane has the workspaces of them all, it is the first.
        """
        if not self._context.in_flight:
            return self.pool[0]
        newest: Lane | None = None
        most = 0
        for ref in plan.reads + plan.writes:
            block = blocks.get(ref.buffer)
            pending = None if block is None else block.usage.pending_write()
            if pending is not None:
                writer, seq = pending
                if seq - writer.completed > most and (lane := self._pooled(writer)) is not None:
                    newest, most = lane, seq - writer.completed
        if newest is not None and newest.provided.issuperset(libraries):
            return newest
        least, fewest = self.pool[0], math.inf
        lacking: Lane | None = None
        for lane in self.pool:
            unfinished = lane.issued - lane.completed
            if unfinished >= fewest:
                continue
            if not lane.provided.issuperset(libraries):
                lacking = lacking or lane
            elif not unfinished:
                return lane
            else:
                least, fewest = lane, unfinished
        if lacking is None and self.unused:
            lacking = self.grow()
            if lacking.provided.issuperset(libraries):
                return lacking
        if lacking is not None and not self._is_asking:
            self._is_asking = True
            self._equip(lacking, next(library for library in libraries if library not in lacking.provided))
        return least

    def choose_for(self, batch: BatchSubmission, own: Collection[str], blocks: Mapping[int, Block | Held]) -> Lane:
        """Return where a batch goes, all of it.

        Ops of one registered library, and copies for them, go where its other ops do. Other
        libraries that are not spread keep to one stream for batches, the pool's first.
        """
        if batch.places and (lane := self._pooled(batch.places[0][0])) is not None:  # some of it is there already
            return lane
        libraries = set(batch.libraries) - {_MEMORY}
        if not libraries.issubset(self.spread):
            return self.routes[libraries.pop()] if len(libraries) == 1 and libraries.issubset(own) else self.pool[0]
        return self.choose(libraries & self.lending, batch.plans[0], blocks) if batch.plans else self.pool[0]

    def _pooled(self, writer: Timeline) -> Lane | None:
        return writer if isinstance(writer, Lane) and writer in self.pool else None

    # -- workspaces

    def lanes_with(self, library: str) -> list[Lane]:
        """Return the lanes that take ops of an open library."""
        if library not in self.spread:
            return [self.routes[library]]
        return [lane for lane in self.pool if library in lane.provided]

    def on_equipped(self) -> None:
        """Note that the lane has what was asked for, or cannot have it."""
        self.equipping = None
        self._is_asking = self._is_short

    def stop_equipping(self) -> None:
        """Ask for no more workspaces: there was a shortage of memory."""
        self._is_asking = self._is_short = True

    def idle_lanes(self) -> list[Lane]:
        """Return the lanes whose workspaces can be given back now."""
        return [lane for lane in self.pool[1:] if lane is not self.equipping and lane.is_idle()]


def make_streams(device: AccelDevice, count: int) -> tuple[Streams, Exception | None]:
    """Make the streams of a context; blocks.

    They are made together: to make one on a busy device would hold up launches. Where another
    stream cannot be had, there are fewer; then what was raised is returned besides.
    """
    names = [("lane-1", _BATCH)]
    if count > 1:
        names += [("put", _MEMORY), ("get", _MEMORY)] + [(f"lane-{number}", _BATCH) for number in range(2, count + 1)]
    streams: Streams = []
    try:
        for name, library in names:
            streams.append((name, device.create_stream(library=library)))
    except Exception as raised:
        if not streams or (isinstance(raised, AccelError) and raised.is_fault):
            raise
        return streams, raised
    return streams, None
