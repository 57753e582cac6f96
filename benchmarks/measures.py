"""What cases measure with besides what ``accel bench`` needs: tasks at once, the worst of several values, medians of passes, and points of a picture."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from array import array
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.cli.bench.budgets import BUDGETS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from accel.cli.bench.measure import Meter, Samples
    from accel.cli.bench.report import Report
    from accel.cli.bench.suite import Bench

__all__ = ["Point", "add_overlapped", "add_point", "hold_medians", "hold_worst", "points_of", "together"]


def add_overlapped(samples: Samples, times: array[float], wall: float, ops: int | None = None) -> None:
    """Add the times of ops that ran at once, and the time that all together took; ``ops`` of them, if ``times`` is a sample."""
    samples.times.extend(times)
    samples.ops += len(times) if ops is None else ops
    samples.seconds += wall


def together(function: Callable[[], Awaitable[Any]], tasks: int, count: int) -> Meter:
    """Return a round in which ``tasks`` tasks at once await ``function()`` ``count`` times each."""

    async def client(times: array[float]) -> None:
        clock = time.perf_counter
        for _ in range(count):
            began = clock()
            await function()
            times.append(clock() - began)

    async def meter(samples: Samples) -> None:
        times: array[float] = array("d")
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(tasks):
                group.create_task(client(times))
        add_overlapped(samples, times, time.perf_counter() - began)

    return meter


def hold_worst(bench: Bench, name: str, values: Mapping[str, float], **details: Any) -> None:
    """Hold a budget by the worst of several values, which the JSON has too, with the details."""
    worst = min if BUDGETS[name].better == "higher" else max
    bench.report.hold(name, worst(values.values()), ratios=dict(values), **details)


def hold_medians(passes: Sequence[Mapping[str, float]], must: Mapping[str, tuple[float, str]], file: str | None) -> int:
    """Print the median of each value over all passes, and write them to a JSON file, if one is named.

    Parameters
    ----------
    passes
        What each has found.
    must
        Of some values, what their median must not be beyond, and ``"<="`` or ``">="``.
    file
        Its name.

    Returns
    -------
    int
        1 if a median is beyond what it must be, else 0.
    """
    medians = {name: statistics.median([found[name] for found in passes]) for name in passes[0]}
    width, missed = max(map(len, medians)), 0
    for name, value in medians.items():
        limit, sign = must.get(name, (None, ""))
        is_ok = limit is None or (value <= limit if sign == "<=" else value >= limit)
        missed += not is_ok
        print(f"{name:{width}s}{value:12.3f}" + ("" if limit is None else f"   {'ok' if is_ok else 'MISSED'} ({sign} {limit:g})"))
    if file:
        Path(file).write_text(json.dumps({"passes": passes, "medians": medians}, indent=1), encoding="utf-8")
    return 1 if missed else 0


@dataclass(frozen=True, slots=True)
class Point:
    """What one way of waiting adds to work of a known length: microseconds (p50 and p99), and percent of one core while it waits."""

    line: str
    kernel_us: float
    added_us: float
    added_p99_us: float
    cpu_percent: float


def add_point(report: Report, point: Point) -> None:
    """Add a point to what the report's JSON has."""
    report.more.setdefault("points", []).append(asdict(point))


def points_of(report: Report) -> list[Point]:
    """Return the points of a report."""
    return [Point(**each) for each in report.more.get("points", ())]
