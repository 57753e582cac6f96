"""Random uses of some buffers by some streams: whoever waits as it is told never runs beside a use that it conflicts with."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from accel.memory import Dependency, Timeline, Usage

STREAMS = 3
BUFFERS = 3


@dataclass(frozen=True)
class Op:
    """An issued op, and what its stream was told to wait for."""

    timeline: Timeline
    seq: int
    reads: frozenset[int]
    writes: frozenset[int]
    dependencies: tuple[Dependency, ...]

    def conflicts(self, other: Op) -> bool:
        return bool(self.writes & (other.reads | other.writes) or self.reads & other.writes)


operands = st.frozensets(st.integers(0, BUFFERS - 1), max_size=BUFFERS)
issues = st.tuples(st.just("issue"), st.integers(0, STREAMS - 1), operands, operands)
completions = st.tuples(st.just("complete"), st.integers(0, STREAMS - 1), st.just(frozenset[int]()), st.just(frozenset[int]()))
programs = st.lists(st.one_of(issues, issues, completions), max_size=40)


def before(op: Op, ops: dict[tuple[Timeline, int], Op]) -> set[Op]:
    """Return everything that stream order and the dependencies make end before ``op`` begins."""
    found: set[Op] = set()
    todo = [op]
    while todo:
        at = todo.pop()
        for timeline, seq in (*at.dependencies, (at.timeline, at.seq - 1)):
            earlier = ops.get((timeline, seq))
            if earlier is not None and earlier not in found:
                found.add(earlier)
                todo.append(earlier)
    return found


def can_end(op: Op) -> bool:
    return all(timeline.completed >= seq for timeline, seq in op.dependencies)


def play(program: list[tuple[str, int, frozenset[int], frozenset[int]]]) -> None:
    timelines = [Timeline(str(number)) for number in range(STREAMS)]
    usages = [Usage() for _ in range(BUFFERS)]
    ops: dict[tuple[Timeline, int], Op] = {}
    for action, stream, reads, writes in program:
        timeline = timelines[stream]
        if action == "complete":
            following = ops.get((timeline, timeline.completed + 1))
            if following is not None and can_end(following):
                timeline.complete(following.seq)
            continue
        seq, dependencies = timeline.issue(), list[Dependency]()
        over = {op for op in ops.values() if op.seq <= op.timeline.completed}
        for buffer in reads:
            usages[buffer].read(timeline, seq, dependencies)
        for buffer in writes:
            usages[buffer].write(timeline, seq, dependencies)
        assert all(other is not timeline and number > other.completed for other, number in dependencies)
        op = ops[timeline, seq] = Op(timeline, seq, reads, writes, tuple(timeline.outstanding(dependencies)))
        assert len({other for other, _ in op.dependencies}) == len(op.dependencies)
        ordered = before(op, ops) | over
        missing = [other for other in ops.values() if other is not op and other.conflicts(op) and other not in ordered]
        assert not missing, f"{op} may run beside {missing}"
        needless = [pair for pair in op.dependencies if not ops[pair].conflicts(op)]
        assert not needless, f"{op} waits for {needless}"
    check_idle(timelines, usages, ops)


def check_idle(timelines: list[Timeline], usages: list[Usage], ops: dict[tuple[Timeline, int], Op]) -> None:
    for buffer, usage in enumerate(usages):
        running = [op for op in ops.values() if buffer in op.reads | op.writes and op.seq > op.timeline.completed]
        assert usage.is_idle() == (not running)
        for timeline in timelines:
            assert usage.is_idle_for(timeline) or any(op.timeline is not timeline for op in running)
        for other, seq in usage.pending():
            assert seq <= max(op.seq for op in running if op.timeline is other)
    for timeline in timelines:
        timeline.complete(timeline.issued)
    assert all(usage.is_idle() and usage.pending() == [] for usage in usages)


@settings(max_examples=300)
@given(programs)
def test_conflicting_uses_are_always_ordered_and_nothing_else_waits(program: list[tuple[str, int, frozenset[int], frozenset[int]]]) -> None:
    play(program)


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, STREAMS - 1), st.booleans()), max_size=6),
        min_size=1,
        max_size=5,
    ),
    st.lists(st.integers(0, 8), min_size=STREAMS, max_size=STREAMS),
)
def test_a_merged_usage_has_the_latest_pending_use_of_each_part(parts: list[list[tuple[int, bool]]], over: list[int]) -> None:
    timelines = [Timeline(str(number)) for number in range(STREAMS)]
    usages = []
    for part in parts:
        usage = Usage()
        for stream, writes in part:
            seq = timelines[stream].issue()
            (usage.write if writes else usage.read)(timelines[stream], seq, [])
        usages.append(usage)
    for timeline, seq in zip(timelines, over, strict=True):
        timeline.complete(min(seq, timeline.issued))
    expected: dict[Timeline, int] = {}
    for usage in usages:
        for timeline, seq in usage.pending():
            expected[timeline] = max(seq, expected.get(timeline, 0))
    merged = Usage()
    for usage in usages:
        merged.merge(usage)
    assert dict(merged.pending()) == expected
    dependencies: list[Dependency] = []
    merged.write(Timeline("new"), 1, dependencies)
    assert dict(dependencies) == expected
    assert len(dependencies) == len(expected)
