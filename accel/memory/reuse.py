"""Freed memory and the ways to use it again, from the cheapest to the last.

Only the allocator uses this. Freed chunks rest by size, with their pending uses, until clean memory
has no room.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from accel.memory.space import CLEAN, LIVE, RESTING, Chunk, free_run
from accel.memory.usage import Usage

if TYPE_CHECKING:
    from collections.abc import Iterable

    from accel.memory.space import Slab
    from accel.memory.usage import Timeline

__all__ = ["FreeMemory"]

_MAX_SEARCH: Final = 8
"""How many of the newest chunks of a size are looked at for one of the same timeline: a longer
search costs more than it finds."""


class FreeMemory:
    """All memory that no block has.

    Attributes
    ----------
    slabs : list of Slab
        Oldest first.
    resting : dict of int to list of Chunk
        Freed chunks by their size, oldest first. They are merged only when clean memory has no room.
    clean : list of (int, int, Chunk)
        Size, address and chunk of what is clean, in that order.
    """

    __slots__ = ("clean", "resting", "slabs")

    def __init__(self) -> None:
        self.slabs: list[Slab] = []
        self.resting: defaultdict[int, list[Chunk]] = defaultdict(list)
        self.clean: list[tuple[int, int, Chunk]] = []

    def add_slab(self, slab: Slab, clean: Iterable[Chunk]) -> None:
        """Add a slab, and those of its chunks that are clean."""
        self.slabs.append(slab)
        for chunk in clean:
            self._add_clean(chunk)

    def remove_slab(self, slab: Slab) -> None:
        """Remove an empty slab."""
        self.slabs.remove(slab)
        self._remove_clean(slab.first)

    def allocate(self, size: int, timeline: Timeline | None) -> Chunk | None:
        """Return a chunk of ``size`` bytes for use on ``timeline``, or ``None``.

        Its ``usage`` is what is pending on it. The caller sets its state.
        """
        chunks = self.resting.get(size)
        found = (_pop_idle(chunks, timeline) if chunks else None) or self._take_clean(size)
        if found is None and self._nbytes() >= size:  # else merging it all, which takes long, is in vain
            self.clean_idle(size)
            found = self._take_clean(size) or self._take_pending(size, timeline) or self._join_pending(size)
        return found

    def _nbytes(self) -> int:
        """Return the bytes that are free."""
        return sum([size * len(chunks) for size, chunks in self.resting.items()]) + sum([size for size, *_ in self.clean])

    def clean_idle(self, enough: float = math.inf) -> None:
        """Make resting chunks clean of which all uses are over, until ``enough`` bytes are in one piece."""
        for size, chunks in list(self.resting.items()):
            del self.resting[size]  # a size is known only while chunks of it rest
            for at, chunk in enumerate(chunks, 1):
                if not chunk.usage.is_idle():
                    self.resting[size].append(chunk)
                elif self._merge(chunk) >= enough:
                    self.resting[size] += chunks[at:]
                    return

    def _take_clean(self, size: int) -> Chunk | None:
        """Return a chunk of exactly ``size`` bytes, of the smallest clean one that has them."""
        at = bisect_left(self.clean, (size,))
        if at == len(self.clean):
            return None
        chunk = self.clean.pop(at)[2]
        if chunk.size > size:
            self._add_clean(chunk.split(size))
        return chunk

    def _merge(self, chunk: Chunk) -> int:
        """Make an idle chunk clean: merge it with its clean neighbours, and return their size."""
        after = chunk.next
        if after is not None and after.state == CLEAN:
            self._remove_clean(after)
            chunk.absorb_next()
        before = chunk.prev
        if before is not None and before.state == CLEAN:
            self._remove_clean(before)
            before.absorb_next()
            chunk = before
        chunk.state = CLEAN
        self._add_clean(chunk)
        return chunk.size

    def _add_clean(self, chunk: Chunk) -> None:
        """Add a chunk to the clean ones, which are sorted."""
        insort(self.clean, (chunk.size, chunk.address, chunk))

    def _remove_clean(self, chunk: Chunk) -> None:
        """Remove a chunk from the clean ones."""
        del self.clean[bisect_left(self.clean, (chunk.size, chunk.address))]

    def _take_pending(self, size: int, timeline: Timeline | None) -> Chunk | None:
        """Return a resting chunk of the size in spite of its pending uses.

        One with uses of this timeline alone if there is one, else the oldest.
        """
        chunks = self.resting.get(size)
        if not chunks:
            return None
        chunk = next((chunk for chunk in chunks if chunk.usage.is_idle_for(timeline)), chunks[0])
        chunks.remove(chunk)
        return chunk

    def _join_pending(self, size: int) -> Chunk | None:
        """Join neighbours to a chunk of ``size``, which inherits the pending uses of all."""
        # What is wholly clean was tried, so a fitting run has a resting chunk; and those are few,
        # because the work in flight is bounded.
        seen: set[Chunk] = set()
        for chunks in self.resting.values():
            for chunk in chunks:
                if chunk not in seen:
                    run = free_run(chunk)
                    seen.update(run)
                    window = _window(run, size)
                    if window:
                        return self._join(window, size)
        return None

    def _join(self, window: list[Chunk], size: int) -> Chunk:
        """Make neighbouring chunks one of ``size`` bytes, with the pending uses of all."""
        usage = Usage()
        for chunk in window:
            if chunk.state == CLEAN:
                self._remove_clean(chunk)
            else:
                self.resting[chunk.size].remove(chunk)
            usage.merge(chunk.usage)
        first, last_usage = window[0], window[-1].usage
        for _ in window[1:]:
            first.absorb_next()
        first.usage = usage
        first.state = LIVE
        if first.size > size:
            self._free_tail(first.split(size), last_usage)
        return first

    def _free_tail(self, tail: Chunk, usage: Usage) -> None:
        """Free what is left of the last chunk that was joined, which has that one's uses."""
        if usage.is_idle():
            self._merge(tail)
        else:
            tail.usage = usage
            tail.state = RESTING
            self.resting[tail.size].append(tail)


def _pop_idle(chunks: list[Chunk], timeline: Timeline | None) -> Chunk | None:
    """Remove a chunk that nothing has to wait for, and return it."""
    # The oldest is the most likely to be over, the newest to be of this timeline.
    for chunk in (chunks[0], *reversed(chunks[-_MAX_SEARCH:])):
        if chunk.usage.is_idle_for(timeline):
            chunks.remove(chunk)
            return chunk
    return None


def _window(run: list[Chunk], size: int) -> list[Chunk]:
    """Return the first chunks in a row of ``run`` that have ``size`` bytes, as few as do.

    Or none.
    """
    start = total = 0
    for end, chunk in enumerate(run):
        total += chunk.size
        while total - run[start].size >= size:
            total -= run[start].size
            start += 1
        if total >= size:
            return run[start : end + 1]
    return []
