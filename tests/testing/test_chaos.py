"""Chaos runs: a short one that must lose nothing, and runs and parts of them that must find what was planted."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

import accel
from benchmarks.chaos_parts.audit import Left, Witness, growth
from benchmarks.chaos_parts.oracle import Ledger, WrongAnswerError
from benchmarks.chaos_parts.plants import Plant
from benchmarks.chaos_parts.processes import children, send_signal
from benchmarks.chaos_parts.report import percentile
from benchmarks.chaos_parts.schedule import FAULTS, Fault, Options, Schedule
from benchmarks.chaos_parts.subject import FAILURE_CODE, Subject

if TYPE_CHECKING:
    from benchmarks.chaos_parts.subject import Entry

ROOT = Path(__file__).resolve().parents[2]


def chaos(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Run the program, and return its status, its report, and what it printed."""
    out = tmp_path / "report.json"
    command = [sys.executable, "benchmarks/chaos.py", "--json", str(out), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=55, check=False)
    assert out.is_file(), f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.returncode, json.loads(out.read_text()), done.stdout + done.stderr


def test_a_short_run_loses_nothing(tmp_path: Path) -> None:
    seed = str(secrets.randbits(32))
    status, report, said = chaos(tmp_path, "--seconds", "4", "--clients", "60", "--gap", "100", "--seed", seed, "--model", "0")
    assert (status, report["violations"]) == (0, []), said
    assert report["answered"] == report["requests"] > 100, said
    assert sum(report["figures"]["faults"].values()) >= 3, said
    assert report["outcomes"]["right"] > 50, said
    assert f"seed {seed}" in said


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        ("lost", "(planted on calm, sent in generation 1)"),
        ("wrong", "the answer is wrong"),
        ("child", "is left"),
        ("unraisable", "nobody was told of RuntimeError('planted')"),
    ],
)
def test_a_run_finds_what_was_planted(tmp_path: Path, plant: str, found: str) -> None:
    arguments = [
        "--seconds",
        "1",
        "--clients",
        "8",
        "--suspects",
        "0",
        "--model",
        "0",
        "--faults",
        "",
        "--hosts",
        "process",
        "--patience",
        {"lost": "1", "child": "4"}.get(plant, "30"),
    ]
    status, report, said = chaos(tmp_path, *arguments, "--plant", plant)
    assert status == 1, said
    assert any(found in each for each in report["violations"]), said
    assert plant == "lost" or report["violated"] == 1, said


# -- what is left behind


@pytest.mark.parametrize(
    ("plant", "found"), [("child", "process"), ("thread", "thread planted"), ("descriptor", "pipe:"), ("memory", "/memfd:planted")]
)
def test_what_is_left_is_found(plant: str, found: str) -> None:
    before, planted = Left(), Plant(plant)
    assert before.behind(0.0) == []
    planted.leave()
    try:
        left = before.behind(0.0)
    finally:
        planted.remove()
    assert left
    assert all(found in each for each in left), left
    assert before.behind() == []


def test_what_accel_could_not_clean_up_is_found() -> None:
    found: list[str] = []
    witness = Witness(found.append)
    with witness.watching():
        accel._log.get_logger().warning("actor_hook_failed", actor="x")
        accel._log.get_logger().info("context_ready")
    assert len(found) == 1
    assert witness.events == {"actor_hook_failed": 1, "context_ready": 1}


@pytest.mark.parametrize(("samples", "grown"), [([9] * 7, 0), ([0, 9, 5, 5, 5, 5, 8, 8], 3), ([50, 60, *[61] * 13, 70], 0)])
def test_memory_that_comes_to_a_process_is_measured_after_the_first_quarter(samples: list[int], grown: int) -> None:
    assert growth(samples) == grown


# -- who judges


class Device:
    """As much of a device as judging takes."""

    name = "cpu:0"

    def __init__(self) -> None:
        self.generation = 1
        self.state = accel.DeviceState.READY

    def info(self) -> Any:
        return Info()


class Info:
    state = accel.DeviceState.READY
    generation = pid = queued = in_flight = 0
    host = "process"


class Judge:
    """A ledger with one device."""

    def __init__(self, **flags: bool) -> None:
        self.ledger = Ledger()
        self.device = Device()
        self.subject = Subject("x", cast("accel.Device", self.device), cast("Any", None), self.ledger.violation, **flags)

    def ask(self, **more: Any) -> Entry:
        return self.ledger.begin("gemm", self.subject, **more)

    def accepts(self, entry: Entry, error: BaseException) -> bool:
        before = self.ledger.violated
        self.ledger.failed(entry, error)
        return self.ledger.violated == before


def poisoned() -> accel.ContextPoisonedError:
    error = accel.ContextPoisonedError("faulted", generation=1)
    error.__cause__ = accel.HostDiedError("died", signal=9)
    return error


def stale() -> accel.StaleRefError:
    return accel.StaleRefError("gone", reason="generation")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no error of accel's"),
        WrongAnswerError("off by one"),
        accel.UnsupportedError("not so"),
        accel.HostDiedError("by itself"),
        poisoned(),
        stale(),
        accel.StaleRefError("gone", reason="freed"),
        accel.StaleRefError("gone", reason="torn"),
        accel.DeadlineExceededError("late"),
        accel.OutOfMemoryError("none"),
        accel.LibraryError("broken", code=FAILURE_CODE),
        accel.MailboxFullError("full", retry_after=1.0),
        accel.DeviceLostError("lost"),
        accel.ClosedError("closed"),
    ],
    ids=lambda error: f"{type(error).__name__}-{error}"[:40],
)
def test_without_a_reason_no_error_is_accepted(error: Exception) -> None:
    judge = Judge()
    assert not judge.accepts(judge.ask(), error)
    assert judge.ledger.violated == 1
    assert not judge.ledger.open


