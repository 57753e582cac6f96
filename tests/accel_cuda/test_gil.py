"""Line 8: hot calls keep the GIL, beside libraries whose callbacks wait for it."""

from __future__ import annotations

import pytest

from tests.accel_cuda.hazard_programs import run_program

pytestmark = pytest.mark.gpu


@pytest.mark.timeout(150)
def test_nothing_hangs_beside_python_callbacks_of_other_libraries() -> None:
    run_program("works_beside_python_callbacks", seconds=140)
