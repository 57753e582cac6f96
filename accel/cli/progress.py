"""How far a long run has come: a rich bar on a terminal, a line per tenth elsewhere. No thread: it draws when it is told of progress."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Self, TextIO

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["ServingProgress"]

_REFRESH = 0.1
"""Seconds between two drawings; each takes a millisecond or two from the loop."""


class ServingProgress:
    """Counts answers: ``with ServingProgress(20_000, out) as progress``.

    Parameters
    ----------
    total
        Answers to come.
    out
        Where to write.
    """

    def __init__(self, total: int, out: TextIO) -> None:
        self._total = total
        self._out = out
        self._done = 0
        self._drawn = 0.0
        self._tenths = 0
        self._bar: Any = _rich_bar(out) if out.isatty() else None
        self._task: Any = None if self._bar is None else self._bar.add_task("serving", total=total)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
            self._bar.stop()

    def advance(self, answers: int) -> None:
        """Count answers, and draw if it is time."""
        self._done += answers
        if self._bar is None:
            tenths = 10 * self._done // self._total
            if tenths > self._tenths:
                self._tenths = tenths
                self.note(f"  {self._done:,} of {self._total:,} answered")
            return
        now = time.perf_counter()
        if now - self._drawn >= _REFRESH:
            self._drawn = now
            self._bar.update(self._task, completed=self._done, refresh=True)

    def note(self, text: str) -> None:
        """Print a line, above the bar."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._out, flush=True)


def _rich_bar(out: TextIO) -> Any:
    """Return a bar, or ``None`` where rich is not installed."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ModuleNotFoundError:
        return None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(file=out), auto_refresh=False)
