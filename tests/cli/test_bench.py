from __future__ import annotations

import asyncio
import json
import random
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from accel import InvalidArgumentError, UnsupportedError
from accel.cli.bench import budgets, command
from accel.cli.bench.budgets import BUDGETS, Budget, holds
from accel.cli.bench.cases import CASES
from accel.cli.bench.measure import Samples, awaited, called, compare
from accel.cli.bench.report import Report, describe_machine
from accel.cli.bench.suite import Bench, BenchCase, choose
from accel.cli.main import main
from benchmarks import run
from benchmarks.cases import data, mixed, suite
from benchmarks.measures import together

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let cases do next to nothing: what is tested is that they run and report, not what they measure."""
    monkeypatch.setattr(Bench, "scale", lambda self, full, quick: 2)
    monkeypatch.setattr(data, "_SIZES", {"4 KiB": 1 << 12, "1 MiB": 1 << 20})
    monkeypatch.setattr(data, "_SIDES", (8, 32))
    monkeypatch.setattr(mixed, "SIZES", (8, 16, 32))


def sampled(*seconds: float) -> Samples:
    samples = Samples()
    for value in seconds:
        samples.add(value)
    return samples


# -- measuring


def test_percentiles_are_nearest_rank() -> None:
    seed = random.randrange(2**32)
    rng = np.random.default_rng(seed)
    for size in (1, 2, 3, 10, 99, 100, 101):
        values = rng.random(size)
        samples = sampled(*values)
        for q in (1, 50, 90, 99, 100):
            expected = float(np.percentile(values, q, method="inverted_cdf"))
            assert samples.percentile(q) == expected, f"size {size}, q {q}, seed {seed}"
    assert Samples().percentile(50) == 0.0
    assert Samples().rate == 0.0


def test_samples_of_groups_are_times_per_op() -> None:
    samples = Samples()
    samples.add(1.0, ops=4)
    samples.add(2.0, ops=4)
    assert (samples.ops, samples.seconds, list(samples.times)) == (8, 3.0, [0.25, 0.5])
    assert samples.rate == pytest.approx(8 / 3)


async def test_subjects_take_turns_and_warm_up_does_not_count() -> None:
    order: list[str] = []

    def subject(name: str) -> Any:
        async def meter(samples: Samples) -> None:
            order.append(name)
            samples.add(1.0 + len(order))

        return meter

    results = await compare({"a": subject("a"), "b": subject("b")}, 2)
    assert order == ["a", "b"] * 3
    assert list(results["a"].times) == [4.0, 6.0]
    assert list(results["b"].times) == [5.0, 7.0]


async def test_the_rate_is_the_median_rounds() -> None:
    seconds = iter([9.0, 1.0, 2.0, 100.0])

    async def meter(samples: Samples) -> None:
        samples.add(next(seconds), ops=2)

    results = await compare({"a": meter}, 3)
    assert results["a"].rate == 1.0


async def test_rounds_call_as_often_as_they_say() -> None:
    calls: list[int] = []

    async def once() -> None:
        calls.append(1)
        await asyncio.sleep(0)

    samples = Samples()
    await awaited(once, 3, ops=5)(samples)
    assert (len(calls), samples.ops, len(samples.times)) == (3, 15, 3)
    await called(lambda: calls.append(2), 4)(samples)
    assert (len(calls), samples.ops) == (7, 19)
    await together(once, 5, 2)(samples)
    assert (len(calls), samples.ops) == (17, 29)


# -- budgets and the report


def test_every_budget_that_needs_nothing_has_one_case() -> None:
    answered = [name for case in CASES for name in case.budgets]
    assert sorted(answered) == sorted(name for name, budget in BUDGETS.items() if not budget.needs) == ["P11", "P12", "P13", "P5"]
    assert len({case.name for case in CASES}) == len(CASES)


def test_the_source_tree_has_all_cases_and_more() -> None:
    answered = [name for case in suite.CASES for name in case.budgets]
    assert sorted(answered) == ["P11", "P12", "P13", "P5", "batcher", "completion"]
    assert set(suite.CASES) > set(CASES)
    assert len({case.name for case in suite.CASES}) == len(suite.CASES)


@pytest.mark.parametrize(
    ("value", "better", "kept"), [(1.0, "lower", True), (1.1, "lower", False), (1.0, "higher", True), (0.9, "higher", False)]
)
def test_limits(value: float, better: Any, kept: bool) -> None:
    assert holds(value, 1.0, better) is kept
    assert holds(value, None, better) is True
    assert holds(float("nan"), 1.0, better) is False


def test_the_json_has_the_contracts_form() -> None:
    report = Report(describe_machine(loop="asyncio"))
    report.add("a case", "accel", sampled(2e-6, 2e-6, 4e-6))
    report.hold("P12", 2.0, more=1)
    document = json.loads(json.dumps(report.as_json()))
    assert list(document) == ["machine", "rows", "ratios"]
    assert document["rows"] == [{"case": "a case", "subject": "accel", "p50_us": 2.0, "p99_us": 4.0, "ops_per_s": 375000.0}]
    ratio = document["ratios"]["P12"]
    assert {name: ratio[name] for name in ("value", "must", "goal", "ok", "more")} == {
        "value": 2.0,
        "must": 2.5,
        "goal": 1.6,
        "ok": True,
        "more": 1,
    }


def test_what_is_not_a_number_is_not_a_measurement() -> None:
    report = Report({})
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="no measurement"):
            report.hold("P12", value)
    assert report.ratios == {}


def test_a_second_condition_breaks_a_budget_too(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report({})
    assert report.hold("P13", 0.0, also=True).ok
    verdict_before = report.is_ok
    assert not report.hold("P13", 0.0, also=False).ok
    assert (verdict_before, report.is_ok) == (True, False)
    report.hold("batcher", 0.7)
    report.hold("P11", 20.0)
    report.print(sys.stdout)
    verdicts = {line.split()[0]: line.split()[-1] for line in capsys.readouterr().out.splitlines() if line.startswith(("P", "batcher"))}
    assert verdicts == {"P13": "FAILED", "batcher": "ok", "P11": "goal"}


def test_of_several_passes_the_median_is_held_and_all_samples_are_one_row() -> None:
    report = Report({})
    for seconds, ratio in ((4e-6, 2.9), (1e-6, 2.0), (2e-6, 2.4)):
        report.add("a case", "accel", sampled(seconds, seconds))
        report.hold("P12", ratio, which=seconds)
    (row,), ratios = report.rows, report.ratios
    assert (row.p50_us, row.p99_us) == (2.0, 4.0)
    assert row.ops_per_s == pytest.approx(6 / 14e-6)
    assert (ratios["P12"].value, ratios["P12"].ok) == (2.4, True)
    assert ratios["P12"].as_json()["passes"] == [2.9, 2.0, 2.4]
    assert ratios["P12"].details["which"] == 2e-6


@pytest.mark.parametrize(
    ("name", "values", "worse"), [("P12", (1.0, 2.6), 2.6), ("batcher", (0.4, 0.7), 0.4), ("batcher", (0.9, 0.8, 0.4, 0.7), 0.7)]
)
def test_where_a_pass_has_failed_the_worse_of_two_is_held(name: str, values: tuple[float, ...], worse: float) -> None:
    report = Report({})
    for value in values:
        report.hold(name, value)
    assert report.ratios[name].value == worse


def test_what_is_demanded_besides_every_pass_has_to_keep() -> None:
    report = Report({})
    for value, also in ((0.0, True), (9.0, False), (0.0, True)):
        report.hold("P13", value, also=also)
    assert report.ratios["P13"].value == 0.0
    assert not report.is_ok


# -- choosing


def test_cases_are_chosen_by_name_and_by_budget() -> None:
    assert choose(CASES, [""]) == CASES
    chosen = choose(CASES, ["p12", " idle", "ASK"])
    assert [case.name for case in chosen] == ["idle", "ask"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "no case 'nothing'"),
        ("P1", "P1 needs a CUDA device"),
        ("batcher", "BATCHER needs benchmarks/run.py"),
        ("p16", "P16 has no benchmark yet"),
    ],
)
def test_what_cannot_be_run_is_refused(name: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        choose(CASES, ["P5", name])
    assert main(["bench", "--only", name]) == 2
    assert message in capsys.readouterr().err


def test_list_shows_what_is_not_run_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in BUDGETS)
    assert budgets.NEEDS_CUDA in out


# -- running


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("case", suite.CASES, ids=lambda case: case.name)
async def test_every_case_runs_and_answers_its_budgets(case: BenchCase) -> None:
    bench = Bench(Report({}), seed=7)  # with which each block of `mixed` has a smallest product
    await case.run(bench)
    report = bench.report
    assert set(report.ratios) == set(case.budgets)
    assert report.rows or case.budgets == ("P5",)
    for row in report.rows:
        assert 0 < row.p50_us <= row.p99_us, row
        assert row.ops_per_s > 0, row
    subjects = {row.subject for row in report.rows}
    assert len(subjects) > 1 or case.budgets in (("P5",), ("P13",)), "each has its twin"


@pytest.mark.usefixtures("tiny")
def test_the_source_trees_command_runs_what_the_package_does_not_bring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "bench.json"
    words = ["bench", "--only", "tell", "--json", str(target)]
    assert main(words) == 2
    assert "there is no case 'tell'" in capsys.readouterr().err
    assert main(words, run.COMMANDS) == 0
    document = json.loads(target.read_text(encoding="utf-8"))
    assert list(document) == ["machine", "rows", "ratios"]
    assert {row["case"] for row in document["rows"]} == {"mailbox hop, 1000 tells"}


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_the_command_writes_a_file(loop: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "bench.json"
    assert main(["bench", "--only", "P12", "--quick", "--loop", loop, "--seed", "7", "--json", str(target)]) == 0
    document = json.loads(target.read_text(encoding="utf-8"))
    assert document["machine"]["loop"] == loop
    assert document["machine"]["seed"] == 7
    assert set(document["ratios"]) == {"P12"}
    captured = capsys.readouterr()
    assert "ask round trip" in captured.out
    assert captured.err == "[1/1] actor ask round trip against a bare future\n"


def test_passes_go_over_all_loops_and_share_the_rounds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[tuple[str, str]] = []
    rounds: list[float] = []

    async def often(bench: Bench) -> None:
        ran.append(("often", bench.report.loop))
        results = await bench.compare("often", {"accel": awaited(lambda: asyncio.sleep(0), 1)})
        rounds.append(len(results["accel"].rates))

    async def seldom(bench: Bench) -> None:
        ran.append(("seldom", bench.report.loop))
        rounds.append(len((await bench.compare("seldom", {"accel": awaited(lambda: asyncio.sleep(0), 1)}, rounds=7))["accel"].rates))

    monkeypatch.setattr(command, "CASES", (BenchCase("often", "often", often), BenchCase("seldom", "seldom", seldom, once=True)))
    assert main(["bench", "--loop", "both", "--passes", "3", "--json", "-"]) == 0
    assert ran == [("often", ""), ("seldom", ""), ("often", "uvloop"), *[("often", ""), ("often", "uvloop")] * 2]
    assert rounds == [3, 7, 3, 3, 3, 3, 3]
    document = json.loads(capsys.readouterr().out)
    assert document["machine"]["passes"] == 3
    assert [(row["case"], row["subject"]) for row in document["rows"]] == [
        ("often", "accel"),
        ("seldom", "accel"),
        ("often, uvloop", "accel"),
    ]


@pytest.mark.parametrize("passes", ["0", "2", "-1", "many"])
def test_passes_are_odd(passes: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--passes", passes]) == 2
    assert "is no odd number" in capsys.readouterr().err


def test_a_report_that_could_not_be_written_is_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "nowhere" / "bench.json"
    assert main(["bench", "--only", "P12", "--json", str(target)]) == 2
    assert capsys.readouterr() == ("", f"accel bench: there is no folder for {target}\n")


@pytest.mark.usefixtures("tiny")
def test_a_broken_budget_is_an_exit_code_only_with_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUDGETS, "P12", Budget("impossible", 0.0, 0.0))
    assert main(["bench", "--only", "P12"]) == 0
    assert main(["bench", "--only", "P12", "--check"]) == 1


def test_a_case_that_fails_is_told_and_does_not_stop_the_rest(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async def breaks(bench: Bench) -> None:
        raise RuntimeError("no luck")

    async def works(bench: Bench) -> None:
        bench.report.add("good", "accel", sampled(1.0))

    async def lacks(bench: Bench) -> None:
        raise UnsupportedError("this device cannot")

    good = BenchCase("good", "one that works", works)
    monkeypatch.setattr(command, "CASES", (BenchCase("bad", "one that fails", breaks), BenchCase("no", "not here", lacks), good))
    assert main(["bench"]) == 1
    out = capsys.readouterr().out
    assert "FAILED: bad: RuntimeError: no luck" in out
    assert "not run: no: this device cannot" in out
    assert "good" in out
    assert main(["bench", "--only", "no,good"]) == 0
