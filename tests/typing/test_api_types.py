"""The public types say what users rely on: the examples pass ``mypy --strict``, and the mistakes are found."""

from __future__ import annotations

from pathlib import Path

import pytest

api = pytest.importorskip("mypy.api")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_examples_pass_and_mistakes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    files = ["tests/typing/api_examples.py", "tests/typing/api_mistakes.py"]
    out, err, status = api.run(["--strict", "--config-file", "pyproject.toml", "--warn-unused-ignores", *files])

    assert status == 0, out + err


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_wrong_type_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "import accel\n\n\nasync def f(device: accel.Device, a: accel.AccelRef) -> int:\n    return await device.blas.gemm(a, a)\n",
        encoding="utf-8",
    )
    out, err, status = api.run(["--strict", "--config-file", "pyproject.toml", str(wrong)])

    assert status == 1, out + err
    assert "Incompatible return value type" in out
