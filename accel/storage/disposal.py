"""Closing descriptors that another process has sent, which may block for as long as it likes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from typing import TYPE_CHECKING

from accel.fork import close_after_fork

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Disposal"]

_CLOSE_TIMEOUT = 1.0
"""Seconds that :meth:`Disposal.aclose` waits. A large memory takes a fraction of that; a socket
that lingers may take minutes."""


class Disposal:
    """Closes descriptors that another process has sent, off the loop.

    Their kind is not known, and closing may block: the last descriptor of a socket with
    ``SO_LINGER``, for example, until all is sent.

    Each call has a thread of its own, so that none waits for another, nor for the worker pool of
    the system, which may be full or closed. Used on the loop's thread only.

    Parameters
    ----------
    loop
        Where the end is waited for.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pid = os.getpid()
        self._unclosed: list[int] = []  # for which there was no thread
        self._closing: list[list[int]] = []  # one list for each thread, which removes those that it closes
        self._idle: asyncio.Future[None] | None = None  # ends the wait of aclose()
        close_after_fork(self)

    def close_fds(self, descriptors: Iterable[int]) -> None:
        """Close descriptors, which belong to this object from now on; -1 stands for none.

        Never blocks; where the system has no thread, they are closed together with the next ones.
        In a forked process they are closed at once.
        """
        self._unclosed += [fd for fd in descriptors if fd >= 0]
        if os.getpid() != self._pid:
            self.close_inherited()
        elif self._unclosed:
            thread = threading.Thread(target=self._close, args=(self._unclosed,), name="accel-disposal", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return
            self._closing.append(self._unclosed)
            self._unclosed = []

    def close_inherited(self) -> None:
        """Close all in a fork; see :class:`accel.fork.Inherited`.

        The parent has them too, so closing them here does not block.
        """
        for descriptors in (self._unclosed, *self._closing):
            _close(descriptors)
        self._closing = []

    async def aclose(self) -> None:
        """Wait until all is closed, for a second at most. Cancelling ends the wait.

        A thread that still closes some goes on after that. Where the system still has no thread
        for those that wait for one, they stay open until the process ends: closing them here may
        block.
        """
        self.close_fds(())  # those for which there was no thread
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_TIMEOUT):
                while self._closing:
                    self._idle = self._loop.create_future()
                    await self._idle

    def _close(self, descriptors: list[int]) -> None:
        """Close descriptors on a thread of their own, and report that to the loop."""
        _close(descriptors)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._on_closed, descriptors)

    def _on_closed(self, descriptors: list[int]) -> None:
        """Note that a thread has ended, and wake :meth:`aclose` after the last one."""
        self._closing = [batch for batch in self._closing if batch is not descriptors]
        if not self._closing and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)


def _close(descriptors: list[int]) -> None:
    """Close descriptors, and remove each from the list, whose owner sees what is left."""
    while descriptors:
        with contextlib.suppress(OSError):  # an error of its file; it is closed all the same
            os.close(descriptors.pop())
