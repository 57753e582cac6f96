"""A child is judged by the time in which this process could read its answers, not by the clock alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import accel
from accel.remote.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Callable


class Clock:
    """A loop that has a clock and nothing else: the test says how time passes."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due: list[tuple[float, Callable[[], object]]] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Callable[[], object]) -> Any:
        entry = (when, call)
        self.due.append(entry)
        clock = self

        class Handle:
            def cancel(self) -> None:
                if entry in clock.due:
                    clock.due.remove(entry)

        return Handle()

    def go_on(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        while self.due and self.due[0][0] <= end:
            at, call = self.due.pop(0)
            self.now = max(self.now, at)
            call()
        self.now = end

    def stop(self, seconds: float) -> None:
        """Let time pass in which nothing runs."""
        self.now += seconds


class Child:
    """A child that answers pings if it is told to, and its watchdog."""

    def __init__(self, hang_timeout: float | None = 1.0) -> None:
        self.is_stopped = False
        self.clock, self.verdicts = Clock(), list[str]()
        self.is_busy, self.busy, self.answers, self.pings = False, 0.0, True, 0
        self.ops: dict[int, object] = {}
        self.questions: dict[int, object] = {}
        loop: Any = self.clock
        options: Any = SimpleNamespace(hang_timeout=hang_timeout, limits=accel.ProcessHost(busy_timeout=4.0))
        self.watchdog = Watchdog(loop, self, options, self.verdicts.append)
        self.watchdog.watch(self.ops, self.questions, self.busy_seconds)

    def busy_seconds(self) -> float:
        return self.busy

    def ping(self) -> None:
        self.pings += 1
        if self.answers:
            self.watchdog.is_heard = True


# -- the start


def test_a_step_that_does_not_end_expires_once() -> None:
    child = Child()
    child.watchdog.begin_step(2.0)
    child.clock.go_on(1.9)
    assert not child.verdicts
    child.clock.go_on(0.7)
    assert child.verdicts == ["was not ready within 2 s"]
    child.clock.go_on(500.0)
    assert (child.verdicts, child.clock.due) == (["was not ready within 2 s"], [])


def test_a_child_that_has_sent_something_has_more_time_but_not_without_end() -> None:
    child = Child()
    child.answers = False
    child.watchdog.begin_step(2.0, then=120.0)
    child.clock.go_on(1.5)
    child.watchdog.is_heard = True
    child.clock.go_on(110.0)
    assert not child.verdicts
    child.clock.go_on(15.0)
    assert child.verdicts == ["was not ready within 120 s"]


def test_time_in_which_nothing_could_be_heard_does_not_count() -> None:
    child = Child()
    child.watchdog.begin_step(2.0, then=120.0)
    child.answers = False
    for _ in range(3):
        child.clock.go_on(0.2)
        child.clock.stop(50.0)
    child.clock.go_on(0.0)
    assert not child.verdicts
    child.clock.go_on(0.1)
    child.watchdog.is_heard = True
    child.clock.go_on(60.0)
    assert not child.verdicts
    child.watchdog.stop()
    assert not child.clock.due


def test_an_answer_that_came_in_a_stop_at_the_very_end_is_read_before_the_verdict() -> None:
    child = Child()
    child.answers = False
    child.watchdog.begin_step(2.0, then=120.0)
    child.clock.go_on(1.9)
    child.clock.stop(3.0)
    child.clock.go_on(0.0)
    assert not child.verdicts
    child.watchdog.is_heard = True
    child.clock.go_on(3.0)
    assert not child.verdicts


# -- requests


def test_the_oldest_request_alone_is_judged() -> None:
    child = Child()
    for number in range(1, 8):
        child.ops[number] = child.ops[number + 1] = object()
        child.clock.go_on(0.8)
        del child.ops[number]
    assert not child.verdicts
    child.clock.go_on(2.0)
    assert child.verdicts == ["hung: its oldest op has not ended for 1 s"]


def test_a_question_has_the_time_of_loading_and_compiling() -> None:
    child = Child(hang_timeout=None)
    child.ops[1] = child.questions[2] = object()
    child.clock.go_on(3.9)
    assert not child.verdicts
    child.clock.go_on(1.5)
    assert child.verdicts == ["hung: it has not compiled or opened for 4 s what it was asked to"]


def test_loading_does_not_count_up_to_its_own_bound() -> None:
    child = Child()
    child.ops[1] = object()
    for _ in range(9):
        child.clock.go_on(0.5)
        child.busy += 0.5
    assert not child.verdicts, "4 s of 4.5 do not count"
    for _ in range(3):
        child.clock.go_on(0.5)
        child.busy += 0.5
    assert len(child.verdicts) == 1


# -- silence


def test_a_child_that_answers_pings_is_not_silent() -> None:
    child = Child()
    child.clock.go_on(100.0)
    assert (child.verdicts, child.watchdog.silence()) == ([], "")
    assert 90 <= child.pings <= 110, "one each second"


def test_a_silent_child_is_seen_after_an_interval_and_given_up_in_time() -> None:
    child = Child()
    child.answers = False
    child.clock.go_on(0.9)
    assert not child.watchdog.silence()
    child.clock.go_on(1.5)
    assert "has not answered" in child.watchdog.silence()
    child.watchdog.is_heard = True
    assert not child.watchdog.silence()
    child.clock.go_on(9.0)
    assert not child.verdicts
    child.clock.go_on(3.0)
    assert child.verdicts == ["has not answered for 10 s"]


@pytest.mark.parametrize("what", ["starting", "busy"])
def test_a_child_that_starts_or_loads_may_be_silent(what: str) -> None:
    child = Child()
    child.answers = False
    if what == "starting":
        child.watchdog.begin_step(500.0)
    child.is_busy = what == "busy"
    child.clock.go_on(55.0)
    assert (child.verdicts, child.watchdog.silence()) == ([], "")
    child.clock.go_on(10.0)
    assert child.verdicts == ([] if what == "starting" else ["has not answered for 60 s"])


@pytest.mark.parametrize("what", ["starting", "busy"])
def test_a_child_that_a_signal_has_stopped_is_silent_whatever_it_does(what: str) -> None:
    child = Child()
    child.is_stopped, child.answers, child.is_busy = True, False, what == "busy"
    if what == "starting":
        child.watchdog.begin_step(500.0)
    child.clock.go_on(13.0)
    assert child.verdicts == ["has not answered for 10 s"]


def test_a_stop_of_this_process_is_no_silence_of_the_child() -> None:
    child = Child()
    child.answers = False
    for _ in range(5):
        child.clock.stop(60.0)
        child.clock.go_on(0.01)
    assert (child.verdicts, child.pings) == ([], 2), "five stops count as five ticks of 0.25 s"
