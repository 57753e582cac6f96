"""Whether another thread may be about to call the driver, for the few microseconds in which that must not be.

A thread that is in native code has given the interpreter's lock up, and cannot be kept from anything: it may have left Python a moment ago and enter the
driver in the next. Where it left Python its frame tells, and the line in it.

What cannot be seen: threads that never run Python; a native function that uvloop calls by itself, because somebody has given it to ``call_soon``; and what a
destructor in native code does that runs on such a line.
"""

from __future__ import annotations

import linecache
import sys
from threading import get_ident
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from types import CodeType

__all__ = ["in_the_way"]

_WAITING = {
    ("threading", "wait"): ".acquire(",
    ("threading", "join"): "_handle.join(",
    ("threading", "_wait_for_tstate_lock"): "lock.acquire(",
    ("selectors", "select"): "self._sele",  # an epoll's poll(), or select()
    ("concurrent.futures.thread", "_worker"): "work_queue.get(block=True)",
    ("accel.actors.workers", "_sleep"): "wake.acquire(",
    ("accel.completion.host_fn", "wait"): "self._wait(",
    ("accel.cpu.stream", "_work"): "_park.acquire(",
    ("accel.device.exports", "wait"): "gone.get(",
    ("accel.hosts.worker", "wait"): "poll.poll(",
    ("accel_cuda.staging", "_soon"): "inbox.get(",
    ("accel_cuda.staging", "wait"): "_ended.acquire(",
    ("accel_cuda.staging", "work"): "move(",
}
"""Module and function -> what is on the lines whose native code waits for something that is no GPU, and needs the lock before it can do anything else."""

_LOOPS = (".run_until_complete(", ".run_forever(")
"""What is on the lines, in any function, below which a loop waits that is native code itself, as uvloop is."""

_lines: WeakKeyDictionary[CodeType, frozenset[int]] = WeakKeyDictionary()


def in_the_way() -> str | None:
    """Return where a thread is that may be about to call the driver; ``None`` if every other one that runs Python is known to wait for something else.

    As long as the lock is kept, that stays so. A thread that computes in Python is not told from one in native code, and is in the way. So is, once, one in a
    function that was never seen: to find out which lines are on the list takes reading files.
    """
    found, unseen = _look()
    for code, module in unseen:
        _lines[code] = _lines_of(code, module)
    return found


def _look() -> tuple[str | None, list[tuple[CodeType, str]]]:
    """Return where a thread is that is not known to wait, and the functions, with their modules, that were never seen. No frame is kept: it has operands."""
    found: str | None = None
    unseen: list[tuple[CodeType, str]] = []
    frames = sys._current_frames()  # noqa: SLF001 - documented, in spite of its name
    del frames[get_ident()]  # a frame that refers to itself, and to all that called it, would stay until cycles are collected
    for frame in frames.values():
        code, module = frame.f_code, str(frame.f_globals.get("__name__"))
        lines = _lines.get(code)
        if lines is None:
            unseen.append((code, module))
        if lines is None or frame.f_lineno not in lines:
            found = f"{module}.{code.co_name}, line {frame.f_lineno}"
    return found, unseen


def _lines_of(code: CodeType, module: str) -> frozenset[int]:
    """Return the lines of a function on which it is known to wait; none if its source is not there."""
    text = _WAITING.get((module, code.co_name))
    texts = _LOOPS if text is None else (text,)
    numbers = {number for _, _, number in code.co_lines() if number is not None}
    return frozenset(number for number in numbers if any(each in linecache.getline(code.co_filename, number) for each in texts))
