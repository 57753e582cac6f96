"""Ctrl-C at the edges of ``python -m accel``, and of ``accel``, which is the same: while it imports, and after its command has ended.

Only for the program, never for those who import the package: no handler is installed then.
"""

from __future__ import annotations

import os
import signal
import sys
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["guard", "guard_again", "release"]


def _leave(number: int, frame: FrameType | None) -> None:
    # Nothing is open that would have to be closed. An exception would not do: extension modules that are being imported turn a
    # KeyboardInterrupt into an ImportError.
    os.write(2, b"accel: interrupted\n")
    os._exit(130)


def guard() -> None:
    """End the process on Ctrl-C with a short message, if it is ``accel`` or ``python -m accel`` and Ctrl-C has no other handler."""
    program = sys.argv[0] if sys.argv else ""
    # The script that installers write has the command's name, without an ending.
    if os.path.basename(program) == "accel" or (program == "-m" and ("-m", "accel") in pairwise(sys.orig_argv)):
        guard_again()


def guard_again() -> None:
    """Do what :func:`guard` does, after :func:`release`."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def release() -> bool:
    """Let Ctrl-C raise KeyboardInterrupt again, as asyncio expects it; return whether it was guarded."""
    if signal.getsignal(signal.SIGINT) is not _leave:
        return False
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return True


# When imported, which is the first thing that `import accel` does.
guard()
