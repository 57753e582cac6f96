"""What is said about installing works as it stands: in a checkout, of a distribution that is on no index, also where pip refuses."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMAND = re.compile(r"pip install (?:-e )?'([^']*)'")


def extras() -> set[str]:
    return set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


@pytest.mark.parametrize(
    ("program", "missing"),
    [
        ("import accel.integrations.fastapi", "fastapi"),
        ("import accel.integrations.aiohttp", "aiohttp"),
        ("from accel.cli import main; main(['serve'])", "fastapi"),
        ("from accel.cli import main; main(['serve', '--device', 'cuda'])", "cuda"),
    ],
)
def test_a_remedy_names_a_command_that_works_in_a_checkout(program: str, missing: str) -> None:
    program = f"import sys; sys.modules[{missing!r}] = None; {program}"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    found = COMMAND.findall(done.stderr)
    assert found, done.stderr
    assert {command.removeprefix(str(ROOT)).strip(".[]") for command in found} <= extras(), found
    if "accel.cli" in program:
        assert all(command.startswith(f"{ROOT}[") or "in a checkout" in done.stderr.lower() for command in found), found
    else:
        assert all(command.startswith(".[") for command in found), found
        assert "in a checkout" in done.stderr.lower(), done.stderr


def test_no_page_and_no_message_names_a_distribution_that_no_index_has() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").iterdir()]
    for path in [*pages, *(ROOT / "accel").rglob("*.py"), *(ROOT / "accel_cuda").rglob("*.py")]:
        if path.suffix in (".md", ".py"):
            assert not re.search(r"pip install [^`\n]*accel-actors", path.read_text()), path
