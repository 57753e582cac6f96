"""compute-sanitizer over the backend's own kernels: ``python -m tests.accel_cuda.memcheck`` says which were run, and fails for an error or a kernel left out.

It runs the conformance checks of the level ``compute`` and the programs of :data:`EXTRA` under memcheck, several processes side by side. Each process writes
down which kernels it launched, and at the end every function of every program of ``accel_cuda.families.programs`` must be among them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel.testing import conformance
from accel_cuda import CudaBackend
from accel_cuda.core.compiler import architecture, compile_source
from accel_cuda.core.driver import load_driver
from accel_cuda.families.programs import PROGRAMS, source_of
from tests.accel_cuda.every_kernel import every_contraction, every_kernel, every_order, every_solver, every_sparse
from tests.accel_cuda.signal_kernels import signal_kernels

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["EXTRA", "main"]

ROOT = Path(__file__).resolve().parents[2]

EXTRA: dict[str, Callable[[], None]] = {
    "every_contraction": every_contraction,
    "every_kernel": every_kernel,
    "every_order": every_order,
    "every_solver": every_solver,
    "every_sparse": every_sparse,
    "signal_kernels": signal_kernels,
}
"""What is run besides the conformance checks: add what launches kernels that no check of theirs does."""

NOT_RUN = {"poison", "hang"}
"""Kernels whose purpose is to do wrong."""


def names() -> list[str]:
    """Return all that is run."""
    return [check.name for check in conformance.checks() if check.name.startswith("compute.")] + list(EXTRA)


def functions() -> set[str]:
    """Return the names of all kernels of the backend, as compiled."""
    driver = load_driver()
    device = driver.call("cuDeviceGet", 0)
    major, minor = (driver.device_attribute(device, f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
    found: set[str] = set()
    with driver.section(int(driver.call("cuDevicePrimaryCtxRetain", device))):
        for program in PROGRAMS:
            module = driver.call("cuModuleLoadData", compile_source(source_of(program), architecture(major, minor)))
            for function in driver.call("cuModuleEnumerateFunctions", int(driver.call("cuModuleGetFunctionCount", module)), module):
                found.add(driver.call("cuFuncGetName", function).decode())
    return found


def run_here(wanted: list[str], report: Path) -> None:
    """Run some of :func:`names` in this process, and write down which kernels were launched."""
    driver, launched = load_driver(), set[str]()
    launch = driver.hot.launch

    def noting(config: Any, function: Any, *arguments: Any) -> int:
        launched.add(driver.call("cuFuncGetName", function.value).decode())
        return launch(config, function, *arguments)

    driver.hot.launch = noting
    checks = {check.name: check for check in conformance.checks()}
    for name in wanted:
        if name in EXTRA:
            EXTRA[name]()
        else:
            asyncio.run(_checked(checks[name]))
    report.write_text(json.dumps(sorted(launched)))


async def _checked(check: conformance.Check) -> None:
    await check.run(conformance.Harness(CudaBackend()))


def memcheck(tool: str, wanted: list[str], report: Path) -> tuple[int, str]:
    """Run some of :func:`names` under compute-sanitizer in a process of its own; return its status and what it printed."""
    command = [tool, "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "86", "--target-processes", "all"]
    command += [sys.executable, "-m", "tests.accel_cuda.memcheck", "--here", str(report), *wanted]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.returncode, done.stdout


def main(arguments: list[str] | None = None) -> int:
    """Run what was asked for, or all; return 0 if memcheck found nothing and no kernel was left out."""
    parser = argparse.ArgumentParser(prog="python -m tests.accel_cuda.memcheck", description=__doc__)
    parser.add_argument("names", nargs="*", help="conformance checks or extra programs; all if left out")
    parser.add_argument(
        "--processes", type=int, default=max(2, (os.cpu_count() or 8) - 2), help="how many to run side by side (%(default)s)"
    )
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    wanted: list[str] = options.names or names()
    if options.here is not None:
        run_here(wanted, options.here)
        return 0
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    known = functions()  # compiled here, so that it is found in the cache there
    groups = [group for i in range(options.processes) if (group := wanted[i :: options.processes])]
    bad, launched = 0, set[str]()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(groups)) as pool:
        reports = [Path(folder) / f"{i}.json" for i in range(len(groups))]
        for group, report, (status, output) in zip(groups, reports, pool.map(memcheck, [tool] * len(groups), groups, reports), strict=True):
            print(f"memcheck of {', '.join(group)}: {'clean' if status == 0 else f'FAILED ({status})'}")
            if status:
                bad += 1
                print(output[-6000:])
            if report.exists():
                launched.update(json.loads(report.read_text()))
    left_out = sorted(known - launched - NOT_RUN)
    print(f"{len(known & launched)} of {len(known - NOT_RUN)} kernels were run under memcheck")
    if left_out and not options.names:
        print(f"never launched: {', '.join(left_out)}")
        bad += 1
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
