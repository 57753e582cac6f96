"""``accel bench``: measured cases, each with its raw twin in the same run, held against the design's budgets."""

from __future__ import annotations

from accel.cli.bench.command import add_arguments, run

__all__ = ["add_arguments", "run"]
