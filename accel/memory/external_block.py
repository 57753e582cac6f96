"""Blocks that are not cut from a slab, and uses of memory that other libraries use too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.memory.allocator import Block
from accel.memory.usage import Usage

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel.backend import SlabMemory
    from accel.memory.usage import Dependency, Timeline

__all__ = ["ExternalBlock", "ExternalWork", "SharedUsage"]


class ExternalBlock(Block):
    """Memory that is one buffer, whole: another library's, or managed. No allocator owns it.

    Attributes
    ----------
    memory : SlabMemory
        What is closed once the last use is over.
    """

    __slots__ = ("memory",)

    def __init__(self, memory: SlabMemory, usage: Usage) -> None:
        self._chunk = None
        self.memory = memory
        self.address = memory.address
        self.nbytes = self.size = memory.nbytes
        self.usage = usage


class ExternalWork:
    """The work of other libraries in the process, unseen and at any moment, as a timeline.

    Parameters
    ----------
    timeline
        Its numbers are in the stream as soon as they are given out: waiting for one waits for all
        work that the process has enqueued by the time of the wait.
    advance
        Notes that a number is in the stream.
    watch
        Has the timeline told when the last number given out is over.
    """

    __slots__ = ("_advance", "_watch", "timeline")

    def __init__(self, timeline: Timeline, advance: Callable[[int], None], watch: Callable[[], None]) -> None:
        self.timeline = timeline
        self._advance = advance
        self._watch = watch

    def now(self) -> int:
        """Return a new number, which stands for all that is enqueued by now."""
        seq = self.timeline.issue()
        self._advance(seq)
        return seq

    def last(self) -> int:
        """Return such a number after which no such work follows, and have its end watched."""
        seq = self.now()
        self._watch()
        return seq


class SharedUsage(Usage):
    """The uses of memory that other libraries use too, unseen.

    Each use of ours comes after all that they had enqueued before.

    Parameters
    ----------
    usage
        The uses so far, which it inherits.
    external_work
        The work of the other libraries.
    is_shared
        Whether they can still enqueue uses; once they cannot, only those that they did are waited
        for.
    """

    __slots__ = ("_external_work", "_is_over", "_seq", "is_shared")

    def __init__(self, usage: Usage, external_work: ExternalWork, is_shared: Callable[[], object]) -> None:
        super().__init__()
        self.merge(usage)
        written = usage.pending_write()
        if written is not None:
            # Merged uses are only waited for by writes; this one is not over, and reads come after
            # it too.
            self._writer, self._written = written
        self._external_work = external_work
        self.is_shared = is_shared
        self._is_over = False
        self._seq = 0

    def read(self, timeline: Timeline, seq: int, dependencies: list[Dependency]) -> None:
        """See :meth:`Usage.read`."""
        super().read(timeline, seq, dependencies)
        self._depend_on_external(dependencies)

    def write(self, timeline: Timeline, seq: int, dependencies: list[Dependency]) -> None:
        """See :meth:`Usage.write`."""
        super().write(timeline, seq, dependencies)
        self._depend_on_external(dependencies)

    def _depend_on_external(self, dependencies: list[Dependency]) -> None:
        """Add a dependency on all that other libraries have enqueued by now, or had at the last use."""
        external_work = self._external_work
        if not self._is_over:
            self._is_over = not self.is_shared()
            self._seq = external_work.last() if self._is_over else external_work.now()
        if self._seq > external_work.timeline.completed:
            dependencies.append((external_work.timeline, self._seq))

    def split(self) -> Usage:
        """Return ordinary uses in the place of these, for memory that is freed.

        The next block of the memory waits for all uses there were.
        """
        usage = super().split()
        usage.read(self._external_work.timeline, self._external_work.last(), [])
        return usage
