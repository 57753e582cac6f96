"""Closing what another process has sent: that takes as long as the other process likes, so it happens on threads of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Disposal"]

_PATIENCE = 1.0
"""Seconds for which the end of what is being closed is waited for. A large memory takes a fraction of that; a socket that lingers may take minutes."""


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
        self._left: list[int] = []  # there was no thread for these
        self._running = 0
        self._idle: asyncio.Future[None] | None = None

    def close(self, descriptors: Iterable[int]) -> None:
        """Close descriptors. Never blocks; where the system has no thread, they are closed together with the next ones."""
        self._left += descriptors
        if not self._left:
            return
        thread = threading.Thread(target=self._close, args=(self._left,), name="accel-disposal", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return
        self._left = []
        self._running += 1

    async def aclose(self) -> None:
        """Wait until all is closed, for a second at most. Cancelling ends the wait."""
        self.close(())
        while self._running:
            self._idle = self._loop.create_future()
            try:
                async with asyncio.timeout(_PATIENCE):
                    await self._idle
            except TimeoutError:
                return

    def _close(self, descriptors: list[int]) -> None:
        for fd in descriptors:
            with contextlib.suppress(OSError):  # an error of what it was of; it is closed all the same
                os.close(fd)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._closed)

    def _closed(self) -> None:
        self._running -= 1
        if not self._running and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)
