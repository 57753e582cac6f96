"""How many Python calls, in how many files, an op, a request and a fault pass through. The counts are the same on any machine."""

from __future__ import annotations

import asyncio
import sys

import pytest

from benchmarks import walk
from benchmarks.walk import LIMITS, Walk, calls_of

TOO_MANY_FILES = {"request of a served model, inline": 49}
"""Rows whose calls are as few as they must be, and their files are not: how many these are now, at most."""

of_this_python = pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="the limits are for Python 3.11: later ones inline comprehensions"
)


@pytest.fixture(scope="module")
def walks() -> dict[str, Walk]:
    found: dict[str, Walk] = {}
    for walked in (walk.ops("inline"), walk.ops("process"), walk.request("inline"), walk.fault()):
        found |= asyncio.run(walked)
    return found


@of_this_python
@pytest.mark.parametrize("row", LIMITS)
def test_the_way_is_as_short_as_it_must_be(row: str, walks: dict[str, Walk]) -> None:
    limit = LIMITS[row]
    calls, files = calls_of(row, walks), walks[row].files
    assert calls <= limit.calls, f"{calls:g} calls: {limit}"
    if limit.files is None:
        return
    if limit.files < files <= TOO_MANY_FILES.get(row, 0):
        pytest.xfail(f"{files} files")
    assert files <= limit.files, f"{files} files: {limit}"
    assert row not in TOO_MANY_FILES, "it is reached: take it out"
