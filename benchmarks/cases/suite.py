"""All cases: those of ``accel bench``, and those that only the source tree has. The command line is that of ``accel bench``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel.cli.bench import add_arguments
from accel.cli.bench.cases import CASES as OWN_CASES
from accel.cli.bench.command import run_cases
from accel.cli.bench.suite import Suite
from benchmarks.cases import actors, batcher, data, mixed, ops, process, recovery, waiting
from benchmarks.cuda_cases.suite import cuda_suite

if TYPE_CHECKING:
    import argparse

    from accel.backend import AccelBackend

__all__ = ["CASES", "add_arguments", "run", "suite_of"]

*_QUICK, _SOAK = OWN_CASES
CASES = (
    *_QUICK,
    *ops.CASES,
    *actors.CASES,
    *data.CASES,
    *waiting.CASES,
    *process.CASES,
    *recovery.CASES,
    *batcher.CASES,
    *mixed.CASES,
    _SOAK,
)
"""The cases that every backend can run, in the order in which they run."""


def suite_of(backend: AccelBackend) -> Suite:
    """Return all cases of a backend. Needs no device."""
    return cuda_suite() if backend.name == "cuda" else Suite(CASES)


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen cases and print the report."""
    return run_cases(arguments, suite_of)
