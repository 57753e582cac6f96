"""The lanes over which independent ops are spread: ``streams="balanced"``.

Each lane of the pool has a kernel actor of its own and takes ops of every library that the pool serves. An op goes to the first of these that exists:

1. The lane of its newest unfinished dependency: the last write of an operand. A chain of ops stays in one stream and waits for no other stream.
2. An idle lane, in the order in which the lanes were made. A device that runs one op at a time uses one lane.
3. The lane with the fewest unfinished ops.

If operands have unfinished writes in several lanes, the write with the most unfinished ops before it counts as the newest. A batch is placed once, by its
first op. The choice does not order anything: dependencies across lanes are waited for by events, as they are between libraries.

All lanes are made at the first use of the pool: making a stream on a busy device would hold up the loop's launches. Lanes but the first are made without
workspaces. A lane gets those of a library when an op of that library, or a batch that has one, finds all lanes busy that have them; no op waits for that.
When memory is short, idle lanes but the first give their workspaces back, and ask for none any more in this generation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from accel.engine.lane import Lane
    from accel.engine.launches import Port
    from accel.memory import Block, Timeline
    from accel.ops import Plan
    from accel.storage.buffers import Held

__all__ = ["LanePool"]


class LanePool:
    """The lanes of one context over which ops are spread.

    Parameters
    ----------
    limit
        How many lanes there are.
    libraries
        Whose ops are spread.
    equip
        Asks that another lane takes ops of a library. Returns at once; :meth:`answered` follows.

    Attributes
    ----------
    limit : int
    libraries : set of str
    lending : set of str
        Those that were found to need workspaces.
    ports : list of Port
        The lanes, each with its kernel actor. The first one has the workspaces of all libraries that were used, and keeps them.
    equipping : Lane or None
        The lane that is being given workspaces.
    """

    __slots__ = ("_equip", "_is_asking", "_is_short", "_ports_by_lane", "equipping", "lending", "libraries", "limit", "ports")

    def __init__(self, limit: int, libraries: Iterable[str], equip: Callable[[str], object]) -> None:
        self.libraries = set(libraries)
        self.lending: set[str] = set()
        self.ports: list[Port] = []
        self.equipping: Lane | None = None
        self.limit = limit
        self._equip = equip
        self._ports_by_lane: dict[Timeline, Port] = {}
        self._is_asking = False
        self._is_short = False

    def choose(self, libraries: Collection[str], plan: Plan, blocks: Mapping[int, Block | Held]) -> Port:
        """Return where an op of some library, or a batch of several, goes; see the module. If no lane has the workspaces of them all, it is the first."""
        newest: Port | None = None
        most = 0
        for ref in plan.reads + plan.writes:
            block = blocks.get(ref.buffer)
            pending = None if block is None else block.usage.pending_write()
            if pending is not None:
                writer, seq = pending
                if seq - writer.completed > most and (port := self._ports_by_lane.get(writer)) is not None:
                    newest, most = port, seq - writer.completed
        if newest is not None and newest.lane.provided.issuperset(libraries):
            return newest
        least, fewest = self.ports[0], -1
        lacking: Lane | None = None
        for port in self.ports:
            lane = port.lane
            unfinished = lane.issued - lane.completed
            if not lane.provided.issuperset(libraries):
                lacking = lacking or lane
            elif not unfinished:
                return port
            elif unfinished < fewest or fewest < 0:
                least, fewest = port, unfinished
        if lacking is not None and not self._is_asking:
            self._is_asking = True
            self._equip(next(each for each in libraries if each not in lacking.provided))
        return least

    def port_of(self, lane: Lane) -> Port:
        """Return the port of a lane of the pool."""
        return self._ports_by_lane[lane]

    # -- lanes and workspaces

    def add(self, port: Port) -> None:
        """Use another lane."""
        self.ports.append(port)
        self._ports_by_lane[port.lane] = port

    def lanes_with(self, library: str) -> list[Lane]:
        """Return the lanes that take ops of a library."""
        return [port.lane for port in self.ports if library in port.lane.provided]

    def answered(self) -> None:
        """Take note that the lane has what was asked for, or cannot have it."""
        self.equipping = None
        self._is_asking = self._is_short

    def stop_equipping(self) -> None:
        """Ask for no more workspaces: there was a shortage of memory."""
        self._is_asking = self._is_short = True

    def spare_lanes(self) -> list[Lane]:
        """Return the lanes whose workspaces can be given back now."""
        return [port.lane for port in self.ports[1:] if port.lane is not self.equipping and port.lane.is_idle()]
