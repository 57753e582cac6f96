"""What the demo shows while it serves: a table by rich on a terminal, a line per tenth elsewhere.

No thread: it draws when it is told of progress.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, TextIO

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

__all__ = ["DemoScreen", "Tally"]

_REFRESH = 0.1
"""Seconds between two drawings; each takes a millisecond or two from the loop."""


@dataclass(slots=True)
class Tally:
    """What the clients of a service saw.

    Parameters
    ----------
    name
        The service.
    answered, failed
        Requests.
    gap
        The longest time between two answers, in seconds.
    is_over
        Whether the service has gone, and no answer can come.
    """

    name: str
    answered: int = 0
    failed: int = 0
    gap: float = 0.0
    is_over: bool = False
    _last: float = field(default_factory=time.perf_counter)

    def begin(self) -> None:
        """Count from now on."""
        self.answered, self.failed, self.gap, self._last = 0, 0, 0.0, time.perf_counter()

    def on_answer(self) -> None:
        """Count an answer."""
        now = time.perf_counter()
        self.gap = max(self.gap, now - self._last)
        self._last = now
        self.answered += 1

    def on_failure(self) -> None:
        """Count a request that got no answer."""
        self.failed += 1

    @property
    def gap_text(self) -> str:
        """The longest gap, for people."""
        return "no answer any more" if self.is_over else f"{self.gap * 1e3:,.0f} ms"


class DemoScreen:
    """Shows the tallies: ``with DemoScreen(tallies, 20_000, out) as screen``.

    Parameters
    ----------
    tallies
        One for each service. The first one's requests are the progress.
    total
        Requests that each service gets.
    out
        Where to write.
    """

    def __init__(self, tallies: Sequence[Tally], total: int, out: TextIO) -> None:
        self._tallies = tallies
        self._total = total
        self._out = out
        self._drawn = 0.0
        self._tenths = 0
        self._live: Any = _rich_live(out) if out.isatty() else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.update(_rich_tallies(self._tallies, self._total), refresh=True)
            self._live.stop()

    def update(self) -> None:
        """Draw if it is time."""
        if self._live is None:
            done = self._tallies[0].answered + self._tallies[0].failed
            tenths = 10 * done // self._total
            if tenths > self._tenths:
                self._tenths = tenths
                counts = "; ".join(f"{tally.name}: {tally.answered:,} answered, {tally.failed:,} failed" for tally in self._tallies)
                self.note(f"  {done:,} of {self._total:,}  {counts}")
            return
        now = time.perf_counter()
        if now - self._drawn >= _REFRESH:
            self._drawn = now
            self._live.update(_rich_tallies(self._tallies, self._total), refresh=True)

    def note(self, text: str) -> None:
        """Print a line, above what is drawn."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._out, flush=True)


def _rich_live(out: TextIO) -> Any:
    """Return what draws in place, or ``None`` where rich is not installed."""
    try:
        from rich.console import Console
        from rich.live import Live
    except ModuleNotFoundError:
        return None
    return Live(console=Console(file=out), auto_refresh=False)


def _rich_tallies(tallies: Sequence[Tally], total: int) -> Any:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    table = Table("service", "requests", box=None, padding=(0, 2, 0, 0))
    for heading in ("answered", "failed", "longest gap"):
        table.add_column(heading, justify="right")
    for tally in tallies:
        bar = ProgressBar(total=total, completed=tally.answered, width=30)
        color = "red" if tally.failed else "green"
        counts = (
            f"[green]{tally.answered:,}[/]",
            f"[{color}]{tally.failed:,}[/]",
            f"[red]{tally.gap_text}[/]" if tally.is_over else tally.gap_text,
        )
        table.add_row(tally.name, bar, *counts)
    return table
