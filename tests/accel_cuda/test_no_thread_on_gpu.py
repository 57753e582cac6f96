"""Line 4: no thread is to be had for a large copy."""

from __future__ import annotations

import pytest

from tests.accel_cuda.hazard_programs import run_program

pytestmark = pytest.mark.gpu


def test_a_copy_for_which_no_thread_starts_fails_and_may_be_tried_again() -> None:
    run_program("has_no_thread_for_a_copy")
