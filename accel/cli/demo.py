"""``python -m accel demo``: a request kills what computes it; supervised actors answer all, a plain service dies.

Both have the same model of real digits and get the same requests; every answer of the first is checked.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

import numpy as np

import accel
from accel.cli.console import quiet_log
from accel.cli.demo_report import ACCURACY, DemoReport, print_report, say, write_report
from accel.cli.demo_screen import DemoScreen, Tally
from accel.cli.digits import Digits, Model, load_digits
from accel.cli.plain import plain_service
from accel.cli.traffic import Traffic, Witness
from accel.patterns import DynamicBatcher
from accel.registry import find_device
from accel.testing import FaultPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from accel.device import DeviceInfo
    from accel.patterns import BatcherStatistics

__all__ = ["add_arguments", "run"]

_TIE = 1e-4
"""How far below the best a score may be for its label to count as the same answer: the device rounds to float32, the reference does not."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options to a parser."""
    parser.add_argument(
        "--device", default="auto", help="what to open: auto, cpu, cuda, cuda:1 or a UUID (default: %(default)s, the best there is)"
    )
    parser.add_argument(
        "--host",
        choices=("auto", "inline", "process"),
        default="process",
        help="where the context lives (default: %(default)s, a child, which is killed)",
    )
    parser.add_argument(
        "--standby",
        choices=("none", "imports", "context"),
        help="the spare child that takes over (default: context, where the fault costs a process)",
    )
    parser.add_argument(
        "--requests", type=_positive, default=20_000, metavar="N", help="single-image requests to serve (default: %(default)s)"
    )
    parser.add_argument("--clients", type=_positive, default=256, metavar="N", help="tasks that send them (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the split, the model and the order of requests (default: %(default)s)")
    parser.add_argument(
        "--no-fault",
        action="store_true",
        help="leave out the fault in the middle; it is left out anyway where it would lose the device",
    )
    parser.add_argument(
        "--alone", action="store_true", help="leave out the plain asyncio service; it is left out anyway where no process is killed"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write the numbers to FILE, or with - to standard output (the text goes to standard error)"
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


async def run(arguments: argparse.Namespace) -> int:
    """Run the demo.

    Parameters
    ----------
    arguments
        As :func:`add_arguments` defines them.

    Returns
    -------
    int
        0: every request was answered and right. 1: not so. 2: an option or an installation that cannot be served; it was said which.

    Notes
    -----
    Cancelling closes the batcher and the device, and raises.
    """
    target = arguments.json
    out = sys.stderr if target == "-" else sys.stdout
    if target not in (None, "-") and not _has_folder(target):
        print(f"accel demo: there is no folder for {target}", file=sys.stderr)
        return 2
    try:
        with quiet_log(), _one_blas_thread():
            report, errors = await _demonstrate(arguments, out)
    except (accel.UnsupportedError, accel.BackendUnavailableError) as error:
        print(f"accel demo: {error}", file=sys.stderr)
        return 2
    print_report(report, errors, out)
    if target is not None:
        write_report(report, target)
    return 0 if report.ok else 1


@contextlib.contextmanager
def _one_blas_thread() -> Iterator[None]:
    """Have children compute with one thread, unless the environment says otherwise.

    On a busy machine their threads wait for each other: the demo took 41 s instead of 16 s.
    """
    name = "OPENBLAS_NUM_THREADS"
    was_set = name in os.environ
    os.environ.setdefault(name, "1")
    try:
        yield
    finally:
        if not was_set:
            del os.environ[name]


def _has_folder(target: str) -> bool:
    return Path(target).resolve().parent.is_dir()


async def _demonstrate(arguments: argparse.Namespace, out: TextIO) -> tuple[DemoReport, list[Exception]]:
    plan = FaultPlan()
    async with accel.System() as system:
        device = await system.open_device(
            arguments.device, host=arguments.host, libraries=("blas", "elementwise"), faults=plan, standby=await _standby(arguments, system)
        )
        info = device.info()
        say(out, f"opened {info.name} ({info.host} host, process {info.pid or os.getpid()}, generation {info.generation})")
        strike = None if arguments.no_fault else _striking(device, plan)
        if strike is not None and info.backend != "cpu" and arguments.host == "inline":
            # A fault of real hardware takes the whole process's access to it along, and --host inline keeps the context here.
            say(out, "the fault is left out: with --host inline it would lose the device")
            strike = None
        digits = load_digits(arguments.seed)
        began = time.perf_counter()
        model = await Model.load(device, digits, seed=arguments.seed, durable=True)
        fitted = time.perf_counter() - began
        say(out, f"fitted {len(digits.train_labels):,} digits on the device in {fitted:.2f} s; {len(digits.held_out_labels)} were held out")
        await _until_spare(device, out)
        return await _serve(arguments, device, model, digits, strike, out)


async def _standby(arguments: argparse.Namespace, system: accel.System) -> Literal["none", "imports", "context"]:
    """Return which spare child to have: none where the context that faults is made anew in this process."""
    if arguments.standby is not None or arguments.no_fault or arguments.host == "inline":
        return arguments.standby or "none"
    _, description = await system.run_blocking(find_device, arguments.device)
    return "none" if arguments.host == "auto" and description.backend == "cpu" else "context"


async def _until_spare(device: accel.Device, out: TextIO) -> None:
    """Wait until the spare child is there: on a small machine the demo would be over before."""
    began = time.perf_counter()
    if device.info().standby == "starting":
        await device.spare_ready()
        say(out, f"a spare process is {device.info().standby}, after {time.perf_counter() - began:.2f} s more")


def _striking(device: accel.Device, plan: FaultPlan) -> Callable[[], str]:
    """Return what brings the fault about, and says what it did."""

    def strike() -> str:
        info = device.info()
        if info.pid is not None:
            os.kill(info.pid, signal.SIGKILL)
            return f"SIGKILL to process {info.pid}"
        # The second op from now on: the batch has begun, and others are under way.
        plan.poison_at(plan.count + 2)
        return "an op that poisons the context"

    return strike


async def _serve(
    arguments: argparse.Namespace, device: accel.Device, model: Model, digits: Digits, strike: Callable[[], str] | None, out: TextIO
) -> tuple[DemoReport, list[Exception]]:
    before = device.info()
    traffic = Traffic(digits, arguments.requests, arguments.seed)
    middle = (arguments.requests + 1) // 2
    ours, beside = Tally("accel"), Tally("plain asyncio")
    async with contextlib.AsyncExitStack() as stack:
        plain = None
        if before.pid is not None and not arguments.alone:
            plain = await stack.enter_async_context(plain_service(model, beside))
            say(out, f"a plain asyncio service has the same model, in process {plain.pid}, and gets the same requests")
        say(out, f"serving {arguments.requests:,} requests from {arguments.clients:,} clients")
        with DemoScreen((ours,) if plain is None else (ours, beside), arguments.requests, out) as screen:
            witness = Witness(model, strike, middle, screen.note)
            async with DynamicBatcher(witness.classify, max_items=64, max_in_flight=4, idempotent=True, device=device) as batcher:
                await traffic.run(batcher, arguments.clients, ours, screen, plain, middle if strike is not None else None)
    # All of them at once, by the context that survived, so that the number does not depend on which were asked for.
    right = await model.predict(digits.held_out_images) == digits.held_out_labels
    is_intact = await model.is_intact()
    tallies = (ours, None if plain is None else beside)
    report = _report(
        device, model, digits, traffic, witness, tallies, batcher.statistics(), before, float(right.mean()), is_intact=is_intact
    )
    return report, traffic.errors


def _report(
    device: accel.Device,
    model: Model,
    digits: Digits,
    traffic: Traffic,
    witness: Witness,
    tallies: tuple[Tally, Tally | None],
    statistics: BatcherStatistics,
    before: DeviceInfo,
    accuracy: float,
    *,
    is_intact: bool,
) -> DemoReport:
    info = device.info()
    got = traffic.answers >= 0
    answered, wrong, latencies = int(got.sum()), _wrong(model, digits, traffic), traffic.latencies[got]
    lost = len(got) - answered
    ours, beside = tallies
    return DemoReport(
        device=info.name,
        backend=info.backend,
        host=info.host,
        requests=len(got),
        answered=answered,
        lost=lost,
        wrong=wrong,
        accuracy=accuracy,
        p50_ms=_percentile(latencies, 50),
        p99_ms=_percentile(latencies, 99),
        requests_per_s=answered / traffic.seconds,
        seconds=traffic.seconds,
        batches=statistics.batches,
        mean_batch=statistics.mean_batch,
        retried=statistics.retried,
        gap_ms=ours.gap * 1e3,
        plain_answered=None if beside is None else beside.answered,
        plain_failed=None if beside is None else beside.failed,
        plain_gap_ms=None if beside is None or beside.is_over else beside.gap * 1e3,
        **_recovery(witness, before, info),
        weights_bytes=model.projection.nbytes + model.weights.nbytes,
        weights_durable=model.durable,
        weights_put=model.puts,
        weights_intact=is_intact,
        ok=not lost and not wrong and accuracy >= ACCURACY and witness.is_over and is_intact and model.puts == 1,
    )


def _wrong(model: Model, digits: Digits, traffic: Traffic) -> int:
    """Return how many labels are not the one that numpy computes."""
    got = traffic.answers >= 0
    answers, chosen = traffic.answers[got], traffic.chosen[got]
    scores = model.reference(digits.held_out_images)
    return int(np.sum(scores[chosen, answers] < scores.max(axis=1)[chosen] - _TIE))


def _recovery(witness: Witness, before: DeviceInfo, after: DeviceInfo) -> dict[str, Any]:
    """Return the report's fields that tell of the fault."""
    return {
        "fault": witness.struck,
        "fault_at_request": witness.fault_at,
        "fault_to_answer_ms": None if witness.seconds_to_answer is None else witness.seconds_to_answer * 1e3,
        "generation_before": before.generation,
        "generation_after": after.generation,
        "pid_before": before.pid or os.getpid(),
        "pid_after": after.pid or os.getpid(),
        "standby": witness.standby,
    }


def _percentile(seconds: np.ndarray[tuple[int], np.dtype[np.float64]], which: float) -> float | None:
    return float(np.percentile(seconds, which)) * 1e3 if len(seconds) else None
