"""Several loops in one run, the points of a run, and their picture."""

from __future__ import annotations

import json
import sys
import types
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from accel.cli.bench import command
from accel.cli.bench.budgets import BUDGETS, budget_of
from accel.cli.bench.measure import Samples
from accel.cli.bench.report import Report
from accel.cli.bench.suite import Bench, BenchCase, Suite
from accel.cli.main import main
from benchmarks import plot
from benchmarks.measures import Point, add_point
from benchmarks.plot import curves, draw
from benchmarks.poison_timeline import draw as timeline

if TYPE_CHECKING:
    from pathlib import Path

POINTS = [Point(line, us, 3.0 + us / 100, 9.0, 50.0) for us in (1000, 0, 20) for line in ("accel, adaptive", "CuPy")]


class FakeFigure:
    """Notes what is drawn."""

    made: list[FakeFigure]

    def __init__(self, **options: Any) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        FakeFigure.made.append(self)

    def subplots(self, rows: int, columns: int, **options: Any) -> list[FakeFigure]:
        return [FakeFigure() for _ in range(rows)]

    def __getattr__(self, name: str) -> Any:
        def note(*arguments: Any, **options: Any) -> tuple[list[Any], list[Any]]:
            self.calls.append((name, arguments, options))
            return [], []

        return note


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[FakeFigure]:
    module = types.ModuleType("matplotlib.figure")
    module.Figure = FakeFigure  # type: ignore[attr-defined]
    FakeFigure.made = []
    monkeypatch.setitem(sys.modules, "matplotlib", types.ModuleType("matplotlib"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", module)
    return FakeFigure.made


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


@pytest.mark.parametrize(
    ("loop", "ran"), [("asyncio", ["each", "once"]), ("uvloop", ["each", "once"]), ("both", ["each", "once", "each uvloop"])]
)
def test_the_loop_can_be_chosen(loop: str, ran: list[str], suite: list[str]) -> None:
    assert main(["bench", "--loop", loop]) == 0
    assert suite == [*ran, "closed"]


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


def test_each_line_is_in_both_panels(figures: list[FakeFigure]) -> None:
    draw(POINTS, "some.png", "title")
    figure, above, below = figures
    assert [name for name, _, _ in figure.calls] == ["legend", "savefig"]
    assert figure.calls[-1][1] == ("some.png",)
    for panel, values in ((above, [3.0, 3.2, 13.0]), (below, [50.0] * 3)):
        lines = {options["label"]: (arguments, options["linestyle"]) for name, arguments, options in panel.calls if name == "plot"}
        assert lines == {"accel, adaptive": (([0, 20, 1000], values), "-"), "CuPy": (([0, 20, 1000], values), "--")}


@pytest.fixture
def numbers(suite: list[str], tmp_path: Path) -> Path:
    """Return the JSON of a run that gave points."""
    path = tmp_path / "numbers.json"
    assert main(["bench", "--loop", "asyncio", "--json", str(path)]) == 0
    return path


def test_a_runs_numbers_are_drawn(numbers: Path, figures: list[FakeFigure], tmp_path: Path) -> None:
    target = str(tmp_path / "latency.png")
    assert plot.main([str(numbers), target]) == 0
    figure, above, _ = figures
    assert figure.calls[-1][1] == (target,)
    assert [options["label"] for name, _, options in above.calls if name == "plot"] == ["accel, adaptive", "CuPy"]
    (title,) = [arguments[0] for name, arguments, _ in above.calls if name == "set_title"]
    assert title.startswith("accel on ")
    assert ", asyncio, " in title


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "no report"),
        ("[]", "no report"),
        ("nothing", "cannot be drawn"),
        ('{"machine": {"device": "x", "loop": "y", "date": "z"}}', "no points"),
    ],
)
def test_what_has_no_points_is_not_drawn(
    text: str, words: str, figures: list[FakeFigure], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "numbers.json"
    source.write_text(text, encoding="utf-8")
    assert plot.main([str(source), str(tmp_path / "x.png")]) == 2
    assert words in capsys.readouterr().err
    assert plot.main([str(tmp_path / "none.json"), str(tmp_path / "x.png")]) == 2
    assert "none.json cannot be drawn" in capsys.readouterr().err
    assert not figures


def test_without_matplotlib_the_remedy_is_said(
    numbers: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    capsys.readouterr()
    assert plot.main([str(numbers), str(tmp_path / "latency.png")]) == 2
    assert "Run: pip install '.[bench]'" in capsys.readouterr().err


def test_the_timeline_of_a_poison_has_its_answers_and_when_contexts_were_there() -> None:
    events = [
        {"at_s": 1.0, "event": "actor_failed", "actor": "cpu:0#1/context"},
        {"at_s": 1.2, "event": "context_ready", "serves": True},
        {"at_s": 1.5, "event": "actor_failed", "actor": "cpu:0#2 quarantine/context"},
    ]
    row = {
        "what": "assert", "error": "poison <fault>", "detected_s": 1.0, "next_good_s": 0.25, "told_s": 1.6, "spare_s": None, "quarantine_deaths": 2,
        "innocents_failed": 0, "wrong": 0, "timeline": {"from_s": -0.5, "bin_s": 0.5, "answers": [4, 2, 0, 6, 99, 9], "events": events},
    }  # fmt: skip
    report = {"backend": "cpu", "clients": 3, "rows": [row, row | {"what": "nan", "detected_s": None}]}
    root = ET.fromstring(timeline(report, "assert"))
    boxes = [(each.attrib["fill"], float(each.attrib["width"]), float(each.attrib["height"])) for each in root.findall("{*}rect")][1:]
    heights = [high for fill, _, high in boxes if fill == "#4878b0"]
    np.testing.assert_allclose(heights, 190 * np.array([4, 2, 0, 6, 99]) / 99, atol=0.06)
    second = 790 / 2.5
    lanes = [(fill, wide / second) for fill, wide, _ in boxes if fill != "#4878b0"]
    assert [fill for fill, _ in lanes] == ["#8fc79a", "#d9534f", "#8fc79a", "#8fc79a", "#d9534f"]
    np.testing.assert_allclose([wide for _, wide in lanes], [1.5, 0.2, 0.8, 2.0, 0.5], atol=0.001)
    assert "1.00 s later" in (texts := "".join(root.itertext()))
    assert "poison <fault>" in texts
    with pytest.raises(ValueError, match="no row 'nan'"):
        timeline(report, "nan")
