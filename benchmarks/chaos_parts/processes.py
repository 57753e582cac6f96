"""The child processes of this one, as the system shows them."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

__all__ = ["children", "parent_of", "send_signal", "workers"]

_WORKER = b"accel.process.worker"


def parent_of(pid: int) -> int | None:
    """Return the number of a process's parent, or ``None`` if it is gone or a zombie that was collected meanwhile."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[1])


def _arguments(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def children() -> set[int]:
    """Return this process's children, and the workers that it started and that somebody else has adopted."""
    me, found = os.getpid(), set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        pid = int(name)
        if parent_of(pid) == me:
            found.add(pid)
        else:
            arguments = _arguments(pid)
            if _WORKER in arguments and str(me).encode() in arguments:
                found.add(pid)
    return found


def workers() -> set[int]:
    """Return those of this process's children that run a device's program, or are about to: not one that was forked and is not another program yet."""
    return {pid for pid in children() if _WORKER in _arguments(pid)}


def send_signal(pid: int, number: int) -> bool:
    """Send a signal to a child of this process, and to nobody else; return whether it was there."""
    if pid == os.getpid() or parent_of(pid) != os.getpid():
        return False
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            if parent_of(pid) == os.getpid():
                signal.pidfd_send_signal(descriptor, number)
                return True
        finally:
            os.close(descriptor)
    return False