def test_errors_that_were_brought_about_are_accepted() -> None:
    judge = Judge()
    judge.subject.credit("oom")
    assert judge.accepts(judge.ask(), accel.OutOfMemoryError("none"))
    assert not judge.accepts(judge.ask(), accel.OutOfMemoryError("one was planned, and this is the second"))
    judge.subject.credit("fail")
    assert not judge.accepts(judge.ask(), accel.LibraryError("another", code=1))
    assert judge.accepts(judge.ask(), accel.LibraryError("the planned one", code=FAILURE_CODE))
    assert judge.accepts(judge.ask(allows=frozenset({"freed"})), accel.StaleRefError("gone", reason="freed"))
    assert not judge.accepts(judge.ask(timeout=9.0), accel.DeadlineExceededError("too early"))
    assert judge.accepts(judge.ask(timeout=0.0), accel.DeadlineExceededError("late"))
    judge.subject.is_closing = True
    assert judge.accepts(judge.ask(), accel.ClosedError("closed"))


def test_a_fault_must_have_been_sent_and_have_ended_the_generation() -> None:
    judge = Judge()
    before = judge.ask()
    judge.subject.faulted()
    assert not judge.accepts(judge.ask(), poisoned()), "the generation goes on"
    judge.device.state = accel.DeviceState.REBUILDING
    assert judge.accepts(before, poisoned())
    assert judge.accepts(judge.ask(), stale())
    judge.device.generation, judge.device.state = 2, accel.DeviceState.READY
    judge.ledger.right(judge.ask())
    assert len(judge.subject.recoveries) == 1
    assert not judge.accepts(judge.ask(), poisoned())
    no_cause = accel.ContextPoisonedError("faulted")
    judge.device.state = accel.DeviceState.REBUILDING
    assert not judge.accepts(judge.ask(), no_cause)


@pytest.mark.parametrize(("doomed", "state", "accepted"), [(True, "LOST", True), (True, "READY", False), (False, "LOST", False)])
def test_only_a_doomed_device_may_be_lost(doomed: bool, state: str, accepted: bool) -> None:
    judge = Judge(is_doomed=doomed)
    judge.device.state = accel.DeviceState[state]
    assert judge.accepts(judge.ask(), accel.DeviceLostError("lost")) is accepted


def test_a_queue_is_full_only_where_one_may_be_and_says_for_how_long() -> None:
    judge = Judge(rejects=True)
    assert judge.accepts(judge.ask(), accel.MailboxFullError("full", retry_after=1.0))
    assert not judge.accepts(judge.ask(), accel.MailboxFullError("full"))


def test_an_answer_twice_is_found_and_so_is_one_that_does_not_come() -> None:
    judge = Judge()
    entry = judge.ask()
    judge.ledger.right(entry)
    judge.ledger.cancelled(entry)
    assert judge.ledger.violated == 1
    waiting = judge.ask()
    assert judge.ledger.overdue(0.0) == [waiting]
    assert judge.ledger.overdue(60.0) == []


class Generations(Device):
    """A device of which the generations are given."""

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        self.numbers = numbers

    async def generations(self) -> Any:
        for number in self.numbers:
            yield number


@pytest.mark.parametrize(("numbers", "faults", "violated"), [((1, 2, 4), 3, 0), ((1, 2, 2), 3, 1), ((1, 3, 2), 3, 1), ((1, 2), 0, 1)])
async def test_generations_rise_and_are_explained(numbers: tuple[int, ...], faults: int, violated: int) -> None:
    judge = Judge()
    subject = Subject("x", cast("accel.Device", Generations(*numbers)), cast("Any", None), judge.ledger.violation)
    subject.faults = faults
    await subject.watch()
    assert judge.ledger.violated == violated


# -- what comes when


def faults(seed: int, count: int) -> list[Fault | None]:
    schedule = Schedule(Options(seed=seed))
    return list(islice(iter(schedule.next, None), count))


def test_a_seed_gives_the_same_faults_again_and_another_gives_others() -> None:
    seed = secrets.randbits(32)
    assert faults(seed, 100) == faults(seed, 100), f"seed {seed}"
    assert faults(seed, 100) != faults(seed + 1, 100), f"seed {seed}"
    assert {fault.kind for fault in faults(seed, len(FAULTS) + 3) if fault} == set(FAULTS), (
        f"seed {seed}: each comes once before any comes again"
    )


def test_without_kinds_nothing_comes() -> None:
    assert Schedule(Options(faults=())).next() is None


# -- odds and ends


def test_signals_reach_children_only() -> None:
    assert not send_signal(os.getpid(), 0)
    assert not send_signal(os.getppid(), 0)
    with subprocess.Popen(["sleep", "60"]) as child:
        assert child.pid in children()
        assert send_signal(child.pid, 9)
        assert child.wait(10) == -9
    assert not send_signal(child.pid, 9)


def test_percentiles_are_of_what_there_is() -> None:
    assert percentile([], 0.5) is None
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0
