"""Draws what each way of waiting adds to a kernel, and its CPU, by the kernel's length: ``python benchmarks/plot.py numbers.json latency.png``.

The numbers are those of ``python benchmarks/run.py --backend cuda --only lengths --json numbers.json``. It needs matplotlib, and no GPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measures import Point

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["curves", "draw", "main", "recorded"]

_OWN = "accel"
_LENGTHS = (0, 10, 100, 1000, 10000)
_NAMES = ("empty", "10 us", "100 us", "1 ms", "10 ms")


def _title_of(machine: Mapping[str, Any]) -> str:
    """Return what stands above a picture: the device, the loop that the points are of, and the day."""
    loop, day = str(machine["loop"]).partition(",")[0], str(machine["date"]).partition("T")[0]
    return f"accel on {machine['device']}, {loop}, {day}"


def recorded(document: Any) -> tuple[list[Point], str]:
    """Return the points of a report that was written as JSON, and their picture's title.

    Raises
    ------
    ValueError
        If it has none.
    """
    try:
        points = [Point(**each) for each in document.get("points", ())]
        title = _title_of(document["machine"])
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"it is no report of accel bench: {error!r}") from error
    if not points:
        raise ValueError("it has no points; the case `lengths` gives them")
    return points, title


def curves(points: Iterable[Point]) -> dict[str, list[Point]]:
    """Return line -> its points from the shortest kernel to the longest, lines in the order in which they came."""
    found: dict[str, list[Point]] = {}
    for point in points:
        found.setdefault(point.line, []).append(point)
    return {line: sorted(each, key=lambda point: point.kernel_us) for line, each in found.items()}


def draw(points: Sequence[Point], path: str, title: str) -> None:
    """Draw two panels into the PNG ``path``: added latency above, percent of one core below.

    Lines of this project are drawn through, those of others dashed.
    """
    # Figure alone, without pyplot: nothing of a window system is looked for, and nothing is kept.
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(10, 9), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    for line, each in curves(points).items():
        style = {"marker": "o", "markersize": 4, "linestyle": "-" if line.startswith(_OWN) else "--", "label": line}
        lengths = [point.kernel_us for point in each]
        above.plot(lengths, [max(point.added_us, 0.1) for point in each], **style)
        below.plot(lengths, [point.cpu_percent for point in each], **style)
    _label(above, "added to the kernel, p50, us")
    _label(below, "CPU of one core while waiting, %")
    above.set_yscale("log")
    above.set_title(title)
    below.set_ylim(bottom=0)
    below.set_xlabel("kernel takes")
    figure.legend(*above.get_legend_handles_labels(), loc="outside lower center", fontsize="small", ncols=3)
    figure.savefig(path, dpi=120, format="png")


def _label(panel: Any, what: str) -> None:
    # Linear up to 10 us, so that the empty kernel has a place.
    panel.set_xscale("symlog", linthresh=10, linscale=0.4)
    panel.set_xticks(_LENGTHS, _NAMES)
    panel.set_ylabel(what)
    panel.grid(visible=True, which="major", alpha=0.3)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the picture; return 2 if there is nothing to draw from or with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", type=Path, metavar="NUMBERS.json", help="what a run with the case `lengths` wrote")
    parser.add_argument("picture", type=Path, metavar="PICTURE.png")
    options = parser.parse_args(arguments)
    try:
        points, title = recorded(json.loads(options.numbers.read_text(encoding="utf-8")))
        draw(points, str(options.picture), title)
    except ModuleNotFoundError as error:
        print(f"plot.py: {error.name} is not installed. Run: pip install '.[bench]'", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        print(f"plot.py: {options.numbers} cannot be drawn into {options.picture}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
