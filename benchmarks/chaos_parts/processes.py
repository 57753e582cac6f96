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


def _is_ours(pid: int) -> bool:
    """Return whether a process is a child of this one, or a worker: another process may have forked, or adopted, it."""
    arguments = _arguments(pid)
    return parent_of(pid) == os.getpid() or (_WORKER in arguments and str(os.getpid()).encode() in arguments)


def children() -> set[int]:
    """Return this process's children, and all workers that it or its forkservers have started."""
    return {int(name) for name in os.listdir("/proc") if name.isdigit() and _is_ours(int(name))}


def workers() -> set[int]:
    """Return those of this process's children that run a device's program, or are about to, and forkservers: not one that is not another program yet."""
    return {pid for pid in children() if _WORKER in _arguments(pid)}


def send_signal(pid: int, number: int) -> bool:
    """Send a signal to a child or worker of this process, and to no other; return whether it was there."""
    if pid == os.getpid() or not _is_ours(pid):
        return False
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            if _is_ours(pid):
                signal.pidfd_send_signal(descriptor, number)
                return True
        finally:
            os.close(descriptor)
    return False
