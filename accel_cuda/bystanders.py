"""Whether another thread may be about to call the driver, for the few microseconds in which that must not be.

A thread that is in native code has given the interpreter's lock up, and cannot be kept from anything: it may have left Python a moment ago and enter the
driver in the next. Where it left Python its frame tells.
"""

from __future__ import annotations

import sys
from threading import get_ident

__all__ = ["all_wait"]

# Module and function of frames whose native code waits for other things than a GPU, and needs the lock before it can do anything else. Not all of "threading",
# or of this project: what is run by an executor, or by a worker, may be a function of a library that has no frame of its own.
_WAITING = frozenset(
    {
        ("threading", "wait"),
        ("threading", "join"),
        ("threading", "_wait_for_tstate_lock"),
        ("selectors", "select"),
        ("asyncio.runners", "run"),  # uvloop's selector has no frame
        ("concurrent.futures.thread", "_worker"),
        ("accel.actors.workers", "_sleep"),
        ("accel.completion.host_fn", "wait"),
        ("accel.device.exports", "wait"),
        ("accel.hosts.worker", "wait"),
        ("accel_cuda.staging", "_soon"),
        ("accel_cuda.staging", "wait"),
        ("accel_cuda.staging", "work"),
    }
)


def all_wait() -> bool:
    """Return whether every other thread that runs Python stands where it waits for something else than a GPU; as long as the lock is kept, it stays there.

    One that computes in Python is not told from one that is in native code, and counts as about to call. Threads that never run Python are not seen.
    """
    own = get_ident()
    return all(
        (frame.f_globals.get("__name__"), frame.f_code.co_name) in _WAITING
        for thread, frame in sys._current_frames().items()  # noqa: SLF001 - documented, in spite of its name
        if thread != own
    )
