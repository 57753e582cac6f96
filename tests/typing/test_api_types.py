"""The public types say what users rely on: the examples pass ``mypy --strict``, and the mistakes are found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")

ROOT = Path(__file__).resolve().parents[2]
FILES = ("tests/typing/api_examples.py", "tests/typing/api_mistakes.py")
WRONG = "import accel\n\n\nasync def f(device: accel.Device, a: accel.AccelRef) -> int:\n    return await device.blas.gemm(a, a)\n"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_examples_pass_mistakes_are_found_and_a_wrong_type_is_reported(tmp_path: Path) -> None:
    """One run of mypy, in a process of its own: what it keeps in memory would slow later garbage collections down."""
    wrong = tmp_path / "wrong.py"
    wrong.write_text(WRONG, encoding="utf-8")
    words = ("--strict", "--config-file", "pyproject.toml", "--warn-unused-ignores", *FILES, str(wrong))
    done = subprocess.run([sys.executable, "-m", "mypy", *words], cwd=ROOT, capture_output=True, text=True, check=False)

    out = done.stdout + done.stderr
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert len(errors) == 1, out
    assert wrong.name in errors[0], out
    assert "Incompatible return value type" in errors[0], out
    assert done.returncode == 1, out
