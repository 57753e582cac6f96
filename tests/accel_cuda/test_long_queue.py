"""Line 6: a long queue of work never freezes the interpreter."""

from __future__ import annotations

import pytest

from tests.accel_cuda.hazard_programs import run_program

pytestmark = pytest.mark.gpu


def test_no_python_thread_waits_for_the_launch_queue() -> None:
    run_program("fills_the_queue")
