"""The allocator against a model of intervals and of who uses which bytes: a state machine of random calls."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from accel.errors import InvalidArgumentError, OutOfMemoryError, StaleRefError
from accel.memory import Allocator, Block, Timeline
from accel.memory.space import CLEAN, LIVE, RESTING, Chunk, Slab
from tests.memory_support import pending

SLAB = 16 << 10
GRANULARITY = 1 << 10
STREAMS = 3
Use = tuple[Timeline, int, int, int]
"""Timeline, number, first and last byte."""


class FakeSlab:
    """Addresses without memory behind them."""

    next_address = 1 << 20

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.address = FakeSlab.next_address
        FakeSlab.next_address += nbytes + 256
        self.closed = False

    def close(self) -> None:
        assert not self.closed, "closed twice"
        self.closed = True


def chunks_of(slab: Slab) -> list[Chunk]:
    chunks = [slab.first]
    while chunks[-1].next is not None:
        chunks.append(chunks[-1].next)
    return chunks


sizes = st.one_of(st.integers(0, 3000), st.sampled_from([0, 1, 256, 257, 2048, 2049, 4096, SLAB - 1, SLAB, SLAB + 1, 3 * SLAB]))
streams = st.integers(0, STREAMS - 1)


class AllocatorMachine(RuleBasedStateMachine):
    """Random allocations, uses, completions, frees and trims."""

    @initialize(limit=st.one_of(st.none(), st.integers(0, 8 * SLAB)))
    def open(self, limit: int | None) -> None:
        self.made: list[FakeSlab] = []
        self.allocator = Allocator(self.create, limit=limit, slab_bytes=SLAB, granularity=GRANULARITY)
        self.timelines = [Timeline(str(number)) for number in range(STREAMS)]
        self.live: list[Block] = []
        self.uses: list[Use] = []

    def create(self, nbytes: int) -> FakeSlab:
        assert nbytes % GRANULARITY == 0
        self.made.append(FakeSlab(nbytes))
        return self.made[-1]

    def timeline(self, stream: int | None) -> Timeline | None:
        return None if stream is None else self.timelines[stream]

    def pending_in(self, start: int, end: int) -> dict[Timeline, int]:
        latest: dict[Timeline, int] = {}
        for timeline, seq, first, last in self.uses:
            if first < end and start < last and seq > timeline.completed:
                latest[timeline] = max(seq, latest.get(timeline, 0))
        return latest

    def check_new(self, block: Block) -> None:
        start, end = block.address, block.address + block.size
        assert start % 256 == 0
        assert block.size >= max(block.nbytes, 1)
        assert block.slab.address <= start
        assert end <= block.slab.address + block.slab.nbytes
        assert not isinstance(block.slab, FakeSlab) or not block.slab.closed
        for other in self.live:
            assert end <= other.address or other.address + other.size <= start, f"{block} overlaps {other}"
        inherited = dict(block.usage.pending())
        for timeline, seq in self.pending_in(start, end).items():
            assert inherited.get(timeline, 0) >= seq, f"{block} forgets that {timeline} is at work in it up to {seq}"
        self.live.append(block)

    @rule(nbytes=sizes, stream=st.one_of(st.none(), streams))
    def allocate(self, nbytes: int, stream: int | None) -> None:
        before = len(self.made)
        free = self.free_runs()
        try:
            block = self.allocator.allocate_blocking(nbytes, self.timeline(stream))
        except OutOfMemoryError as error:
            self.check_refusal(error, nbytes, max(free, default=0))
            return
        if len(self.made) > before:
            assert max(free, default=0) < block.size, "took a slab although there was room"
        self.check_new(block)

    def check_refusal(self, error: OutOfMemoryError, nbytes: int, largest_free: int) -> None:
        assert self.allocator.limit is not None
        assert (error.requested, error.used, error.limit) == (nbytes, self.used(), self.allocator.limit)
        assert largest_free < max(nbytes, 1) * 1.125 + 256

    @rule(nbytes=sizes, stream=streams)
    def allocate_from_what_is_there(self, nbytes: int, stream: int) -> None:
        before = len(self.made)
        fits = max(self.free_runs(), default=0)
        block = self.allocator.allocate(nbytes, self.timelines[stream])
        assert len(self.made) == before
        if block is not None:
            self.check_new(block)
        else:
            assert fits < max(nbytes, 1) * 1.125 + 256

    @precondition(lambda self: self.live)
    @rule(data=st.data(), stream=streams, writes=st.booleans())
    def use(self, data: Any, stream: int, writes: bool) -> None:
        block = data.draw(st.sampled_from(self.live))
        timeline = self.timelines[stream]
        dependencies: list[tuple[Timeline, int]] = []
        seq = timeline.issue()
        before = self.pending_in(block.address, block.address + block.size)
        (block.usage.write if writes else block.usage.read)(timeline, seq, dependencies)
        if writes:
            # A recorded write stands for what it waits for, so here it must be told of all of that.
            before.pop(timeline, None)
            told = dict(dependencies)
            assert all(told.get(other, 0) >= number for other, number in before.items()), (told, before)
            self.forget(block)
        self.uses.append((timeline, seq, block.address, block.address + block.size))

    def forget(self, block: Block) -> None:
        """Leave out the uses of a rewritten block, which come before the write; their bytes outside the block stay used."""
        start, end = block.address, block.address + block.size
        kept: list[Use] = []
        for timeline, seq, first, last in self.uses:
            kept += [(timeline, seq, a, b) for a, b in ((first, min(last, start)), (max(first, end), last)) if a < b]
        self.uses = kept

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: Any) -> None:
        block = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.allocator.free(block)
        with pytest.raises(InvalidArgumentError):
            self.allocator.free(block)
        with pytest.raises(StaleRefError):
            block.usage.write(self.timelines[0], 1, [])

    @rule(stream=streams, steps=st.integers(1, 10))
    def complete(self, stream: int, steps: int) -> None:
        timeline = self.timelines[stream]
        timeline.complete(min(timeline.completed + steps, timeline.issued))

    @rule(everything=st.booleans())
    def trim(self, everything: bool) -> None:
        for slab in self.allocator.trim(everything=everything):
            assert not self.pending_in(slab.address, slab.address + slab.nbytes)
            slab.close()
        empty = [
            slab
            for slab in self.allocator.slabs()
            if not any(block.slab is slab for block in self.live) and not self.pending_in(slab.address, slab.address + slab.nbytes)
        ]
        assert len(empty) <= (0 if everything else 1)

    @rule(nbytes=sizes)
    def withdraw_a_request(self, nbytes: int) -> None:
        try:
            request = self.allocator.request_slab(nbytes)
        except OutOfMemoryError:
            return
        for slab in self.allocator.cancel(request):
            slab.close()

    def used(self) -> int:
        return sum(block.size for block in self.live)

    def free_runs(self) -> list[int]:
        """Return the sizes of the gaps between the live blocks, slab by slab."""
        gaps = []
        for slab in self.allocator.slabs():
            at = slab.address
            for block in sorted((block for block in self.live if block.slab is slab), key=lambda block: block.address):
                gaps.append(block.address - at)
                at = block.address + block.size
            gaps.append(slab.address + slab.nbytes - at)
        return gaps

    @invariant()
    def what_is_used_and_reserved_agrees_with_the_model(self) -> None:
        assert self.allocator.used == self.used()
        assert self.allocator.reserved == sum(slab.nbytes for slab in self.made if not slab.closed)
        assert self.allocator.limit is None or self.allocator.reserved <= self.allocator.limit

    @invariant()
    def what_rests_is_found_by_its_size(self) -> None:
        memory = self.allocator._memory
        resting = [chunk for size, chunks in memory.resting.items() for chunk in chunks if (chunk.size, chunk.state) == (size, RESTING)]
        assert len(resting) == sum(len(chunks) for chunks in memory.resting.values())
        clean = [(chunk.size, chunk.address) for slab in memory.slabs for chunk in chunks_of(slab) if chunk.state == CLEAN]
        assert sorted(clean) == [(size, address) for size, address, _ in memory.clean]

    @invariant()
    def chunks_cover_the_slabs_and_clean_ones_are_merged(self) -> None:
        for slab in self.allocator._memory.slabs:
            at = slab.memory.address
            previous: Chunk | None = None
            for chunk in chunks_of(slab):
                assert (chunk.address, chunk.prev, chunk.state in (LIVE, RESTING, CLEAN)) == (at, previous, True)
                assert chunk.state != CLEAN or previous is None or previous.state != CLEAN
                at, previous = at + chunk.size, chunk
            assert at == slab.memory.address + slab.size

    def teardown(self) -> None:
        if not hasattr(self, "allocator"):
            return
        for block in self.live:
            self.allocator.free(block)
        for timeline in self.timelines:
            timeline.complete(timeline.issued)
        assert pending(self.allocator) == []
        for slab in self.allocator.trim(everything=True):
            slab.close()
        assert all(slab.closed for slab in self.made), "not everything merged, or a slab was lost"
        assert self.allocator.reserved == 0


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
