"""Chaos runs: a short one that must lose nothing, and runs and parts of them that must find what was planted."""

from __future__ import annotations

import json
import random
import secrets
import subprocess
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import pytest

import accel
from benchmarks.chaos_parts.audit import Left, Witness
from benchmarks.chaos_parts.bad_loads import BadLoads, makers
from benchmarks.chaos_parts.models import CpuModel, Modelled, weights
from benchmarks.chaos_parts.oracle import Ledger, WrongAnswerError
from benchmarks.chaos_parts.plants import Plant
from benchmarks.chaos_parts.schedule import FAULTS, Fault, Options, Schedule
from benchmarks.chaos_parts.subject import FAILURE_CODE, Subject
from benchmarks.chaos_parts.suspects import POISON, Suspects
from benchmarks.model_poison import ASSERT, HANG, NAN, RAISE
from benchmarks.model_service import LENGTH, VOCABULARY

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
    only = ("--model", "0", "--replicas", "0", "--no-node")  # `nox -s chaos` has them
    status, report, said = chaos(tmp_path, "--seconds", "2.5", "--clients", "30", "--gap", "100", "--seed", seed, *only)
    assert (status, report["violations"]) == (0, []), said
    assert report["answered"] == report["requests"] > 100, said
    assert sum(report["figures"]["faults"].values()) >= 1, said  # how many there is time for depends on the machine
    assert report["outcomes"]["right"] > 50, said
    assert f"seed {seed}" in said


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        ("lost", "(planted on calm, sent in generation 1)"),
        ("wrong", "the answer is wrong"),
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
        "--replicas",
        "0",
        "--no-node",
        "--faults",
        "",
        "--hosts",
        "process",
        "--patience",
        "1" if plant == "lost" else "30",
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


