"""How much of a model is loaded: a rich bar on a terminal, a line per tenth elsewhere. No thread."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Self, TextIO

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["LoadingProgress"]

_REFRESH = 0.1
"""Seconds between two drawings; each takes a millisecond or two from the loop."""

_MIB = 1 << 20


class LoadingProgress:
    """Says how much of a model's weights is on the device: ``with LoadingProgress("embed", out) as progress``, then ``progress.update(done, total)``.

    Parameters
    ----------
    what
        What is loaded.
    out
        Where to write.
    """

    def __init__(self, what: str, out: TextIO) -> None:
        self._what = what
        self._out = out
        self._bar: Any = None
        self._task: Any = None
        self._drawn = 0.0
        self._tenths = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, total: int) -> None:
        """Draw if it is time: ``done`` of ``total`` bytes are there. A model without weights draws nothing."""
        if not total:
            return
        if self._tenths < 0 and self._out.isatty():
            self._bar = _rich_bytes(self._out)
            if self._bar is not None:
                self._task = self._bar.add_task(f"loading {self._what}", total=total)
                self._bar.start()
        tenths = 10 * done // total
        if self._bar is not None:
            now = time.perf_counter()
            if now - self._drawn >= _REFRESH or done == total:
                self._drawn = now
                self._bar.update(self._task, completed=done, refresh=True)
        elif tenths > self._tenths:
            print(f"  loading {self._what}: {done / _MIB:,.1f} of {total / _MIB:,.1f} MiB", file=self._out, flush=True)
        self._tenths = tenths


def _rich_bytes(out: TextIO) -> Any:
    """Return a bar that counts bytes, or ``None`` where rich is not installed."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
    except ModuleNotFoundError:
        return None
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    return Progress(*columns, console=Console(file=out), auto_refresh=False)
