"""docs/troubleshooting.md: each message that it quotes is in the code, and each event of the log."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (?!symptom|---)(.*?) \| ", re.MULTILINE)
QUOTED = re.compile(r"`([^`]+)`")
HOLE = "\0"
"""Where a text of the code has a value."""


def text_of(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(text_of(part) for part in parts)
        case _:
            return HOLE


def texts() -> str:
    """Return all texts of the packages, one a line."""
    found = []
    for path in sorted([*(ROOT / "accel").rglob("*.py"), *(ROOT / "accel_cuda").rglob("*.py")]):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found += [text_of(node) for node in ast.walk(tree) if isinstance(node, (ast.Constant, ast.JoinedStr))]
    return "\n".join(found)


def pattern(quoted: str) -> str:
    """Return what a quoted message is in the code: `...` stands for anything, and so does a value of the code's."""
    words = [re.escape(part.strip()) for part in quoted.split("...")]
    return r"[^\n]*".join(words)


@pytest.fixture(scope="module")
def said() -> str:
    return texts()


def test_every_symptom_that_is_quoted_is_in_the_code(said: str) -> None:
    quoted = {text for row in ROW.findall(PAGE) for text in QUOTED.findall(row)}
    assert len(quoted) > 40, "the tables were read"
    assert sorted(text for text in quoted if not re.search(pattern(text), said)) == []


def test_a_symptom_that_is_not_there_is_noticed(said: str) -> None:
    assert not re.search(pattern("there is no NVIDIA driver: ... of this kind"), said)
    assert re.search(pattern("device ... is lost"), said)
