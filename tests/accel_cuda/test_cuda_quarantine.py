"""The search for an item whose kernel reads out of range, on a GPU; in processes of their own, since the fault ends CUDA where it happens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.accel_cuda.cuda_programs import run_program

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("host", ["process", "auto"])
def test_the_item_that_reads_out_of_range_is_found(host: str) -> None:
    run_program(host, module="tests.accel_cuda.poison_programs")


ROOT = Path(__file__).resolve().parents[2]
SECONDS = 280.0
"""The quarantine starts a child, which imports torch, for each half of the batch that has the input."""


@pytest.mark.parametrize("program", ["quarantine", "inline"])
def test_a_token_out_of_range_costs_one_request(program: str) -> None:
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.accel_cuda.embedding", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, f"{program} ended with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
