"""Timelines, and the dependencies that reads and writes of one block of memory have on each other."""

from __future__ import annotations

import pytest

from accel.memory import Dependency, Timeline, Usage


class Lane(Timeline):
    __slots__ = ("stream",)

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.stream = stream


@pytest.fixture
def lanes() -> tuple[Lane, Lane, Lane]:
    return Lane("a"), Lane("b"), Lane("c")


def read(usage: Usage, timeline: Timeline) -> list[Dependency]:
    dependencies: list[Dependency] = []
    usage.read(timeline, timeline.issue(), dependencies)
    return dependencies


def write(usage: Usage, timeline: Timeline) -> list[Dependency]:
    dependencies: list[Dependency] = []
    usage.write(timeline, timeline.issue(), dependencies)
    return dependencies


def test_numbers_start_at_one_and_completion_never_goes_back() -> None:
    timeline = Timeline("t")
    assert timeline.is_idle()
    assert [timeline.issue() for _ in range(3)] == [1, 2, 3]
    timeline.complete(2)
    timeline.complete(1)
    assert timeline.completed == 2
    assert not timeline.is_idle()
    timeline.complete(3)
    assert timeline.is_idle()
    assert "completed 3 of 3" in repr(timeline)


def test_timelines_are_told_apart_by_identity_and_take_slots_in_subclasses() -> None:
    one, other = Lane("same"), Lane("same")
    assert one != other
    assert len({one, other}) == 2
    assert not hasattr(one, "__dict__")


def test_outstanding_drops_oneself_what_is_over_and_what_is_waited_for(lanes: tuple[Lane, Lane, Lane]) -> None:
    a, b, c = lanes
    b.complete(4)
    c.complete(1)
    a.waited[c] = 7
    assert a.outstanding([(a, 9), (b, 4), (c, 7)]) == []
    assert a.outstanding([(b, 5), (c, 8), (b, 9), (b, 6)]) == [(b, 9), (c, 8)]
    assert a.waited == {c: 7}


def test_one_stream_never_depends_on_itself(lanes: tuple[Lane, Lane, Lane]) -> None:
    a, _, _ = lanes
    usage = Usage()
    assert [write(usage, a), read(usage, a), read(usage, a), write(usage, a), write(usage, a)] == [[], [], [], [], []]
    assert usage.pending() == [(a, 5)]


def test_a_read_waits_for_the_write_before_it(lanes: tuple[Lane, Lane, Lane]) -> None:
    a, b, _ = lanes
    usage = Usage()
    write(usage, a)
    assert read(usage, b) == [(a, 1)]
    a.complete(1)
    assert read(usage, b) == []


def test_reads_do_not_wait_for_reads(lanes: tuple[Lane, Lane, Lane]) -> None:
    usage = Usage()
    assert [read(usage, lane) for lane in lanes] == [[], [], []]


def test_a_write_waits_for_the_reads_since_and_for_the_write_before(lanes: tuple[Lane, Lane, Lane]) -> None:
    a, b, c = lanes
    usage = Usage()
    write(usage, a)
    read(usage, b)
    read(usage, c)
    read(usage, b)
    assert sorted(write(usage, c), key=lambda pair: pair[0].name) == [(a, 1), (b, 2)]
    assert read(usage, a) == [(c, 2)], "the write took the place of what was before it"


def test_a_write_of_the_first_reader_still_waits_for_the_others(lanes: tuple[Lane, Lane, Lane]) -> None:
    a, b, _ = lanes
    usage = Usage()
    read(usage, a)
    read(usage, b)
    assert write(usage, a) == [(b, 1)]


def test_a_write_after_a_write_waits_unless_that_is_over(lanes: tuple[Lane, Lane, Lane]) -> None:
    a, b, _ = lanes
    usage = Usage()
    write(usage, a)
    assert write(usage, b) == [(a, 1)]
    b.complete(1)
    assert write(usage, a) == []


def test_a_write_names_each_timeline_once_with_its_largest_number(lanes: tuple[Lane, Lane, Lane]) -> None:
    a, b, _ = lanes
    usage = Usage()
    write(usage, a)
    read(usage, a)
    read(usage, a)
    assert write(usage, b) == [(a, 3)]


