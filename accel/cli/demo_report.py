"""What the demo tells in the end: numbers for people, and the same for programs."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ACCURACY", "DemoReport", "print_report", "say", "write_report"]

ACCURACY = 0.93
"""Fraction of held-out digits that must be told right."""

_LOST_SHOWN = 3


@dataclass(frozen=True, slots=True)
class DemoReport:
    """What a run of the demo found; ``--json`` writes it.

    Parameters
    ----------
    device, backend, host
        What served.
    requests, answered, lost, wrong
        How many were sent, got a label, got none, and got another label than numpy computes with the same model.
    accuracy
        Fraction of the digits held out from fitting that the served model tells right, after the fault.
    p50_ms, p99_ms
        Milliseconds from sending a request to its answer.
    requests_per_s, seconds
        Throughput, and the time that serving took.
    batches, mean_batch
        Calls of the handler, and their mean size.
    retried
        Requests that the fault cut short and that were sent again.
    gap_ms
        The longest time between two answers.
    plain_answered, plain_failed, plain_gap_ms
        The same of the plain service; ``None`` without it. Its gap is ``None`` too where no answer
        came any more.
    fault
        What brought the fault about; ``None`` without.
    fault_at_request, fault_to_answer_ms
        How many requests had been launched when the fault surfaced, and the time from then to the first good answer; ``None`` without.
    generation_before, generation_after
        The device's.
    pid_before, pid_after
        The process that held the context: this one, or a child.
    standby
        What there was of a spare child when the fault came: ``"ready"`` if one took over; ``None`` without a fault.
    weights_bytes, weights_durable
        Size of the model's buffers on the device, and whether they are to outlive faults.
    weights_put, weights_intact
        How often they were put there, and whether they are, in the end, what was put.
    ok
        Whether nothing was lost or wrong, the accuracy is as it must be, and the fault, if there was to be one, came and was survived.
    """

    device: str
    backend: str
    host: str
    requests: int
    answered: int
    lost: int
    wrong: int
    accuracy: float
    p50_ms: float | None
    p99_ms: float | None
    requests_per_s: float
    seconds: float
    batches: int
    mean_batch: float
    retried: int
    gap_ms: float
    plain_answered: int | None
    plain_failed: int | None
    plain_gap_ms: float | None
    fault: str | None
    fault_at_request: int | None
    fault_to_answer_ms: float | None
    generation_before: int
    generation_after: int
    pid_before: int
    pid_after: int
    standby: str | None
    weights_bytes: int
    weights_durable: bool
    weights_put: int
    weights_intact: bool
    ok: bool


def write_report(report: DemoReport, target: str) -> None:
    """Write it as JSON to a file, or with ``-`` to standard output."""
    text = json.dumps(asdict(report), indent=2) + "\n"
    if target == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        Path(target).write_text(text, encoding="utf-8")


def print_report(report: DemoReport, errors: Sequence[Exception], out: TextIO) -> None:
    """Print both services side by side, a table of details, the first of the errors, and whether all is well."""
    if report.plain_answered is not None:
        plain_gap = "no answer any more" if report.plain_gap_ms is None else f"{report.plain_gap_ms:,.0f} ms"
        pairs = [
            ("", "accel", "plain asyncio"),
            ("answered", f"{report.answered:,}", f"{report.plain_answered:,}"),
            ("failed", f"{report.lost:,}", f"{report.plain_failed:,}"),
            ("longest gap", f"{report.gap_ms:,.0f} ms", plain_gap),
        ]
        say(out, "\n" + "\n".join(f"  {name:<11}  {ours:>10}  {theirs:>18}" for name, ours, theirs in pairs))
    rows = [
        ("device", f"{report.device} ({report.backend}, {report.host} host)"),
        ("requests answered", f"{report.answered:,} of {report.requests:,}; {report.lost} lost, {report.wrong} wrong"),
        ("accuracy, held-out digits", f"{report.accuracy:.4f} (must be at least {ACCURACY})"),
        ("latency p50 / p99", "-" if report.p50_ms is None else f"{report.p50_ms:.2f} ms / {report.p99_ms:.2f} ms"),
        ("throughput", f"{report.requests_per_s:,.0f} requests/s"),
        ("mean batch", f"{report.mean_batch:.1f} images ({report.batches:,} batches)"),
        ("fault", "-" if report.fault is None else report.fault),
        ("fault to first good answer", "-" if report.fault_to_answer_ms is None else f"{report.fault_to_answer_ms:.1f} ms"),
        ("requests retried", f"{report.retried:,}"),
        ("generation before / after", f"{report.generation_before} / {report.generation_after}"),
        ("process before / after", f"{report.pid_before} / {report.pid_after}"),
        ("spare process at the fault", "-" if report.standby is None else report.standby),
        ("weights", _weights(report)),
    ]
    width = max(len(name) for name, _ in rows)
    say(out, "\n" + "\n".join(f"  {name:<{width}}  {value}" for name, value in rows) + "\n")
    for error in errors[:_LOST_SHOWN]:
        say(out, f"lost: {type(error).__name__}: {error}")
    say(out, "every request was answered, and right" if report.ok else "FAILED: see above")


def _weights(report: DemoReport) -> str:
    kind = "durable" if report.weights_durable else "ordinary"
    times = "once" if report.weights_put == 1 else f"{report.weights_put} times"
    return f"{kind}, {report.weights_bytes / 1024:.0f} KiB, put {times}, {'intact' if report.weights_intact else 'NOT intact'}"


def say(out: TextIO, text: str) -> None:
    """Print a line, at once."""
    print(text, file=out, flush=True)
