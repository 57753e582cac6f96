"""What commands print with: tables, and how far long work has come."""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import TYPE_CHECKING, TextIO

from accel._log import one_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["LoadingProgress", "Progress", "print_table", "quiet_log"]

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
    widths = [max(len(row[index]) for row in (columns, *rows)) for index in range(len(columns))]
    if title:
        print(title, file=out)
    for row in (columns, ["-" * width for width in widths], *rows):
        cells = (cell.rjust(width) if to_right else cell.ljust(width) for cell, width, to_right in zip(row, widths, right, strict=True))
        print("  ".join(cells).rstrip(), file=out)
    print(file=out)


def _is_number(text: str) -> bool:
    return not text or text[0].isdigit() or (text[0] in "-+<>" and text[1:2].isdigit()) or text in ("-", "n/a")


class Progress:
    """Says on standard error which step of a long run begins: a line each.

    Parameters
    ----------
    total
        Number of steps.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._begun = 0

    def begin(self, what: str) -> None:
        """Say what is next."""
        self._begun += 1
        print(f"[{self._begun}/{self._total}] {what}", file=sys.stderr, flush=True)


class LoadingProgress:
    """Says how much of a model's weights is on the device: a line per tenth.

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
        self._tenths = -1

    def update(self, done: int, total: int) -> None:
        """Print a line if it is time: ``done`` of ``total`` bytes are there. A model without weights prints none."""
        tenths = 10 * done // total if total else self._tenths
        if tenths > self._tenths:
            self._tenths = tenths
            print(f"  loading {self._what}: {done / _MIB:,.1f} of {total / _MIB:,.1f} MiB", file=self._out, flush=True)


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
