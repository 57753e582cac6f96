"""Several loops in one run, the points of a run, and their picture."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from accel.cli.bench import command
from accel.cli.bench.budgets import BUDGETS, budget_of
from accel.cli.bench.measure import Samples
from accel.cli.bench.report import Report
from accel.cli.bench.suite import Bench, BenchCase, Suite
from accel.cli.main import main
from benchmarks import plot
from benchmarks.measures import Point, add_point
from benchmarks.plot import curves

if TYPE_CHECKING:
    from pathlib import Path

POINTS = [Point(line, us, 3.0 + us / 100, 9.0, 50.0) for us in (1000, 0, 20) for line in ("accel, adaptive", "CuPy")]


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the command run cases of the test; return what they and the suite's hooks did."""
    log: list[str] = []

    async def each(bench: Bench) -> None:
        log.append(f"each {bench.report.loop}".strip())
        samples = Samples()
        samples.add(2e-6)
        bench.report.add("case", "accel", samples)
        bench.report.hold("P1", 2.0)

    async def once(bench: Bench) -> None:
        log.append(f"once {bench.report.loop}".strip())
        for point in POINTS:
            add_point(bench.report, point)

    cases = (BenchCase("each", "on each loop", each, ("P1",)), BenchCase("once", "on the first", once, once=True))
    made = Suite(cases, ("asyncio", "uvloop"), lambda: {"driver": "580"}, lambda: log.append("closed"))
    monkeypatch.setattr(command, "suite_of", lambda backend: made)
    return log


def test_names_carry_the_second_loop(suite: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "bench.json"
    assert main(["bench", "--json", str(target), "--check"]) == 0
    assert suite == ["each", "once", "each uvloop", "closed"]
    document = json.loads(target.read_text(encoding="utf-8"))
    assert list(document) == ["machine", "rows", "ratios", "points"]
    assert list(document["ratios"]) == ["P1", "P1-uvloop"]
    assert document["ratios"]["P1-uvloop"]["must"] == BUDGETS["P1"].must
    assert [row["case"] for row in document["rows"]] == ["case", "case, uvloop"]
    assert document["machine"]["loop"] == "asyncio, uvloop"
    assert document["machine"]["driver"] == "580"
    assert len(document["points"]) == len(POINTS)
    captured = capsys.readouterr()
    assert captured.err == "[1/3] on each loop\n[2/3] on the first\n[3/3] on each loop, uvloop\n"
    assert sum(line.startswith("P1") for line in captured.out.splitlines()) == 2


def test_a_loop_that_is_not_installed_is_noted_unless_it_was_asked_for(
    suite: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert main(["bench"]) == 0
    assert suite == ["each", "once", "closed"]
    assert "not run: uvloop: it is not installed. Run: pip install uvloop" in capsys.readouterr().out
    assert main(["bench", "--loop", "both"]) == 2
    assert "pip install uvloop" in capsys.readouterr().err


def test_a_case_ends_by_its_limit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import asyncio

    async def hangs(bench: Bench) -> None:
        await asyncio.get_running_loop().create_future()

    closed: list[int] = []
    made = Suite((BenchCase("hangs", "for ever", hangs, limit=0.01),), close=lambda: closed.append(1))
    monkeypatch.setattr(command, "suite_of", lambda backend: made)
    assert main(["bench"]) == 1
    assert "FAILED: hangs: TimeoutError" in capsys.readouterr().out
    assert closed == [1]


def test_budgets_are_found_under_a_loops_name() -> None:
    assert budget_of("P3-graph-uvloop") is BUDGETS["P3-graph"]
    assert budget_of("P4-cpu") is BUDGETS["P4-cpu"]
    with pytest.raises(KeyError):
        Report({}).hold("P99", 1.0)


# -- the picture


def test_curves_are_sorted_by_length_and_keep_their_order() -> None:
    found = curves(POINTS)
    assert list(found) == ["accel, adaptive", "CuPy"]
    assert [point.kernel_us for point in found["CuPy"]] == [0, 20, 1000]


@pytest.fixture
def numbers(suite: list[str], tmp_path: Path) -> Path:
    """Return the JSON of a run that gave points."""
    path = tmp_path / "numbers.json"
    assert main(["bench", "--loop", "asyncio", "--json", str(path)]) == 0
    return path


def test_without_matplotlib_the_remedy_is_said(
    numbers: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    capsys.readouterr()
    assert plot.main([str(numbers), str(tmp_path / "latency.png")]) == 2
    assert "Run: pip install '.[bench]'" in capsys.readouterr().err