def test_a_use_that_both_reads_and_writes_depends_on_both_kinds(lanes: tuple[Lane, Lane, Lane]) -> None:
    a, b, c = lanes
    usage = Usage()
    write(usage, a)
    read(usage, b)
    dependencies: list[Dependency] = []
    seq = c.issue()
    usage.read(c, seq, dependencies)
    usage.write(c, seq, dependencies)
    assert sorted(c.outstanding(dependencies), key=lambda pair: pair[0].name) == [(a, 1), (b, 1)]


def test_idle_means_over_or_on_the_timeline_that_asks(lanes: tuple[Lane, Lane, Lane]) -> None:
    a, b, c = lanes
    usage = Usage()
    assert usage.is_idle()
    write(usage, a)
    assert not usage.is_idle()
    assert (usage.is_idle_for(a), usage.is_idle_for(b)) == (True, False)
    read(usage, b)
    assert (usage.is_idle_for(a), usage.is_idle_for(b)) == (False, False)
    a.complete(1)
    assert (usage.is_idle_for(a), usage.is_idle_for(b)) == (False, True)
    read(usage, c)
    b.complete(1)
    assert (usage.is_idle_for(b), usage.is_idle_for(c)) == (False, True)
    c.complete(1)
    assert usage.is_idle()
    assert usage.pending() == []


def test_an_unfinished_write_is_reported_until_it_is_over(lanes: tuple[Lane, Lane, Lane]) -> None:
    a, b, _ = lanes
    usage = Usage()
    assert usage.pending_write() is None
    write(usage, a)
    read(usage, b)
    assert usage.pending_write() == (a, 1)
    a.complete(1)
    assert usage.pending_write() is None
    assert usage.pending() == [(b, 1)]


def test_merged_usages_make_the_next_writer_wait_for_both(lanes: tuple[Lane, Lane, Lane]) -> None:
    a, b, c = lanes
    left, right = Usage(), Usage()
    write(left, a)
    read(left, b)
    write(right, b)
    write(right, a)
    right_reads = read(right, c)
    assert right_reads == [(a, 2)]
    left.merge(right)
    assert dict(left.pending()) == {a: 2, b: 1, c: 1}
    assert dict(write(left, Timeline())) == {a: 2, b: 1, c: 1}


def test_merging_leaves_out_what_is_over_and_keeps_the_largest_number(lanes: tuple[Lane, Lane, Lane]) -> None:
    a, b, _ = lanes
    left, right = Usage(), Usage()
    write(right, a)
    read(right, b)
    a.complete(1)
    left.merge(right)
    assert left.pending() == [(b, 1)]
    read(right, b)
    left.merge(right)
    right = Usage()
    right.read(b, 1, [])
    left.merge(right)
    assert left.pending() == [(b, 2)]


def test_merging_keeps_the_larger_number_whichever_side_has_it(lanes: tuple[Lane, Lane, Lane]) -> None:
    a, b, _ = lanes
    parts = []
    for seq in (3, 5, 4):
        usage = Usage()
        usage.read(a, seq, [])
        usage.read(b, seq, [])
        parts.append(usage)
    parts[0].merge(parts[1])
    parts[0].merge(parts[2])
    assert dict(parts[0].pending()) == {a: 5, b: 5}


def test_a_write_takes_the_place_of_all_reads_before_it(lanes: tuple[Lane, Lane, Lane]) -> None:
    usage = Usage()
    for lane in lanes:
        read(usage, lane)
    write(usage, lanes[0])
    assert usage.pending() == [(lanes[0], 2)]
    assert write(usage, lanes[1]) == [(lanes[0], 2)]


def test_memory_is_idle_only_when_the_last_of_many_readers_is_done(lanes: tuple[Lane, Lane, Lane]) -> None:
    usage = Usage()
    for lane in lanes:
        read(usage, lane)
    for lane in lanes:
        assert not usage.is_idle()
        assert usage.is_idle_for(lane) == (lane is lanes[-1])
        lane.complete(1)
    assert usage.is_idle()


def test_reads_of_many_timelines_are_all_kept(lanes: tuple[Lane, Lane, Lane]) -> None:
    usage = Usage()
    many = [Timeline(str(number)) for number in range(20)]
    for _ in range(3):
        for timeline in many:
            read(usage, timeline)
    assert dict(usage.pending()) == dict.fromkeys(many, 3)
    assert dict(write(usage, lanes[0])) == dict.fromkeys(many, 3)
    assert "pending" in repr(usage)
