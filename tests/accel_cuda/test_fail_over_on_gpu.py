"""Line 1: a fail-over leaves other libraries' page-locked memory alone, and gives our own device memory back."""

from __future__ import annotations

import pytest

from tests.accel_cuda.hazard_programs import run_program

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_page_locked_memory_of_other_libraries_outlives_a_fail_over(library: str) -> None:
    run_program(f"puts_pinned_memory_of_{library}")


def test_slabs_and_workspaces_come_back_and_the_log_says_what_stays() -> None:
    run_program("gives_slabs_back")
