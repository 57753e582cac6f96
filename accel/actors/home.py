"""Where something lives: one event loop, in one thread, of one process."""

from __future__ import annotations

import asyncio
import os
import threading

from accel.errors import ClosedError

__all__ = ["Home"]


class Home:
    """The loop, thread and process of whoever makes it.

    Parameters
    ----------
    owner
        What lives here, as named in errors.
    """

    __slots__ = ("loop", "owner", "pid", "thread")

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.loop = asyncio.get_running_loop()
        self.pid = os.getpid()
        self.thread = threading.get_ident()

    def not_here(self) -> ClosedError:
        """Return the error that says why a call was made in the wrong place."""
        if os.getpid() != self.pid:
            where, remedy = f"the process that this one (pid {os.getpid()}) was forked from", "Make a new system after the fork."
        elif threading.get_ident() != self.thread:
            where, remedy = f"another thread than {threading.current_thread().name!r}", "Use system.portal from other threads."
        else:
            where, remedy = "another event loop", "Use it in the loop in which it was entered, or make a new system here."
        return ClosedError(f"{self.owner} lives in {where}", remedy=remedy)
