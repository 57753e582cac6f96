"""The end of a child process, and the error for it."""

from __future__ import annotations

import signal as signals
from dataclasses import dataclass
from typing import Any

from accel import _child
from accel.errors import HostDiedError

__all__ = ["ExitStatus"]

_MAX_LINES = 8
_MAX_CHARACTERS = 1000
"""The most of a child's output that an error shows."""
_CRASH = "Fatal Python error: "
_CURRENT = "Current thread "
"""What ``faulthandler``'s report of a crash begins with, and the part on the crashed thread."""
_MEANINGS = {
    1: "it raised",
    _child.USAGE: "its command line or its socket is wrong",
    _child.TARGET: "its function cannot be imported",
    _child.ORPHAN: "it had lost its parent",
}


@dataclass(frozen=True)
class ExitStatus:
    """How a child process ended.

    Attributes
    ----------
    code
        The exit code; ``None`` if a signal ended it, or if it is unknown.
    signal
        The number of the signal that ended it; ``None`` if none did, or if it is unknown.
    stderr
        The last 32 KiB of its output to stdout and stderr.
    lost
        Why nothing is known of its end, as the end of a sentence about it; empty where that is not
        so.
    """

    code: int | None
    signal: int | None
    stderr: str = ""
    lost: str = ""

    def describe(self) -> str:
        """Return in words how the process ended, with its last output or the report of a crash."""
        _, crash, report = self.stderr.rpartition(_CRASH)
        if crash:  # the crashed thread may be the last one; its most recent call comes first
            crash_line, _, threads = report.partition("\n")
            frames = threads[max(threads.rfind(_CURRENT), 0) :].strip().splitlines()
            said = "\n".join((crash + crash_line, *frames[:_MAX_LINES]))[:_MAX_CHARACTERS]
        else:
            said = "\n".join(self.stderr.rstrip().splitlines()[-_MAX_LINES:])[-_MAX_CHARACTERS:]
        return f"{self._describe_end()}; it last wrote:\n{said}" if said else self._describe_end()

    def error(self, **fields: Any) -> HostDiedError:
        """Return the error for what waited for the process.

        Parameters
        ----------
        **fields
            Fields of :class:`~accel.errors.AccelError`, such as ``device="cuda:0"``.
        """
        return HostDiedError(f"the child process {self.describe()}", exit_code=self.code, signal=self.signal, **fields)

    def _describe_end(self) -> str:
        """Return how the process ended, as the end of a sentence about it."""
        if self.signal is not None:
            try:
                name = signals.Signals(self.signal).name
            except ValueError:  # a real-time signal has no name
                name = "unnamed"
            return f"was ended by signal {self.signal} ({name})"
        if self.code is None:
            return (
                self.lost
                or "ended, and its exit status is not known: code in this process took it, or the forkserver that it came from was busy, or has ended"
            )
        meaning = _MEANINGS.get(self.code)
        return f"ended with exit code {self.code}" + (f" ({meaning})" if meaning else "")
