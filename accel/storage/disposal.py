"""Closing what another process has sent: that takes as long as the other process likes, so it happens on threads of its own."""

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
"""Seconds that :meth:`Disposal.aclose` waits. A large memory takes a fraction of that; a socket that lingers may take minutes."""


class Disposal:
    """Closes descriptors off the loop. What they are of is not known: the last one of a socket with ``SO_LINGER`` blocks its closer until all is sent.

    Each call has a thread of its own, so that none waits for another, nor for the worker pool of the system, which may be full or closed. Used on the
    loop's thread only.

    Parameters
    ----------
    loop
        Where the end is waited for.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pid = os.getpid()
        self._left: list[int] = []  # there was no thread for these
        self._closing: list[list[int]] = []  # each is a thread's, which takes out what it closes
        self._idle: asyncio.Future[None] | None = None
        close_after_fork(self)

    def close(self, descriptors: Iterable[int]) -> None:
        """Close descriptors. Never blocks; where the system has no thread, they are closed together with the next ones."""
        self._left += descriptors
        if os.getpid() != self._pid:
            self.close_inherited()
        elif self._left:
            thread = threading.Thread(target=self._close, args=(self._left,), name="accel-disposal", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return
            self._closing.append(self._left)
            self._left = []

    def close_inherited(self) -> None:
        """See :class:`accel.fork.Inherited`. The parent has them too, so that closing them here waits for nothing."""
        for descriptors in (self._left, *self._closing):
            _close(descriptors)
        self._closing = []

    async def aclose(self) -> None:
        """Wait until all is closed, for a second at most. Cancelling ends the wait."""
        self.close(())
        while self._closing:
            self._idle = self._loop.create_future()
            try:
                async with asyncio.timeout(_CLOSE_TIMEOUT):
                    await self._idle
            except TimeoutError:
                return

    def _close(self, descriptors: list[int]) -> None:
        _close(descriptors)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._closed, descriptors)

    def _closed(self, descriptors: list[int]) -> None:
        self._closing = [each for each in self._closing if each is not descriptors]
        if not self._closing and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)


def _close(descriptors: list[int]) -> None:
    while descriptors:
        with contextlib.suppress(OSError):  # an error of what it was of; it is closed all the same
            os.close(descriptors.pop())
