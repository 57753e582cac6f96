"""Line 7: kernels of products are loaded beside the loop."""

from __future__ import annotations

import pytest

from tests.accel_cuda.hazard_programs import run_program

pytestmark = pytest.mark.gpu


def test_products_of_new_shapes_do_not_hold_the_loop() -> None:
    run_program("multiplies_new_shapes")
