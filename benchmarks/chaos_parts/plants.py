"""Violations made on purpose: a run that does not find them proves nothing."""

from __future__ import annotations

import asyncio
import mmap
import os
import subprocess
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.chaos_parts.clients import ask

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from benchmarks.chaos_parts.oracle import Ledger
    from benchmarks.chaos_parts.subject import Subject

__all__ = ["PLANTS", "Plant"]

PLANTS = ("lost", "wrong", "twice", "error", "child", "descriptor", "thread", "memory", "task", "unraisable")
_AT = 50
"""The answer that is falsified."""


class Plant:
    """One violation, or none.

    Parameters
    ----------
    kind
        One of :data:`PLANTS`, or empty.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._reads = 0
        self._undo: list[Callable[[], Any]] = []

    def tamper(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return what a client is to take for the answer."""
        self._reads += 1
        return array + 1 if self._kind == "wrong" and self._reads == _AT else array

    def begin(self, ledger: Ledger, subject: Subject) -> None:
        """Do what is done on the loop, while the run goes on."""
        if self._kind == "lost":
            entry = ledger.begin("planted", subject)
            self._keep(asyncio.ensure_future(ask(ledger, entry, asyncio.get_running_loop().create_future())))
        elif self._kind == "twice":
            entry = ledger.begin("planted", subject)
            ledger.right(entry)
            ledger.right(entry)
        elif self._kind == "error":
            ledger.failed(ledger.begin("planted", subject), ValueError("nothing of accel's"))
        elif self._kind == "task":
            self._keep(asyncio.ensure_future(asyncio.Event().wait()))
        elif self._kind == "unraisable":
            _Raises()

    def leave(self) -> None:
        """Leave something behind."""
        if self._kind == "child":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            self._undo += [child.wait, child.kill]
        elif self._kind == "descriptor":
            self._undo += [partial(os.close, fd) for fd in os.pipe()]
        elif self._kind == "thread":
            ended = threading.Event()
            thread = threading.Thread(target=ended.wait, name="planted")
            thread.start()
            self._undo += [thread.join, ended.set]
        elif self._kind == "memory":
            fd = os.memfd_create("planted")
            os.ftruncate(fd, 4096)
            self._undo.append(mmap.mmap(fd, 4096).close)
            os.close(fd)

    def remove(self) -> None:
        """Undo it."""
        while self._undo:
            self._undo.pop()()

    def _keep(self, task: asyncio.Future[Any]) -> None:
        self._undo.append(lambda: task)


class _Raises:
    def __del__(self) -> None:
        raise RuntimeError("planted")
