"""The lanes of a context, and which of them an op goes to.

``streams=n`` gives a context a pool of n lanes. Independent ops of the built-in libraries, and
batches, are spread over it; ``put`` and ``get`` have a lane each besides. Replays, captures,
kernels that are compiled, and each library of the user's that does not say that it takes several
streams, have a lane of their own, made at its first use. With one stream everything but captures is
in that one.

An op that is spread over the pool goes to the first of these that exists:

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
    from collections.abc import Callable, Collection

    from accel.backend import AccelDevice, AccelStream
    from accel.engine.lane import LaneContext
    from accel.engine.submission import BatchSubmission
    from accel.memory import Timeline
    from accel.ops import Plan

    Streams: TypeAlias = list[tuple[str, AccelStream]]
    """Name of a lane, and its stream."""

__all__ = ["Lanes", "make_streams"]

_COLLECTIVE = "collective"

_DEDICATED = frozenset({"graph", "capture", "compiler", _COLLECTIVE})
"""Built-in libraries with a lane of their own.

Replays keep one stream. So do kernels of users, whose modules may have state in device memory.
While a stream is captured, whatever is enqueued there becomes a part of the graph. Collectives of
all worlds come in one order on all devices, so that none waits for another in a circle.
"""

_BATCH, _MEMORY = "batch", "memory"
"""Names that the backend is told when it creates streams: of the pool, and of transfers."""


class Lanes:
    """The lanes of one context.

    Parameters
    ----------
    context
        The context.
    count
        How many streams independent ops are spread over.
    request_workspaces
        Asks the kernel actor of a library to give a lane its workspaces. Returns at once;
        :meth:`on_equipped` is called when that is done, or has failed.

    Attributes
    ----------
    all : list of Lane
    pool : list of Lane
        The lanes over which ops are spread; one more is made when all are busy.
    unused : list of (str, AccelStream)
        The pool's streams that have no lane yet.
    routes : dict
        Library that is open -> its lane; for the pooled ones the first lane of the pool.
    pooled_libraries : set of str
        Libraries whose ops are spread over the pool.
    workspace_libraries : set of str
        The libraries that were found to need workspaces.
    transfer_lanes : dict
        ``"put"`` and ``"get"`` -> lane.
    equipping : Lane or None
        The lane that is being given workspaces.
    takes_workspaces : bool
        Whether libraries need workspaces, memory that is theirs while the context lives.
    """

    def __init__(self, context: LaneContext, count: int, request_workspaces: Callable[[Lane, str], object]) -> None:
        self.all: list[Lane] = []
        self.pool: list[Lane] = []
        self.unused: Streams = []
        self.routes: dict[str, Lane] = {}
        self.pooled_libraries = set(LIBRARIES) - _DEDICATED
        self.workspace_libraries: set[str] = set()
        self.transfer_lanes: dict[str, Lane] = {}
        self.equipping: Lane | None = None
        self.takes_workspaces = False
        self._context = context
        self._count = count
        self._request_workspaces = request_workspaces
        self._dedicated: dict[str, Lane] = {}  # library -> a lane that no other library uses
        # Lanes of libraries that were unregistered: a stream is not closed before its context.
        self._reusable: list[Lane] = []
        self._is_requested = False  # whether workspaces were requested, until on_equipped()
        self._is_memory_short = False  # whether memory was short once: none are requested any more

    # -- making lanes

    def adopt(self, streams: Streams) -> None:
        """Make the first lane of the pool, and those of transfers, of the context's streams.

        Of one stream there is one lane, which transfers use too. The pool's further streams are
        kept until :meth:`grow` makes their lanes.
        """
        first = self._add_lane(*streams[0])
        self.pool.append(first)
        first.ready_libraries.add(_MEMORY)
        self.takes_workspaces = isinstance(first.stream, TakesWorkspace)
        self.routes[_MEMORY] = first
        self.transfer_lanes = dict.fromkeys(("put", "get"), first)
        for name, stream in streams[1:]:
            if name in self.transfer_lanes:
                self.transfer_lanes[name] = self._add_lane(name, stream)
            else:
                self.unused.append((name, stream))

    def grow(self) -> Lane:
        """Add a lane with the next unused stream to the pool.

        It takes ops of the open libraries that need no workspace there.
        """
        lane = self._add_lane(*self.unused.pop(0))
        for library in self.pooled_libraries.intersection(self.routes):
            if not self.takes_workspaces or not lane.needs_workspace(library):
                lane.ready_libraries.add(library)
        self.pool.append(lane)
        return lane

    def _add_lane(self, name: str, stream: AccelStream) -> Lane:
        """Make a lane of a stream, and have its failures reported."""
        lane = Lane(name, self._context, stream)
        self._context.failures.listen(lane)
        self.all.append(lane)
        return lane

    async def dedicated_lane(self, library: str, *, is_registered: bool = False, captures: bool = False) -> Lane:
        """Return the lane of a library that is not pooled; made off the loop at its first use.

        With ``streams=1`` it is the only lane, unless the library ``captures``. A registered
        library takes over the lane of one that was unregistered, if there is one.
        """
        lane = self._dedicated.get(library)
        if lane is None:
            if self._count == 1 and not captures:
                return self.pool[0]
            if is_registered and self._reusable:
                lane = self._reusable.pop()
                lane.name = library
            else:
                context = self._context
                create = partial(context.device.create_stream, library=library)
                lane = self._add_lane(library, await context.core.system.run_blocking(context.offloaded.call, create))
            self._dedicated[library] = lane
        return lane

    def remove_library(self, library: str) -> None:
        """Route no more ops of a registered library.

        A lane of its own is kept for the next registered library that needs one.
        """
        self.routes.pop(library, None)
        self.pooled_libraries.discard(library)
        lane = self._dedicated.pop(library, None)
        if lane is not None:
            self._reusable.append(lane)
        for lane in self.all:
            lane.ready_libraries.discard(library)

    # -- choosing one

    def choose(self, libraries: Collection[str], plan: Plan) -> Lane:
        """Return the lane of an op, or of a batch, whose libraries are pooled; see the module.

        If no lane has the workspaces of all libraries, it is the first. When no lane is idle, this
        may add one to the pool, or request workspaces for one; later ops use these.
        """
        context = self._context
        # Where nothing is in flight the first lane is idle, and it has all workspaces.
        if not context.in_flight:
            return self.pool[0]
        # 1. The lane of the newest unfinished write of an operand.
        newest: Lane | None = None
        most_unfinished = 0
        for ref in plan.reads + plan.writes:
            block = context.buffers.blocks.get(ref.buffer)
            pending = None if block is None else block.usage.pending_write()
            if pending is not None:
                writer, seq = pending
                if seq - writer.completed > most_unfinished and (lane := self._as_pool_lane(writer)) is not None:
                    newest, most_unfinished = lane, seq - writer.completed
        if newest is not None and newest.ready_libraries.issuperset(libraries):
            return newest
        # 2. An idle lane; 3. the one with the fewest unfinished ops.
        least_busy, fewest = self.pool[0], math.inf
        unready: Lane | None = None  # an idle, or less busy, lane that lacks workspaces
        for lane in self.pool:
            unfinished = lane.issued - lane.completed
            if unfinished >= fewest:
                continue
            if not lane.ready_libraries.issuperset(libraries):
                unready = unready or lane
            elif not unfinished:
                return lane
            else:
                least_busy, fewest = lane, unfinished
        # No lane is idle: add one, or have one more prepared for later ops.
        if unready is None and self.unused:
            unready = self.grow()
            if unready.ready_libraries.issuperset(libraries):
                return unready
        if unready is not None and not self._is_requested and not self._is_memory_short:
            self._is_requested = True
            self._request_workspaces(unready, next(library for library in libraries if library not in unready.ready_libraries))
        return least_busy

    def choose_for_batch(self, batch: BatchSubmission) -> Lane:
        """Return the lane of a batch, which is one for all of its ops.

        Ops of one registered library, and copies for them, go where its other ops do; and so do
        collectives. Batches with other libraries that are not pooled go to the pool's first lane. So
        does a batch that has ended: it has no plans any more.
        """
        if batch.chunks and (lane := self._as_pool_lane(batch.chunks[0][0])) is not None:
            return lane  # that of the ops that were dispatched already
        libraries = set(batch.libraries) - {_MEMORY}
        if libraries.issubset(self.pooled_libraries):
            return self.choose(libraries & self.workspace_libraries, batch.plans[0]) if batch.plans else self.pool[0]
        if len(libraries) == 1 and libraries.issubset((*self._context.core.registrations, _COLLECTIVE)):
            return self.routes[libraries.pop()]
        return self.pool[0]

    def _as_pool_lane(self, writer: Timeline) -> Lane | None:
        """Return a timeline if it is that of a lane in the pool, else ``None``."""
        return writer if isinstance(writer, Lane) and writer in self.pool else None

    # -- workspaces

    def lanes_for(self, library: str) -> list[Lane]:
        """Return the lanes that take ops of an open library."""
        if library not in self.pooled_libraries:
            return [self.routes[library]]
        return [lane for lane in self.pool if library in lane.ready_libraries]

    def on_equipped(self) -> None:
        """Allow the next request: the requested workspaces are there, or could not be had."""
        self.equipping = None
        self._is_requested = False

    def stop_equipping(self) -> None:
        """Request no more workspaces in this generation: memory was short."""
        self._is_memory_short = True

    def reclaimable_lanes(self) -> list[Lane]:
        """Return the lanes whose workspaces can be released now: idle ones, but never the first."""
        return [lane for lane in self.pool[1:] if lane is not self.equipping and lane.is_idle()]


def make_streams(device: AccelDevice, count: int) -> tuple[Streams, Exception | None]:
    """Make the streams of a context; blocks.

    They are made together: to make one on a busy device would hold up launches. If not all can be
    made, those that were made are returned, with the error that was raised for the next one.
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
