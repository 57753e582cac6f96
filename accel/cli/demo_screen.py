"""What the demo shows while it serves: a line per tenth."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["DemoScreen", "Tally"]


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


class DemoScreen:
    """Shows the tallies.

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
        self._tenths = 0

    def update(self) -> None:
        """Print a line if it is time."""
        done = self._tallies[0].answered + self._tallies[0].failed
        tenths = 10 * done // self._total
        if tenths > self._tenths:
            self._tenths = tenths
            counts = "; ".join(f"{tally.name}: {tally.answered:,} answered, {tally.failed:,} failed" for tally in self._tallies)
            self.note(f"  {done:,} of {self._total:,}  {counts}")

    def note(self, text: str) -> None:
        """Print a line."""
        print(text, file=self._out, flush=True)
