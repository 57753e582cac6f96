"""``accel.__version__`` is the installation's, and is looked up when it is asked for."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import accel
from accel._version import installed_version

ROOT = Path(__file__).resolve().parents[1]
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_it_is_the_one_of_the_metadata() -> None:
    assert accel.__version__ == installed_version() in (DECLARED, f"{DECLARED}+checkout")


def test_a_checkout_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    assert installed_version() == f"{DECLARED}+checkout"


def test_it_costs_nothing_until_it_is_asked_for() -> None:
    program = "import sys, accel; assert 'importlib.metadata' not in sys.modules; print(accel.__version__)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (f"{accel.__version__}\n", "")


def test_another_name_is_missing_as_in_any_module() -> None:
    with pytest.raises(AttributeError, match="module 'accel' has no attribute 'Sistem'") as caught:
        _ = accel.Sistem  # type: ignore[attr-defined]
    assert (caught.value.name, caught.value.obj) == ("Sistem", accel)
