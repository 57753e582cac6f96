"""Measures all cases, also those that ``accel bench`` does not bring: ``python benchmarks/run.py --only P11,P14``. The options are its own."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from accel.cli.main import Command, main

COMMANDS = {"bench": Command("benchmarks.cases.suite", "measure this machine by all cases, and hold the numbers against the budgets")}

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]], COMMANDS))
