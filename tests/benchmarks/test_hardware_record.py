"""The record of a machine with a GPU: its parts are limited in time, and what they find is written down whatever happens to the rest."""

from __future__ import annotations

import json
import tarfile
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks import hardware
from benchmarks.hardware_record import read_junit, read_lines, render

if TYPE_CHECKING:
    from pathlib import Path


def part(name: str, code: str, limit: float = 20.0) -> hardware.Part:
    return hardware.Part(name, f"part {name}", limit, lambda _: ("-c", code), lambda _, text: read_lines(text))


def test_parts_that_need_no_gpu_run_and_are_written_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hardware.main(["--backend", "cpu", "--parts", "doctor,examples,bench", "--out", str(tmp_path)]) == 0, capsys.readouterr()
    found = json.loads((tmp_path / "record.json").read_text())
    assert list(found["parts"]) == ["doctor", "bench", "examples"]
    assert {entry["state"] for entry in found["parts"].values()} == {"ok"}
    assert found["parts"]["bench"]["data"]["ratios"]["P12"]["value"] > 0
    text = (tmp_path / "record.md").read_text()
    assert "| P12 |" in text
    assert "in a graph, with other inputs: True" in text


def test_a_part_that_fails_or_takes_too_long_does_not_end_the_record(tmp_path: Path) -> None:
    sleeps = "import time\ntry: print('begun', flush=True); time.sleep(60)\nexcept KeyboardInterrupt: print('interrupted')"
    parts = (part("one", "print(1)"), part("two", sleeps, 5.0), part("three", "raise SystemExit(3)"))
    found = hardware.record(parts, tmp_path, 100.0, "cpu")
    assert [entry["state"] for entry in found["parts"].values()] == ["ok", "out of time", "failed"]
    assert found["parts"]["two"]["data"] == ["begun", "interrupted"]
    left = hardware.record((part("one", "print(1)"),), tmp_path, 1.0, "cpu")
    assert left["parts"]["one"]["state"] == "not run: no time left"
    assert "no time left" in (tmp_path / "record.md").read_text()


def test_a_part_that_wrote_nothing_is_no_success(tmp_path: Path) -> None:
    silent = hardware.Part("silent", "says it went well", 20.0, lambda _: ("-c", ""), lambda out, _: read_junit(out / "tests.xml"))
    (entry,) = hardware.record((silent,), tmp_path, 100.0, "cpu")["parts"].values()
    assert entry["state"].startswith("failed: ")
    assert entry["data"] is None


def test_the_parts_of_a_gpu_are_known_and_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert hardware.main(["--list"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names[:5] == ["doctor", "tests", "recovery", "memcheck", "bench"]
    assert {"kernels", "curves", "cuda_torch_library", "chaos", "two_gpus"} <= set(names)
    with pytest.raises(SystemExit):
        hardware.main(["--parts", "nonsense"])
    assert "nonsense" in capsys.readouterr().err


@pytest.mark.parametrize("call", hardware.CALLS)
def test_each_call_has_its_parts(call: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert hardware.main(["--list", "--parts", call]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    found = {name.replace("cuda_", "examples:").partition(":")[0] for name, *_ in lines}
    assert found == set(hardware.CALLS[call])
    if call != "measures":  # the last of which may be left out
        assert sum(float(limit) for _, limit, *_ in lines) <= 590


def test_what_is_fetched_can_be_a_few_files(tmp_path: Path) -> None:
    writes = "from pathlib import Path\nimport sys\nPath(sys.argv[1], 'latency.png').write_text('x')"
    drawn = hardware.Part("drawn", "draws", 20.0, lambda out: ("-c", writes, str(out)), lambda _, text: read_lines(text))
    found = hardware.record((drawn, part("two", "print(2)")), tmp_path, 100.0, "cpu", pack=True)
    assert [entry["state"] for entry in found["parts"].values()] == ["ok", "ok"]
    assert {path.name for path in tmp_path.iterdir()} == {"record.md", "record.json", "latency.png", "parts.tar.gz"}
    with tarfile.open(tmp_path / "parts.tar.gz") as archive:
        assert set(archive.getnames()) == {"drawn.txt", "drawn.err", "two.txt", "two.err"}


def test_results_of_tests_are_read(tmp_path: Path) -> None:
    path = tmp_path / "tests.xml"
    path.write_text(
        '<testsuites><testsuite><testcase classname="tests.gpu.test_a" name="fine"><system-out>seed 7 ms\nfft 3 us\nnothing</system-out></testcase>'
        '<testcase classname="tests.gpu.test_a" name="bad"><failure message="assert 1 == 2&#10;more">x</failure></testcase>'
        '<testcase classname="tests.gpu.test_a" name="worse"><error message="no">x</error></testcase>'
        '<testcase classname="tests.gpu.test_b" name="left"><skipped message="torch is not installed"/></testcase></testsuite></testsuites>'
    )
    assert read_junit(path) == {
        "passed": 1,
        "failed": [["test_a::bad", "assert 1 == 2"], ["test_a::worse", "no"]],
        "skipped": [["test_b::left", "torch is not installed"]],
        "printed": ["fft 3 us"],
    }


def test_a_record_shows_what_was_missed_and_what_was_left_out() -> None:
    ratio = {"value": 3.5, "must": 3.0, "goal": 1.8, "unit": "x", "better": "lower", "ok": False, "raw_us": 8.0}
    bench = {
        "machine": {"driver": "580"},
        "rows": [{"case": "await", "subject": "raw", "p50_us": 8.0, "p99_us": 9.0, "ops_per_s": 1e5}],
        "ratios": {"P1-uvloop": ratio, "P5": {**ratio, "value": 0.0, "must": 0.5, "goal": 0.0, "ok": True, "unit": "%"}},
        "skipped": {"tasks": "CuPy is not installed"},
        "failures": {"copy": "TimeoutError: "},
    }
    kernels = [
        {"unit": "GB/s", "where": "sum int8 (3, 4) axis 1", "value": 1.0, "of_copy": 0.4},
        {"unit": "GB/s", "where": "sum int8 (3, 9) axis 1", "value": 2.0, "of_copy": 0.9},
        {"unit": "TFLOP/s", "where": "attention float16", "value": 300.0, "torch_TFLOP/s": 400.123},
    ]
    tests = {"passed": 9, "failed": [["test_a::bad", "a | b"]], "skipped": [], "printed": []}
    parts: dict[str, Any] = {"tests": tests, "bench": bench, "kernels": kernels}
    entries = {name: {"what": name, "command": f"run {name}", "state": "ok", "seconds": 1.0, "data": data} for name, data in parts.items()}
    text = render({"began": "now", "backend": "cuda", "commit": "abc", "seconds": 3.0, "parts": entries})
    for line in (
        "| driver | 580 |",
        "| `run tests` | ok | 1.0 s | 9 passed, 1 failed, 0 skipped |",
        "| test_a::bad | a \\| b |",
        '| P1-uvloop | await an empty kernel, against raw launch + synchronize | 3.5 x | <= 3 | <= 1.8 | **missed** | {"raw_us": 8.0} |',
        "skipped: tasks: CuPy is not installed",
        "failures: copy: TimeoutError: ",
        "| sum int8 axis 1 | 2 | 0.40 | 0.90 |",
        "| attention float16 | 300.0 TFLOP/s | torch_TFLOP/s 400.1 |",
    ):
        assert line in text.splitlines(), f"{line}\nis not in\n{text}"
    assert "| goal |" in next(line for line in text.splitlines() if line.startswith("| P5 "))
