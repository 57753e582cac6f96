"""NVIDIA's packages import each other in circles: threads that load several at a time get whole modules all the same."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from accel_cuda.core.libraries import load_module

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

STARTED = {"first": threading.Event(), "second": threading.Event()}
FIRST = """
from {tests} import STARTED
STARTED["first"].set()
STARTED["second"].wait(0.2)
import circle.second
STARTED["read"].wait(0.2)
WHOLE = True
"""
SECOND = """
from {tests} import STARTED
STARTED["second"].set()
STARTED["first"].wait(0.2)
STARTED["read"].wait(0.1)  # until the other thread waits for this module: then this one is let through
import circle.first
"""


def test_modules_that_import_each_other_are_whole_in_every_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(STARTED, "read", threading.Event())
    package = tmp_path / "circle"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for name, text in (("first", FIRST), ("second", SECOND)):
        (package / f"{name}.py").write_text(text.format(tests=__name__))

    def second() -> bool:
        found = load_module("circle.second", "circle").circle.first
        try:
            return hasattr(found, "WHOLE")
        finally:
            STARTED["read"].set()

    try:
        with ThreadPoolExecutor(2) as threads:
            loaded = threads.submit(load_module, "circle.first", "circle")
            assert threads.submit(second).result(10), "it was half there"
            assert loaded.result(10).WHOLE
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "circle"]:
            del sys.modules[name]
