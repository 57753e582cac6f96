"""The record of a machine with a GPU: its parts are limited in time, and what they find is written down whatever happens to the rest."""

from __future__ import annotations

import json
import tarfile
from typing import TYPE_CHECKING

import pytest

from benchmarks import hardware
from benchmarks.hardware_record import read_junit, read_lines

if TYPE_CHECKING:
    from pathlib import Path


def part(name: str, code: str, limit: float = 20.0) -> hardware.Part:
    return hardware.Part(name, f"part {name}", limit, lambda _: ("-c", code), lambda _, text: read_lines(text))


def test_parts_that_need_no_gpu_run_and_are_written_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hardware.main(["--backend", "cpu", "--parts", "doctor,bench", "--out", str(tmp_path)]) == 0, capsys.readouterr()
    found = json.loads((tmp_path / "record.json").read_text())
    assert list(found["parts"]) == ["doctor", "bench"]
    assert {entry["state"] for entry in found["parts"].values()} == {"ok"}
    assert found["parts"]["bench"]["data"]["ratios"]["P12"]["value"] > 0
    assert "| P12 |" in (tmp_path / "record.md").read_text()


def test_a_part_that_fails_or_takes_too_long_does_not_end_the_record(tmp_path: Path) -> None:
    sleeps = "import time\ntry: print('begun', flush=True); time.sleep(60)\nexcept KeyboardInterrupt: print('interrupted')"
    parts = (part("one", "print(1)"), part("two", sleeps, 3.0), part("three", "raise SystemExit(3)"))
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


def test_what_is_fetched_can_be_a_few_files(tmp_path: Path) -> None:
    writes = "from pathlib import Path\nimport sys\nPath(sys.argv[1], 'latency.png').write_text('x')"
    drawn = hardware.Part("drawn", "draws", 20.0, lambda out: ("-c", writes, str(out)), lambda _, text: read_lines(text))
    found = hardware.record((drawn, part("two", "print(2)")), tmp_path, 100.0, "cpu", pack=True)
    assert [entry["state"] for entry in found["parts"].values()] == ["ok", "ok"]
    assert {path.name for path in tmp_path.iterdir()} == {"record.md", "record.json", "latency.png", "parts.tar.gz"}
    with tarfile.open(tmp_path / "parts.tar.gz") as archive:
        assert set(archive.getnames()) == {"drawn.txt", "drawn.err", "two.txt", "two.err"}
