"""``accel bench``: choose cases, run them, and report."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from accel import InvalidArgumentError, UnsupportedError
from accel.backend import find_device
from accel.cli.bench import cases_actors, cases_batcher, cases_data, cases_device, cases_recovery, cases_soak, cases_waiting
from accel.cli.bench.budgets import BUDGETS
from accel.cli.bench.report import Report, describe_machine
from accel.cli.bench.suite import Bench, Case, choose
from accel.cli.console import print_table, progress, quiet_log

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

__all__ = ["CASES", "add_arguments", "measure", "run"]

CASES: tuple[Case, ...] = (
    *cases_device.CASES,
    *cases_actors.CASES,
    *cases_data.CASES,
    *cases_waiting.CASES,
    *cases_recovery.CASES,
    *cases_batcher.CASES,
    *cases_soak.CASES,
)
"""All cases, in the order in which they run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--json", metavar="FILE", help="write the report as JSON; - is standard output (the tables then go to standard error)"
    )
    parser.add_argument("--backend", default="cpu", metavar="SPEC", help="device to measure (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="NAMES", help="cases or budgets, separated by commas: P5,P12")
    parser.add_argument("--quick", action="store_true", help="fewer ops and rounds; numbers are rougher, and P13 runs 1e5 ops")
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), default="asyncio", help="event loop (default: %(default)s)")
    parser.add_argument("--seed", type=int, help="seed of the data")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a budget's `must` is broken")
    parser.add_argument("--list", action="store_true", help="list cases and budgets, and measure nothing")


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen cases and print the report.

    Returns
    -------
    int
        0. 1 if a case could not be measured; with ``--check``, also if a budget is broken. 2 if a case is not known, or there is no folder for the report.
    """
    if arguments.list:
        return _list()
    try:
        cases = choose(CASES, arguments.only.split(","))
    except InvalidArgumentError as error:
        return _refuse(str(error))
    if arguments.json not in (None, "-") and not Path(arguments.json).resolve().parent.is_dir():
        return _refuse(f"there is no folder for {arguments.json}")
    factory = _loop_factory(arguments.loop)
    _, device = find_device(arguments.backend)
    machine = describe_machine(backend=device.backend, device=device.name, loop=arguments.loop, quick=arguments.quick)
    bench = Bench(Report(machine), device.spec, arguments.quick)
    if arguments.seed is not None:
        bench.seed = arguments.seed
    machine["seed"] = bench.seed
    with quiet_log(), asyncio.Runner(loop_factory=factory) as runner:
        runner.run(measure(bench, cases))
    _write(bench.report, arguments.json)
    if bench.report.failures:
        return 1
    return 1 if arguments.check and not bench.report.is_ok else 0


def _refuse(text: str) -> int:
    print(f"accel bench: {text}", file=sys.stderr)
    return 2


async def measure(bench: Bench, cases: Sequence[Case]) -> None:
    """Run cases one after the other, with progress on standard error. A case that fails is noted in the report, and the rest goes on."""
    with progress(len(cases)) as shown:
        for case in cases:
            shown.begin(case.title)
            try:
                await case.run(bench)
            except UnsupportedError as error:
                bench.report.skipped[case.name] = str(error)
            except Exception as error:
                # The other cases' numbers are worth having all the same.
                bench.report.failures[case.name] = f"{type(error).__name__}: {error}"
            shown.end()


def _write(report: Report, target: str | None) -> None:
    text = json.dumps(report.as_json(), indent=2)
    report.print(sys.stderr if target == "-" else sys.stdout)
    if target == "-":
        print(text)
    elif target is not None:
        Path(target).write_text(text + "\n", encoding="utf-8")


def _loop_factory(name: str) -> Callable[[], asyncio.AbstractEventLoop] | None:
    if name == "asyncio":
        return None
    import uvloop

    return uvloop.new_event_loop


def _list() -> int:
    print_table("", ("case", "budgets", "what"), [(case.name, ", ".join(case.budgets), case.title) for case in CASES])
    rows = [
        (name, budget.title, *(_limit(limit, budget.better, budget.unit) for limit in (budget.must, budget.goal)), budget.needs)
        for name, budget in BUDGETS.items()
    ]
    print_table("", ("budget", "what", "must", "goal", "not run here"), rows)
    return 0


def _limit(limit: float | None, better: str, unit: str) -> str:
    return "" if limit is None else f"{'<=' if better == 'lower' else '>='} {limit:g} {unit}"
