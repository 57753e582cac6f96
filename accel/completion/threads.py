"""Threads that wait for a device."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

from accel.shortage import no_thread

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["start_thread", "wait_ended"]


def start_thread(name: str, run: Callable[[], None]) -> threading.Thread:
    """Start a thread. It is a daemon: a device that never answers must not keep the process.

    Raises
    ------
    OutOfMemoryError
        If the operating system has no thread now.
    """
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise no_thread(error, "nothing can wait for the device's work") from error
    return thread


async def wait_ended(thread: threading.Thread) -> None:
    """Wait for a thread that is about to return, which ``join`` would do by blocking the loop."""
    while thread.is_alive():  # noqa: ASYNC110 - a thread sets no event after its last instruction
        await asyncio.sleep(0)
