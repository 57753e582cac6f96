"""Runs ``accel bench`` from a checkout that was never installed: ``python benchmarks/run.py --only P11,P12``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from accel.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
