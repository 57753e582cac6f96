"""``accel bench``: choose cases, run them, and report."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from accel import InvalidArgumentError, UnsupportedError
from accel.backend import LaunchesEmptyKernels
from accel.cli.bench.budgets import BUDGETS
from accel.cli.bench.cases import CASES, LAUNCH_CASES
from accel.cli.bench.report import Report, describe_machine
from accel.cli.bench.suite import Bench, BenchCase, Suite, choose
from accel.cli.console import print_table, progress, quiet_log
from accel.registry import backend_names, find_device, load_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from accel.backend import AccelBackend, Diagnosis
    from accel.cli.console import Progress

    Loops = dict[str, Callable[[], asyncio.AbstractEventLoop] | None]

__all__ = ["add_arguments", "measure", "run", "run_cases", "suite_of"]

_LOOPS = ("asyncio", "uvloop")


def suite_of(backend: AccelBackend) -> Suite:
    """Return the cases of the package for a backend: with P1 and P10 where kernels are launched. Needs no device."""
    if not isinstance(backend, LaunchesEmptyKernels):
        return Suite(CASES)
    checks: Callable[[], Iterable[Diagnosis]] = getattr(backend, "checks", tuple)
    return Suite(LAUNCH_CASES, _LOOPS, lambda: {"requirements": {check.name: check.detail for check in checks()}})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--json", metavar="FILE", help="write the report as JSON; - is standard output (the tables then go to standard error)"
    )
    parser.add_argument("--backend", default="cpu", metavar="SPEC", help="device to measure, such as cuda (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="NAMES", help="cases or budgets, separated by commas: P5,P12")
    parser.add_argument("--quick", action="store_true", help="fewer ops and rounds; numbers are rougher, and P13 runs 1e5 ops")
    parser.add_argument("--loop", choices=(*_LOOPS, "both"), help="event loop (default: asyncio; both on cuda)")
    parser.add_argument(
        "--passes",
        type=_odd,
        default=1,
        metavar="N",
        help="run the cases this many times, and compare the median pass with each budget: for machines that others disturb for seconds (odd)",
    )
    parser.add_argument("--seed", type=int, help="seed of the data")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a budget's `must` is broken")
    parser.add_argument("--list", action="store_true", help="list the backend's cases and all budgets, and measure nothing")


def run(arguments: argparse.Namespace) -> int:
    """Run the cases that the package brings; see :func:`run_cases`."""
    return run_cases(arguments, suite_of)


def run_cases(arguments: argparse.Namespace, find_suite: Callable[[AccelBackend], Suite]) -> int:
    """Run the chosen cases of a backend's suite and print the report.

    Parameters
    ----------
    arguments
        What :func:`add_arguments` declares.
    find_suite
        Returns the suite of a backend. It is called without a device too.

    Returns
    -------
    int
        0. 1 if a case could not be measured; with ``--check``, also if a budget is broken. 2 if a case is not known or the report has no folder.
    """
    if arguments.list:
        return _list(find_suite(_backend(arguments.backend)))
    target = arguments.json
    if target not in (None, "-") and not Path(target).resolve().parent.is_dir():
        return _refuse(f"there is no folder for {target}")
    backend, device = find_device(arguments.backend)
    suite = find_suite(backend)
    try:
        cases = choose(suite.cases, arguments.only.split(","))
    except InvalidArgumentError as error:
        return _refuse(str(error))
    report = Report(describe_machine(backend=device.backend, device=device.name, quick=arguments.quick, passes=arguments.passes))
    bench = Bench(report, device.spec, arguments.quick)
    if arguments.seed is not None:
        bench.seed = arguments.seed
    loops = _loops(arguments.loop, suite, report)
    report.machine |= {"loop": ", ".join(loops), "seed": bench.seed, **suite.machine()}
    _run(bench, cases, loops, suite, arguments.passes)
    _write(report, target)
    if report.failures:
        return 1
    return 1 if arguments.check and not report.is_ok else 0


def _odd(text: str) -> int:
    if text.isdecimal() and int(text) % 2:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no odd number, of which one pass is the median")


def _refuse(text: str) -> int:
    print(f"accel bench: {text}", file=sys.stderr)
    return 2


def _backend(spec: str) -> AccelBackend:
    """Return the backend that a device's name begins with, whether or not it has a device here."""
    name = spec.partition(":")[0]
    return load_backend(name) if name in backend_names() else find_device(spec)[0]


def _loops(wanted: str | None, suite: Suite, report: Report) -> Loops:
    """Return name -> factory of the loops to measure on; one that is not installed is left out, with a note, unless it was asked for."""
    names = suite.loops if wanted is None else _LOOPS if wanted == "both" else (wanted,)
    found: Loops = {}
    for name in names:
        try:
            found[name] = None if name == "asyncio" else importlib.import_module(name).new_event_loop
        except ModuleNotFoundError:
            if wanted is not None:
                raise
            report.skipped[name] = f"it is not installed. Run: pip install {name}"
    return found


def _run(bench: Bench, cases: Sequence[BenchCase], loops: Loops, suite: Suite, passes: int) -> None:
    """Run the cases on each loop, the first of which is the one that names do not mention; then all of it again, as often as is asked for."""
    first = next(iter(loops))
    turns = [(name, [case for case in cases if not case.once or (name, turn) == (first, 0)]) for turn in range(passes) for name in loops]
    began = time.perf_counter()
    with quiet_log(), contextlib.closing(suite), progress(sum(len(chosen) for _, chosen in turns)) as shown:
        for name, chosen in turns:
            bench.report.loop = "" if name == first else name
            with asyncio.Runner(loop_factory=loops[name]) as runner:
                runner.run(measure(bench, chosen, shown, passes))
    bench.report.machine["seconds"] = round(time.perf_counter() - began, 1)


async def measure(bench: Bench, cases: Sequence[BenchCase], shown: Progress, passes: int = 1) -> None:
    """Run cases one after the other, with progress on standard error. A case that fails is noted in the report, and the rest goes on."""
    report = bench.report
    for case in cases:
        bench.passes = 1 if case.once else passes
        shown.begin(f"{case.title}, {report.loop}" if report.loop else case.title)
        try:
            async with asyncio.timeout(case.limit):
                await case.run(bench)
        except UnsupportedError as error:
            report.skipped[report.named(case.name)] = str(error)
        except Exception as error:
            # The other cases' numbers are worth having all the same.
            report.failures[report.named(case.name)] = f"{type(error).__name__}: {error}"
        shown.end()


def _write(report: Report, target: str | None) -> None:
    text = json.dumps(report.as_json(), indent=2)
    report.print(sys.stderr if target == "-" else sys.stdout)
    if target == "-":
        print(text)
    elif target is not None:
        Path(target).write_text(text + "\n", encoding="utf-8")


def _list(suite: Suite) -> int:
    print_table("", ("case", "budgets", "what"), [(case.name, ", ".join(case.budgets), case.title) for case in suite.cases])
    answered = {name for case in suite.cases for name in case.budgets}
    rows = [
        (
            name,
            budget.title,
            *(_limit(limit, budget.better, budget.unit) for limit in (budget.must, budget.goal)),
            "" if name in answered else budget.needs or "not among this suite's cases",
        )
        for name, budget in BUDGETS.items()
    ]
    print_table("", ("budget", "what", "must", "goal", "not run here"), rows)
    return 0


def _limit(limit: float | None, better: str, unit: str) -> str:
    return "" if limit is None else f"{'<=' if better == 'lower' else '>='} {limit:g} {unit}"
