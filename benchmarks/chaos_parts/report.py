"""What a run says at its end: as text for people, as a mapping for programs."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.chaos_parts.schedule import Options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.chaos_parts.oracle import Ledger
    from benchmarks.chaos_parts.subject import Subject

__all__ = ["Figures", "Report", "percentile"]


def percentile(values: Sequence[float], part: float) -> float | None:
    """Return the nearest-rank percentile; ``None`` of nothing."""
    return sorted(values)[max(0, math.ceil(part * len(values)) - 1)] if values else None


@dataclass(frozen=True)
class Figures:
    """What the service counted.

    Parameters
    ----------
    faults, skipped
        Kind -> how many were sent, and how many had no meaning for the device as it was.
    ended
        Hangs that were ended from outside, because nothing of the devices' own did.
    devices
        Per device its faults, generations, and seconds of notice and recovery.
    memory
        MiB of the process's own memory, every five seconds.
    """

    faults: dict[str, int]
    skipped: dict[str, int]
    ended: int
    devices: dict[str, dict[str, Any]]
    memory: list[int]

    @staticmethod
    def of(faults: dict[str, int], skipped: dict[str, int], ended: int, subjects: Sequence[Subject], memory: list[int]) -> Figures:
        """Return the figures of these devices."""
        return Figures(faults, skipped, ended, {each.label: _device(each) for each in subjects}, memory)


def _device(subject: Subject) -> dict[str, Any]:
    return {
        "faults": subject.faults,
        "generations": subject.device.generation,
        "causes": dict(subject.causes),
        "outages": len(subject.recoveries),
        "recovery_p50_s": percentile(subject.recoveries, 0.5),
        "recovery_p99_s": percentile(subject.recoveries, 0.99),
        "notice_p50_s": percentile(subject.notices, 0.5),
        "notice_p99_s": percentile(subject.notices, 0.99),
    }


@dataclass(frozen=True)
class Report:
    """The outcome of a run.

    Parameters
    ----------
    options
        What was asked for.
    seconds
        How long it took.
    requests, answered
        How many requests were sent, and answered.
    outcomes
        Outcome -> how many.
    figures
        What the service counted.
    events
        What accel logged, how often.
    latest
        Seconds by which the latest deadline was late.
    violated
        How many violations there were.
    violations
        The first of them, in words.
    device_memory
        MiB before and after, where known.
    """

    options: Options
    seconds: float
    requests: int
    answered: int
    outcomes: dict[str, int]
    figures: Figures
    events: dict[str, int]
    latest: float
    violated: int
    violations: list[str]
    device_memory: tuple[int | None, int | None] = (None, None)

    @staticmethod
    def of(
        options: Options,
        seconds: float,
        ledger: Ledger,
        figures: Figures,
        events: dict[str, int],
        memory: tuple[int | None, int | None],
    ) -> Report:
        """Return the report of a run that has ended."""
        total: Counter[str] = Counter()
        for (_, outcome), count in ledger.outcomes.items():
            total[outcome] += count
        outcomes = dict(total.most_common())
        return Report(
            options,
            seconds,
            ledger.sent,
            ledger.answered,
            outcomes,
            figures,
            events,
            ledger.latest,
            ledger.violated,
            ledger.violations,
            memory,
        )

    def as_json(self) -> dict[str, Any]:
        """Return it as a mapping of plain values."""
        return dataclasses.asdict(self)

    def command(self) -> str:
        """Return the command that repeats the run."""
        options = self.options
        words = [
            f"python benchmarks/chaos.py --device {options.device} --seconds {options.seconds:g} --seed {options.seed} --clients {options.clients}",
            f"--hosts {','.join(options.hosts)} --gap {options.gap} --faults {','.join(options.faults)}",
        ]
        if options.suspects != Options.suspects:
            words.append(f"--suspects {options.suspects}")
        if options.models != Options.models:
            words.append(f"--model {options.models}")
        if options.replicas != Options.replicas:
            words.append(f"--replicas {options.replicas}")
        if options.ranks != Options.ranks:
            words.append(f"--ranks {options.ranks}")
        if not options.node:
            words.append("--no-node")
        if options.standby != "none":
            words.append(f"--standby {options.standby}")
        if not options.durable:
            words.append("--no-durable")
        if options.hang_timeout is not None:
            words.append(f"--hang-timeout {options.hang_timeout:g}")
        return " ".join(words)

    def text(self) -> str:
        """Return it for people."""
        lines = [
            f"{self.answered:,} of {self.requests:,} requests answered in {self.seconds:.1f} s, {self.violated} violations",
            f"  answers: {_counts(self.outcomes)}",
            f"  faults: {_counts(self.figures.faults)}"
            + (f"; not possible then: {_counts(self.figures.skipped)}" if self.figures.skipped else "")
            + f"; hangs ended from outside: {self.figures.ended}",
            f"  logged: {_counts(self.events)}",
        ]
        for label, found in self.figures.devices.items():
            lines.append(
                f"  {label}: {found['generations']} generations, {found['faults']} faults, {found['outages']} recoveries "
                f"p50 {_seconds(found['recovery_p50_s'])} p99 {_seconds(found['recovery_p99_s'])}, "
                f"noticed p50 {_seconds(found['notice_p50_s'])} p99 {_seconds(found['notice_p99_s'])} ({_counts(found['causes'])})"
            )
        own = [self.figures.memory[0], self.figures.memory[-1]] if self.figures.memory else "-"
        lines.append(
            f"  latest deadline: {max(self.latest, 0.0) * 1e3:.1f} ms late; MiB of this process: {own}, "
            f"of the device before and after: {self.device_memory}"
        )
        lines += [f"VIOLATION: {each}" for each in self.violations]
        lines.append(f"seed {self.options.seed}; to repeat: {self.command()}")
        return "\n".join(lines)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "none"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value * 1e3:.0f} ms"
