"""Ctrl-C before a command runs: minded by the program, whatever it is started as, and left alone by those who import the package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import signal
import sys

sys.path.insert(0, sys.argv[1])
from accel import _startup
from accel.cli import main

print(signal.getsignal(signal.SIGINT) is _startup._leave)
signal.raise_signal(signal.SIGINT)
"""


def started(folder: Path, name: str) -> subprocess.CompletedProcess[str]:
    """Run what an installer writes, under a name, and interrupt it before its command runs."""
    script = folder / name
    script.write_text(SCRIPT, encoding="utf-8")
    return subprocess.run([sys.executable, str(script), str(ROOT)], capture_output=True, text=True, timeout=30, check=False)


def test_the_installed_script_is_interrupted_without_a_traceback(tmp_path: Path) -> None:
    done = started(tmp_path, "accel")
    assert (done.returncode, done.stderr) == (130, "accel: interrupted\n")


@pytest.mark.parametrize("name", ["service", "accel.py"])
def test_a_program_that_imports_the_package_keeps_its_ctrl_c(tmp_path: Path, name: str) -> None:
    done = started(tmp_path, name)
    assert done.stdout == "False\n"
    assert "KeyboardInterrupt" in done.stderr
