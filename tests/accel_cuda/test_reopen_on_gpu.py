"""Line 13: a device that a fault of the process has lost is reopened in a child, and never in the poisoned process."""

from __future__ import annotations

import pytest

from tests.accel_cuda.hazard_programs import run_program

pytestmark = pytest.mark.gpu


def test_a_device_of_a_poisoned_process_is_reopened_in_a_child() -> None:
    run_program("reopens_in_a_child")
