"""A bound for the start of a program in a new process.

Until the program starts, the spawner thread waits in a system call. A process that is stopped before that (SIGSTOP, a freezer, an executable on a file system
that hangs) would block the thread and all calls in its queue. So another thread checks the start, and kills the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import Final

__all__ = ["CHECK_INTERVAL", "SpawnTimeout"]

CHECK_INTERVAL: Final = 0.25
"""Seconds between two checks."""

_CHECKS, _CHECKS_QUEUED = 20, 120
"""Checks within which a program must start (5 s), and within which the spawner thread must begin with it (30 s). After twice as many the caller gives up."""


class SpawnTimeout:
    """The start of one program: entered by the spawner thread, checked by another thread.

    The bound counts checks, not time: time in which this process itself was stopped does not count.

    Attributes
    ----------
    is_given_up : bool
        Whether the process was killed because its program did not start.
    """

    def __init__(self) -> None:
        self.is_given_up = False
        self._thread = 0
        self._before: frozenset[int] = frozenset()
        self._seen = 0
        self._checks = 0

    def __enter__(self) -> None:
        self._before = _children(threading.get_native_id())
        self._thread = threading.get_native_id()

    def __exit__(self, *_: object) -> None:
        self._thread = 0

    def check(self) -> bool:
        """Kill the process if its program does not start; called each :data:`CHECK_INTERVAL` seconds. Return ``False`` when the caller is to give up."""
        thread = self._thread
        if thread != self._seen:
            self._seen, self._checks = thread, 0
        self._checks += 1
        most = _CHECKS if thread else _CHECKS_QUEUED
        if thread and self._checks == most:
            self.is_given_up = True
            _kill(thread, self._before)
        return self._checks < 2 * most


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
