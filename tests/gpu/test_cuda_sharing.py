"""What the device's memory and the primary context are to others: given back, and shared with torch."""

from __future__ import annotations

import importlib.util

import pytest

from tests.gpu.cuda_programs import run_program

pytestmark = pytest.mark.gpu


def test_closed_devices_leave_no_device_memory_behind() -> None:
    run_program("gives_memory_back")


def test_torch_in_the_same_process_goes_on() -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    run_program("shares_the_context_with_torch")
