"""Freed memory and the ways to use it again, from the cheapest to the last.

Only the allocator uses this. Freed chunks rest, with their pending uses, in a queue for their size;
clean memory is in :class:`~accel.memory.space.Space`.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from accel.errors import InvalidArgumentError
from accel.memory.space import CLEAN, LIVE, RESTING, Chunk, SizeClass, Space, free_run, round_up
from accel.memory.usage import Usage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from accel.memory.usage import Dependency, Timeline

__all__ = ["FreeMemory"]

_KEEP: Final = 32
"""Idle chunks that may rest in one queue at most; fewer where they would be more than a slab's
``_KEEP_SHARE``-th part."""

_KEEP_SHARE: Final = 32

_LOOK: Final = 8
"""How many of the newest chunks of a queue are looked at for one of the same timeline: a longer
search costs more than it finds."""

_REMEMBERED: Final = 4096
"""Sizes that were asked for whose class is remembered."""

_FINE_MAX: Final = 16 << 20
"""Sizes up to this one have queues of their own."""


class FreeMemory:
    """All memory that no block has.

    Parameters
    ----------
    slab_bytes
        Size of an ordinary slab; blocks of one size rest up to a fraction of it.
    """

    __slots__ = ("_by_request", "_classes", "_keep_bytes", "_odd", "reuses", "space")

    def __init__(self, slab_bytes: int) -> None:
        self.space = Space()
        self.reuses = 0
        self._keep_bytes = slab_bytes // _KEEP_SHARE
        self._classes: dict[int, SizeClass] = {}
        # The queue of chunks of all other sizes: coarse ones, and what was cut off resting chunks.
        self._odd: deque[Chunk] = deque()
        self._by_request: dict[int, SizeClass] = {}

    def size_class(self, nbytes: int) -> SizeClass:
        """Return the class of blocks for ``nbytes``."""
        found = self._by_request.get(nbytes)
        if found is not None:
            return found
        if nbytes < 0:
            raise InvalidArgumentError(f"a block cannot have {nbytes} bytes")
        size = round_up(nbytes)
        if size > _FINE_MAX:
            # There may be any number of these, so they are made anew and share a queue.
            found = SizeClass(size, self._odd, 0)
        else:
            found = self._classes.get(size)
            if found is None:
                found = self._classes[size] = SizeClass(size, deque(), min(_KEEP, self._keep_bytes // size))
        if len(self._by_request) >= _REMEMBERED:
            self._by_request.clear()
        self._by_request[nbytes] = found
        return found

    def free(self, chunk: Chunk) -> None:
        """Let a freed chunk rest.

        The oldest of too many become clean, unless their uses are pending.
        """
        chunk.state = RESTING
        home = chunk.home
        assert home is not None
        rest = home.rest
        rest.append(chunk)
        if len(rest) > home.keep:
            # Two for one, so that a queue that grew while its uses were pending becomes short
            # again.
            for _ in range(min(2, len(rest) - home.keep)):
                if not _usage(rest[0]).is_idle():
                    break
                self.space.add(rest.popleft())

    def allocate(self, nbytes: int, timeline: Timeline | None) -> Chunk | None:
        """Return a chunk for a block of ``nbytes`` for use on ``timeline``, or ``None``.

        Its ``usage`` is what is pending on it. The caller sets its state.
        """
        wanted = self._by_request.get(nbytes) or self.size_class(nbytes)
        rest = wanted.rest
        # Nearly always the newest one will do.
        found: Chunk | None
        if rest and (chunk := rest[-1]).size == wanted.size and (usage := chunk.usage) and usage.is_idle_for(timeline):
            self.reuses += 1
            found = rest.pop()
        else:
            found = self._reuse(wanted, timeline) if rest else None
            found = found or self.space.allocate(wanted)
            if found is None:
                self.clean_idle()
                found = self.space.allocate(wanted) or self._inherit_one(wanted, timeline) or self._inherit_many(wanted.size)
                if found is None:
                    return None
        found.home = wanted
        return found

    def clean_idle(self) -> None:
        """Make every resting chunk clean of which all uses are over."""
        for rest in self._queues():
            for _ in range(len(rest)):
                chunk = rest.popleft()
                if _usage(chunk).is_idle():
                    self.space.add(chunk)
                else:
                    rest.append(chunk)

    def pending(self) -> list[Dependency]:
        """Return what resting memory waits for."""
        uses = Usage()
        for rest in self._queues():
            for chunk in rest:
                uses.merge(_usage(chunk))
        return uses.pending()

    def _queues(self) -> Iterator[deque[Chunk]]:
        for home in self._classes.values():
            if home.rest:
                yield home.rest
        yield self._odd

    def _reuse(self, wanted: SizeClass, timeline: Timeline | None) -> Chunk | None:
        rest = wanted.rest
        newest = len(rest) - 1
        # The oldest is the most likely to be over, the newest to be of this timeline.
        for index in (0, *range(newest, max(0, newest - _LOOK), -1)):
            chunk = rest[index]
            if chunk.size == wanted.size and _usage(chunk).is_idle_for(timeline):
                del rest[index]
                self.reuses += 1
                return chunk
        return None

    def _inherit_one(self, wanted: SizeClass, timeline: Timeline | None) -> Chunk | None:
        """Reuse a resting chunk of the size in spite of its pending uses.

        One with uses of this timeline alone if there is one, else the oldest.
        """
        rest = wanted.rest
        fitting = [index for index, chunk in enumerate(rest) if chunk.size == wanted.size]
        if not fitting:
            return None
        index = next((index for index in fitting if _usage(rest[index]).is_idle_for(timeline)), fitting[0])
        chunk = rest[index]
        del rest[index]
        self.reuses += 1
        return chunk

    def _inherit_many(self, size: int) -> Chunk | None:
        """Join neighbours to a chunk of ``size``, which inherits the pending uses of all."""
        # What is wholly clean was tried, so a fitting run has a resting chunk; and those are few,
        # because the work in flight is bounded.
        seen: set[Chunk] = set()
        for rest in self._queues():
            for chunk in rest:
                if chunk not in seen:
                    run = free_run(chunk)
                    seen.update(run)
                    window = _window(run, size)
                    if window:
                        return self._join(window, size)
        return None

    def _join(self, window: list[Chunk], size: int) -> Chunk:
        usage = Usage()
        for chunk in window:
            if chunk.state == CLEAN:
                self.space.remove(chunk)
            else:
                assert chunk.home is not None
                chunk.home.rest.remove(chunk)
            if chunk.usage is not None:
                usage.merge(chunk.usage)
        first, last = window[0], window[-1]
        last_usage = last.usage
        for _ in window[1:]:
            first.absorb_next()
        first.usage = usage
        first.state = LIVE
        if first.size > size:
            self._put_rest(first.split(size), last_usage)
        return first

    def _put_rest(self, tail: Chunk, usage: Usage | None) -> None:
        if usage is None or usage.is_idle():
            self.space.add(tail)
            return
        tail.usage = usage
        tail.state = RESTING
        tail.home = SizeClass(tail.size, self._odd, 0)
        self._odd.append(tail)


def _usage(chunk: Chunk) -> Usage:
    assert chunk.usage is not None
    return chunk.usage


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
