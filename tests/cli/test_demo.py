"""The demo as its users run it: what it reports, how it ends when something is wrong, and that Ctrl-C leaves nothing behind."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import os
import re
import secrets
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import accel
from accel.cli import plain
from accel.cli.demo_report import DemoReport
from accel.cli.demo_screen import DemoScreen, Tally
from accel.cli.digits import Digits, Model, load_digits
from accel.cli.main import main
from accel.testing import FaultPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["demo", "--requests", "1500", "--clients", "64"]


@pytest.fixture(scope="module")
def digits() -> Digits:
    return load_digits()


def test_the_same_seed_gives_the_same_split_and_no_digit_is_on_both_sides(digits: Digits) -> None:
    again, other = load_digits(), load_digits(1)
    assert len(digits.train_images) + len(digits.held_out_images) == 1797
    assert len(digits.held_out_labels) == 359
    assert digits.train_images.dtype == np.float32
    assert (digits.train_images.min(), digits.train_images.max()) == (0, 1)
    np.testing.assert_array_equal(digits.held_out_images, again.held_out_images)
    np.testing.assert_array_equal(digits.train_labels, again.train_labels)
    assert not np.array_equal(digits.held_out_images, other.held_out_images)
    both = {image.tobytes() for image in digits.train_images} & {image.tobytes() for image in digits.held_out_images}
    assert both == set()


async def test_the_model_is_right_often_enough_and_agrees_with_numpy(device: accel.Device, digits: Digits) -> None:
    seed = secrets.randbelow(1000)
    model = await Model.load(device, digits, seed=seed)
    labels = await model.predict(digits.held_out_images)
    one = await model.classify([digits.held_out_images[0]])
    assert np.mean(labels == digits.held_out_labels) >= 0.93, f"seed {seed}"
    scores = model.reference(digits.held_out_images)
    assert np.all(scores[np.arange(len(labels)), labels] >= scores.max(axis=1) - 1e-4), f"seed {seed}"
    assert one == [labels[0]]


async def test_the_model_puts_its_weights_again_after_a_rebuild(digits: Digits) -> None:
    plan = FaultPlan()
    async with accel.System() as system:
        device = await system.open_device("cpu", faults=plan)
        model = await Model.load(device, digits)
        before = await model.predict(digits.held_out_images)
        plan.poison_at(plan.count + 1)
        with pytest.raises(accel.ContextPoisonedError):
            await model.predict(digits.held_out_images)
        after = await asyncio.gather(*(model.predict(digits.held_out_images) for _ in range(3)))
        assert device.generation == 2
    for labels in after:
        np.testing.assert_array_equal(labels, before)


def test_a_request_kills_both_services_and_one_answers_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "demo.json"
    assert main([*SMALL, "--json", str(target)]) == 0
    report = DemoReport(**json.loads(target.read_text(encoding="utf-8")))
    assert (report.host, report.requests, report.answered, report.lost, report.wrong, report.ok) == ("process", 1500, 1500, 0, 0, True)
    assert report.accuracy >= 0.93
    assert (report.generation_before, report.generation_after) == (1, 2)
    assert len({report.pid_before, report.pid_after, os.getpid()}) == 3
    assert report.fault == f"SIGKILL to process {report.pid_before}"
    assert report.fault_at_request is not None
    assert 750 <= report.fault_at_request <= 750 + 4 * 64
    assert report.fault_to_answer_ms is not None
    assert report.gap_ms >= report.fault_to_answer_ms > 0
    assert 0 < report.retried <= 4 * 64
    assert report.standby == "ready"
    assert (report.weights_durable, report.weights_put, report.weights_intact) == (True, 1, True)
    assert report.p50_ms is not None
    assert report.p99_ms is not None
    assert 0 < report.p50_ms <= report.p99_ms
    assert 1 < report.mean_batch <= 64
    assert report.requests_per_s == pytest.approx(1500 / report.seconds)
    # The plain service: what it answered before it was killed, at most all but what its 64 clients had sent.
    assert report.plain_answered is not None
    assert 750 - 64 <= report.plain_answered <= 750
    assert (report.plain_failed, report.plain_gap_ms) == (1500 - report.plain_answered, None)
    printed = capfd.readouterr()
    assert printed.err == ""
    assert re.search(
        rf"fault at request {report.fault_at_request:,}, by {report.fault}: (ContextPoisonedError|StaleRefError) in", printed.out
    )
    assert "every request was answered, and right" in printed.out
    assert "durable, 150 KiB, put once, intact" in printed.out
    plain = re.search(r"request 750 kills the plain service: SIGKILL to process (\d+)", printed.out)
    assert plain is not None
    for line in ("answered +1,500 +{:,}", "failed +0 +{:,}", r"longest gap +\d+ ms +no answer any more"):
        assert re.search(line.format(report.plain_answered if line.startswith("answered") else report.plain_failed), printed.out), line
    for pid in (report.pid_before, report.pid_after, int(plain[1])):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_without_a_child_the_context_is_poisoned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--host", "inline", "--json", "-"]) == 0
    printed = capsys.readouterr()
    report = DemoReport(**json.loads(printed.out))
    assert (report.host, report.lost, report.wrong, report.ok) == ("inline", 0, 0, True)
    assert (report.generation_before, report.generation_after) == (1, 2)
    assert report.pid_before == report.pid_after == os.getpid()
    assert (report.plain_answered, report.plain_failed, report.plain_gap_ms) == (None, None, None)
    assert f"fault at request {report.fault_at_request:,}, by {report.fault}: ContextPoisonedError in generation 1" in printed.err


def test_without_a_fault_both_services_answer_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--no-fault", "--json", "-"]) == 0
    report = DemoReport(**json.loads(capsys.readouterr().out))
    assert (report.answered, report.plain_answered, report.plain_failed) == (1500, 1500, 0)
    assert report.plain_gap_ms is not None
    assert (report.pid_before, report.generation_after) == (report.pid_after, 1)


async def test_a_plain_service_that_does_not_start_is_said(digits: Digits, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("")
    monkeypatch.setattr(plain, "_PROGRAM", tmp_path / "ends.py")
    async with accel.System() as system:
        model = await Model.load(await system.open_device("cpu"), digits)
        with pytest.raises(accel.HostDiedError, match="did not start"):
            async with plain.plain_service(model, Tally("plain")):
                raise AssertionError


def test_a_wrong_answer_fails_the_demo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    honest = Model.classify

    async def lying(self: Model, images: list[Any]) -> Sequence[int]:
        return [*(await honest(self, images))[:-1], 10 - 1 - (await honest(self, images[-1:]))[0]]

    monkeypatch.setattr(Model, "classify", lying)
    assert main([*SMALL, "--host", "inline", "--no-fault"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_a_lost_request_fails_the_demo_and_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async def failing(self: Model, images: list[Any]) -> Sequence[int]:
        raise accel.LibraryError("no luck", code=13)

    monkeypatch.setattr(Model, "classify", failing)
    assert main([*SMALL, "--host", "inline", "--no-fault"]) == 1
    printed = capsys.readouterr().out
    assert "1500 lost" in printed
    assert "lost: LibraryError: no luck [code=13]" in printed


@pytest.mark.parametrize(
    "words", [["--host", "elsewhere"], ["--json", "/there/is/no/such/folder/x"], ["--requests", "0"], ["--clients", "x"]], ids=str
)
def test_what_cannot_be_served_is_said_and_exits_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *words]) == 2
    printed = capsys.readouterr()
    assert any(word in printed.err for word in (words[0], words[0].strip("-"), "folder"))
    assert "Traceback" not in printed.err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_both_services_in_a_table() -> None:
    out = Terminal()
    ours, beside = Tally("accel"), Tally("plain")
    with DemoScreen((ours, beside), 100, out) as screen:
        for _ in range(40):
            ours.on_answer()
        screen.update()
        screen.note("something [happened]")
        beside.is_over = True
        beside.on_failure()
    drawn = out.getvalue()
    assert "something [happened]" in drawn
    assert re.search(r"accel .*40.* ms", drawn)
    assert re.search(r"plain .*no answer any more", drawn)


@pytest.mark.parametrize("out", [io.StringIO(), Terminal()], ids=["no terminal", "no rich"])
def test_elsewhere_there_is_a_line_per_tenth(out: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    if out.isatty():
        monkeypatch.setitem(sys.modules, "rich.console", None)
    tally = Tally("accel")
    with DemoScreen((tally, Tally("plain")), 20, out) as screen:
        for _ in range(20):
            tally.on_answer()
            screen.update()
        screen.note("done")
    counts = (f"  {n} of 20  accel: {n} answered, 0 failed; plain: 0 answered, 0 failed" for n in range(2, 21, 2))
    assert out.getvalue().splitlines() == [*counts, "done"]


MOMENTS = {"a plain": 4_000, "fault at": 20_000, "closing": 4_000}


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "requests"), MOMENTS.items())
def test_an_interrupt_leaves_a_short_message_and_nothing_else(moment: str, requests: int) -> None:
    command = [sys.executable, "-m", "accel", "demo", "--requests", str(requests)]
    awaited = f"  {requests:,} of" if moment == "closing" else moment
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, cwd=ROOT) as process:
        assert process.stdout is not None
        lines = [*itertools.takewhile(lambda line: not line.startswith(awaited), process.stdout)]
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    if moment == "closing" and process.returncode == 0:
        assert "every request was answered" in out  # it came too late to interrupt anything
    else:
        assert (process.returncode, err) == (130, "accel: interrupted\n"), out
    assert "Traceback" not in out
    for line in lines:
        if line.startswith("a plain"):  # in a group of its own
            with pytest.raises(ProcessLookupError):
                os.kill(int(line.split("process ")[1].split(",")[0]), 0)
    # The session it was started in has no process left: neither children nor what they started.
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
