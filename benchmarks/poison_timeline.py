"""Draws what one poison of ``model_poison.py`` does to the other clients: ``python benchmarks/poison_timeline.py poison.json timeline.svg [--row assert]``."""

from __future__ import annotations

import argparse
import json
import math
from html import escape
from pathlib import Path
from typing import Any

__all__ = ["draw"]

_WIDTH, _LEFT, _RIGHT = 900, 90, 20
_TOP, _HEIGHT = 70, 190
"""Where the columns of answers begin, and how high they are."""
_COLUMNS = 40
_LANES = {"the device": 300, "quarantine": 336}
_LANE = 22
_BLUE, _GREEN, _RED, _GREY = "#4878b0", "#8fc79a", "#d9534f", "#555555"


def draw(report: dict[str, Any], what: str) -> str:
    """Return a picture of one row as SVG.

    Parameters
    ----------
    report
        What ``model_poison.py --json`` wrote.
    what
        Name of the row.

    Raises
    ------
    ValueError
        If there is no such row, or it has no fault.
    """
    row = next((each for each in report["rows"] if each["what"] == what), None)
    if row is None or row["detected_s"] is None:
        raise ValueError(f"the report has no row {what!r} with a fault; it has {[each['what'] for each in report['rows']]}")
    timeline = row["timeline"]
    first, last = timeline["from_s"], row["told_s"] + 0.4
    picture = _Picture(first, last)
    _draw_answers(picture, timeline, first, last)
    detected, good = row["detected_s"], row["detected_s"] + row["next_good_s"]
    served = [each for each in timeline["events"] if each.get("serves", " quarantine" not in each.get("actor", " quarantine"))]
    apart = [each for each in timeline["events"] if each not in served]
    _draw_lane(picture, "the device", served, last)
    _draw_lane(picture, "quarantine", apart, last)
    for number, (at, text) in enumerate(
        [
            (0.0, "the poison is sent"),
            (detected, f"its fault is detected, {detected:.2f} s later: it waited its turn, and ran"),
            (good, f"the next good answer, {row['next_good_s']:.3f} s after the detection"),
            (
                row["told_s"],
                f"its sender is told ({row['error']}), after {row['told_s']:.2f} s and {row['quarantine_deaths']} trials that died",
            ),
        ],
        1,
    ):
        picture.mark(number, at, text)
    spare = "no spare child" if row["spare_s"] is None else f"the next spare child is ready after {row['spare_s']:.1f} s"
    picture.text(
        _LEFT, 20, f"{report['clients']} clients of a served model ({report['backend']}), one poisonous request: {row['what']}", size=15
    )
    failed = f"{row['innocents_failed']} other requests failed, {row['wrong']} answers were wrong; {spare}"
    picture.text(_LEFT, 40, failed, color=_GREY)
    return picture.svg()


def _draw_answers(picture: _Picture, timeline: dict[str, Any], first: float, last: float) -> None:
    """Draw good answers per second, in columns of some bins."""
    width = max(1, math.ceil((last - first) / timeline["bin_s"] / _COLUMNS)) * timeline["bin_s"]
    bins = round(width / timeline["bin_s"])
    counts = timeline["answers"][: math.ceil((last - first) / timeline["bin_s"])]
    rates = [sum(counts[at : at + bins]) / width for at in range(0, len(counts), bins)]
    most = max(rates)
    for number, rate in enumerate(rates):
        high = rate / most * _HEIGHT
        picture.box(first + number * width, min(last, first + (number + 1) * width), _TOP + _HEIGHT - high, high, _BLUE)
    for part in (0.0, 0.5, 1.0):
        picture.text(_LEFT - 8, _TOP + _HEIGHT * (1 - part) + 4, f"{most * part:,.0f}", anchor="end", color=_GREY)
    picture.text(8, _TOP - 12, "good answers / s", color=_GREY)


def _draw_lane(picture: _Picture, name: str, events: list[dict[str, Any]], last: float) -> None:
    """Draw when contexts were there, and when not."""
    y, since, is_there = _LANES[name], picture.first, True
    picture.text(_LEFT - 8, y + 15, name, anchor="end", color=_GREY)
    for each in events:
        if each["event"] in ("actor_failed", "context_ready") and each["at_s"] < last:
            picture.box(since, each["at_s"], y, _LANE, _GREEN if is_there else _RED)
            since, is_there = each["at_s"], each["event"] == "context_ready"
    picture.box(since, last, y, _LANE, _GREEN if is_there else _RED)


class _Picture:
    """Shapes over an axis of seconds."""

    def __init__(self, first: float, last: float) -> None:
        self.first = first
        self._scale = (_WIDTH - _LEFT - _RIGHT) / (last - first)
        self._shapes: list[str] = []
        self._notes = 0
        bottom = max(_LANES.values()) + _LANE
        step = next(each for each in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if (last - first) / each <= 12)
        for tick in range(math.ceil(first / step), math.floor(last / step) + 1):
            self.text(self._x(tick * step), bottom + 18, f"{tick * step:g} s", anchor="middle", color=_GREY)
        self._bottom = bottom + 42

    def _x(self, at: float) -> float:
        return _LEFT + (at - self.first) * self._scale

    def box(self, since: float, until: float, y: float, high: float, color: str) -> None:
        """Add a box from one time to another."""
        x = self._x(since)
        self._shapes.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{self._x(until) - x:.1f}" height="{high:.1f}" fill="{color}"/>')

    def mark(self, number: int, at: float, text: str) -> None:
        """Add a numbered line at a time, and what it means below the picture."""
        x, top, bottom = self._x(at), _TOP - 6 + 14 * (number % 2), max(_LANES.values()) + _LANE
        self._shapes.append(
            f'<line x1="{x:.1f}" y1="{top + 8}" x2="{x:.1f}" y2="{bottom}" stroke="black" stroke-dasharray="3 3"/>'
            f'<circle cx="{x:.1f}" cy="{top}" r="9" fill="white" stroke="black"/>'
        )
        self.text(x, top + 4, str(number), anchor="middle")
        self.text(_LEFT, self._bottom + 20 * self._notes, f"{number}  {text}")
        self._notes += 1

    def text(self, x: float, y: float, text: str, *, anchor: str = "start", color: str = "black", size: int = 13) -> None:
        """Add a text."""
        self._shapes.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}" font-size="{size}">{escape(text)}</text>')

    def svg(self) -> str:
        """Return it all."""
        high = self._bottom + 20 * self._notes
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {high}" width="{_WIDTH}" font-family="sans-serif">',
                f'<rect width="{_WIDTH}" height="{high}" fill="white"/>',
                *self._shapes,
                "</svg>\n",
            ]
        )


def main() -> None:
    """Read the report, and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path, help="what model_poison.py --json wrote")
    parser.add_argument("picture", type=Path, help="the SVG to write")
    parser.add_argument("--row", default="assert", help="whose timeline (default: %(default)s)")
    given = parser.parse_args()
    given.picture.write_text(draw(json.loads(given.report.read_text()), given.row), encoding="utf-8")


if __name__ == "__main__":
    main()
