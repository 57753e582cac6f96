"""Uses of memory: clocks of streams, and per block of memory the last write and the reads since.

The host never waits for the device to keep buffers apart. Each use is a point on a stream's clock,
and a use that must come after another one on a different stream is told so as a *dependency*, which
the device layer turns into one stream waiting for the other's event.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Dependency", "Timeline", "Usage"]

Dependency: TypeAlias = "tuple[Timeline, int]"
"""A point on a timeline that must be over first."""


class Timeline:
    """The clock of one stream: its work is numbered from 1, and ends in the order of the numbers.

    Compared and hashed by identity. Meant to be subclassed (with ``__slots__``) by what owns the
    stream and its events.

    Parameters
    ----------
    name
        For debugging.

    Attributes
    ----------
    issued : int
        The last number given out.
    enqueued : int
        The last number that has reached the stream. Set by the owner of the stream.
    completed : int
        The last number known to have ended; only :meth:`complete` moves it, and never back.
    waited : dict of Timeline to int
        Up to which number of other timelines the stream already waits. Set by the owner of the
        stream, once the wait is in the stream.

    Notes
    -----
    A number that was given out must be completed at last, or its recorded uses keep their memory
    busy: also if its work was dropped before it reached the stream. Dropped work that recorded uses
    still makes its stream, or the host, wait for its dependencies before its number is over, because
    a recorded write stands for the uses before it. Once a stream is gone,
    ``timeline.complete(timeline.issued)`` ends all it was said to do.
    """

    __slots__ = ("completed", "enqueued", "issued", "name", "waited")

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.issued = 0
        self.enqueued = 0
        self.completed = 0
        self.waited: dict[Timeline, int] = {}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name or hex(id(self))} completed {self.completed} of {self.issued}>"

    def issue(self) -> int:
        """Give out the next number."""
        self.issued = seq = self.issued + 1
        return seq

    def complete(self, seq: int) -> None:
        """Note that everything up to ``seq`` has ended.

        Numbers may arrive in any order; the clock does not go back.
        """
        if seq > self.completed:
            self.completed = seq

    def is_idle(self) -> bool:
        """Return whether every number given out has ended."""
        return self.completed >= self.issued

    def outstanding(self, dependencies: Iterable[Dependency]) -> list[Dependency]:
        """Return what this timeline must really wait for, one pair per timeline.

        Left out are itself, what is over, and what it waits for already. It changes nothing: the
        caller updates :attr:`waited` when the waits are in the stream.
        """
        waited = self.waited
        latest: dict[Timeline, int] = {}
        for other, seq in dependencies:
            if other is not self and seq > other.completed and seq > waited.get(other, 0) and seq > latest.get(other, 0):
                latest[other] = seq
        return list(latest.items())


class Usage:
    """Uses of a block of memory that later ones may wait for: the last write, the reads since.

    Uses are recorded in the order in which they were issued, when they are issued and not when they
    run. Single-threaded.

    Notes
    -----
    Nearly every buffer is read by one stream between two writes, so one reader has fields of its
    own and only further ones cost a dict.
    """

    __slots__ = ("__weakref__", "_others", "_read", "_reader", "_writer", "_written")

    def __init__(self) -> None:
        self._writer: Timeline | None = None
        self._written = 0
        # Invariant: there are no others without a reader.
        self._reader: Timeline | None = None
        self._read = 0
        self._others: dict[Timeline, int] | None = None

    def __repr__(self) -> str:
        return f"<Usage pending {self.pending()}>"

    def read(self, timeline: Timeline, seq: int, dependencies: list[Dependency]) -> None:
        """Record that work ``seq`` of ``timeline`` reads the memory.

        Parameters
        ----------
        timeline, seq
            The work.
        dependencies
            Is appended to: the last write, if it is on another timeline and not over
            (read-after-write).
        """
        writer = self._writer
        if writer is not timeline and writer is not None and self._written > writer.completed:
            dependencies.append((writer, self._written))
        if self._reader is timeline or self._reader is None:
            self._reader = timeline
            if seq > self._read:
                self._read = seq
        else:
            self._record_read(timeline, seq)

    def write(self, timeline: Timeline, seq: int, dependencies: list[Dependency]) -> None:
        """Record that work ``seq`` of ``timeline`` writes the memory.

        It stands for the uses before it, which are forgotten.

        Parameters
        ----------
        timeline, seq
            The work.
        dependencies
            Is appended to: the reads since the last write (write-after-read) and that write
            (write-after-write), as far as they are on other timelines and not over; the largest
            number of each timeline.
        """
        writer, reader = self._writer, self._reader
        if not ((writer is timeline or writer is None) and (reader is timeline or reader is None) and self._others is None):
            dependencies += self.pending(timeline)
        self._writer = timeline
        self._written = seq
        self._reader = None
        self._read = 0
        self._others = None

    def is_idle(self) -> bool:
        """Return whether every recorded use is over."""
        return self.is_idle_for(None)

    def is_idle_for(self, timeline: Timeline | None) -> bool:
        """Return whether all uses are over, or are of ``timeline`` (stream order).

        Work of that timeline can then use the memory at once.
        """
        writer = self._writer
        if writer is not timeline and writer is not None and self._written > writer.completed:
            return False
        reader = self._reader
        if reader is not timeline and reader is not None and self._read > reader.completed:
            return False
        others = self._others
        return others is None or all(other is timeline or seq <= other.completed for other, seq in others.items())

    def pending(self, own: Timeline | None = None) -> list[Dependency]:
        """Return the recorded uses that are not over: the largest number of each timeline but ``own``."""
        latest = dict(self._others) if self._others else {}
        if self._reader is not None:
            latest[self._reader] = self._read
        writer = self._writer
        if writer is not None and self._written > latest.get(writer, 0):
            latest[writer] = self._written
        return [pair for pair in latest.items() if pair[0] is not own and pair[1] > pair[0].completed]

    def pending_write(self) -> Dependency | None:
        """Return the last write if it is not over: until then contents are half old, half new."""
        writer = self._writer
        if writer is None or self._written <= writer.completed:
            return None
        return writer, self._written

    def merge(self, other: Usage) -> None:
        """Inherit the pending uses of ``other``: both memories become one block.

        For free memory: the next write waits for the uses of both, and a read before that write has
        no contents to wait for.
        """
        for timeline, seq in other.pending():
            self._record_read(timeline, seq)

    def split(self) -> Usage:
        """Return a usage of its own for one of several blocks that share this one.

        It has the pending uses of this one: the next write of that block waits for all of them.
        """
        usage = Usage()
        usage.merge(self)
        return usage

    def _record_read(self, timeline: Timeline, seq: int) -> None:
        """Record a read: in the fields of the one reader if these are free, else in the dict."""
        reader = self._reader
        if reader is timeline:
            self._read = max(self._read, seq)
            return
        others = self._others
        if others is None:
            if reader is None or self._read <= reader.completed:
                self._reader, self._read = timeline, seq
                return
            others = self._others = {}
        others[timeline] = max(seq, others.get(timeline, 0))
