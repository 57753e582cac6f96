"""What a run found: rows and ratios, as a table and as JSON."""

from __future__ import annotations

import datetime as dt
import math
import os
import platform
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from accel import __version__
from accel.cli.bench.budgets import budget_of, holds
from accel.cli.bench.measure import Samples
from accel.cli.console import print_table
from accel.cli.extras import version_of

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Ratio", "Report", "Row", "describe_machine"]


@dataclass(frozen=True, slots=True)
class Row:
    """One subject of one case. Times in microseconds of one op."""

    case: str
    subject: str
    p50_us: float
    p99_us: float
    ops_per_s: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """A value held against its budget. ``ok`` is about ``must``, ``also`` about what is demanded besides, ``details`` is what else was found on the way."""

    value: float
    must: float | None
    goal: float | None
    unit: str
    better: str
    ok: bool
    details: dict[str, Any] = field(default_factory=dict)
    also: bool = True

    def as_json(self) -> dict[str, Any]:
        """Return the contract's keys first, the details beside them."""
        fields = {name: value for name, value in asdict(self).items() if name not in ("details", "also")}
        return {**fields, **self.details}


@dataclass(slots=True)
class Report:
    """All rows and ratios of a run; which cases this device cannot run, and which went wrong.

    What is measured in several passes has one row, of all samples, and one ratio: the median pass's.

    Parameters
    ----------
    machine
        What the numbers depend on.
    more
        What else the JSON has.
    skipped, failures
        Name -> why.
    loop
        The event loop that names carry from now on, in a run that measures several; empty for the first.
    """

    machine: dict[str, Any]
    more: dict[str, Any] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    loop: str = ""
    _sampled: dict[tuple[str, str], Samples] = field(default_factory=dict, init=False, repr=False)
    _held: dict[str, list[Ratio]] = field(default_factory=dict, init=False, repr=False)

    def named(self, name: str) -> str:
        """Return the name with the loop, as ratios and cases carry it: ``"P1-uvloop"``."""
        return f"{name}-{self.loop}" if self.loop else name

    def add(self, case: str, subject: str, samples: Samples) -> Row:
        """Add what was sampled to the row of a case and a subject, and return that."""
        case = f"{case}, {self.loop}" if self.loop else case
        all_samples = self._sampled.setdefault((case, subject), Samples())
        all_samples.extend(samples)
        return _row(case, subject, all_samples)

    @property
    def rows(self) -> list[Row]:
        """What was measured, in the order in which it came first."""
        return [_row(*names, samples) for names, samples in self._sampled.items()]

    @property
    def ratios(self) -> dict[str, Ratio]:
        """What was held against a budget."""
        return {name: _typical(held) for name, held in self._held.items()}

    def hold(self, name: str, value: float, *, also: bool = True, **details: Any) -> Ratio:
        """Hold a value against the budget ``name``.

        Parameters
        ----------
        name
            Key of :data:`~accel.cli.bench.budgets.BUDGETS`.
        value
            In the budget's unit; infinities and NaN raise :class:`ValueError`.
        also
            Whether what the budget demands besides the value is kept.
        **details
            Found on the way, for the JSON.
        """
        budget = budget_of(name)
        if not math.isfinite(value):
            raise ValueError(f"{name} gave {value}, which is no measurement")
        # Compared as shown, so that no report shows a limit kept and calls it broken.
        value = _round(value)
        ok = also and holds(value, budget.must, budget.better)
        ratio = Ratio(value, budget.must, budget.goal, budget.unit, budget.better, ok, details, also)
        self._held.setdefault(self.named(name), []).append(ratio)
        return ratio

    @property
    def is_ok(self) -> bool:
        """Whether every ``must`` is kept."""
        return all(ratio.ok for ratio in self.ratios.values())

    def as_json(self) -> dict[str, Any]:
        """Return the report in the form that the design fixes."""
        return {
            "machine": self.machine,
            "rows": [asdict(row) for row in self.rows],
            "ratios": {name: ratio.as_json() for name, ratio in self.ratios.items()},
            **self.more,
        }

    def print(self, stream: TextIO) -> None:
        """Print the tables."""
        rows = [(row.case, row.subject, f"{row.p50_us:,.1f}", f"{row.p99_us:,.1f}", f"{row.ops_per_s:,.0f}") for row in self.rows]
        if rows:
            print_table("", ("case", "subject", "p50 us", "p99 us", "op/s"), rows, stream=stream)
        verdicts = [_verdict_line(name, ratio) for name, ratio in self.ratios.items()]
        if verdicts:
            print_table("", ("budget", "what", "value", "must", "goal", "verdict"), verdicts, stream=stream)
        for name, reason in self.skipped.items():
            print(f"not run: {name}: {reason}", file=stream)
        for name, reason in self.failures.items():
            print(f"FAILED: {name}: {reason}", file=stream)


def _row(case: str, subject: str, samples: Samples) -> Row:
    return Row(case, subject, _round(samples.percentile(50) * 1e6), _round(samples.percentile(99) * 1e6), _round(samples.rate))


def _typical(held: Sequence[Ratio]) -> Ratio:
    """Return the ratio whose value is the median of all passes, with the others' values beside it. What is demanded besides the value, each has to keep.

    Where a pass has failed, so that two are in the middle, it is the worse of these.
    """
    if len(held) == 1:
        return held[0]
    from_best = sorted(held, key=lambda ratio: ratio.value, reverse=held[0].better == "higher")
    median = from_best[len(held) // 2]
    also = all(ratio.also for ratio in held)
    return replace(median, ok=also and median.ok, also=also, details={**median.details, "passes": [ratio.value for ratio in held]})


def _verdict_line(name: str, ratio: Ratio) -> Sequence[str]:
    sign = "<=" if ratio.better == "lower" else ">="
    limits = ["" if limit is None else f"{sign} {limit:g}" for limit in (ratio.must, ratio.goal)]
    reached = ratio.ok and ratio.goal is not None and holds(ratio.value, ratio.goal, "lower" if ratio.better == "lower" else "higher")
    verdict = "goal" if reached else "ok" if ratio.ok else "FAILED"
    return (name, budget_of(name).title, f"{ratio.value:g} {ratio.unit}", *limits, verdict)


def _round(value: float) -> float:
    # Three places of a microsecond are more than any clock here gives.
    return round(value, 3)


def describe_machine(**more: Any) -> dict[str, Any]:
    """Return what the numbers depend on."""
    return {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "accel": __version__,
        "numpy": np.__version__,
        "ml_dtypes": version_of("ml_dtypes"),
        **more,
    }
