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


def test_outstanding_drops_oneself_what_is_over_and_what_is_waited_for(lanes: tuple[Lane, Lane, Lane]) -> None:
    a, b, c = lanes
    b.complete(4)
    c.complete(1)
    a.waited[c] = 7
    assert a.outstanding([(a, 9), (b, 4), (c, 7)]) == []
    assert a.outstanding([(b, 5), (c, 8), (b, 9), (b, 6)]) == [(b, 9), (c, 8)]
    assert a.waited == {c: 7}


def test_a_write_names_each_timeline_once_with_its_largest_number(lanes: tuple[Lane, Lane, Lane]) -> None:
    a, b, _ = lanes
    usage = Usage()
    write(usage, a)
    read(usage, a)
    read(usage, a)
    assert write(usage, b) == [(a, 3)]


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


def test_reads_of_many_timelines_are_all_kept(lanes: tuple[Lane, Lane, Lane]) -> None:
    usage = Usage()
    many = [Timeline(str(number)) for number in range(20)]
    for _ in range(3):
        for timeline in many:
            read(usage, timeline)
    assert dict(usage.pending()) == dict.fromkeys(many, 3)
    assert dict(write(usage, lanes[0])) == dict.fromkeys(many, 3)
    assert "pending" in repr(usage)