def test_only_the_sender_of_poison_is_told(tmp_path: Path) -> None:
    out, seed = tmp_path / "report.json", str(secrets.randbits(32))
    command = [sys.executable, "benchmarks/chaos.py", "--json", str(out), "--seed", seed, "--seconds", "2", "--clients", "2"]
    command += ["--hosts", "process", "--faults", "", "--suspects", "12", "--model", "12", "--replicas", "0", "--no-node"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    report = json.loads(out.read_text())
    assert report["answered"] == report["requests"] > 50, done.stdout
    assert report["events"]["poisoned_item"] >= 1, done.stdout
    assert report["figures"]["devices"]["suspect"]["generations"] > 1, done.stdout
    assert report["figures"]["devices"]["model"]["faults"] >= 1, done.stdout
    assert report["figures"]["devices"]["calm"]["generations"] == 1, done.stdout


class Batcher:
    """Answers in the same way always."""

    def __init__(self, answer: float | Exception) -> None:
        self.answer = answer

    async def submit(self, item: float, timeout: float | None = None) -> float:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def suspects(answer: float | Exception, *faults: str) -> Suspects:
    """Return clients whose batcher gives this answer."""
    device = SimpleNamespace(generations=lambda: None, quarantine=lambda: None)
    subject: Any = SimpleNamespace(device=device)
    made, batcher = Suspects(subject, None, 1, faults), Batcher(answer)  # type: ignore[arg-type]
    made.batcher = batcher  # type: ignore[assignment]
    return made


def poisoned_item(item: float, code: int) -> accel.PoisonedInputError:
    """Return what is told of an item that died of a signal, or of one of the driver's codes."""
    error = accel.PoisonedInputError("found", item=item)
    error.__cause__ = accel.ContextPoisonedError("faulted")
    error.__cause__.__cause__ = accel.HostDiedError("died", signal=code)
    return error


def told(note: str = "", executed: Literal["no", "unknown"] = "unknown") -> accel.ContextPoisonedError:
    error = accel.ContextPoisonedError("faulted", executed=executed)
    if note:
        error.add_note(note)
    return error


@pytest.mark.parametrize("answer", [poisoned_item(1.5, 11), told(), told("because of this"), 8.0, float("nan")], ids=repr)
async def test_who_sent_no_poison_must_be_answered(answer: float | Exception) -> None:
    with pytest.raises(WrongAnswerError):
        await suspects(answer)._item(1.5)


async def test_what_the_run_itself_did_to_a_search_is_no_violation() -> None:
    await suspects(9.0)._item(1.5)
    await suspects(poisoned_item(1.5, 9))._item(1.5)
    with pytest.raises(WrongAnswerError):
        await suspects(poisoned_item(1.5, 11), "spare")._item(1.5)
    with pytest.raises(accel.ContextPoisonedError):  # the ledger judges it
        await suspects(told("the quarantine could not be used"), "rebuild")._item(1.5)
    with pytest.raises(accel.ContextPoisonedError):
        await suspects(told(executed="no"))._item(1.5)


@pytest.mark.parametrize("answer", [-6.0, poisoned_item(1.5, 11)], ids=repr)
async def test_who_sent_poison_must_be_told_so(answer: float | Exception) -> None:
    with pytest.raises(WrongAnswerError):
        await suspects(answer)._poison()
    await suspects(poisoned_item(POISON, 11))._poison()
    await suspects(poisoned_item(POISON, 9))._poison()


# -- the served model
def modelled(answer: Any, *faults: str) -> Modelled:
    """Return clients of a model that gives this answer, and whose versions are 1 and 2."""
    made = Modelled(SimpleNamespace(device=SimpleNamespace(name="cpu:0")), None, 1, faults, hangs=True)  # type: ignore[arg-type]
    made._made(1)
    made._made(2)
    made.batcher = Batcher(answer)  # type: ignore[assignment]
    return made


def answer_of(version: int, ids: np.ndarray[Any, Any], told: int | None = None) -> np.ndarray[Any, Any]:
    """Return what the model gives to one request, as another version if one is given."""
    model = CpuModel()
    given: Any = {**weights(1, version), "encoder.version": np.full((1, 1), told or version, np.float32)}
    model.open(given)
    row: np.ndarray[Any, Any] = model.run({"input_ids": ids[None]})[0]  # type: ignore[dict-item]
    return row


async def test_an_answer_of_a_model_is_of_one_version_that_is_known(rng: np.random.Generator) -> None:
    ids = rng.integers(0, VOCABULARY, LENGTH)
    for version in (1, 2):
        await modelled(answer_of(version, ids))._clean(ids)
    for wrong in (answer_of(1, ids, told=2), answer_of(3, ids), answer_of(1, np.roll(ids + 1, 1) % VOCABULARY), np.full(9, np.nan)):
        with pytest.raises((WrongAnswerError, ValueError)):
            await modelled(wrong)._clean(ids)


@pytest.mark.parametrize(
    ("token", "right"),
    [
        (ASSERT, accel.PoisonedInputError(kind="fault")),
        (HANG, accel.PoisonedInputError(kind="hang")),
        (NAN, accel.NonFiniteError()),
        (RAISE, accel.LibraryError()),
    ],
)
async def test_each_poison_of_a_model_has_an_error_of_its_own(token: int, right: Exception) -> None:
    ids = np.full(LENGTH, token)
    await modelled(right)._poison(ids)
    kinds: list[Any] = [
        accel.PoisonedInputError(kind="fault"),
        accel.PoisonedInputError(kind="hang"),
        accel.NonFiniteError(),
        accel.LibraryError(),
    ]
    for wrong in [np.zeros(9), *kinds]:
        if isinstance(wrong, np.ndarray) or (type(wrong), getattr(wrong, "kind", "")) != (type(right), getattr(right, "kind", "")):
            with pytest.raises(WrongAnswerError):
                await modelled(wrong)._poison(ids)


async def test_each_bad_load_of_a_run_is_refused_and_costs_no_context(tmp_path: Path) -> None:
    draw = random.Random(seed := secrets.randbits(32))
    print(f"seed {seed}")
    takes = {"inputs": {"input_ids": accel.TensorSpec(("batch", LENGTH), "int64")}, "buckets": {"batch": (1,)}}
    async with accel.System() as system:
        device = await system.open_device("cpu", host="process", memory_limit=64 << 20)
        loads = BadLoads(SimpleNamespace(device=device), SimpleNamespace(), 0, CpuModel, **takes)  # type: ignore[arg-type]
        await loads.load(None)
        for make in makers():
            await loads.load(make(tmp_path, draw))
        assert device.generation == 1
        good = BadLoads(SimpleNamespace(device=device), SimpleNamespace(), 0, Anything, **takes)  # type: ignore[arg-type]
        with pytest.raises(WrongAnswerError):
            await good.load(None)


class Anything:
    """A model that takes any weights."""

    def open(self, *_: Any) -> None:
        pass

    def run(self, inputs: Any) -> Any:
        return np.zeros((len(np.asarray(inputs["input_ids"])), 1))
