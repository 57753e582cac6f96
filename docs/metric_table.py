"""Writes the table of metrics in ``telemetry.md`` from the code: ``python docs/metric_table.py``. A test says when it is stale."""
# ruff: noqa: INP001

from __future__ import annotations

import re
from pathlib import Path

from accel.integrations.metrics import METRICS, MetricSpec

__all__ = ["table"]

PAGE = Path(__file__).with_name("telemetry.md")
BEGIN, END = "<!-- metrics -->", "<!-- end of metrics -->"


def table() -> str:
    """Return the table of all metrics, with its marks."""
    head = ("| metric | type | labels | what it is |", "|---|---|---|---|")
    return "\n".join((BEGIN, "", *head, *map(row, METRICS), "", END))


def row(spec: MetricSpec) -> str:
    """Return the row of one metric."""
    name = spec.name + "_total" * (spec.kind == "counter")
    labels = ", ".join(f"`{label}`" for label in spec.labels)
    return f"| `{name}` | {spec.kind} | {labels} | {spec.text} |"


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: table(), page, flags=re.DOTALL), encoding="utf-8")
