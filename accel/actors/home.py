"""The one event loop, thread and process in which an object may be used."""

from __future__ import annotations

import asyncio
import os
import threading

from accel.errors import ClosedError
from accel.fork import close_after_fork

__all__ = ["Home"]


class Home:
    """The running event loop, thread and process at the time of construction.

    Parameters
    ----------
    owner
        The object that belongs here, as named in errors.

    Attributes
    ----------
    is_inherited : bool
        Whether this process was forked from that one. The loop cannot show this: a fork that leaves
        through ``asyncio.run()`` runs its copy of the loop.
    """

    __slots__ = ("__weakref__", "is_inherited", "loop", "owner", "thread")

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.loop = asyncio.get_running_loop()
        self.thread = threading.get_ident()
        self.is_inherited = False
        close_after_fork(self)

    @property
    def is_here(self) -> bool:
        """Whether the caller is in the loop, thread and process.

        A thread runs one loop at a time, so that it needs no system call.
        """
        return threading.get_ident() == self.thread and self.loop.is_running() and not self.is_inherited

    def close_inherited(self) -> None:
        """See :class:`accel.fork.Inherited`."""
        self.is_inherited = True

    def wrong_place_error(self) -> ClosedError:
        """Return the error for a call from another loop, thread or process."""
        if self.is_inherited:
            where, remedy = f"the process that this one (pid {os.getpid()}) was forked from", "Make a new system after the fork."
        elif threading.get_ident() != self.thread:
            where, remedy = f"another thread than {threading.current_thread().name!r}", "Use system.portal from other threads."
        else:
            where, remedy = "another event loop", "Use it in the loop in which it was entered, or make a new system here."
        return ClosedError(f"{self.owner} lives in {where}", remedy=remedy)
