"""What a case is, what it is given, and the choice of cases."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from accel import InvalidArgumentError
from accel.cli.bench.budgets import BUDGETS
from accel.cli.bench.measure import Meter, Samples, compare
from accel.cli.bench.report import Report

__all__ = ["Bench", "BenchCase", "Suite", "choose"]

_FEWEST = 3
"""Rounds of one pass: a disturbed one does not move their median."""


@dataclass(slots=True)
class Bench:
    """What cases measure with.

    Parameters
    ----------
    report
        Where rows and ratios go.
    spec
        The device to measure.
    quick
        Whether to do with fewer ops.
    seed
        Of the data.
    passes
        How many times the case runs that runs just now; its rounds are shared out among these.
    """

    report: Report
    spec: str = "cpu"
    quick: bool = False
    seed: int = field(default_factory=lambda: time.time_ns() % 2**32)
    passes: int = 1

    @property
    def rng(self) -> np.random.Generator:
        """A new source of data, the same for each case of the run."""
        return np.random.default_rng(self.seed)

    def scale(self, full: int, quick: int) -> int:
        """Return the number that the run's thoroughness asks for."""
        return quick if self.quick else full

    async def compare(self, case: str, subjects: Mapping[str, Meter], *, rounds: int = 0, warm_up: int = 1) -> dict[str, Samples]:
        """Measure subjects in turn and add a row for each; ``warm_up`` rounds of each come before, and do not count."""
        rounds = rounds or self.scale(9, 3)
        results = await compare(subjects, min(rounds, max(_FEWEST, -(-rounds // self.passes))), warm_up=warm_up)
        for subject, samples in results.items():
            self.report.add(case, subject, samples)
        return results


@dataclass(frozen=True, slots=True)
class BenchCase:
    """Something that is measured.

    Parameters
    ----------
    name
        How ``--only`` calls it; budgets are called by their names too.
    title
        What it is.
    run
        Measures it.
    budgets
        The budgets that it answers.
    once
        Whether the first loop, and the first pass, is enough, in a run that measures several.
    limit
        Seconds after which it has failed.
    """

    name: str
    title: str
    run: Callable[[Bench], Awaitable[object]]
    budgets: tuple[str, ...] = ()
    once: bool = False
    limit: float = 900.0


def _nothing() -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class Suite:
    """What is measured on the devices of one backend.

    Parameters
    ----------
    cases
        All of them, in the order in which they run; cases that ``accel`` brings may be among them.
    loops
        The event loops that are measured where none is named.
    machine
        What the numbers depend on besides what every report says: versions of drivers and libraries. Called once, with the device there.
    close
        Gives back what the cases share; called once, after the last.
    """

    cases: tuple[BenchCase, ...]
    loops: tuple[str, ...] = ("asyncio",)
    machine: Callable[[], Mapping[str, Any]] = _nothing
    close: Callable[[], object] = _nothing


def choose(cases: Sequence[BenchCase], only: Iterable[str]) -> tuple[BenchCase, ...]:
    """Return the cases that are named, by name or budget, in their order; all if none is.

    Raises
    ------
    InvalidArgumentError
        If a name is not known, or is of a budget that this machine cannot be asked about.
    """
    wanted = {name.strip().lower() for name in only if name.strip()}
    if not wanted:
        return tuple(cases)
    known = {name.lower(): case for case in cases for name in (case.name, *case.budgets)}
    for name in sorted(wanted - known.keys()):
        budget = next((budget for key, budget in BUDGETS.items() if key.lower() == name), None)
        if budget is not None and budget.needs:
            raise InvalidArgumentError(f"{name.upper()} {budget.needs}", remedy="Choose others: see `accel bench --list`.")
        raise InvalidArgumentError(f"there is no case {name!r}", remedy=f"Use some of {', '.join(known)}.")
    return tuple(case for case in cases if any(known[name] is case for name in wanted))
