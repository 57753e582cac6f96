"""Chaos runs with poison among the items: only its sender may be told, and who is told wrongly is found."""

from __future__ import annotations

import contextlib
import json
import random
import secrets
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest

import accel
from benchmarks.chaos_parts.bad_loads import BadLoads, makers
from benchmarks.chaos_parts.models import CpuModel, Modelled, weights
from benchmarks.chaos_parts.oracle import WrongAnswerError
from benchmarks.chaos_parts.suspects import POISON, Suspects
from benchmarks.model_poison import ASSERT, HANG, NAN, RAISE
from benchmarks.model_service import LENGTH, VOCABULARY

ROOT = Path(__file__).resolve().parents[2]


def test_only_the_sender_of_poison_is_told(tmp_path: Path) -> None:
    out, seed = tmp_path / "report.json", str(secrets.randbits(32))
    command = [sys.executable, "benchmarks/chaos.py", "--json", str(out), "--seed", seed, "--seconds", "3", "--clients", "2"]
    command += ["--hosts", "process", "--faults", "", "--suspects", "12", "--model", "12"]
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


def poisoned(item: float, code: int) -> accel.PoisonedInputError:
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


@pytest.mark.parametrize("answer", [poisoned(1.5, 11), told(), told("because of this"), 8.0, float("nan")], ids=repr)
async def test_who_sent_no_poison_must_be_answered(answer: float | Exception) -> None:
    with pytest.raises(WrongAnswerError):
        await suspects(answer)._item(1.5)


async def test_what_the_run_itself_did_to_a_search_is_no_violation() -> None:
    await suspects(9.0)._item(1.5)
    await suspects(poisoned(1.5, 9))._item(1.5)
    with pytest.raises(WrongAnswerError):
        await suspects(poisoned(1.5, 11), "spare")._item(1.5)
    with pytest.raises(accel.ContextPoisonedError):  # the ledger judges it
        await suspects(told("the quarantine could not be used"), "rebuild")._item(1.5)
    with pytest.raises(accel.ContextPoisonedError):
        await suspects(told(executed="no"))._item(1.5)


@pytest.mark.parametrize("answer", [-6.0, poisoned(1.5, 11)], ids=repr)
async def test_who_sent_poison_must_be_told_so(answer: float | Exception) -> None:
    with pytest.raises(WrongAnswerError):
        await suspects(answer)._poison()
    await suspects(poisoned(POISON, 11))._poison()
    await suspects(poisoned(POISON, 9))._poison()


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
    ("answer", "hunted"),
    [(poisoned(1.5, 9), None), (poisoned(1.5, 11), WrongAnswerError), (told(executed="no"), accel.ContextPoisonedError)],
    ids=repr,
)
async def test_a_clean_request_is_answered_unless_the_run_kills_unknown_children(answer: Exception, hunted: type[Exception] | None) -> None:
    ids = np.zeros(LENGTH, np.int64)
    with pytest.raises(WrongAnswerError):
        await modelled(answer)._clean(ids)
    with contextlib.nullcontext() if hunted is None else pytest.raises(hunted):
        await modelled(answer, "spare")._clean(ids)


async def test_the_version_that_serves_is_known_after_many_swaps_that_failed(rng: np.random.Generator) -> None:
    ids = rng.integers(0, VOCABULARY, LENGTH)
    made, failing = modelled(answer_of(2, ids)), True

    async def swap(_weights: Any, canaries: Any) -> None:
        if failing:
            raise told()

    async def release() -> None:
        pass

    made._model = SimpleNamespace(swap=swap, release=release)  # type: ignore[assignment]
    for version in range(3, 13):
        with pytest.raises(accel.ContextPoisonedError):
            await made._swap(version, ids)
    await made._clean(ids)
    failing = False
    for version in range(13, 23):
        await made._swap(version, ids)
    with pytest.raises(WrongAnswerError):
        await made._clean(ids)


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
