"""Whether a child is there: it is asked from time to time, and one that stays silent is given up."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

__all__ = ["BUSY", "Heartbeat"]

BUSY = 6
"""So many times as long may a child be silent that loads or compiles: one call that keeps the interpreter's lock may be all that it does for a while."""


class _Asked(Protocol):
    is_heard: bool

    @property
    def pid(self) -> int: ...

    @property
    def is_opening(self) -> bool: ...

    @property
    def is_busy(self) -> bool: ...

    def ping(self) -> None: ...


class Heartbeat:
    """Asks one child until it is stopped.

    A child that starts may not answer for long; then only being stopped by a signal counts as silence. One that is busy with something besides ops is
    given more time. That this process was stopped itself says nothing of the child.

    Parameters
    ----------
    loop
        Where it asks.
    link
        Whom: it has a ``pid``, a method ``ping``, and says whether something ``is_heard`` since, whether it ``is_opening``: starts, and whether it
        ``is_busy``: loads or compiles.
    silent
        Called once, with the seconds for which there was no answer.
    interval
        Seconds between two questions.
    patience
        Seconds without an answer after which the child counts as gone: its loop hangs, or the process is stopped.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, link: _Asked, silent: Callable[[float], object], interval: float, patience: float
    ) -> None:
        self._interval = interval
        self._most = math.ceil(patience / interval)
        self._loop = loop
        self._link = link
        self._tell = silent
        self._count = 0
        self._due = loop.time() + interval
        self._handle = loop.call_at(self._due, self._beat)

    def stop(self) -> None:
        """Ask no more."""
        self._handle.cancel()

    def missed(self) -> str:
        """Return that the child does not answer, or nothing; one that starts, loads or compiles may take its time. Any thread may ask."""
        count, link = self._count, self._link
        return f"the child has not answered for {count * self._interval:g} s" if count and not (link.is_opening or link.is_busy) else ""

    def _beat(self) -> None:
        link, now = self._link, self._loop.time()
        is_stopped = (link.is_opening or link.is_busy) and _is_stopped(link.pid)
        is_silent = is_stopped or not (link.is_opening or link.is_heard or now > self._due + self._interval)
        self._count = self._count + 1 if is_silent else 0
        if self._count >= self._most and (is_stopped or not link.is_busy or self._count >= self._most * BUSY):
            self._tell(self._interval * self._count)
            return
        link.ping()
        self._due = now + self._interval
        self._handle = self._loop.call_at(self._due, self._beat)


def _is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name, in parentheses, may have any characters in it.
            state = file.read().rpartition(b")")[2].split()[:1]
    except OSError:
        return False
    return state in ([b"T"], [b"t"])
