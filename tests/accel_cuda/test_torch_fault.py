"""Line 2: what torch raises of a dead context is the fault; the quarantine finds the one request, and all others are answered."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 280.0
"""The quarantine starts a child, which imports torch, for each half of the batch that has the input."""


@pytest.mark.parametrize("program", ["quarantine", "inline"])
def test_a_token_out_of_range_costs_one_request(program: str) -> None:
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.accel_cuda.embedding", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, f"{program} ended with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
