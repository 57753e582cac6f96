"""The beginning of a program in a new process, and an end to it if it does not begin.

Until then the thread that starts it waits, in the system's call. What stops the process in between (SIGSTOP, a freezer, an executable on a file system that
hangs) would keep the thread, and all who wait for their turn there, for ever: so another thread looks, and ends it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import Final

__all__ = ["LOOK", "SpawnTimeout"]

LOOK: Final = 0.25
"""Seconds between two looks at a birth."""

_LOOKS, _LOOKS_IN_LINE = 20, 120
"""So many looks a program may take to begin (5 s), and to have its turn (30 s); after twice as many it is not waited for any more."""


class SpawnTimeout:
    """A program that is about to begin: told by the thread that starts it, looked at by another one.

    What counts is how often it was looked at, not the time: if this process was stopped itself, that says nothing of the other one.

    Attributes
    ----------
    is_given_up : bool
        Whether the process was killed because the program did not begin.
    """

    def __init__(self) -> None:
        self.is_given_up = False
        self._thread = 0
        self._before: frozenset[int] = frozenset()
        self._seen = 0
        self._looks = 0

    def __enter__(self) -> None:
        self._before = _children(threading.get_native_id())
        self._thread = threading.get_native_id()

    def __exit__(self, *_: object) -> None:
        self._thread = 0

    def look(self) -> bool:
        """Look whether it begins, every :data:`LOOK` seconds; kill what does not. Return ``False`` once nothing more can be done."""
        thread = self._thread
        if thread != self._seen:
            self._seen, self._looks = thread, 0
        self._looks += 1
        most = _LOOKS if thread else _LOOKS_IN_LINE
        if thread and self._looks == most:
            self.is_given_up = True
            _kill(thread, self._before)
        return self._looks < 2 * most


def _children(thread: int) -> frozenset[int]:
    """Return the processes that a thread of this process has started."""
    with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/children", encoding="ascii") as file:
        return frozenset(map(int, file.read().split()))
    return frozenset()


def _kill(thread: int, before: frozenset[int]) -> None:
    for pid in _children(thread) - before:
        with contextlib.suppress(OSError):
            handle = os.pidfd_open(pid)
            try:
                if pid in _children(thread):  # else its number may be another's
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            finally:
                os.close(handle)
