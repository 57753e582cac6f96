"""Uses of memory that other code in the process uses too: each use of ours waits for all that the others enqueued before."""

from __future__ import annotations

import pytest

from accel.memory import Dependency, ExternalWork, SharedUsage, Timeline, Usage


class Others:
    """The others' work, whether they can still enqueue more, and what was asked of their stream."""

    def __init__(self) -> None:
        self.timeline = Timeline("others")
        self.advanced: list[int] = []
        self.watched = 0
        self.have_it = True
        self.work = ExternalWork(self.timeline, self.advanced.append, self.watch)

    def watch(self) -> None:
        self.watched += 1


@pytest.fixture
def others() -> Others:
    return Others()


def use(usage: Usage, timeline: Timeline, how: str) -> list[Dependency]:
    dependencies: list[Dependency] = []
    (usage.read if how == "read" else usage.write)(timeline, timeline.issue(), dependencies)
    return [each for each in dependencies if each[0] is not timeline]


@pytest.mark.parametrize("how", ["read", "write"])
def test_each_use_waits_for_all_that_the_others_enqueued_before_it(others: Others, how: str) -> None:
    usage, ours = SharedUsage(Usage(), others.work, lambda: others.have_it), Timeline("ours")

    assert use(usage, ours, how) == [(others.timeline, 1)]
    assert use(usage, ours, how) == [(others.timeline, 2)]

    assert others.advanced == [1, 2]
    assert others.watched == 0


@pytest.mark.parametrize("how", ["read", "write"])
def test_once_the_others_have_let_go_only_their_last_work_is_waited_for(others: Others, how: str) -> None:
    usage, ours = SharedUsage(Usage(), others.work, lambda: others.have_it), Timeline("ours")
    use(usage, ours, how)
    others.have_it = False

    assert use(usage, ours, how) == [(others.timeline, 2)]
    assert use(usage, ours, how) == [(others.timeline, 2)]
    assert (others.advanced, others.watched) == ([1, 2], 1)

    others.timeline.complete(2)
    assert use(usage, ours, how) == []


def test_an_unfinished_write_of_ours_is_taken_over(others: Others) -> None:
    writer, reader, before = Timeline("writer"), Timeline("reader"), Usage()
    before.write(writer, writer.issue(), [])

    usage = SharedUsage(before, others.work, lambda: True)

    assert usage.pending_write() == (writer, 1)
    assert use(usage, reader, "read") == [(writer, 1), (others.timeline, 1)]


def test_memory_that_the_others_have_let_go_is_ordinary_again_after_their_last_work(others: Others) -> None:
    usage, ours, next_one = SharedUsage(Usage(), others.work, lambda: True), Timeline("ours"), Timeline("next")
    use(usage, ours, "write")

    left = usage.split()

    assert type(left) is Usage
    assert others.watched == 1
    assert sorted(use(left, next_one, "write"), key=lambda each: str(each[0])) == sorted(
        [(others.timeline, 2), (ours, 1)], key=lambda each: str(each[0])
    )
    assert others.advanced == [1, 2]
