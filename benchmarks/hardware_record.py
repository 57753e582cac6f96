"""What the parts of ``benchmarks/hardware.py`` wrote, read, and rendered as Markdown for ``benchmarks/records/hardware.md``."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING, Any

from accel.cli.bench.budgets import budget_of, holds

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

__all__ = ["read_json", "read_junit", "read_lines", "render"]

_LAST = 12


def read_json(path: Path) -> Any:
    """Return what a file holds."""
    return json.loads(path.read_text(encoding="utf-8"))


def read_lines(text: str) -> list[str]:
    """Return the last lines that are not empty."""
    return [line.rstrip() for line in text.splitlines() if line.strip()][-_LAST:]


def read_junit(path: Path) -> dict[str, Any]:
    """Return how many tests passed, which failed or were skipped and why, and the lines with numbers that they printed."""
    passed, failed, skipped, printed = 0, [], [], []
    for case in ET.parse(path).getroot().iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        problem = next((found for tag in ("failure", "error") if (found := case.find(tag)) is not None), None)
        left_out = case.find("skipped")
        if problem is not None:
            failed.append([name, (problem.get("message") or "").partition("\n")[0][:200]])
        elif left_out is not None:
            skipped.append([name, (left_out.get("message") or "")[:200]])
        else:
            passed += 1
        output = case.findtext("system-out") or ""
        printed += [line for line in output.splitlines() if re.search(r"\d (?:us|ms|GB/s)\b", line) and not line.startswith("seed ")]
    return {"passed": passed, "failed": failed, "skipped": skipped, "printed": printed}


def render(found: dict[str, Any]) -> str:
    """Return the record as Markdown.

    Parameters
    ----------
    found
        What ``record.json`` holds.
    """
    parts = found["parts"]
    data = {name: entry["data"] for name, entry in parts.items() if entry["data"] is not None}
    lines = [f"# Record of {found['began']}", "", *_machine(found, data)]
    rows = [(f"`{e['command'] or name}`", e["state"], f"{e['seconds']} s", _summary(data.get(name))) for name, e in parts.items()]
    lines += ["## Parts", "", *_table(("command", "outcome", "time", "what it found"), rows)]
    for name in ("tests", "recovery", "two_gpus"):
        if name in data:
            lines += _tests(data[name])
    reports = [data[name] for name in ("bench", "mixed", "lengths", "soak", "curves") if name in data]
    lines += _budgets(reports)
    lines += _rows(reports)
    lines += _kernels(data.get("kernels", []))
    for name, entry in data.items():
        if isinstance(entry, list) and name != "kernels":
            lines += [f"## {parts[name]['what']}", "", "```text", *entry, "```", ""]
    return "\n".join(lines)


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in row) + " |"
    yield ""


def _machine(found: dict[str, Any], data: dict[str, Any]) -> Iterator[str]:
    rows = [("backend", found["backend"]), ("commit", found["commit"]), ("time of all parts", f"{found.get('seconds', 0)} s")]
    rows += list(data.get("bench", {}).get("machine", {}).items())
    rows += [(check["name"], f"{check['state']}: {check['detail']}") for check in data.get("doctor", {}).get("checks", ())]
    yield from _table(("what", "value"), rows)


def _summary(data: Any) -> str:
    """Return in a line what a part found."""
    if not isinstance(data, dict):
        return ""
    if "passed" in data:
        return f"{data['passed']} passed, {len(data['failed'])} failed, {len(data['skipped'])} skipped"
    if "ratios" in data:
        broken = [name for name, ratio in data["ratios"].items() if not ratio["ok"]]
        return f"{len(data['ratios'])} budgets, {len(broken)} broken{': ' if broken else ''}{', '.join(broken)}"
    return ", ".join(f"{name} {value}" for name, value in data.items() if isinstance(value, (int, float, str)))


def _tests(data: dict[str, Any]) -> Iterator[str]:
    yield from ("## Tests", "", f"{_summary(data)}.", "")
    for title in ("failed", "skipped"):
        if data[title]:
            yield from _table((title, "why"), data[title])
    if data["printed"]:
        yield from ("What they measured on the way:", "", "```text", *data["printed"], "```", "")


def _budgets(reports: list[dict[str, Any]]) -> Iterator[str]:
    rows = [_budget(name, ratio) for report in reports for name, ratio in report["ratios"].items()]
    if rows:
        yield from ("## Budgets", "", *_table(("budget", "what", "value", "must", "goal", "verdict", "details"), rows))
    for report in reports:
        for kind in ("skipped", "failures"):
            for name, reason in report.get(kind, {}).items():
                yield from (f"{kind}: {name}: {reason}", "")


def _budget(name: str, ratio: dict[str, Any]) -> tuple[object, ...]:
    sign = "<=" if ratio["better"] == "lower" else ">="
    limits = ["" if ratio[key] is None else f"{sign} {ratio[key]:g}" for key in ("must", "goal")]
    reached = ratio["ok"] and ratio["goal"] is not None and holds(ratio["value"], ratio["goal"], ratio["better"])
    details = {key: value for key, value in ratio.items() if key not in ("value", "must", "goal", "unit", "better", "ok")}
    verdict = "goal" if reached else "ok" if ratio["ok"] else "**missed**"
    return name, budget_of(name).title, f"{ratio['value']:g} {ratio['unit']}", *limits, verdict, json.dumps(details) if details else ""


def _rows(reports: list[dict[str, Any]]) -> Iterator[str]:
    rows = [
        (row["case"], row["subject"], f"{row['p50_us']:,.1f}", f"{row['p99_us']:,.1f}", f"{row['ops_per_s']:,.0f}")
        for report in reports
        for row in report["rows"]
    ]
    if rows:
        yield from ("## Measurements", "", *_table(("case", "subject", "p50 us", "p99 us", "op/s"), rows))


def _kernels(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the kernels: those held against a copy by groups, least and most of each, the others one by one."""
    groups: dict[str, list[float]] = {}
    single = []
    for row in rows:
        if "of_copy" in row:
            words = row["where"].split()
            axis = f" axis {words[-1]}" if "axis" in words else ""
            groups.setdefault(" ".join(words[:2]) + axis, []).append(row["of_copy"])
        else:
            others = {key: round(value, 1) for key, value in row.items() if key not in ("unit", "where", "value")}
            single.append((row["where"], f"{row['value']:.1f} {row['unit']}", ", ".join(f"{key} {value}" for key, value in others.items())))
    if groups:
        shown = [(name, len(values), f"{min(values):.2f}", f"{max(values):.2f}") for name, values in groups.items()]
        yield from ("## Kernels beside a copy", "", *_table(("kernel", "cases", "least", "most"), shown))
    if single:
        yield from ("## Convolutions and attention", "", *_table(("kernel", "rate", "beside it"), single))
