"""What a child process of ours does before anything else: while ``python -m accel.process.worker`` imports this package, which comes first.

Only for that program. It binds the child's life to its parent's, and keeps the package's names for later: they take long to import, and what
the child runs may need few of them.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
from itertools import pairwise
from typing import Any

__all__ = ["IS_WORKER", "ORPHAN", "TARGET", "USAGE", "WORKER", "defer", "is_deferred"]

WORKER = "accel.process.worker"

USAGE = 64
"""Exit code: the command line, or the descriptor that it names, is wrong."""
TARGET = 65
"""Exit code: the function cannot be imported."""
ORPHAN = 66
"""Exit code: the parent had ended before the child could bind its life to it."""

_PR_SET_PDEATHSIG = 1
_SOONER = 300
"""Thousandths of the machine's memory, or of the group's, that a child counts as larger than it is where the kernel looks for a process to end."""
_FIRST_OTHER = 3


def _is_worker() -> bool:
    # While a package is imported for `-m`, the program's name is still "-m".
    return bool(sys.argv) and sys.argv[0] == "-m" and ("-m", WORKER) in pairwise(sys.orig_argv)


IS_WORKER = _is_worker()
"""Whether this process is a child of accel's, or was forked by one."""

_deferred = IS_WORKER


def _protect(fd: int, parent: int) -> None:
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(ORPHAN)
    _offer(_SOONER)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.closerange(_FIRST_OTHER, fd)
    os.closerange(max(fd + 1, _FIRST_OTHER), os.sysconf("SC_OPEN_MAX"))


def _offer(more: int) -> None:
    """Where memory runs out, have the kernel end this process before its parent: a child is replaced."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/oom_score_adj", "r+", encoding="ascii") as file:
        score = min(int(file.read()) + more, 1000)
        file.seek(0)
        file.write(str(score))


def is_deferred() -> bool:
    """Return whether the names of ``accel`` are to be imported when the first of them is used."""
    return _deferred


def defer(names: dict[str, Any]) -> None:
    """Import the names of ``accel`` when the first of them is used.

    Parameters
    ----------
    names
        The globals of ``accel``, which is imported once more for it.
    """
    turn = threading.RLock()
    loading = False

    def load(name: str) -> Any:
        global _deferred
        nonlocal loading
        # Asked for by what is being imported: as in any package that is half imported, it is not there.
        with turn:
            if _deferred and not loading and name in names["__all__"]:
                loading, _deferred = True, False
                try:
                    importlib.reload(sys.modules["accel"])
                except BaseException:
                    loading, _deferred = False, True
                    raise
            if name in names:
                return names[name]
            if names["__getattr__"] is not load:  # what the package has for names that take long
                return names["__getattr__"](name)
        raise AttributeError(f"module 'accel' has no attribute {name!r}")

    names["__getattr__"] = load


# When imported, which is the first thing that `import accel` does.
if _deferred and len(sys.argv) > _FIRST_OTHER and all(text.isdecimal() for text in sys.argv[1:3]):
    _protect(int(sys.argv[1]), int(sys.argv[2]))
