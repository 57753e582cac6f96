"""``accel bench`` on a GPU."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from accel.cli.main import main
from benchmarks import run

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.gpu


@pytest.mark.timeout(120)
def test_the_command_measures_both_loops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "bench.json"
    assert main(["bench", "--backend", "cuda", "--quick", "--only", "P1,P3,P4", "--json", str(target)], run.COMMANDS) == 0
    document = json.loads(target.read_text(encoding="utf-8"))
    names = {"P1", "P3", "P4", "P4-cpu"}
    assert set(document["ratios"]) == names | {f"{name}-uvloop" for name in names}
    assert document["machine"]["loop"] == "asyncio, uvloop"
    assert document["machine"]["cuda-bindings"]
    assert all(ratio["value"] > 0 for ratio in document["ratios"].values())
    raw = [row for row in document["rows"] if row["subject"].startswith("raw launch")]
    assert raw
    assert all(row["p50_us"] > 0 for row in raw)
