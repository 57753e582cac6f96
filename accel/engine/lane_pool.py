"""The lanes over which independent ops are spread: ``streams="balanced"``.

Each lane of the pool has a kernel actor of its own and takes ops of every library that the pool serves. An op goes to the first of these that exists:

1. The lane of its newest unfinished dependency: the last write of an operand. A chain of ops stays in one stream and waits for no other stream.
2. An idle lane, in the order in which the lanes were made. A device that runs one op at a time uses one lane.
3. The lane with the fewest unfinished ops.

If operands have unfinished writes in several lanes, the write with the most unfinished ops before it counts as the newest. A batch is placed once, by its
first op. The choice does not order anything: dependencies across lanes are waited for by events, as they are between libraries.

The pool begins with two lanes, one of them in reserve, and grows when it is used. The op that takes the last idle lane asks for another lane, which is made
off the event loop; no op waits for that. Lanes but the first are made without workspaces. A lane gets those of a library when an op of that library, or a
batch that has one, finds all lanes busy that have them. When memory is short, idle lanes but the first give their workspaces back. The pool then does not
grow any more in this generation.
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
        How many lanes there may be.
    libraries
        Whose ops are spread.
    ask_for_lane
        Asks for another lane that takes ops of a library, or, for ``None``, of those that need no workspace. Returns at once; :meth:`answered` follows.

    Attributes
    ----------
    limit : int
    libraries : set of str
    lending : set of str
        Those that were found to need workspaces.
    ports : list of Port
        The lanes, each with its kernel actor. The first one has the workspaces of all libraries that were used, and keeps them.
    growing : Lane or None
        The lane that is being made ready.
    """

    __slots__ = ("_ask_for_lane", "_is_asking", "_is_short", "_ports_by_lane", "growing", "lending", "libraries", "limit", "ports")

    def __init__(self, limit: int, libraries: Iterable[str], ask_for_lane: Callable[[str | None], object]) -> None:
        self.libraries = set(libraries)
        self.lending: set[str] = set()
        self.ports: list[Port] = []
        self.growing: Lane | None = None
        self.limit = limit
        self._ask_for_lane = ask_for_lane
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
        idle: Port | None = None
        least, fewest = self.ports[0], -1
        lacking: Lane | None = None
        is_other_idle = False
        for port in self.ports:
            lane = port.lane
            unfinished = lane.issued - lane.completed
            if not lane.provided.issuperset(libraries):
                lacking, is_other_idle = lacking or lane, is_other_idle or not unfinished
            elif unfinished:
                if unfinished < fewest or fewest < 0:
                    least, fewest = port, unfinished
            elif idle is None:
                idle = port
            else:
                return idle
        if not self._is_asking:
            if idle is None and lacking is not None:
                self._ask(next(each for each in libraries if each not in lacking.provided))
            elif self.has_room and (idle is None or not is_other_idle):
                self._ask(None)
        return idle or least

    def _ask(self, library: str | None) -> None:
        self._is_asking = True
        self._ask_for_lane(library)

    def port_of(self, lane: Lane) -> Port:
        """Return the port of a lane of the pool."""
        return self._ports_by_lane[lane]

    # -- growing, and giving back

    @property
    def has_room(self) -> bool:
        """Whether another lane may be made."""
        return len(self.ports) < self.limit and not self._is_short

    def add(self, port: Port) -> None:
        """Use another lane."""
        self.ports.append(port)
        self._ports_by_lane[port.lane] = port

    def answered(self) -> None:
        """Take note that the lane that was asked for is there, or cannot be made."""
        self.growing = None
        self._is_asking = self._is_short

    def stop_growing(self) -> None:
        """Ask for no more lanes and workspaces: there was a shortage of memory, or a lane could not be made."""
        self._is_asking = self._is_short = True

    def spare_lanes(self) -> list[Lane]:
        """Return the lanes whose workspaces can be given back now."""
        return [port.lane for port in self.ports[1:] if port.lane is not self.growing and port.lane.is_idle()]
