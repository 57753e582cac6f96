"""What commands print with: tables and progress, by rich where it is installed and plainly where it is not."""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import TYPE_CHECKING, Any, Self, TextIO

from accel._log import one_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

__all__ = ["LoadingProgress", "Progress", "print_table", "progress", "quiet_log"]

_MIB = 1 << 20


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, stream: TextIO | None = None) -> None:
    """Print rows under their columns, numbers to the right. What a driver or an error puts into a cell stays on its line.

    Parameters
    ----------
    title
        Printed above; empty for none.
    columns
        Headings.
    rows
        One string per column.
    stream
        Where to; ``None``: standard output.
    """
    out = sys.stdout if stream is None else stream
    rows = [[one_line(cell) for cell in row] for row in rows]
    right = [bool(rows) and all(_is_number(row[index]) for row in rows) for index in range(len(columns))]
    # A pipe or a file has no width: there, cutting cells to 80 columns would only lose what was to be read.
    if out.isatty() and (made := _rich_table(title, columns, right)) is not None:
        table, console = made
        for row in rows:
            table.add_row(*row)
        console(out).print(table)
        return
    widths = [max(len(row[index]) for row in (columns, *rows)) for index in range(len(columns))]
    if title:
        print(title, file=out)
    for row in (columns, ["-" * width for width in widths], *rows):
        cells = (cell.rjust(width) if to_right else cell.ljust(width) for cell, width, to_right in zip(row, widths, right, strict=True))
        print("  ".join(cells).rstrip(), file=out)
    print(file=out)


def _is_number(text: str) -> bool:
    return not text or text[0].isdigit() or (text[0] in "-+<>" and text[1:2].isdigit()) or text in ("-", "n/a")


def _rich_table(title: str, columns: Sequence[str], right: Sequence[bool]) -> tuple[Any, Any] | None:
    try:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table
    except ImportError:
        return None
    table = Table(title=escape(title) or None, title_justify="left")
    for column, to_right in zip(columns, right, strict=True):
        table.add_column(escape(column), justify="right" if to_right else "left", overflow="fold")
    return table, lambda out: Console(file=out, markup=False, highlight=False)


class Progress:
    """Says on standard error how far a long run has come. It draws only when told, so that it takes no time from what is measured.

    Parameters
    ----------
    bar, task
        rich's, or ``None`` to print a line per step.
    total
        Number of steps.
    """

    def __init__(self, bar: Any, task: Any, total: int) -> None:
        self._bar = bar
        self._task = task
        self._total = total
        self._done = 0

    def begin(self, what: str) -> None:
        """Say what is next."""
        if self._bar is not None:
            self._bar.update(self._task, description=what)
            self._bar.refresh()
        else:
            print(f"[{self._done + 1}/{self._total}] {what}", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Count a step as done."""
        self._done += 1
        if self._bar is not None:
            self._bar.advance(self._task)
            self._bar.refresh()


@contextlib.contextmanager
def progress(total: int) -> Iterator[Progress]:
    """Show progress while the block runs: a bar on a terminal with rich, else a line per step."""
    bar = _rich_bar(sys.stderr, "steps") if sys.stderr.isatty() else None
    if bar is None:
        yield Progress(None, None, total)
        return
    with bar:
        yield Progress(bar, bar.add_task("", total=total), total)


def _rich_bar(out: TextIO, counted: str) -> Any:
    """Return a bar that counts ``"steps"`` and goes at the end, bytes of ``"weights"``, or something else; ``None`` where rich is not installed."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TransferSpeedColumn
        from rich.progress import Progress as Bar
    except ImportError:
        return None
    what, counts = TextColumn("{task.description}", markup=False), (MofNCompleteColumn(), TimeElapsedColumn())
    columns = {
        "steps": (BarColumn(), *counts, what),
        "weights": (what, BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn()),
    }.get(counted, (what, BarColumn(), counts[0], TextColumn(counted, markup=False), counts[1]))
    # Refreshing by itself means a thread that wakes ten times a second and takes the GIL.
    return Bar(*columns, console=Console(file=out), auto_refresh=False, transient=counted == "steps")


class LoadingProgress:
    """Says how far a model is loaded: ``with LoadingProgress("embed", out) as progress``, then ``progress.update("weights", done, total)``.

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
        self._stage = self._title = ""
        self._bar: Any = None
        self._task: Any = None
        self._drawn = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, stage: str, done: int, total: int) -> None:
        """Draw each hundredth, or print each tenth; see ``on_progress`` of :meth:`accel.Device.load_model`. A stage that has nothing draws nothing."""
        if not total:
            return
        if stage != self._stage:
            self._begin(stage, total)
        drawn, self._drawn = self._drawn, done * (10 if self._bar is None else 100) // total
        if self._drawn <= drawn:
            return
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, refresh=True)
        else:
            text = f"{done / _MIB:,.1f} of {total / _MIB:,.1f} MiB" if stage == "weights" else f"{done} of {total} {stage}"
            print(f"  {self._title}: {text}", file=self._out, flush=True)

    def _begin(self, stage: str, total: int) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._stage, self._drawn = stage, -1
        self._title = f"{'loading' if stage == 'weights' else 'warming up'} {self._what}"
        self._bar = _rich_bar(self._out, stage) if self._out.isatty() else None
        if self._bar is not None:
            self._task = self._bar.add_task(self._title, total=total)
            self._bar.start()


@contextlib.contextmanager
def quiet_log() -> Iterator[None]:
    """Keep the library's log off the terminal while the block runs, unless logging was configured: the faults in there are meant to be."""
    handler = logging.NullHandler()
    logger = logging.getLogger("accel")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
