"""How a child process ended, and the error that says so."""

from __future__ import annotations

import signal as signals
from dataclasses import dataclass
from typing import Any

from accel import _child
from accel.errors import HostDiedError

__all__ = ["ExitStatus"]

_LINES = 8
_CHARACTERS = 1000
_CRASH = "Fatal Python error: "
_CURRENT = "Current thread "
"""How ``faulthandler`` begins its report of a crash, and the part of the thread that crashed."""
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
        What it exited with; ``None`` if a signal ended it, or if it is not known.
    signal
        Number of the signal that ended it; ``None`` if none did, or if it is not known.
    stderr
        The last few KiB of what it wrote to stdout and stderr.
    """

    code: int | None
    signal: int | None
    stderr: str = ""

    def describe(self) -> str:
        """Say in words how the process ended, with the last lines that it wrote, or the first ones of the report of a crash."""
        _, crash, report = self.stderr.rpartition(_CRASH)
        if crash:  # the thread that crashed may be the last one; its most recent call is the first
            what, _, threads = report.partition("\n")
            frames = threads[max(threads.rfind(_CURRENT), 0) :].strip().splitlines()
            said = "\n".join((crash + what, *frames[:_LINES]))[:_CHARACTERS]
        else:
            said = "\n".join(self.stderr.rstrip().splitlines()[-_LINES:])[-_CHARACTERS:]
        return f"{self._ending()}; it last wrote:\n{said}" if said else self._ending()

    def error(self, **fields: Any) -> HostDiedError:
        """Return the error for the callers that waited for the process.

        Parameters
        ----------
        **fields
            Fields of :class:`~accel.errors.AccelError`, such as ``device="cuda:0"``.
        """
        return HostDiedError(f"the child process {self.describe()}", exit_code=self.code, signal=self.signal, **fields)

    def _ending(self) -> str:
        if self.signal is not None:
            try:
                name = signals.Signals(self.signal).name
            except ValueError:  # a real-time signal has no name
                name = "unnamed"
            return f"was ended by signal {self.signal} ({name})"
        if self.code is None:
            return "ended, and something else took its exit status: code in this process, or the end of the forkserver that it came from"
        meaning = _MEANINGS.get(self.code)
        return f"ended with exit code {self.code}" + (f" ({meaning})" if meaning else "")
